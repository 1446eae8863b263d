"""Where a worker's time went, and what it got done.

Phases of a ring are nested or disjoint intervals, recorded in the order of their ends. Each ns of wall time
is counted once: for the innermost phase around it (a phase's *self* time), or as OTHER when it is in none.
Wall time runs from the ring's creation to its last record's end, or to the end that its CLOSED frame
states. So the states sum to the wall time exactly, after every frame.

A phase that is still open has no record, so a gap between two recorded phases may yet turn out to lie in an
enclosing one. Once the step ends it cannot: then it is *settled*. A cumulative metric must not
fall, so points have settled OTHER only, while a summary has all of it; after a CLOSED or an OPEN frame both
are the same. What encloses a whole step counts from that step's end.

An OPEN frame closes the books: the phases that it lists count up to its time, and time in none of them is
settled. What it gave to a state is final; a later record adds what lies after it. OTHER time is UNCAPTURED if
the frame before said that phases were not captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from otel_dflash import semconv
from otel_dflash.metrics.coverage import PENDING_MAX, Coverage
from otel_dflash.metrics.decoding import Records, Ring, Timed
from otel_dflash.metrics.ended import Names
from otel_dflash.metrics.family import Family, Member, Moment, by_process, by_role
from otel_dflash.metrics.histogram import NS_PER_S
from otel_dflash.metrics.points import Instrument, Metric, NumberPoint
from otel_dflash.recording.catalog import OF_ROLE, RingNames
from otel_dflash.recording.payloads import Closed, Open, OpenWork
from otel_dflash.recording.record_types import HEAD_WORD, StepRecord, kind_of
from otel_dflash.records import KIND_SHIFT, NAME_MASK, NAME_SHIFT, Counter, Kind, State


class Failure(NamedTuple):
    """An exception that ended what a ring recorded last."""

    error: int  # name id of its type
    step: int  # id of the step, the ring's if none
    number: int | None  # that the user gave the step
    end_ns: int  # monotonic


@dataclass(slots=True)
class WorkerTotals:
    """Of one ring."""

    start_ns: int  # monotonic
    coverage: Coverage
    # phase name id -> time in it and in no phase inside it
    self_ns: dict[int, int] = field(default_factory=dict)
    steps: int = 0  # STEP records ...
    tokens: int = 0  # ... and their tokens
    counted_steps: int = 0  # by the ring itself, including those whose record was dropped
    counted_tokens: int = 0
    uncaptured_ns: int = 0
    past_other_ns: int = 0  # OTHER and UNCAPTURED of the rings that were merged into a past (ended.py)
    settled_other_ns: int = 0  # OTHER and UNCAPTURED at the newest OPEN frame
    open: OpenWork | None = None  # at that frame, None if a record followed
    failure: Failure | None = None

    @property
    def batches(self) -> int:
        """Return how many steps ended, including those whose records were dropped."""
        return max(self.steps, self.counted_steps)

    @property
    def batch_tokens(self) -> int:
        """Return the tokens of those steps."""
        return max(self.tokens, self.counted_tokens)

    def state_ns(self, ring: Ring, names: RingNames, settled: bool = False) -> dict[State, int]:
        """Return ns per state, every state present; they sum to the wall time.

        With `settled`, OTHER holds only time that cannot change any more.
        """
        states = dict.fromkeys(State, 0)
        for name_id, own_ns in self.self_ns.items():
            states[names.phase(name_id)[0]] += own_ns
        if settled:
            other_ns = self.settled_ns()
        else:
            other_ns = max(ring.last_ns, self.start_ns) - self.start_ns - self.coverage.covered_ns
        states[State.OTHER] += other_ns - self.uncaptured_ns
        states[State.UNCAPTURED] += self.uncaptured_ns
        return states

    def settled_ns(self) -> int:
        """Return how much of the settled time lies in no phase."""
        return self.coverage.floor_ns - self.start_ns - self.coverage.settled_ns + self.past_other_ns

    def close_books(self, phases: Sequence[Open], time_ns: int, was_captured: bool) -> None:
        """Count open phases, given the outermost first, up to a time, and settle all until then."""
        for name_id, start_ns in reversed(phases):  # innermost first
            self.add_self(name_id, self.coverage.cover(start_ns, time_ns))
        self.coverage.settle(time_ns)
        other_ns = self.settled_ns()
        if not was_captured:
            self.uncaptured_ns += other_ns - self.settled_other_ns
        self.settled_other_ns = other_ns

    def add_self(self, name_id: int, own_ns: int) -> None:
        """Count time in a phase and in no phase inside it."""
        self.self_ns[name_id] = self.self_ns.get(name_id, 0) + own_ns


class Workers(Family[WorkerTotals]):
    """Workers, their time by state, their steps and tokens."""

    name = "workers"
    version = 2

    def open(self, ring: Ring) -> WorkerTotals:
        """Return the totals of a new ring."""
        start_ns = self.start_of(ring)
        return WorkerTotals(start_ns, Coverage(start_ns))

    def take_records(self, ring: Ring, records: Records) -> None:
        """Count steps, and the time of phases."""
        totals = self.of(ring)
        if records.count:
            totals.open = None
        tokens, _ = records.step_tokens
        totals.steps += len(tokens)
        totals.tokens += sum(tokens[tokens > 0].tolist())  # of Python: they may be large
        if len(records.timed.keys):
            totals.failure = _failure(records)
            _account(totals, records.timed)

    def take_counters(self, ring: Ring, counters: Sequence[int]) -> None:
        """Take the ring's own count of steps and tokens."""
        totals = self.of(ring)
        totals.counted_steps, totals.counted_tokens = counters[Counter.STEPS], counters[Counter.TOKENS]

    def take_closed(self, ring: Ring, closed: Closed, was_captured: bool) -> None:
        """End the open phases: they count in their states, but have no duration for a histogram."""
        totals = self.of(ring)
        totals.close_books(closed.open, max(closed.end_ns, ring.last_ns), was_captured)
        totals.open = None

    def take_open(self, ring: Ring, time_ns: int, work: OpenWork, was_captured: bool) -> None:
        """Count the open phases up to `time_ns`."""
        totals = self.of(ring)
        totals.close_books(work.phases, time_ns, was_captured)
        totals.open = work

    def merge(self, past: WorkerTotals, totals: WorkerTotals, names: Names) -> None:
        """Add the time and the work of a closed ring."""
        for name_id, own_ns in totals.self_ns.items():
            past.add_self(names(name_id), own_ns)
        past.past_other_ns += totals.settled_ns()
        past.uncaptured_ns += totals.uncaptured_ns
        past.steps += totals.batches
        past.tokens += totals.batch_tokens

    def points(self, moment: Moment) -> Iterator[Metric]:
        """Yield the metrics of each process."""
        for pid, members in by_process(self.members(moment, with_past=True)):
            yield Metric(semconv.WORKER_COUNT, Instrument.UP_DOWN_COUNTER, pid, list(_count_points(members)))
            members = [member for member in members if member.worker.index != OF_ROLE]
            times = [point for member in members for point in _state_points(moment, member)]
            yield Metric(semconv.WORKER_TIME, Instrument.COUNTER, pid, times)
            ages = [point for member in members for point in _open_age_points(moment, member)]
            yield Metric(semconv.WORKER_OPEN_AGE, Instrument.GAUGE, pid, ages)
            # a ring counts from its creation, whatever is left of the recording
            batches = [
                member.point(member.sum(lambda totals: totals.batches), start_ns=member.created_ns)
                for member in members
            ]
            yield Metric(semconv.WORKER_BATCHES, Instrument.COUNTER, pid, batches)
            tokens = [
                member.point(member.sum(lambda totals: totals.batch_tokens), start_ns=member.created_ns)
                for member in members
            ]
            yield Metric(semconv.WORKER_TOKENS, Instrument.COUNTER, pid, tokens)

    def dump(self, totals: WorkerTotals) -> Any:
        """Return totals ready for JSON."""
        coverage = totals.coverage
        return {
            "start_ns": totals.start_ns,
            "coverage": [coverage.floor_ns, coverage.covered_ns, coverage.pending],
            "self_ns": {str(name_id): own_ns for name_id, own_ns in totals.self_ns.items()},
            "steps": totals.steps,
            "tokens": totals.tokens,
            "counted_steps": totals.counted_steps,
            "counted_tokens": totals.counted_tokens,
            "uncaptured_ns": totals.uncaptured_ns,
            "past_other_ns": totals.past_other_ns,
            "settled_other_ns": totals.settled_other_ns,
            "open": totals.open,
            "failure": totals.failure,
        }

    def load(self, ring: int, data: Any) -> WorkerTotals:
        """Return what `dump` was given."""
        floor_ns, covered_ns, pending = data["coverage"]
        open_work, failure = data["open"], data["failure"]
        restored = {
            "coverage": Coverage(floor_ns, covered_ns, [(start, end) for start, end in pending]),
            "self_ns": {int(name_id): own_ns for name_id, own_ns in data["self_ns"].items()},
            "open": open_work and _open_work(*open_work),
            "failure": failure and Failure(*failure),
        }
        return WorkerTotals(**{**data, **restored})


