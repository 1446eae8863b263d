"""Which part of a starved or backpressured phase the queue made its worker wait; the rest is its own time.

A get that waits for an item ends when the item is put; a put that waits for room ends when a get makes room.
What a get or a put takes beyond that is work: unpickling, a lock inside the queue, a copy.

* Get of an item put at `p`, got at `g`; `s` is the start of its phase, or the get before it in that phase.
  The wait is from `s` to `p`, within `s` to `g`. Items that come together (a list) wait for the last of
  them. A queue that holds items back until `min_ready` of a bucket are there makes the item wait for the
  put that completed them.
* Put number `j` in the order of puts, at `p`, into a queue of capacity `C`: room was made by get number `j
  - C`, at `f`. The wait is from `s` to `f`, within `s` to `p`.
* A get or put outside any phase counts from the end of the phase or step before it.
* A starved phase without an item is a wait, unless no item ever reaches the worker's role: then it reads an
  input from outside, and that is work of its own. A backpressured phase without an item is a wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from otel_dflash.records import State
from otel_dflash.views.analysis.workers import NO_QUEUE, Events, Flow, Ints, Items, Worker, clipped

TOGETHER_NS: Final = 100_000  # gets closer than this in a phase are one get of several items
OF_BUCKET_SHARE_MIN: Final = 0.9  # of gets that found enough items of their bucket
FILLED_SHARE_MIN: Final = 0.75  # of a queue's capacity: a queue seen so full may be full
ROOM_NS_MAX: Final = 1_000_000  # a put waited for room if it came so soon after the get that made it


@dataclass(frozen=True)
class Waits:
    """The times that one worker waited for its queues, disjoint and in order."""

    start_ns: Ints
    end_ns: Ints
    state: Ints  # STARVED or BACKPRESSURED
    queue: Ints  # position in Flow.queues, NO_QUEUE if not known
    in_phase: NDArray[np.bool_]

    def within(self, start_ns: int, end_ns: int) -> Ints:
        """Return how much of each lies between two times."""
        return clipped(self.start_ns, self.end_ns, start_ns, end_ns)


def find_waits(flow: Flow) -> list[Waits]:
    """Return the waits of each worker."""
    available = _available(flow)
    room = _room(flow)
    receiving = {worker.role for worker in flow.workers if len(worker.gets.time_ns)}
    return [_waits(worker, flow.items, available, room, worker.role in receiving) for worker in flow.workers]


def _available(flow: Flow) -> Ints:
    """Return when each item could be got: when it was put, or when there were enough to give any."""
    items = flow.items
    available: Ints = items.put_ns.copy()
    for place, queue in enumerate(flow.queues):
        mine = np.flatnonzero((items.queue == place) & (items.put_ns > 0))
        if queue.min_ready and queue.min_ready > 1 and len(mine):
            available[mine] = np.maximum(available[mine], _completed(items, mine, queue.min_ready))
    return available


def _completed(items: Items, mine: Ints, min_ready: int) -> Ints:
    """Return, of each get, the put after which there were `min_ready` items: of its bucket, if no get ever
    found fewer of them, else of the queue."""
    buckets = [mine[items.bucket[mine] == bucket] for bucket in np.unique(items.bucket[mine])]
    completed = np.zeros(len(items.put_ns), np.int64)
    for of_bucket in buckets:
        completed[of_bucket] = _completing_puts(items, of_bucket, min_ready)
    if np.count_nonzero(completed[mine]) < OF_BUCKET_SHARE_MIN * len(mine):
        completed[mine] = _completing_puts(items, mine, min_ready)
    return completed[mine]


def _completing_puts(items: Items, mine: Ints, min_ready: int) -> Ints:
    """Return the put after which there were `min_ready` of these items at each get, 0 if it came later.

    Before get number `i` there were `i + min_ready` puts.
    """
    puts, gets = np.sort(items.put_ns[mine]), items.get_ns[mine]
    needed = np.arange(min_ready - 1, min_ready - 1 + len(mine))
    found = puts[needed.clip(max=len(puts) - 1)]
    result: Ints = np.where((found <= gets) & (needed < len(puts)), found, 0)
    return result


def _room(flow: Flow) -> Ints:
    """Return when there was room for each item: 0 if there always was, -1 if that is not known."""
    items = flow.items
    room = np.full(len(items.put_ns), -1)
    for place, queue in enumerate(flow.queues):
        mine = np.flatnonzero((items.queue == place) & (items.put_ns > 0))
        if not len(mine):
            continue
        order = mine[np.argsort(items.put_ns[mine], kind="stable")]
        puts, gets = items.put_ns[order], np.sort(items.get_ns[mine])
        occupied = np.arange(1, len(puts) + 1) - np.searchsorted(gets, puts)
        capacity, largest = queue.capacity or 0, int(occupied.max())
        # items that were never got take room too, and have no record
        is_guessed = not capacity or FILLED_SHARE_MIN * capacity <= largest < capacity
        size = largest if is_guessed else capacity
        made = np.zeros(len(puts), np.int64)
        made[size:] = gets[: max(len(puts) - size, 0)]
        if is_guessed:
            made[puts - made > ROOM_NS_MAX] = 0
        room[order] = np.minimum(made, puts)
    return room


def _waits(worker: Worker, items: Items, available: Ints, room: Ints, receives: bool) -> Waits:
    parts: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []
    gets = _at_phase_end(worker, items)
    puts = Events(worker.puts.time_ns, worker.puts.item)
    is_queued = items.queue[puts.item] != NO_QUEUE
    puts = Events(puts.time_ns[is_queued], puts.item[is_queued])
    for state, events, until in ((State.STARVED, gets, available), (State.BACKPRESSURED, puts, room)):
        parts.append(_of_events(worker, state, events, until, items))
        if receives or state == State.BACKPRESSURED:
            parts.append(_of_phases_without_items(worker, state, events))
    start, end, states, queue, in_phase = (np.concatenate(column) for column in zip(*parts, strict=True))
    kept = end > start
    order = np.flatnonzero(kept)[np.argsort(start[kept], kind="stable")]
    return Waits(start[order], end[order], states[order], queue[order], in_phase[order].astype(np.bool_))


def _at_phase_end(worker: Worker, items: Items) -> Events:
    """Return the gets; that of a resumed step at the end of the starved phase before it, if there is one."""
    times = worker.gets.time_ns
    resumed = items.resumed[worker.gets.item]
    phases = worker.phases
    starved_ends = np.sort(phases.end_ns[phases.state == State.STARVED])
    if not resumed.any() or not len(starved_ends):
        return worker.gets
    before = _newest_before(starved_ends, times)
    step_end = _newest_before(np.sort(worker.step_ends), times)
    return Events(np.where(resumed & (before >= step_end) & (before >= 0), before, times), worker.gets.item)


def _newest_before(times: Ints, moments: Ints) -> Ints:
    """Return the newest of the sorted times at or before each moment, -1 if there is none."""
    if not len(times):
        return np.full(len(moments), -1)
    at = np.searchsorted(times, moments, side="right") - 1
    found: Ints = np.where(at >= 0, times[at.clip(min=0)], -1)
    return found


def _of_events(
    worker: Worker, state: State, events: Events, until: Ints, items: Items
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return the waits of gets or puts."""
    times, item = events.time_ns, events.item
    phases = worker.phases
    mine = np.flatnonzero(phases.state == state)
    starts, ends = phases.start_ns[mine], phases.end_ns[mine]
    if len(mine):
        at = np.searchsorted(starts, times, side="right") - 1
        inside = (at >= 0) & (times <= ends[at.clip(min=0)])
        phase_start = starts[at.clip(min=0)]
    else:
        inside, phase_start = np.zeros(len(times), np.bool_), np.zeros(len(times), np.int64)
    others = np.sort(np.concatenate([phases.end_ns, worker.step_starts, worker.step_ends]))
    since = np.where(inside, phase_start, _newest_before(others, times - 1))
    since = np.where(since < 0, times, since)
    last = until[item]
    if len(times) > 1:  # several in one phase
        previous = np.concatenate([[0], times[:-1]])
        same = since[1:] == since[:-1]
        together = np.concatenate([[False], same & (times[1:] - times[:-1] <= TOGETHER_NS)])
        group = np.cumsum(~together) - 1
        first = np.flatnonzero(~together)
        last = np.maximum.reduceat(last, first)[group]
        start_of_group = np.maximum(since, previous)[first]
        since = np.where(together, times, start_of_group[group])
    known = last >= 0
    since, times, last = since[known], times[known], last[known]
    end = np.minimum(np.maximum(last, since), times)
    queue = items.queue[item][known]
    return since, end, np.full(len(end), state), queue, inside[known].astype(np.int64)


