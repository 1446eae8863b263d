"""Items that never arrive, or come by other ways: what cannot be matched is counted, never guessed."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from otel_dflash import Worker
from otel_dflash.trainer import contexts
from otel_dflash.trainer.contexts import MAP_ITEMS_MAX
from tests.agent.rings import Rig, recording
from tests.trainer.queue_kinds import BucketStore, Item, consume, contexts_of, produce


class Listed:
    """Hands out the newest item first."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def put(self, item: Item) -> None:
        self.items.append(item)

    def get(self) -> Item:
        return self.items.pop()


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


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


def test_items_that_came_by_other_ways_are_counted_and_never_guessed(
    rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    produce(target, wrapped.put, Item())
    wrapped.queue.append(Item())  # unseen
    later = produce(target, wrapped.put, Item())
    consume(drafter, wrapped.get, 3)
    assert [record.producer for record in rig.consumed(drafter)] == [later]
    # the loss of the map, and two items without a context
    assert rig.counted(target, drafter) == {"UNMATCHED": 3}


def test_an_object_that_came_once_more_by_other_ways_is_not_guessed(
    rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    item = Item()
    produce(target, wrapped.put, item)
    wrapped.queue.append(item)
    consume(drafter, wrapped.get, 2)
    assert rig.consumed(drafter) == []
    assert rig.counted(target, drafter) == {"UNMATCHED": 3}


def test_an_object_put_again_behind_itself_without_a_context_is_not_guessed(
    rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    item = Item()
    produce(target, wrapped.put, item)
    wrapped.queue.append(Item())  # unseen: the contexts are forgotten
    later = produce(target, wrapped.put, item)
    consume(drafter, wrapped.get, 2)
    assert rig.consumed(drafter) == []
    consume(drafter, wrapped.get)
    assert [record.producer for record in rig.consumed(drafter)] == [later]
    assert rig.counted(target, drafter) == {"UNMATCHED": 3}


def test_a_put_in_a_step_whose_worker_was_closed_has_a_put_time(
    rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    before = time.monotonic_ns()
    with target.step():
        target.close()
        wrapped.put(Item())
    consume(drafter, wrapped.get)
    assert [(record.producer, record.put_ns > before) for record in rig.consumed(drafter)] == [(0, True)]


def test_a_get_after_a_step_whose_worker_was_closed_belongs_to_the_next_step(
    rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    first = rig.telemetry.worker("drafter", 1)
    producer = produce(target, wrapped.put, Item())
    with first.step():
        first.close()
    wrapped.get()
    with drafter.step() as step:
        mine = step.id
    wrapped.put(Item())
    assert [record.link for record in rig.consumed(drafter)] == [(mine, producer)]
    assert rig.counted(target, drafter) == {"OUTSIDE_STEP": 1}


@pytest.mark.parametrize("inside_its_step", [False, True])
def test_what_belongs_to_no_worker_is_not_counted_at_a_closed_one(
    inside_its_step: bool, rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = rig.telemetry.wrap_queue(queue.Queue[Item](), "hidden_states")
    wrapped.queue.append(Item())  # unseen
    if inside_its_step:
        with target.step():
            target.close()
            wrapped.get()
    else:
        target.close()
        wrapped.get()
        with drafter.step():
            pass
    in_thread(lambda: wrapped.put(Item()))
    assert rig.counted(target) == {}
    assert rig.counted(drafter) == {"UNMATCHED": 1, "OUTSIDE_STEP": 1}


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


class NewestByPut(queue.Queue[Item]):
    """Keeps the newest two."""

    def put(self, item: Item, block: bool = True, timeout: float | None = None) -> None:
        if self.qsize() == 2:
            self.get_nowait()
        super().put(item, block, timeout)


class NewestByInheritedGet(queue.Queue[Item]):
    """Keeps the newest two; get of this class does not see the others go."""

    def put(self, item: Item, block: bool = True, timeout: float | None = None) -> None:
        if self.qsize() == 2:
            super().get()
        super().put(item, block, timeout)


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


@pytest.mark.parametrize(
    "make", [Newest, NewestAfterwards, NewestByPut, NewestByInheritedGet, NewestStore, SilentlyNewest]
)
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


class Unique(queue.Queue[Item]):
    """Refuses an item that it holds."""

    def _put(self, item: Item) -> None:
        if all(item is not held for held in self.queue):
            super()._put(item)


def test_an_object_that_is_refused_while_the_queue_holds_it_keeps_its_context(
    rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = rig.telemetry.wrap_queue(Unique(), "hidden_states")
    first, second = Item(), Item()
    producers = [produce(target, wrapped.put, item) for item in (first, second)]
    produce(target, wrapped.put, first)
    _, taken = consume(drafter, wrapped.get, 2)
    assert [taken[0] is first, taken[1] is second] == [True, True]
    assert [record.producer for record in rig.consumed(drafter)] == producers
    assert rig.counted(target, drafter) == {}


def test_a_put_that_fails_takes_its_own_context_back_and_no_other(
    rig: Rig, target: Worker, drafter: Worker
) -> None:
    class Store:
        def __init__(self) -> None:
            self.items: list[Item] = []
            self.meanwhile: Callable[[], object] | None = None

        def put(self, item: Item) -> None:
            if meanwhile := self.meanwhile:
                self.meanwhile = None
                in_thread(meanwhile)
                raise queue.Full
            self.items.append(item)

        def get(self) -> Item:
            return self.items.pop()

    wrapped = rig.telemetry.wrap_queue(Store(), "hidden_states")
    other = rig.telemetry.worker("target", 1)
    item = Item()
    put: list[int] = []
    wrapped.meanwhile = lambda: put.append(produce(other, wrapped.put, item))
    with pytest.raises(queue.Full):
        produce(target, wrapped.put, item)
    consume(drafter, wrapped.get)
    assert [record.producer for record in rig.consumed(drafter)] == put
    assert contexts_of(wrapped).items == 0
    assert rig.counted(target, other, drafter) == {}


@pytest.mark.parametrize("make", [queue.SimpleQueue, Listed])
def test_threads_that_take_one_object_at_once_lose_no_item_and_no_context(
    make: Callable[[], Any], rig: Rig, target: Worker
) -> None:
    wrapped = rig.telemetry.wrap_queue(make(), "hidden_states")
    drafters = [rig.telemetry.worker("drafter", index) for index in range(2)]
    item = Item()
    expected: list[int] = []
    for at in range(60):  # the other thread takes one before this line of the first
        expected += [produce(target, wrapped.put, item) for _ in range(2)]
        left = at

        def line(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename != contexts.__file__:
                return None
            left -= event == "line"
            if left == -1:
                left = -2
                in_thread(lambda: consume(drafters[1], wrapped.get))
            return line

        before = sys.gettrace()
        with drafters[0].step():
            sys.settrace(line)
            try:
                got = wrapped.get()
            finally:
                sys.settrace(before)
        assert got is item
        if left >= 0:  # no such line
            break
    else:
        raise AssertionError("the first thread has more lines")
    assert at > 10
    consume(drafters[1], wrapped.get)
    found = [record.producer for drafter in drafters for record in rig.consumed(drafter)]
    assert sorted(found) == sorted(expected)
    assert rig.counted(target, *drafters) == {}


@pytest.mark.parametrize("same", [False, True])
def test_items_never_consumed_do_not_let_the_map_grow(
    same: bool, rig: Rig, target: Worker, drafter: Worker
) -> None:
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
