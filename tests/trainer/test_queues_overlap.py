"""Steps of several workers that are open in one thread at once: the phase around a put or a get tells whose the
item is. What it does not tell is counted, never guessed."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from otel_dflash import Worker
from tests.agent.rings import Rig, recording
from tests.trainer.queue_kinds import KINDS, Item, QueueKind, consume, produce


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with recording(tmp_path) as rig:
        yield rig


@pytest.fixture
def workers(rig: Rig) -> list[Worker]:
    return [rig.telemetry.worker("target", index) for index in range(3)]


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> QueueKind:
    return request.param  # type: ignore[no-any-return]


def links(rig: Rig, *workers: Worker) -> list[tuple[int, int]]:
    return [record.link for worker in workers for record in rig.consumed(worker)]


def test_asyncio_tasks_that_take_turns_in_one_thread(rig: Rig) -> None:
    targets = [rig.telemetry.worker("target", index) for index in range(2)]
    drafters = [rig.telemetry.worker("drafter", index) for index in range(2)]
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    expected = []

    async def put(worker: Worker) -> None:
        for turn in range(20):
            with worker.step() as step:
                step.set(bucket=worker.index)
                for _ in range((worker.index + turn) % 3):
                    await asyncio.sleep(0)
                with worker.queue_put:
                    wrapped.put(Item(worker.index, step.id))
                await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def get(worker: Worker) -> None:
        for _ in range(20):
            while wrapped.empty():
                await asyncio.sleep(0)
            with worker.step() as step:
                with worker.queue_get:
                    item = wrapped.get_nowait()
                expected.append((step.id, item.producer, str(item.bucket)))
                await asyncio.sleep(0)

    async def run() -> None:
        await asyncio.gather(*map(put, targets), *map(get, drafters))

    asyncio.run(run())
    found = [(*record.link, record.bucket) for worker in drafters for record in rig.consumed(worker)]
    assert sorted(found) == sorted(expected)
    assert rig.counted(*targets, *drafters) == {}


def test_the_step_that_is_left_is_found_whichever_ends_first(rig: Rig, workers: list[Worker]) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    first, second, third = workers
    first.step.begin()
    second.step.begin()
    first.step.end()
    step = second.step.id
    wrapped.put(Item())
    second.step.end()
    wrapped.get()  # outside any step: for the next
    mine, _ = consume(third, lambda: None)
    assert links(rig, *workers) == [(mine, step)]
    assert rig.counted(*workers) == {}


@pytest.mark.parametrize("around", [[], [0, 1]], ids=["none", "both"])
def test_an_item_that_no_phase_or_several_claim_is_counted(
    around: list[int], kind: QueueKind, rig: Rig, workers: list[Worker]
) -> None:
    wrapped = kind.wrap(rig.telemetry, kind.make())
    outside, first, second = workers
    step = produce(outside, wrapped.put, Item(), Item(), bucket=7)
    phases = [(first, second)[index] for index in around]
    with first.step(), second.step():
        for worker in phases:
            worker.queue_get.begin()
        kind.take(wrapped)
        for worker in reversed(phases):
            worker.queue_get.end()
        for worker in phases:
            worker.queue_put.begin()
        wrapped.put(Item())
        wrapped.put(Item())
        for worker in reversed(phases):
            worker.queue_put.end()
    assert links(rig, *workers) == []
    mine, _ = consume(outside, lambda: kind.take(wrapped), 3)
    assert sorted(links(rig, outside)) == [(mine, 0), (mine, 0), (mine, step)]
    assert rig.counted(*workers) == {"UNMATCHED": 3}


@pytest.mark.parametrize("phase", ["queue_get", "prefetch_get", "own"])
def test_any_starved_phase_claims_an_item_also_around_another_step(
    phase: str, rig: Rig, workers: list[Worker]
) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    outside, first, second = workers
    step = produce(outside, wrapped.put, Item())
    waiting = first.phase(phase, state="starved")
    with first.step() as mine, waiting, second.step(), second.forward:
        wrapped.get()
        expected = [(mine.id, step)]
    assert links(rig, *workers) == expected
    assert rig.counted(*workers) == {}


@pytest.mark.parametrize(
    "leave", [Worker.close, lambda worker: worker.step.cancel()], ids=["closed", "cancelled"]
)
def test_a_step_that_is_not_open_any_more_claims_nothing(
    leave: Callable[[Worker], None], rig: Rig, workers: list[Worker]
) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    outside, first, second = workers
    step = produce(outside, wrapped.put, Item(), Item())
    with first.step() as mine:
        with second.step():
            leave(second)
            wrapped.get()
        wrapped.get()
        expected = [(mine.id, step)] * 2
    assert links(rig, first) == expected
    assert rig.counted(*workers) == {}