def _open_work(step: Sequence[int] | None, phases: Sequence[Sequence[int]]) -> OpenWork:
    return OpenWork(Open(*step) if step else None, tuple(Open(*phase) for phase in phases))


def _failure(records: Records) -> Failure | None:
    """Return the failure that the newest phase or step ended with, None if it did not fail."""
    words = tuple(records.rows[np.flatnonzero(records.is_timed)[-1]].tolist())
    step = StepRecord.decode(words)
    number = step.number if kind_of(words[HEAD_WORD]) == Kind.STEP else None
    return Failure(step.error, step.step, number, step.end_ns) if step.error else None


def _account(totals: WorkerTotals, timed: Timed) -> None:
    starts, ends, coverage = timed.starts, timed.ends, totals.coverage
    phases = ~timed.is_step
    # Nothing is nested when each phase starts after all that ended before it: then self time is the duration.
    reached = np.maximum.accumulate(np.concatenate(([np.uint64(coverage.reached_ns)], ends)))[:-1]
    if np.any(phases & (starts < reached)):
        _account_nested(totals, timed)
        return
    length_ns = 0
    for key, histogram in timed.durations.items():
        if key >> KIND_SHIFT == Kind.PHASE:
            totals.add_self(key >> NAME_SHIFT & NAME_MASK, histogram.sum_ns)
            length_ns += histogram.sum_ns
    step_positions = np.flatnonzero(timed.is_step)
    since = 0
    if len(step_positions):
        since = int(step_positions[-1]) + 1
        coverage.settle(int(ends[:since].max()))
    tail = np.flatnonzero(phases[since:])[-PENDING_MAX - 1 :] + since
    coverage.append(list(zip(starts[tail].tolist(), ends[tail].tolist(), strict=True)), length_ns)


