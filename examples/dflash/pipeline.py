"""The threaded pipeline: prefetch -> targets -> postprocess -> hidden-state queue -> drafters.

One process. The prefetch thread makes batches. Each target worker runs the frozen target and packs the chosen
hidden states into one of its two buffers; the postprocess thread completes the transfer to the host and puts
the item on the hidden-state queue, while the target is on its next batch. Each drafter worker takes
`accumulate` items a step. The work itself is in work.py (torch) or simulate.py (sleeps).
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from sections import Sections, Slow

PREFETCH_CAPACITY = 8
TRANSFERS_CAPACITY = 4
BUFFERS_PER_TARGET = 2
STOP_POLL_SECONDS = 0.1
SHUTDOWN_SECONDS = 10.0


@dataclass(frozen=True)
class Batch:
    """Some sequences of like length, padded to the longest. Simulated batches hold no tensors."""

    number: int
    bucket: int  # sequences of up to so many tokens
    tokens: int  # without padding
    loss_tokens: int  # supervised ones
    ids: Any = None  # [sequences, length]
    loss_mask: Any = None


@dataclass(frozen=True)
class Item:
    """What a drafter trains on."""

    batch: Batch
    hidden: Any  # [sequences, length, layers x width]


@dataclass(frozen=True)
class Transfer:
    """An item whose hidden states are still in a target's buffer, and the queue that gets the buffer back."""

    item: Item
    buffer: Any
    free: queue.Queue[Any]
    context: int  # telemetry


class FinishedStep(NamedTuple):
    """A finished drafter step, and the numbers of the batches whose items it consumed."""

    drafter: int
    step: int
    consumed: list[int]


class Drafting(Protocol):
    """The work of one drafter."""

    def forward(self, item: Item) -> Any: ...
    def backward(self, loss: Any) -> None: ...
    def optimizer(self) -> None: ...


class Work(Protocol):
    """What the workers do; the pipeline decides when."""

    newest_loss: Any  # a tensor that only the monitor reads: no worker waits for its value

    def batches(self) -> Iterator[Batch]: ...
    def buffer(self) -> Any: ...
    def model_forward(self, batch: Batch) -> Any: ...
    def pack_hidden(self, hidden: Any, buffer: Any) -> Any: ...
    def d2h(self, packed: Any) -> Any: ...
    def drafter(self, index: int) -> Drafting: ...


class BucketQueue(queue.Queue[Item]):
    """A bounded queue with one lane per length bucket; a get takes from a random lane, so that every drafter
    sees a mix of lengths.

    Nothing is given before `min_ready` items are here: with fewer there is little to mix.
    """

    def __init__(self, capacity: int, min_ready: int) -> None:
        if not 1 <= min_ready <= capacity:
            raise ValueError(f"min_ready must be 1..capacity ({capacity}), got {min_ready}")
        super().__init__(capacity)
        self.min_ready = min_ready

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        with self.not_empty:
            if not self.not_empty.wait_for(lambda: self._qsize() >= self.min_ready, timeout if block else 0):
                raise queue.Empty
            item = self._get()
            self.not_full.notify()
            return item

    def _init(self, maxsize: int) -> None:
        self.lanes: dict[int, deque[Item]] = {}
        self.random = random.Random(0)  # taking turns gave each of three drafters one length: they go in step

    def _qsize(self) -> int:
        return sum(map(len, self.lanes.values()))

    def _put(self, item: Item) -> None:
        self.lanes.setdefault(item.batch.bucket, deque()).append(item)

    def _get(self) -> Item:
        return self.random.choice([lane for lane in self.lanes.values() if lane]).popleft()


def take(source: queue.Queue[Any], stop: threading.Event) -> Any:
    """Wait for an item. Raises queue.Empty once the run is stopping."""
    while not stop.is_set():
        try:
            return source.get(timeout=STOP_POLL_SECONDS)
        except queue.Empty:
            continue
    raise queue.Empty


def give(sink: queue.Queue[Any], item: Any, stop: threading.Event) -> None:
    """Wait for room and put. Raises queue.Full once the run is stopping."""
    while not stop.is_set():
        try:
            return sink.put(item, timeout=STOP_POLL_SECONDS)
        except queue.Full:
            continue
    raise queue.Full


