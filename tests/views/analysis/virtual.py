"""Pipelines in virtual time: threads and queues as events, recorded as a trainer and its agent would.

A run of minutes takes milliseconds, and is the same each time.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from otel_dflash.recording.payloads import Open, OpenWork
from otel_dflash.recording.run_info import RunInfo, create_recording
from otel_dflash.recording.writer import RecordingWriter
from tests.metrics.planted import PlantedRing, open_frame

MS = 1_000_000
S = 1_000_000_000
WAKE = 20_000  # ns from a put to the get that waited for it


@dataclass(frozen=True)
class Part:
    """A phase of a turn."""

    name: str
    ms: float
    state: str = "busy"


@dataclass(frozen=True)
class Stage:
    """A role: its workers do turns of get, parts, put."""

    role: str
    parts: tuple[Part, ...]
    workers: int = 1
    get_ms: float = 0.0  # of the get's own
    put_ms: float = 0.0
    unnamed_ms: float = 0.0  # between the parts and the put
    start_ms: float = 0.0  # before the first turn
    jitter: float = 0.02
    burst: tuple[int, float] | None = None  # each so many turns, so many ms more
    gpu: bool = True
    slow: dict[int, dict[str, float]] = field(default_factory=dict)  # worker -> part, get, put, unnamed -> ms
    ends: dict[int, tuple[float, str]] = field(
        default_factory=dict
    )  # worker -> after ms, raise | kill | hang | stop


@dataclass(frozen=True)
class Link:
    """The queue between two stages."""

    name: str
    capacity: int = 16
    min_ready: int = 1
    wrapped: bool = True


@dataclass
class _Queue:
    link: Link
    items: deque[tuple[int, int]] = field(default_factory=deque)  # time of its put, and the step it is from
    waiting: list[Turns] = field(default_factory=list)


Turns = Generator["int | _Queue", None, None]
"""Yields how long it sleeps, or the queue that it waits for a change of."""


class Run:
    """One run of `seconds`, in virtual time."""

    def __init__(self, stages: list[Stage], links: list[Link], seconds: float = 10.0, seed: int = 0) -> None:
        self.end = round(seconds * S)
        self.random = random.Random(seed)
        self.now = 0
        self.out: list[int] = []  # when the last stage ended a turn
        self._events: list[tuple[int, int, Turns]] = []
        self._count = 0
        queues = [_Queue(link) for link in links]
        self.workers: list[_Worker] = []
        for place, stage in enumerate(stages):
            source = queues[place - 1] if place else None
            sink = queues[place] if place < len(links) else None
            for index in range(stage.workers):
                worker = _Worker(self, len(self.workers), stage, index, source, sink)
                self.workers.append(worker)
                self._at(0, worker.turns())
        while self._events and self._events[0][0] <= self.end:
            self.now, _, turns = heapq.heappop(self._events)
            wanted = next(turns, None)
            if isinstance(wanted, _Queue):
                wanted.waiting.append(turns)
            elif wanted is not None:
                self._at(self.now + wanted, turns)
        self.now = self.end

    @property
    def rate(self) -> float:
        """Items per second that leave the last stage, without the first fifth of the run."""
        since = self.end // 5
        return sum(time > since for time in self.out) / (self.end - since) * S

    def record(self, directory: Path) -> Path:
        """Write the recording, as far as the agent had it when the run was looked at."""
        create_recording(directory, RunInfo(directory.name, "node-a", S, 0, S, "0.1"))
        writer = RecordingWriter(directory, 1 << 30)
        records = [worker.ring.flush(self.end + S) for worker in self.workers]
        ends = [worker.closed() for worker in self.workers if worker.end is not None]
        live = {worker.ring.ring: worker.open_work() for worker in self.workers if worker.end is None}
        names = [worker.ring.names_frame() for worker in self.workers]
        for frame in [*names, *records, *ends, open_frame(self.end, live)]:
            writer.append(frame.kind, frame.ring, frame.first, frame.count, frame.payload, frame.time_ns)
        writer.close()
        return directory

    def wake(self, queue: _Queue) -> None:
        """Let those look again that wait for a change of the queue."""
        for turns in queue.waiting:
            self._at(self.now + WAKE, turns)
        queue.waiting.clear()

    def spent(self, ms: float, jitter: float) -> int:
        """Return ns around `ms`."""
        return max(0, round(ms * MS * (1 + jitter * (2 * self.random.random() - 1))))

    def _at(self, time: int, turns: Turns) -> None:
        heapq.heappush(self._events, (time, self._count, turns))
        self._count += 1


class _Worker:
    def __init__(
        self, run: Run, place: int, stage: Stage, index: int, source: _Queue | None, sink: _Queue | None
    ) -> None:
        self.run, self.stage, self.source, self.sink = run, stage, source, sink
        self.more = stage.slow.get(index, {})
        end_ms, self.how = stage.ends.get(index, (float("inf"), ""))
        self.end_ns = end_ms * MS
        self.ring = PlantedRing(place + 1, stage.role, index, gpu=place if stage.gpu else None)
        self.open: list[tuple[str, str, int]] = []  # state, name, start
        self.step_start: int | None = None
        self.end: int | None = None

    def closed(self):  # type: ignore[no-untyped-def]
        assert self.end is not None
        return self.ring.closed(self.end, self.how == "kill", self.open, self.step_start)

    def open_work(self) -> OpenWork:
        step = (
            None if self.step_start is None else Open(self.ring.ring + self.ring.serial + 1, self.step_start)
        )
        phases = (Open(self.ring.name(3, f"{state} {name}"), start) for state, name, start in self.open)
        return OpenWork(step, tuple(phases))

    def turns(self) -> Turns:
        yield self.run.spent(self.stage.start_ms, 0)
        turn = 0
        while self.how != "stop" or self.run.now < self.end_ns:
            self.step_start = self.run.now
            yield from self._get()
            for number, part in enumerate(self.stage.parts):
                if number == 0 and self.run.now >= self.end_ns:
                    return (yield from self._last(part))
                yield from self._phase(part.state, part.name, part.ms + self.more.get(part.name, 0))
            yield self.run.spent(self.stage.unnamed_ms + self.more.get("unnamed", 0), self.stage.jitter)
            turn += 1
            if self.stage.burst and turn % self.stage.burst[0] == 0:
                yield from self._phase("busy", "evaluate", self.stage.burst[1])
            yield from self._put()
            self.ring.step(self.step_start, self.run.now, tokens=100)
            self.step_start = None
            if self.sink is None:
                self.run.out.append(self.run.now)
        self.end = self.run.now

    def _phase(self, state: str, name: str, ms: float) -> Turns:
        start = self.run.now
        self.open.append((state, name, start))
        yield self.run.spent(ms, self.stage.jitter)
        self._ended(start)

    def _ended(self, start: int, error: str | None = None) -> None:
        state, name, _ = self.open.pop()
        self.ring.phase(name, start, self.run.now, state, error)

    def _get(self) -> Turns:
        if (queue := self.source) is None:
            return
        start = self.run.now
        self.open.append(("starved", "queue_get", start))
        while len(queue.items) < queue.link.min_ready:
            yield queue
        put, step = queue.items.popleft()
        self.run.wake(queue)
        if queue.link.wrapped:
            info = {
                "name": queue.link.name,
                "capacity": queue.link.capacity,
                "min_ready": queue.link.min_ready,
            }
            name = self.ring.name(5, json.dumps(info))
            # put times are wall time: the anchor is at 1 s
            mine = self.ring.ring + self.ring.serial + 1
            self.ring.slot(4, name, None, self.run.now, put + S, mine, step, step, 0)
        yield self.run.spent(self.stage.get_ms + self.more.get("get", 0), self.stage.jitter)
        self._ended(start)

    def _put(self) -> Turns:
        if (queue := self.sink) is None:
            return
        start = self.run.now
        self.open.append(("backpressured", "queue_put", start))
        while len(queue.items) >= queue.link.capacity:
            yield queue
        queue.items.append((self.run.now, self.ring.ring + self.ring.serial + 1))
        self.run.wake(queue)
        yield self.run.spent(self.stage.put_ms + self.more.get("put", 0), self.stage.jitter)
        self._ended(start)

    def _last(self, part: Part) -> Turns:
        """End in a part, or never leave it."""
        start = self.run.now
        self.open.append((part.state, part.name, start))
        if self.how == "hang":
            yield self.run.end
        yield self.run.spent(part.ms, self.stage.jitter)
        self.end = self.run.now
        if self.how == "raise":
            self._ended(start, "ValueError")
            self.ring.step(self.step_start or 0, self.run.now, error="ValueError")
            self.step_start = None
