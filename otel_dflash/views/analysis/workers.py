"""What each worker did, as arrays: its phases cut into disjoint segments, its steps, its gets and puts.

A worker is all rings of a role and index in one process of one node. Times are ns on one clock: that of the
first recording; those of other nodes are shifted by the difference of their anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from otel_dflash.recording.tables import Captured, OpenPhase, RingRow, Tables
from otel_dflash.records import SERIAL_MASK, State

Ints = NDArray[np.int64]
Key = tuple[int, int, str, int]
"""Position of the recording, pid, role and index of a worker."""

NO_QUEUE: Final = -1


@dataclass(frozen=True)
class Segments:
    """Stretches of time in one phase and in no phase inside it, disjoint and in order."""

    name: Ints  # position in Flow.texts
    state: Ints  # records.State
    start_ns: Ints
    end_ns: Ints

    def within(self, start_ns: int, end_ns: int) -> Ints:
        """Return how much of each segment lies between two times."""
        return clipped(self.start_ns, self.end_ns, start_ns, end_ns)


@dataclass(frozen=True)
class Events:
    """Gets or puts of one worker, in the order of their times."""

    time_ns: Ints
    item: Ints  # position in Flow.items


@dataclass(frozen=True)
class Items:
    """Items that were put and got, in the order of their gets."""

    queue: Ints  # position in Flow.queues, NO_QUEUE if none was wrapped
    bucket: Ints  # position in Flow.texts, -1 if none
    put_ns: Ints  # 0 if not known
    get_ns: Ints
    producer: Ints  # position in Flow.workers, -1 if not known
    consumer: Ints
    resumed: NDArray[np.bool_]  # handed on by a context, not by a queue


@dataclass(frozen=True)
class Worker:
    """One worker."""

    key: Key
    name: str
    gpu: int | None
    created_ns: int
    end_ns: int
    rings: Sequence[RingRow]
    segments: Segments
    phases: Segments  # as recorded: they may lie in each other
    step_starts: Ints
    step_ends: Ints
    failed: str  # type of the exception that ended its newest step, "" if none
    failed_step: str  # "step 50", by the user's number if known, else as counted
    gets: Events
    puts: Events
    open_phases: tuple[OpenPhase, ...]
    """Those that were open at `end_ns`, outermost first; they are the newest of `phases` too."""

    @property
    def role(self) -> str:
        """Return its role."""
        return self.key[2]

    @property
    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return self.rings[-1].closed is None

    @property
    def is_killed(self) -> bool:
        """Return whether its process was killed."""
        closed = self.rings[-1].closed
        return closed is not None and closed.killed


@dataclass(frozen=True)
class Queue:
    """A queue by its name."""

    name: str
    capacity: int | None
    min_ready: int | None


@dataclass(frozen=True)
class Flow:
    """All workers, and the items between them."""

    texts: Sequence[str]
    queues: Sequence[Queue]
    workers: Sequence[Worker]
    items: Items
    uncaptured: Sequence[tuple[int, int]]
    """When phases were not captured."""
    start_ns: int
    end_ns: int


def clipped(starts: Ints, ends: Ints, start_ns: int, end_ns: int) -> Ints:
    """Return how much of each interval lies between two times."""
    found: Ints = np.maximum(np.minimum(ends, end_ns) - np.maximum(starts, start_ns), 0)
    return found


def read_flow(recordings: Sequence[Tables]) -> Flow:
    """Join the recordings of the nodes of one run."""
    texts: dict[str, int] = {}
    queues: dict[str, int] = {}
    found_queues: list[Queue] = []
    anchor = recordings[0].info
    parts: dict[Key, list[tuple[Tables, int, int]]] = {}  # worker -> its rings, and the shift of their clock
    shifts = []
    for node, tables in enumerate(recordings):
        opened = [phase.name for ring in tables.rings for phase in ring.open_phases]
        for text in [*tables.texts, *opened]:
            texts.setdefault(text, len(texts))
        for queue in tables.queues:
            if queue.name not in queues:
                queues[queue.name] = len(queues)
                found_queues.append(Queue(queue.name, queue.capacity, queue.min_ready))
        info = tables.info
        shifts.append(
            info.anchor_wall_ns - info.anchor_mono_ns - anchor.anchor_wall_ns + anchor.anchor_mono_ns
        )
        for place, ring in enumerate(tables.rings):
            parts.setdefault((node, ring.pid, ring.role, ring.index), []).append((tables, place, shifts[-1]))
    places = {key: place for place, key in enumerate(sorted(parts))}
    of_ring = {
        tables.rings[place].id: places[key] for key, rings in parts.items() for tables, place, _ in rings
    }
    items, puts = _items(recordings, shifts, texts, queues, places, of_ring)
    names = _worker_names(list(places))
    workers = [_worker(key, names[key], parts[key], texts, items, puts, places[key]) for key in places]
    return Flow(
        list(texts),
        found_queues,
        workers,
        items,
        _uncaptured(recordings[0], max((worker.end_ns for worker in workers), default=0)),
        min((worker.created_ns for worker in workers), default=0),
        max((worker.end_ns for worker in workers), default=0),
    )


def _uncaptured(tables: Tables, end_ns: int) -> list[tuple[int, int]]:
    """Return when phases were not captured. All nodes are expected to change that together."""
    found: list[tuple[int, int]] = []
    for change in [*tables.captured, Captured(end_ns, True)]:
        if not change.is_captured:
            found.append((change.time_ns, end_ns))
        elif found:
            found[-1] = found[-1][0], min(found[-1][1], change.time_ns)
    return found


def _worker_names(keys: Sequence[Key]) -> dict[Key, str]:
    """Return "target 0", with the pid and the node where several have that role and index."""
    short: dict[tuple[str, int], int] = {}
    for *_, role, index in keys:
        short[role, index] = short.get((role, index), 0) + 1
    several_nodes = len({node for node, *_ in keys}) > 1
    names = {}
    for key in keys:
        node, pid, role, index = key
        names[key] = f"{role} {index}"
        if short[role, index] > 1:
            names[key] += f" (node {node}, pid {pid})" if several_nodes else f" (pid {pid})"
    return names


def _worker(
    key: Key,
    name: str,
    parts: Sequence[tuple[Tables, int, int]],
    texts: dict[str, int],
    items: Items,
    putters: Ints,
    place: int,
) -> Worker:
    columns: list[list[Ints]] = [[], [], [], []]
    steps: list[list[Ints]] = [[], []]
    rings = []
    failed = failed_step = ""
    for tables, ring, shift in sorted(parts, key=lambda part: part[0].rings[part[1]].created_ns):
        row = tables.rings[ring]
        rings.append(row)
        mine = tables.phases.ring == ring
        ids = np.array([texts[text] for text in tables.texts] or [0], np.int64)
        phases, opened = tables.phases, row.open_phases
        columns[0] += ids[phases.name[mine]], np.array([texts[phase.name] for phase in opened], np.int64)
        columns[1] += phases.state[mine], np.array([phase.state for phase in opened], np.int64)
        open_ns = np.array([phase.start_ns for phase in opened], np.int64)
        columns[2] += phases.start_ns[mine] + shift, open_ns + shift
        columns[3] += phases.end_ns[mine] + shift, np.full(len(opened), row.end_ns + shift)
        mine = tables.steps.ring == ring
        steps[0].append(tables.steps.start_ns[mine] + shift)
        steps[1].append(tables.steps.end_ns[mine] + shift)
        errors = tables.steps.error[mine]
        if len(errors):
            failed, failed_step = "", ""
            if errors[-1] >= 0:
                number, step = int(tables.steps.number[mine][-1]), int(tables.steps.step[mine][-1])
                failed = tables.texts[errors[-1]]
                failed_step = f"step {number}" if number >= 0 else f"its step {step & SERIAL_MASK}"
    shift = parts[-1][2]
    phases_of = Segments(*(np.concatenate(column) for column in columns))
    got = np.flatnonzero(items.consumer == place)
    put = np.flatnonzero(putters == place)
    put = put[np.argsort(items.put_ns[put], kind="stable")]
    step_starts, step_ends = (np.concatenate(column) for column in steps)
    return Worker(
        key,
        name,
        rings[-1].gpu,
        rings[0].created_ns + shift,
        max(row.end_ns for row in rings) + shift,
        rings,
        _segments(phases_of),
        _sorted(phases_of),
        step_starts,
        step_ends,
        failed,
        failed_step,
        Events(items.get_ns[got], got),
        Events(items.put_ns[put], put),
        rings[-1].open_phases,
    )


def _sorted(phases: Segments) -> Segments:
    """Return phases in the order of their starts, outer ones before those in them."""
    order = np.lexsort((-phases.end_ns, phases.start_ns))
    return Segments(phases.name[order], phases.state[order], phases.start_ns[order], phases.end_ns[order])


def _segments(phases: Segments) -> Segments:
    """Return the stretches of each phase in which no other was inside it."""
    phases = _sorted(phases)
    starts, ends = phases.start_ns, phases.end_ns
    if len(starts) < 2 or bool(np.all(starts[1:] >= np.maximum.accumulate(ends)[:-1])):
        return phases
    cut: list[tuple[int, int, int, int]] = []
    stack: list[tuple[int, int]] = []  # position and end of the phases around
    at = 0

    def pass_to(time_ns: int) -> None:
        nonlocal at
        if stack and time_ns > at:
            place = stack[-1][0]
            cut.append((int(phases.name[place]), int(phases.state[place]), at, time_ns))
        at = max(at, time_ns)

    for place, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        while stack and stack[-1][1] <= start:
            pass_to(stack[-1][1])
            stack.pop()
        pass_to(start)
        stack.append((place, min(end, stack[-1][1]) if stack else end))
    while stack:
        pass_to(stack[-1][1])
        stack.pop()
    return Segments(*(np.array(column, np.int64) for column in zip(*cut, strict=True)))


def _items(
    recordings: Sequence[Tables],
    shifts: Sequence[int],
    texts: dict[str, int],
    queues: dict[str, int],
    places: dict[Key, int],
    of_ring: dict[int, int],
) -> tuple[Items, Ints]:
    """Return all items, and who put each of them into its queue: the producer, or who resumed its step."""
    columns: list[list[Ints]] = [[] for _ in range(7)]
    steps: list[NDArray[np.uint64]] = []
    producers: list[NDArray[np.uint64]] = []
    for node, (tables, shift) in enumerate(zip(recordings, shifts, strict=True)):
        items = tables.items
        text_ids = np.array([*(texts[text] for text in tables.texts), -1], np.int64)
        queue_ids = np.array([*(queues[queue.name] for queue in tables.queues), NO_QUEUE], np.int64)
        ring_places = np.array(
            [places[node, ring.pid, ring.role, ring.index] for ring in tables.rings] or [0], np.int64
        )
        columns[0].append(queue_ids[items.queue])
        columns[1].append(text_ids[items.bucket])
        columns[2].append(np.where(items.put_ns == 0, 0, items.put_ns + shift))
        columns[3].append(items.get_ns + shift)
        rings, inverse = np.unique(items.producer & ~np.uint64(SERIAL_MASK), return_inverse=True)
        known = np.array([of_ring.get(ring, -1) for ring in rings.tolist()] or [-1], np.int64)
        columns[4].append(known[inverse])
        columns[5].append(ring_places[items.ring])
        columns[6].append(items.resumed.astype(np.int64))
        steps.append(items.step)
        producers.append(items.producer)
    queue, bucket, put_ns, get_ns, producer, consumer, resumed = map(np.concatenate, columns)
    order = np.argsort(get_ns, kind="stable")
    found = Items(
        queue[order],
        bucket[order],
        put_ns[order],
        get_ns[order],
        producer[order],
        consumer[order],
        resumed[order].astype(np.bool_),
    )
    producing = np.concatenate(producers)[order]
    putters = found.producer.copy()
    is_resumed = found.resumed
    if is_resumed.any():
        # the step that was resumed -> who did, and when
        by_step = np.argsort(producing[is_resumed], kind="stable")
        resumed_steps = producing[is_resumed][by_step]
        who, since = found.consumer[is_resumed][by_step], found.get_ns[is_resumed][by_step]
        at = np.searchsorted(resumed_steps, producing).clip(max=len(resumed_steps) - 1)
        taken_over = (resumed_steps[at] == producing) & ~is_resumed & (found.put_ns >= since[at])
        putters = np.where(taken_over, who[at], putters)
    return found, putters


def starved(segments: Segments) -> NDArray[np.bool_]:
    """Return which are starved."""
    found: NDArray[np.bool_] = segments.state == State.STARVED
    return found


def backpressured(segments: Segments) -> NDArray[np.bool_]:
    """Return which are backpressured."""
    found: NDArray[np.bool_] = segments.state == State.BACKPRESSURED
    return found
