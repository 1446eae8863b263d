"""Which part of a run an analysis is about, and what became of its workers.

By default the head is left out until every worker has ended its first turn, and 5 % of the rest; and all
after the first worker that finished, ended or died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final

import numpy as np

from otel_dflash.records import State
from otel_dflash.views.analysis.waits import Waits
from otel_dflash.views.analysis.workers import Flow, Worker

HEAD_SHARE: Final = 0.05
SILENT_NS_MIN: Final = 1_000_000_000
SILENT_STEPS: Final = 10  # p99 steps
LOST_SHARE_MIN: Final = 0.1  # of the run after a worker stopped
BLOCKED_SHARE_MIN: Final = 0.5  # of the time that those around it waited afterwards


class End(Enum):
    """What became of a worker."""

    RUNNING = "running"
    FINISHED = "finished"
    ENDED = "ended"  # by an exception
    KILLED = "killed"
    STUCK = "stuck"  # in a phase, or in none


@dataclass(frozen=True)
class Fate:
    """What became of a worker, and when it last did anything."""

    worker: Worker
    end: End
    last_ns: int
    phase: str | None = None  # in which it is stuck, or was killed


@dataclass(frozen=True)
class Window:
    """From when to when an analysis looks. Times as in Flow."""

    start_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        """Return how long it is, 0 if it ends before it starts."""
        return max(self.end_ns - self.start_ns, 0)


def first_turn_ns(worker: Worker) -> int | None:
    """Return when a worker ended its first turn, None if it never did."""
    for times in (worker.step_ends, worker.gets.time_ns, worker.puts.time_ns):
        if len(times):
            return int(times.min())
    return None


def last_turn_ns(worker: Worker) -> int:
    """Return when a worker ended its newest turn or phase."""
    ended = worker.phases.end_ns[worker.phases.end_ns < worker.end_ns]
    return max([worker.created_ns, *(int(times.max()) for times in (worker.step_ends, ended) if len(times))])


def fates(flow: Flow, waits: Sequence[Waits]) -> list[Fate]:
    """Return what became of each worker."""
    return [_fate(flow, worker, of_worker) for worker, of_worker in zip(flow.workers, waits, strict=True)]


def _fate(flow: Flow, worker: Worker, waits: Waits) -> Fate:
    last_ns = last_turn_ns(worker)
    innermost = worker.open_phases[-1] if worker.open_phases else None
    if worker.is_killed:
        return Fate(worker, End.KILLED, worker.end_ns, innermost.name if innermost else None)
    if worker.failed and not worker.is_running:
        return Fate(worker, End.ENDED, worker.end_ns)
    if not worker.is_running:
        return Fate(worker, End.FINISHED, worker.end_ns)
    steps = worker.step_ends - worker.step_starts
    usual_ns = float(np.quantile(steps, 0.99)) if len(steps) else 0.0
    silent_ns = flow.end_ns - last_ns
    if silent_ns > max(SILENT_NS_MIN, SILENT_STEPS * usual_ns):
        if worker.failed:
            return Fate(worker, End.ENDED, last_ns)
        if innermost is None or innermost.state in (State.BUSY, State.LOCK_WAIT):
            return Fate(worker, End.STUCK, last_ns, innermost.name if innermost else None)
    return Fate(worker, End.RUNNING, flow.end_ns)


def lost(flow: Flow, waits: Sequence[Waits], found: Sequence[Fate]) -> Fate | None:
    """Return the first worker that ended, died or is stuck, if that cost a tenth of the run, None if none
    did.

    A killed or silent worker counts only if others went on and, of those, its peers did turns or the other
    roles waited for most of the time: else it may have finished.
    """
    run_ns = max(flow.end_ns - flow.start_ns, 1)
    candidates = [
        fate
        for fate in found
        if fate.end in (End.ENDED, End.KILLED, End.STUCK)
        and flow.end_ns - fate.last_ns >= LOST_SHARE_MIN * run_ns
    ]
    for fate in sorted(candidates, key=lambda fate: fate.last_ns):
        if fate.end is End.ENDED or fate.phase is not None or _was_missed(flow, waits, fate):
            return fate
    return None


def _was_missed(flow: Flow, waits: Sequence[Waits], fate: Fate) -> bool:
    since_ns, role = fate.last_ns, fate.worker.role
    after_ns = flow.end_ns - since_ns
    is_source = not len(fate.worker.gets.time_ns)
    for worker, of_worker in zip(flow.workers, waits, strict=True):
        if worker is fate.worker:
            continue
        if (
            worker.role == role
            and not is_source
            and bool(np.any(worker.step_ends > since_ns + after_ns // 10))
        ):
            return True
        blocked = of_worker.within(since_ns, flow.end_ns)[of_worker.state == State.BACKPRESSURED].sum()
        if worker.role != role and blocked > BLOCKED_SHARE_MIN * after_ns:
            return True
    return False


def steady_window(flow: Flow, found: Sequence[Fate]) -> Window:
    """Return the longest part of the run, after the head, in which no worker ends and every role has one."""
    firsts = [first for worker in flow.workers if (first := first_turn_ns(worker)) is not None]
    ends = sorted({fate.last_ns for fate in found})
    if not firsts:
        return Window(flow.end_ns, flow.end_ns)
    start_ns = max(first for first in firsts if first <= max(ends[0], min(firsts)))
    start_ns += int(HEAD_SHARE * max(ends[0] - start_ns, 0))
    roles = {worker.role for worker in flow.workers}
    longest = Window(start_ns, ends[0])
    for since_ns, until_ns in pairwise(ends):
        left = {fate.worker.role for fate in found if fate.last_ns >= until_ns}
        if left == roles and until_ns - since_ns > longest.length_ns:
            longest = Window(since_ns, until_ns)
    return longest
