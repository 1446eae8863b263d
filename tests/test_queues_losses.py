"""Items that never arrive, or come by other ways: what cannot be matched is counted, never guessed."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_dflash import Worker
from otel_dflash.trainer.contexts import MAP_ITEMS_MAX
from tests.queue_kinds import BucketStore, Item, consume, contexts_of, produce
from tests.rings import Rig, recording


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with recording(tmp_path) as rig:
        yield rig


@pytest.fixture
def target(rig: Rig) -> Worker:
    return rig.telemetry.worker("target", 0)


@pytest.fixture
def drafter(rig: Rig) -> Worker:
    return rig.telemetry.worker("drafter", 0)


def test_a_queue_cleared_by_hand_is_taken_up_again(rig: Rig, target: Worker, drafter: Worker) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    produce(target, wrapped.put, Item(), Item(), Item())
    wrapped.queue.clear()
    later = [produce(target, wrapped.put, Item()) for _ in range(2)]
    consume(drafter, wrapped.get, 2)
    assert [record.producer for record in rig.consumed(drafter)] == later
    assert rig.counted(target, drafter) == {"UNMATCHED": 1}
    assert contexts_of(wrapped).items == wrapped.qsize() == 0


def test_items_that_came_by_other_ways_are_counted_and_never_guessed(rig: Rig, target: Worker, drafter: Worker) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    produce(target, wrapped.put, Item())
    wrapped.queue.append(Item())  # unseen
    later = produce(target, wrapped.put, Item())
    consume(drafter, wrapped.get, 3)
    assert [record.producer for record in rig.consumed(drafter)] == [later]
    assert rig.counted(target, drafter) == {"UNMATCHED": 3}  # the loss of the map, and two items without a context


def test_an_object_that_came_once_more_by_other_ways_is_not_guessed(rig: Rig, target: Worker, drafter: Worker) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    item = Item()
    produce(target, wrapped.put, item)
    wrapped.queue.append(item)
    consume(drafter, wrapped.get, 2)
    assert rig.consumed(drafter) == []
    assert rig.counted(target, drafter) == {"UNMATCHED": 3}


def test_a_put_in_a_step_whose_worker_was_closed_has_a_put_time(rig: Rig, target: Worker, drafter: Worker) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    before = time.monotonic_ns()
    with target.step():
        target.close()
        wrapped.put(Item())
    consume(drafter, wrapped.get)
    assert [(record.producer, record.put_ns > before) for record in rig.consumed(drafter)] == [(0, True)]


class Newest(queue.Queue[Item]):
    """Keeps the newest two."""

    def _put(self, item: Item) -> None:
        if len(self.queue) == 2:
            self._get()
        super()._put(item)


class NewestAfterwards(queue.Queue[Item]):
    """Keeps the newest two."""

    def _put(self, item: Item) -> None:
        super()._put(item)
        if len(self.queue) == 3:
            self._get()


class NewestStore(BucketStore):
    """Keeps the newest two."""

    def put(self, item: Item, timeout: float | None = None) -> None:
        if len(self) == 2:
            self.get_batch()
        super().put(item)


class SilentlyNewest(BucketStore):
    """Keeps the newest two; nobody sees the others go."""

    def put(self, item: Item, timeout: float | None = None) -> None:
        with self.changed:
            kept = self.buckets.setdefault(item.bucket, [])
            kept[:] = [*kept[-1:], item]


@pytest.mark.parametrize("make", [Newest, NewestAfterwards, NewestStore, SilentlyNewest])
def test_items_that_the_queue_itself_throws_away_leave_no_wrong_link(
    make: Callable[[], Any], rig: Rig, target: Worker, drafter: Worker
) -> None:
    made = make()
    get = "get" if isinstance(made, queue.Queue) else "get_batch"
    wrapped = rig.telemetry.wrap_queue(made, "hidden_states", get=get)
    expected = []
    for _ in range(50):  # the memory of what was thrown away is used again: ids come back
        for _ in range(3):
            produce(target, wrapped.put, Item())
        mine, taken = consume(drafter, lambda: getattr(wrapped, get)(), 2)
        items = taken if get == "get" else [item for got in taken for item in got]
        expected += [(mine, item.producer) for item in items]
        del taken, items
    assert [record.link for record in rig.consumed(drafter)] == expected
    assert rig.consumed(target) == []
    assert rig.counted(target, drafter) == {}


@pytest.mark.parametrize("same", [False, True])
def test_items_never_consumed_do_not_let_the_map_grow(same: bool, rig: Rig, target: Worker, drafter: Worker) -> None:
    class Hole:
        def put(self, item: Item) -> None:
            pass

        def get(self) -> None:
            return None

    wrapped = rig.telemetry.wrap_queue(Hole(), "hidden_states")
    kept = [Item()] * (MAP_ITEMS_MAX + 100) if same else [Item() for _ in range(MAP_ITEMS_MAX + 100)]
    produce(target, wrapped.put, *kept)
    assert contexts_of(wrapped).items == 100
    assert rig.counted(target, drafter) == {"UNMATCHED": 1}


def test_an_immediate_shutdown_takes_items_out_for_nobody(rig: Rig, target: Worker, drafter: Worker) -> None:
    class Stoppable(queue.Queue[Item]):
        """Has what every queue has from Python 3.13 on."""

        def shutdown(self, immediate: bool = False) -> None:
            with self.mutex:
                while immediate and self._qsize():
                    self._get()

    wrapped = rig.telemetry.wrap_queue(Stoppable(), "hidden_states")
    step = produce(target, wrapped.put, Item(), Item(), Item())
    with drafter.step():
        wrapped.shutdown()
        wrapped.get()
        wrapped.shutdown(immediate=True)
    assert [record.producer for record in rig.consumed(drafter)] == [step]
    assert wrapped.qsize() == contexts_of(wrapped).items == 0
    assert rig.counted(target, drafter) == {}