class Pipeline:
    """All queues and threads of a run."""

    def __init__(
        self,
        work: Work,
        hidden_states: queue.Queue[Item],
        *,
        targets: int,
        drafters: int,
        steps: int,
        accumulate: int,
        slow: list[Slow],
        profile_interval: int,
        gpus: bool,
    ) -> None:
        self.work, self.hidden_states, self.steps, self.accumulate = work, hidden_states, steps, accumulate
        self.stop = threading.Event()
        self.errors: list[Exception] = []
        self.prefetched: queue.Queue[Batch] = queue.Queue(PREFETCH_CAPACITY)
        self.transfers: queue.Queue[Transfer] = queue.Queue(TRANSFERS_CAPACITY)
        self.tickets = itertools.count()  # a drafter draws one before each step
        self.finished: list[FinishedStep] = []

        def sections(role: str, index: int, gpu: int | None = None) -> Sections:
            return Sections(role, index, gpu if gpus else None, slow, profile_interval)

        self.targets = [sections("target", i, gpu=i) for i in range(targets)]
        self.postprocess = sections("postprocess", 0)
        self.drafters = [sections("drafter", i, gpu=targets + i) for i in range(drafters)]
        self.threads = [
            self.thread("prefetch", self.prefetch_loop),
            self.thread("postprocess", self.postprocess_loop, self.postprocess),
        ]
        self.threads += [self.thread(f"target {own.index}", self.target_loop, own) for own in self.targets]
        self.drafter_threads = [
            self.thread(f"drafter {own.index}", self.drafter_loop, own) for own in self.drafters
        ]

    @property
    def workers(self) -> list[Sections]:
        return [*self.targets, self.postprocess, *self.drafters]

    def prefetch_loop(self) -> None:
        for batch in self.work.batches():
            give(self.prefetched, batch, self.stop)

    def target_loop(self, sections: Sections) -> None:
        free: queue.Queue[Any] = queue.Queue()
        for _ in range(BUFFERS_PER_TARGET):
            free.put(self.work.buffer())
        buffer = free.get()
        while True:
            with sections.worker.step() as step:  # telemetry
                sections.next_step()
                with sections("queue_get"):
                    batch = take(self.prefetched, self.stop)
                step.set(tokens=batch.tokens, loss_tokens=batch.loss_tokens)  # telemetry
                step.set(bucket=batch.bucket, batch_id=batch.number)  # telemetry
                with sections("model_forward"):
                    hidden = self.work.model_forward(batch)
                with sections("pack_hidden"):
                    packed = self.work.pack_hidden(hidden, buffer)
                with sections("queue_put"):  # waits while the other buffer is still in transfer
                    transfer = Transfer(Item(batch, packed), buffer, free, step.produced())  # telemetry
                    give(self.transfers, transfer, self.stop)
                    buffer = take(free, self.stop)
                sections.tokens += batch.tokens

    def postprocess_loop(self, sections: Sections) -> None:
        while True:
            with sections("queue_get"):  # outside the step: which step it is for comes with the item
                transfer = take(self.transfers, self.stop)
            with sections.worker.resume(transfer.context) as step:  # telemetry
                step.set(bucket=transfer.item.batch.bucket)  # telemetry
                sections.next_step()
                with sections("d2h"):
                    item = replace(transfer.item, hidden=self.work.d2h(transfer.item.hidden))
                    transfer.free.put(transfer.buffer)
                with sections("queue_put"):
                    give(self.hidden_states, item, self.stop)

    def drafter_loop(self, sections: Sections) -> None:
        drafter = self.work.drafter(sections.index)
        while (number := next(self.tickets)) < self.steps:
            with sections.worker.step() as step:  # telemetry
                sections.next_step()
                items: list[Item] = []
                for _ in range(self.accumulate):
                    with sections("queue_get"):
                        items.append(take(self.hidden_states, self.stop))
                    with sections("forward"):
                        loss = drafter.forward(items[-1])
                    with sections("backward"):
                        drafter.backward(loss)
                with sections("optimizer"):
                    drafter.optimizer()
                tokens, loss_tokens = (
                    sum(getattr(item.batch, what) for item in items) for what in ("tokens", "loss_tokens")
                )
                step.set(step=number, tokens=tokens, loss_tokens=loss_tokens)  # telemetry
                sections.tokens += tokens
                self.finished.append(
                    FinishedStep(sections.index, number, [item.batch.number for item in items])
                )

    def thread(self, name: str, loop: Callable[..., None], *arguments: Sections) -> threading.Thread:
        def run() -> None:
            try:
                loop(*arguments)
            except Exception as error:  # noqa: BLE001  any failure of a worker ends the run, and the main thread shows it
                if not (self.stop.is_set() and isinstance(error, (queue.Empty, queue.Full))):
                    self.errors.append(error)
                    self.stop.set()
            finally:
                for sections in arguments:
                    sections.close()

        return threading.Thread(target=run, name=name, daemon=True)

    def run(self, progress: Callable[[int], object]) -> float:
        """Run until all drafter steps are finished; return the seconds that took.

        Whatever happens, KeyboardInterrupt too, every thread is asked to stop and waited for. Raises what a
        worker raised.
        """
        start = time.perf_counter()
        for thread in [*self.threads, *self.drafter_threads]:
            thread.start()
        try:
            for thread in self.drafter_threads:
                while thread.is_alive():
                    thread.join(STOP_POLL_SECONDS)
                    progress(len(self.finished))
        finally:
            elapsed = time.perf_counter() - start
            self.stop.set()
            deadline = time.monotonic() + SHUTDOWN_SECONDS
            for thread in [*self.threads, *self.drafter_threads]:
                thread.join(max(0.0, deadline - time.monotonic()))
        if self.errors:
            raise self.errors[0]
        stuck = [thread.name for thread in self.threads if thread.is_alive()]
        if stuck:
            raise RuntimeError(f"threads that didn't stop: {', '.join(stuck)}")
        return elapsed