def _of_phases_without_items(
    worker: Worker, state: State, events: Events
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return the segments of phases in which nothing was got or put."""
    phases, segments = worker.phases, worker.segments
    of_state = phases.state == state
    starts, ends = phases.start_ns[of_state], phases.end_ns[of_state]
    count = np.searchsorted(events.time_ns, ends, side="right") - np.searchsorted(events.time_ns, starts)
    starts, ends = starts[count == 0], ends[count == 0]
    mine = segments.state == state
    inner_starts, inner_ends = segments.start_ns[mine], segments.end_ns[mine]
    if len(starts):
        at = np.searchsorted(starts, inner_starts, side="right") - 1
        inside = (at >= 0) & (inner_ends <= ends[at.clip(min=0)])
    else:
        inside = np.zeros(len(inner_starts), np.bool_)
    found = inner_starts[inside], inner_ends[inside]
    size = len(found[0])
    return *found, np.full(size, state), np.full(size, NO_QUEUE), np.ones(size, np.int64)


def own_time(worker: Worker, waits: Waits, start_ns: int, end_ns: int) -> dict[int, int]:
    """Return the worker's own ns between two times: by name of a phase (position in Flow.texts), without
    waits."""
    spent: dict[int, int] = {}
    length = worker.segments.within(start_ns, end_ns)
    for name in np.unique(worker.segments.name).tolist():
        spent[name] = int(length[worker.segments.name == name].sum())
    # subtract each wait from the phase it lies in
    mine = waits.in_phase
    starts, lengths = waits.start_ns[mine], waits.within(start_ns, end_ns)[mine]
    if len(starts) and len(worker.segments.start_ns):
        at = (np.searchsorted(worker.segments.start_ns, starts, side="right") - 1).clip(min=0)
        names = worker.segments.name[at]
        for name in np.unique(names).tolist():
            spent[name] = max(0, spent[name] - int(lengths[names == name].sum()))
    return spent


def queue_waits(waits: Sequence[Waits], state: State, start_ns: int, end_ns: int) -> int:
    """Return the ns that workers waited in a state between two times."""
    return sum(int(one.within(start_ns, end_ns)[one.state == state].sum()) for one in waits)
