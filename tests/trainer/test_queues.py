"""Contexts travel beside items. Each record is read from the consumer's ring; items know who put them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_dflash import Worker
from otel_dflash.records import Counter, Kind
from otel_dflash.session import DETAIL_OFF, DETAIL_PHASES, map_control
from tests.agent.rings import Rig, recording
from tests.processes import poll
from tests.trainer.queue_kinds import (
    KINDS,
    BucketStore,
    Item,
    OwnPriorityQueue,
    PairedQueue,
    QueueKind,
    consume,
    contexts_of,
    produce,
)


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


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> QueueKind:
    return request.param  # type: ignore[no-any-return]


def test_the_consumer_gets_the_very_object_and_a_record_of_its_producer(
    kind: QueueKind, rig: Rig, target: Worker, drafter: Worker
) -> None:
    made = kind.make()
    wrapped = kind.wrap(rig.telemetry, made)
    assert (wrapped is made) is not kind.proxied
    first, second = Item(3), Item(3)
    before = time.monotonic_ns()
    step = produce(target, wrapped.put, first, second, bucket="512")
    between = time.monotonic_ns()
    with drafter.step() as taking:
        taken = kind.take(wrapped) + kind.take(wrapped)
        mine = taking.id
    after = time.monotonic_ns()

    assert sorted(map(id, taken)) == sorted(map(id, (first, second)))
    records = rig.consumed(drafter)
    assert [(r.step, r.producer, r.root, r.queue, r.bucket, r.fixed_root) for r in records] == [
        (mine, step, step, "hidden_states", "512", True),
        (mine, step, step, "hidden_states", "512", False),
    ]
    times = [[record.put_ns for record in records], [record.get_ns for record in records]]
    assert before <= min(times[0]) < max(times[0]) <= between <= times[1][0] <= times[1][1] <= after
    assert rig.counted(target, drafter) == {}


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS.values() if not kind.proxied],
    ids=[n for n, k in KINDS.items() if not k.proxied],
)
def test_a_consumer_that_holds_the_queue_from_before_is_seen(
    kind: QueueKind, rig: Rig, target: Worker, drafter: Worker
) -> None:
    held = kind.make()
    wrapped = kind.wrap(rig.telemetry, held)
    step = produce(target, wrapped.put, Item(), Item())
    mine, _ = consume(drafter, lambda: kind.take(held), 2)
    assert [record.link for record in rig.consumed(drafter)] == [(mine, step), (mine, step)]


def test_one_object_put_twice_has_two_contexts(
    kind: QueueKind, rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = kind.wrap(rig.telemetry, kind.make())
    item = Item()
    producers = {produce(target, wrapped.put, item), produce(target, wrapped.put, item)}
    _, taken = consume(drafter, lambda: kind.take(wrapped)[0], 2)
    assert [got is item for got in taken] == [True, True]
    assert {record.producer for record in rig.consumed(drafter)} == producers
    assert rig.counted(target, drafter) == {}


@pytest.mark.parametrize(
    ("make", "order"),
    [(queue.Queue, [0, 1, 2]), (queue.SimpleQueue, [0, 1, 2]), (queue.LifoQueue, [2, 1, 0])],
)
def test_one_object_put_thrice_keeps_the_order_of_the_queue(
    make: Callable[[], Any], order: list[int], rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = rig.telemetry.wrap_queue(make(), "hidden_states")
    item = Item()
    producers = [produce(target, wrapped.put, item) for _ in range(3)]
    consume(drafter, wrapped.get, 3)
    assert [record.producer for record in rig.consumed(drafter)] == [producers[place] for place in order]


def test_a_put_of_a_thread_without_a_step_has_a_residence_but_no_producer(
    kind: QueueKind, rig: Rig, drafter: Worker
) -> None:
    wrapped = kind.wrap(rig.telemetry, kind.make())
    before = time.monotonic_ns()
    wrapped.put(Item())
    wrapped.put(Item())
    between = time.monotonic_ns()
    consume(drafter, lambda: kind.take(wrapped), 2)
    assert [
        (r.producer, r.root, r.fixed_root, before <= r.put_ns <= between) for r in rig.consumed(drafter)
    ] == [(0, 0, False, True)] * 2
    assert rig.counted(drafter) == {"OUTSIDE_STEP": 2}


def test_a_get_outside_a_step_belongs_to_the_next_step_of_the_thread(
    kind: QueueKind, rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = kind.wrap(rig.telemetry, kind.make())
    step = produce(target, wrapped.put, Item(), Item(), bucket=7)
    kind.take(wrapped)
    kind.take(wrapped)
    after = time.monotonic_ns()
    mine, _ = consume(drafter, lambda: None)
    records = rig.consumed(drafter)
    assert [(r.link, r.bucket, r.get_ns <= after) for r in records] == [((mine, step), "7", True)] * 2
    assert rig.counted(target, drafter) == {}


def test_what_a_step_without_capture_got_is_no_loss_and_belongs_to_no_later_step(
    kind: QueueKind, rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = kind.wrap(rig.telemetry, kind.make())
    produce(target, wrapped.put, *(Item() for _ in range(4)))
    control = map_control(rig.session)
    control[0] = DETAIL_OFF
    kind.take(wrapped)
    with drafter.step():
        kind.take(wrapped)
    with drafter.step():
        kind.take(wrapped)
    control[0] = DETAIL_PHASES
    mine, _ = consume(drafter, lambda: kind.take(wrapped))
    control.release()
    assert [r.link[0] for r in rig.consumed(drafter)] == [mine]
    assert rig.counted(target, drafter) == {}


def test_a_get_of_a_thread_that_ended_belongs_to_nobody(rig: Rig, target: Worker, drafter: Worker) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    links = set()
    for _ in range(2):  # the second thread may well have the ident of the first
        produce(target, wrapped.put, Item())
        ended = threading.Thread(target=wrapped.get)
        ended.start()
        ended.join()
        step = produce(target, wrapped.put, Item())
        thread = threading.Thread(
            target=lambda step=step: links.add((consume(drafter, wrapped.get)[0], step))
        )
        thread.start()
        thread.join()
    assert {record.link for record in rig.consumed(drafter)} == links


def test_a_queue_wrapped_when_it_is_not_empty(
    kind: QueueKind, rig: Rig, target: Worker, drafter: Worker
) -> None:
    made = kind.make()
    old = [Item(1), Item(1)]
    for item in old:
        made.put(item)
    wrapped = kind.wrap(rig.telemetry, made)
    new = [Item(2), Item(2)]
    step = produce(target, wrapped.put, *new)
    mine, taken = consume(drafter, lambda: kind.take(wrapped)[0], 4)
    assert sorted(map(id, taken)) == sorted(map(id, old + new))
    assert [record.link for record in rig.consumed(drafter)] == [(mine, step)] * 2
    assert rig.counted(target, drafter) == {"UNMATCHED": 2}


def test_sentinels_are_items(rig: Rig, target: Worker, drafter: Worker) -> None:
    for made in (queue.Queue[Any](), queue.LifoQueue[Any](), queue.SimpleQueue[Any]()):
        wrapped = rig.telemetry.wrap_queue(made, "hidden_states")
        producers = {produce(target, wrapped.put, None), produce(target, wrapped.put, None)}
        mine, taken = consume(drafter, wrapped.get, 2)
        assert taken == [None, None]
        assert {record.producer for record in rig.consumed(drafter) if record.step == mine} == producers
    assert rig.counted(target, drafter) == {}


@pytest.mark.parametrize(
    "make",
    [queue.Queue, queue.LifoQueue, queue.PriorityQueue, queue.SimpleQueue, OwnPriorityQueue, PairedQueue],
)
def test_the_nowait_methods_carry_contexts_too(
    make: Callable[[], Any], rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = rig.telemetry.wrap_queue(make(), "hidden_states")
    step = produce(target, wrapped.put_nowait, Item())
    produce(target, lambda item: wrapped.put(item=item, block=False), Item())
    consume(drafter, wrapped.get_nowait)
    consume(drafter, lambda: wrapped.get(block=True, timeout=1))
    assert len({record.producer for record in rig.consumed(drafter)} | {step}) == 2
    with pytest.raises(queue.Empty):
        wrapped.get_nowait()
    assert rig.counted(target, drafter) == {}
    if not isinstance(wrapped, queue.SimpleQueue):
        assert contexts_of(wrapped).items == 0


def test_an_empty_queue_raises_what_it_raised(kind: QueueKind, rig: Rig, drafter: Worker) -> None:
    wrapped = kind.wrap(rig.telemetry, kind.make())
    with drafter.step(), pytest.raises(queue.Empty):
        kind.take(wrapped, timeout=0.001)
    assert rig.consumed(drafter) == []
    assert rig.counted(drafter) == {}


@pytest.mark.parametrize("make", [queue.Queue, queue.LifoQueue, queue.PriorityQueue, BucketStore])
def test_a_put_that_finds_no_room_leaves_nothing_behind(
    make: Callable[[int], Any], rig: Rig, target: Worker, drafter: Worker
) -> None:
    get = "get_batch" if make is BucketStore else "get"
    wrapped = rig.telemetry.wrap_queue(make(1), "hidden_states", get=get)
    item = Item()
    step = produce(target, wrapped.put, item)
    with target.step():
        for refused in (item, Item(), item):
            with pytest.raises(queue.Full):
                wrapped.put(refused, timeout=0.001)
    assert contexts_of(wrapped).items == 1
    consume(drafter, getattr(wrapped, get))
    again = produce(target, wrapped.put, item)
    consume(drafter, getattr(wrapped, get))
    assert [record.producer for record in rig.consumed(drafter)] == [step, again]
    assert contexts_of(wrapped).items == 0


@pytest.mark.parametrize("make", [queue.Queue, BucketStore])
def test_a_put_that_fails_hands_nothing_on(
    make: Callable[[int], Any], rig: Rig, target: Worker, drafter: Worker
) -> None:
    get = "get_batch" if make is BucketStore else "get"
    wrapped = rig.telemetry.wrap_queue(make(1), "hidden_states", get=get)
    step = produce(target, wrapped.put, Item())

    def put_in_vain() -> None:
        with pytest.raises(queue.Full):
            wrapped.put(Item(), timeout=0.001)

    put_in_vain()
    with target.step() as cancelled:
        put_in_vain()
        cancelled.cancel()
    with drafter.step():
        put_in_vain()
        getattr(wrapped, get)()
    ring = rig.ring(target)
    assert [len(list(ring.slots(kind))) for kind in (Kind.STEP, Kind.CANCELLED)] == [1, 1]
    assert [rig.ring(worker).counter(Counter.PUTS) for worker in (target, drafter)] == [1, 0]
    assert [(record.producer, record.fixed_root) for record in rig.consumed(drafter)] == [(step, True)]
    assert rig.counted(target, drafter) == {}


def test_a_priority_queue_that_reorders(rig: Rig, target: Worker, drafter: Worker) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.PriorityQueue[Item](), "hidden_states")
    producers = [produce(target, wrapped.put, Item(bucket)) for bucket in (5, 1, 4, 2, 3)]
    _, taken = consume(drafter, wrapped.get, 5)
    assert [item.bucket for item in taken] == [1, 2, 3, 4, 5]
    assert [record.producer for record in rig.consumed(drafter)] == [
        producers[place] for place in (1, 3, 4, 2, 0)
    ]


def test_a_get_that_returns_a_list_links_each_item(rig: Rig, target: Worker, drafter: Worker) -> None:
    wrapped = rig.telemetry.wrap_queue(BucketStore(), "hidden_states", get="get_batch")
    producers = [produce(target, wrapped.put, Item(bucket), bucket=bucket) for bucket in (8, 9, 8, 8)]
    with drafter.step():
        first = wrapped.get_batch(limit=8)
        second = wrapped.get_batch(8)
    assert [item.bucket for item in first + second] == [8, 8, 8, 9]
    expected = [
        (step_of, bucket)
        for step_of, bucket in zip([producers[i] for i in (0, 2, 3, 1)], "8889", strict=True)
    ]
    assert [(record.producer, record.bucket) for record in rig.consumed(drafter)] == expected


def test_an_item_that_is_a_list_stays_one(rig: Rig, target: Worker, drafter: Worker) -> None:
    made: queue.Queue[list[Item]] = queue.Queue()
    old, new = [Item(), Item()], [Item(), Item()]
    made.put(old)
    wrapped = rig.telemetry.wrap_queue(made, "hidden_states")
    step = produce(target, wrapped.put, new)
    _, taken = consume(drafter, wrapped.get, 2)
    assert taken[0] is old
    assert taken[1] is new
    assert [record.producer for record in rig.consumed(drafter)] == [step]
    assert rig.counted(target, drafter) == {"UNMATCHED": 1}


class Splitting(queue.Queue[Any]):
    """Takes lists, gives items."""

    def put(self, items: list[Item], block: bool = True, timeout: float | None = None) -> None:
        for item in items:
            super().put(item, block, timeout)


@pytest.mark.parametrize("inside", [False, True])
def test_items_that_an_override_splits_are_followed_where_the_inner_methods_are_named(
    inside: bool, rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = QueueKind(Splitting, inside=inside).wrap(rig.telemetry, Splitting())
    step = produce(target, wrapped.put, [Item(), Item()])
    mine, _ = consume(drafter, wrapped.get, 2)
    assert [record.link for record in rig.consumed(drafter)] == ([(mine, step)] * 2 if inside else [])
    assert rig.counted(target, drafter) == ({} if inside else {"UNMATCHED": 2})


def test_methods_that_were_replaced_on_the_queue_itself_are_hooked(
    rig: Rig, target: Worker, drafter: Worker
) -> None:
    made: queue.Queue[Item] = queue.Queue()
    store: list[Item] = []
    made.put, made.get = store.append, store.pop  # type: ignore[method-assign, assignment]
    wrapped = rig.telemetry.wrap_queue(made, "hidden_states")
    step = produce(target, wrapped.put, Item())
    mine, _ = consume(drafter, wrapped.get)
    assert [record.link for record in rig.consumed(drafter)] == [(mine, step)]


def test_two_puts_of_one_step_have_put_times_of_their_own(rig: Rig, target: Worker, drafter: Worker) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    stamps = []
    with target.step():
        for _ in range(2):
            stamps.append(time.monotonic_ns())
            wrapped.put(Item())
            stamps.append(time.monotonic_ns())
    consume(drafter, wrapped.get, 2)
    first, second = (record.put_ns for record in rig.consumed(drafter))
    assert stamps[0] <= first <= stamps[1] < stamps[2] <= second <= stamps[3]


def test_residence_does_not_count_the_wait_for_room(rig: Rig, target: Worker, drafter: Worker) -> None:
    store = BucketStore(1)
    wrapped = rig.telemetry.wrap_queue(store, "hidden_states", get="get_batch")
    produce(target, wrapped.put, Item(1))
    stamps: list[int] = []

    def put_when_there_is_room() -> None:
        produce(target, wrapped.put, Item(2))
        stamps.append(time.monotonic_ns())

    thread = threading.Thread(target=put_when_there_is_room)
    thread.start()
    poll(lambda: contexts_of(wrapped).items == 2)
    made_room = time.monotonic_ns()
    store.get_batch()
    thread.join()
    consume(drafter, wrapped.get_batch)
    assert made_room <= rig.consumed(drafter)[-1].put_ns <= stamps[0]