def _account_nested(totals: WorkerTotals, timed: Timed) -> None:
    coverage = totals.coverage
    for key, start_ns, end_ns in zip(
        timed.keys.tolist(), timed.starts.tolist(), timed.ends.tolist(), strict=True
    ):
        if key >> KIND_SHIFT == Kind.STEP:
            coverage.settle(end_ns)
        else:
            totals.add_self(key >> NAME_SHIFT & NAME_MASK, coverage.cover(start_ns, end_ns))


def _count_points(members: Sequence[Member[WorkerTotals]]) -> Iterator[NumberPoint]:
    for role, of_role in by_role(members):
        start_ns = min(member.start_ns for member in of_role)
        running = sum(any(ring.closed is None for ring, _ in member.rings) for member in of_role)
        ended = sum(max(ring.workers for ring, _ in member.rings) for member in of_role) - running
        for state, count in ((semconv.STATE_RUNNING, running), (semconv.STATE_ENDED, ended)):
            attributes = {semconv.WORKER_ROLE: role, semconv.STATE: state}
            yield NumberPoint(attributes, start_ns, of_role[0].time_ns, count)


def _state_points(moment: Moment, member: Member[WorkerTotals]) -> Iterator[NumberPoint]:
    states = dict.fromkeys(State, 0)
    for ring, totals in member.rings:
        for state, state_ns in totals.state_ns(ring, moment.catalog[ring.id], settled=True).items():
            states[state] += state_ns
    for state, state_ns in states.items():
        yield member.point(state_ns / NS_PER_S, {semconv.STATE: state.name.lower()})


def _open_age_points(moment: Moment, member: Member[WorkerTotals]) -> Iterator[NumberPoint]:
    """Yield a point if the newest frame said what is open."""
    works = [totals.open for _, totals in member.rings if totals.open]
    if works:
        starts = [work.phases[0].start_ns for work in works if work.phases]
        age_ns = max((member.time_ns - moment.info.wall_ns(start_ns) for start_ns in starts), default=0)
        yield member.point(max(age_ns, 0) / NS_PER_S)
