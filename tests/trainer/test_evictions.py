"""Queues that drop items when one is put: the others keep their links, nobody inherits one, and it is counted."""

from __future__ import annotations

import heapq
import queue
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_dflash import Worker
from otel_dflash.records import Counter
from tests.agent.rings import Rig, recording
from tests.trainer.queue_kinds import Item, consume, contexts_of, produce

CAPACITY = 8


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


class Oldest(queue.Queue[Any]):
    def _put(self, item: Any) -> None:
        if len(self.queue) == CAPACITY:
            self.queue.popleft()
        self.queue.append(item)


class OldestAfterwards(queue.Queue[Any]):
    def _put(self, item: Any) -> None:
        self.queue.append(item)
        if len(self.queue) > CAPACITY:
            self.queue.popleft()


class OldestHalf(queue.Queue[Any]):
    def _put(self, item: Any) -> None:
        if len(self.queue) == CAPACITY:
            for _ in range(CAPACITY // 2):
                self.queue.popleft()
        self.queue.append(item)


class OldestByMaxlen(queue.Queue[Any]):
    def _init(self, maxsize: int) -> None:
        self.queue = deque(maxlen=CAPACITY)


class All(queue.Queue[Any]):
    def _put(self, item: Any) -> None:
        if len(self.queue) == CAPACITY:
            self.queue.clear()
        self.queue.append(item)


class TheNewOne(queue.Queue[Any]):
    def _put(self, item: Any) -> None:
        if len(self.queue) < CAPACITY:
            self.queue.append(item)


class Newest(queue.Queue[Any]):
    def _put(self, item: Any) -> None:
        if len(self.queue) == CAPACITY:
            self.queue.pop()
        self.queue.append(item)


class Middle(queue.Queue[Any]):
    def _put(self, item: Any) -> None:
        if len(self.queue) == CAPACITY:
            del self.queue[CAPACITY // 2]
        self.queue.append(item)


class UrgentFirst(queue.Queue[Any]):
    """Every third item jumps the queue."""

    puts = 0

    def _put(self, item: Any) -> None:
        if len(self.queue) == CAPACITY:
            self.queue.popleft() if self.puts % 2 else self.queue.pop()
        self.puts += 1
        self.queue.append(item) if self.puts % 3 else self.queue.appendleft(item)


class Smallest(queue.PriorityQueue[Any]):
    def _put(self, item: Any) -> None:
        if len(self.queue) == CAPACITY:
            heapq.heappushpop(self.queue, item)
        else:
            heapq.heappush(self.queue, item)


TOLD = [Oldest, OldestAfterwards, OldestHalf, OldestByMaxlen, All, TheNewOne]
NOT_TOLD = [Newest, Middle, UrgentFirst, Smallest]


def run(
    rig: Rig, target: Worker, drafter: Worker, wrapped: Any, seed: int
) -> tuple[list[Any], list[Any], int]:
    """Put and get at random; return the links that there are, those that there should be, and the evictions."""
    chance = random.Random(seed)
    expected = []
    puts = 0
    for _ in range(60):
        for _ in range(chance.randrange(2 * CAPACITY)):
            produce(
                target, wrapped.put, Item(chance.randrange(1000))
            )  # freed memory is used again: ids come back
            puts += 1
        for _ in range(min(wrapped.qsize(), chance.randrange(CAPACITY))):
            mine, (item,) = consume(drafter, wrapped.get)
            expected.append((mine, item.producer))
            del item
    links = [record.link for record in rig.consumed(drafter)]
    return links, expected, puts - len(expected) - int(wrapped.qsize())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", TOLD)
def test_what_a_put_drops_costs_no_other_item_its_link(
    make: type[queue.Queue[Any]], seed: int, rig: Rig, target: Worker, drafter: Worker
) -> None:
    links, expected, evicted = run(
        rig, target, drafter, rig.telemetry.wrap_queue(make(), "hidden_states"), seed
    )
    assert links == expected
    assert rig.counted(target, drafter) == {}
    assert rig.ring(target).counter(Counter.EVICTED) == evicted > 50


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", NOT_TOLD)
def test_where_it_cannot_be_told_what_left_no_link_is_wrong_and_each_item_is_counted(
    make: type[queue.Queue[Any]], seed: int, rig: Rig, target: Worker, drafter: Worker
) -> None:
    links, expected, evicted = run(
        rig, target, drafter, rig.telemetry.wrap_queue(make(), "hidden_states"), seed
    )
    assert set(links) <= set(expected)
    assert rig.counted(target, drafter)["UNMATCHED"] >= len(expected) - len(links) > 0
    counted = sum(rig.ring(worker).counter(Counter.EVICTED) for worker in (target, drafter))
    assert evicted - 1 <= counted <= evicted  # on other queues, the next put or get sees it


def test_evictions_begin_with_what_was_there_before(rig: Rig, target: Worker, drafter: Worker) -> None:
    made = Oldest()
    for _ in range(5):
        made.put(Item())
    wrapped = rig.telemetry.wrap_queue(made, "hidden_states")
    steps = [produce(target, wrapped.put, Item()) for _ in range(10)]
    consume(drafter, wrapped.get, CAPACITY)
    assert [record.producer for record in rig.consumed(drafter)] == steps[-CAPACITY:]
    assert rig.counted(target, drafter) == {}
    assert rig.ring(target).counter(Counter.EVICTED) == 7


def test_a_queue_cleared_by_hand_is_followed_again(rig: Rig, target: Worker, drafter: Worker) -> None:
    wrapped = rig.telemetry.wrap_queue(Oldest(), "hidden_states")
    produce(target, wrapped.put, *[Item() for _ in range(CAPACITY + 2)])
    wrapped.queue.clear()
    steps = [produce(target, wrapped.put, Item()) for _ in range(CAPACITY + 3)]
    consume(drafter, wrapped.get, CAPACITY)
    assert [record.producer for record in rig.consumed(drafter)] == steps[-CAPACITY:]
    assert rig.counted(target, drafter) == {"UNMATCHED": 1}
    assert rig.ring(target).counter(Counter.EVICTED) == 2 + CAPACITY + 3


def test_an_object_that_fills_the_queue_alone_is_followed_where_a_maxlen_says_what_left(
    rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = rig.telemetry.wrap_queue(OldestByMaxlen(), "hidden_states")
    steps = [produce(target, wrapped.put, 7) for _ in range(CAPACITY + 3)]
    consume(drafter, wrapped.get, CAPACITY)
    assert [record.producer for record in rig.consumed(drafter)] == steps[-CAPACITY:]


class Unique(queue.Queue[Any]):
    def _put(self, item: Any) -> None:
        if all(item is not held for held in self.queue):
            self.queue.append(item)


@pytest.mark.parametrize("make", [Oldest, TheNewOne, Unique])
def test_an_object_that_fills_the_queue_alone_has_no_link_where_it_may_have_been_refused(
    make: type[queue.Queue[Any]], rig: Rig, target: Worker, drafter: Worker
) -> None:
    wrapped = rig.telemetry.wrap_queue(make(), "hidden_states")
    for _ in range(CAPACITY + 3):
        produce(target, wrapped.put, 7)
    size = wrapped.qsize()
    consume(drafter, wrapped.get, size)
    assert rig.consumed(drafter) == []
    assert rig.counted(target, drafter)["UNMATCHED"] >= size


def test_an_eviction_takes_no_longer_in_a_large_queue(rig: Rig, target: Worker) -> None:
    class Large(queue.Queue[Any]):
        def _init(self, maxsize: int) -> None:
            self.queue = deque(maxlen=50_000)

    wrapped = rig.telemetry.wrap_queue(Large(), "hidden_states")
    with target.step():
        for number in range(150_000):  # a search in each put would take minutes
            wrapped.put(number)
    contexts = contexts_of(wrapped)
    assert (contexts.items, len(contexts._entries), contexts._more) == (50_000, 50_000, {})
    assert rig.ring(target).counter(Counter.EVICTED) == 100_000
