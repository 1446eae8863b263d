"""Queues as people have them, and items that object to being compared or hashed."""

from __future__ import annotations

import heapq
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from otel_dflash import Telemetry, Worker
from otel_dflash.trainer.contexts import Contexts


class Item:
    """What a queue carries: knows by whom it was put. Whoever compares or hashes it fails."""

    def __init__(self, bucket: int = 0, producer: int = 0) -> None:
        self.bucket = bucket
        self.producer = producer  # the id of the step that put it

    def __lt__(self, other: Item) -> bool:
        return self.bucket < other.bucket

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def __hash__(self) -> int:
        raise AssertionError("hashed")


class PairedQueue(queue.Queue[Item]):
    """Items of one bucket leave in pairs; the size counts only those that may leave."""

    def _init(self, maxsize: int) -> None:
        self.waiting: dict[int, Item] = {}
        self.ready: deque[Item] = deque()

    def put(self, item: Item, block: bool = True, timeout: float | None = None) -> None:
        if not 0 <= item.bucket < 1000:
            raise ValueError(item.bucket)
        super().put(item, block, timeout)

    def _qsize(self) -> int:
        return len(self.ready)

    def _put(self, item: Item) -> None:
        other = self.waiting.pop(item.bucket, None)
        if other is None:
            self.waiting[item.bucket] = item
        else:
            self.ready += other, item

    def _get(self) -> Item:
        return self.ready.popleft()


class BucketStore:
    """No queue.Queue: a put that looks into the item, a get that returns a list, the fullest bucket first."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.buckets: dict[int, list[Item]] = {}
        self.changed = threading.Condition()

    def __len__(self) -> int:
        return sum(map(len, self.buckets.values()))

    def put(self, item: Item, timeout: float | None = None) -> None:
        bucket = item.bucket
        with self.changed:
            if self.capacity and not self.changed.wait_for(lambda: len(self) < self.capacity, timeout):
                raise queue.Full
            self.buckets.setdefault(bucket, []).append(item)
            self.changed.notify_all()

    def get_batch(self, limit: int = 1, timeout: float | None = None) -> list[Item]:
        with self.changed:
            if not self.changed.wait_for(lambda: len(self), timeout):
                raise queue.Empty
            bucket = max(self.buckets.values(), key=len)
            taken, bucket[:] = bucket[:limit], bucket[limit:]
            self.changed.notify_all()
            return taken


class OwnPriorityQueue(queue.Queue[Item]):
    """A subclass that stores by ways of its own: neither `_put` nor `_get` is ever called."""

    def _init(self, maxsize: int) -> None:
        self.heap: list[Item] = []

    def put(self, item: Item, block: bool = True, timeout: float | None = None) -> None:
        with self.not_empty:
            heapq.heappush(self.heap, item)
            self.not_empty.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        with self.not_empty:
            if not self.not_empty.wait_for(lambda: self.heap, timeout if block else 0):
                raise queue.Empty
            return heapq.heappop(self.heap)


@dataclass(frozen=True)
class QueueKind:
    """One kind of queue: how it is made, wrapped and taken from."""

    make: Callable[..., Any]  # (capacity) -> queue
    get: str = "get"
    proxied: bool = False
    inside: bool = False  # hooked where an override of put or get hands the item on

    def wrap(self, telemetry: Telemetry, made: Any) -> Any:
        put, get = ("_put", "_get") if self.inside else ("put", self.get)
        return telemetry.wrap_queue(made, "hidden_states", put=put, get=get)

    def take(self, source: Any, timeout: float = 0.0) -> list[Item]:
        """Return what one get returns. Raises queue.Empty."""
        got = getattr(source, self.get)(timeout=timeout)
        return got if isinstance(got, list) else [got]


KINDS = {
    "Queue": QueueKind(queue.Queue),
    "LifoQueue": QueueKind(queue.LifoQueue),
    "PriorityQueue": QueueKind(queue.PriorityQueue),
    "SimpleQueue": QueueKind(lambda capacity=0: queue.SimpleQueue(), proxied=True),
    "bucketed Queue": QueueKind(PairedQueue),
    "bucketed Queue, hooked inside": QueueKind(PairedQueue, inside=True),
    "Queue with a store of its own": QueueKind(OwnPriorityQueue),
    "unrelated class": QueueKind(BucketStore, get="get_batch"),
}


def produce(
    worker: Worker, put: Callable[[Any], object], *items: Any, bucket: str | int | None = None
) -> int:
    """Put items in one step of the worker; return the step's id."""
    with worker.step() as step:
        step.set(bucket=bucket)
        for item in items:
            if isinstance(item, Item):
                item.producer = step.id
            put(item)
        return step.id


def consume(worker: Worker, get: Callable[[], Any], times: int = 1) -> tuple[int, list[Any]]:
    """Get so often in one step of the worker; return the step's id and what came."""
    with worker.step() as step:
        return step.id, [get() for _ in range(times)]


def contexts_of(wrapped: Any) -> Contexts:
    return vars(wrapped)["_otel_dflash_contexts"]  # type: ignore[no-any-return]
