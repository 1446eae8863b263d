"""Frames to totals: the one fold that metrics, summary and report share, so that they agree. Pure: no I/O, no clock.

Where a worker's time went
    Phases of a ring are nested or disjoint intervals, recorded in the order of their ends. Each ns of wall time is counted once: for
    the innermost phase around it (a phase's *self* time), or as OTHER when it is in none. Wall time runs from the ring's creation to
    its last record's end, or to the end that its CLOSED frame states. So the states sum to the wall time exactly, after every frame.

    A phase that is still open has no record, so a gap between two recorded phases may yet turn out to lie in an enclosing one. It
    can't any more once the step ends: then it is *settled*. A cumulative metric must not fall, so metrics report settled OTHER only,
    while a summary reports all of it; after a CLOSED frame both are the same. What encloses a whole step counts from that step's end.

A snapshot (`to_dict`) holds all totals and the names they need, so folding can go on exactly where it stopped, in another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from otel_dflash.agent.catalog import Catalog, RingNames
from otel_dflash.agent.coverage import PENDING_MAX, Coverage
from otel_dflash.agent.exemplars import KEY_MASK, STEP_MASK, Found, Longest
from otel_dflash.agent.frames import Frame, FrameKind
from otel_dflash.agent.histogram import Histogram, group
from otel_dflash.records import (
    DROP_REASONS,
    ERROR_MASK,
    KIND_MASK,
    KIND_SHIFT,
    NAME_MASK,
    NAME_SHIFT,
    RECORD_BYTES,
    RECORD_WORDS,
    SERIAL_MASK,
    WORD_BYTES,
    WORD_MASK,
    Counter,
    Kind,
    State,
)
from otel_dflash.semconv import DROP_MALFORMED, DROP_NOT_RECORDED

SOURCES_MAX: Final = 1024  # distinct rings whose items a worker consumed, counted apart
_FUTURE_NS_MAX: Final = 60_000_000_000  # a record that ends later than this after its frame was written is torn
_DURATION_NS_MAX: Final = 1 << 53  # 104 days

_SNAPSHOT_VERSION: Final = 2


@dataclass(slots=True)
class RingTotals:
    """All that is known of one ring. Times are monotonic ns; histograms by kind, name and error as in word 0 of a slot."""

    ring: int
    created_ns: int
    coverage: Coverage
    last_ns: int
    longest: Longest  # phases and steps since `forget_settled`
    next_sequence: int = 0
    records: int = 0
    malformed: int = 0
    not_recorded: int = 0  # sequence numbers that the recording lacks
    steps: int = 0  # STEP records ...
    tokens: int = 0  # ... and their tokens; the ring's own counters know also those whose record was dropped
    input_tokens: int = 0  # of the steps that say both: their tokens ...
    loss_tokens: int = 0  # ... and those of them that count in the loss
    fill: float = 0.0  # at the newest drain
    closed: dict[str, Any] | None = None  # the CLOSED frame's payload
    counters: list[int] = field(default_factory=lambda: [0] * len(Counter))
    durations: dict[int, Histogram] = field(default_factory=dict)
    self_ns: dict[int, int] = field(default_factory=dict)  # phase name id -> time in it and in no phase inside it
    sources: dict[int, int] = field(default_factory=dict)  # ring that produced -> items consumed or resumed; 0 = any other

    @property
    def wall_ns(self) -> int:
        """Return the time this ring accounts for."""
        return self.last_ns - self.created_ns

    @property
    def batches(self) -> int:
        """Return the steps that ended, also those whose records were dropped."""
        return max(self.steps, self.counters[Counter.STEPS])

    @property
    def batch_tokens(self) -> int:
        """Return the tokens of those steps."""
        return max(self.tokens, self.counters[Counter.TOKENS])

    def histograms(self, kind: Kind) -> Iterator[tuple[int, int, Histogram]]:
        """Yield (name id, error name id, histogram) of the PHASE or STEP records; a step has name id 0."""
        for key, histogram in self.durations.items():
            if key >> KIND_SHIFT == kind:
                yield key >> NAME_SHIFT & NAME_MASK, key & ERROR_MASK, histogram

    def longest_of(self, kind: Kind, name_id: int, error_id: int) -> list[Found]:
        """Return what is kept of one of those series and has a known span, longest first."""
        return self.longest.settled(kind << KIND_SHIFT | name_id << NAME_SHIFT | error_id)

    def state_ns(self, names: RingNames, settled: bool = False) -> dict[State, int]:
        """Return ns per state, every state present: they sum to `wall_ns`. With `settled`, OTHER holds only what can't change."""
        states = dict.fromkeys(State, 0)
        for name_id, own_ns in self.self_ns.items():
            states[names.phase(name_id)[0]] += own_ns
        if settled:
            states[State.OTHER] += self.coverage.floor_ns - self.created_ns - self.coverage.settled_ns
        else:
            states[State.OTHER] += self.wall_ns - self.coverage.covered_ns
        return states

    def dropped(self) -> dict[str, int]:
        """Return lost records by reason, every reason present."""
        lost = {reason: self.counters[counter] for counter, reason in DROP_REASONS.items()}
        return {**lost, DROP_MALFORMED: self.malformed, DROP_NOT_RECORDED: self.not_recorded}

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` takes, ready for JSON."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["coverage"] = [self.coverage.floor_ns, self.coverage.covered_ns, [list(pair) for pair in self.coverage.pending]]
        data["counters"] = list(self.counters)
        data["durations"] = {str(key): histogram.to_dict() for key, histogram in self.durations.items()}
        for name in ("self_ns", "sources"):
            data[name] = {str(key): value for key, value in data[name].items()}
        data["longest"] = self.longest.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RingTotals:
        """Return the totals that `to_dict` wrote."""
        floor_ns, covered_ns, pending = data["coverage"]
        restored = {
            "coverage": Coverage(floor_ns, covered_ns, [(start, end) for start, end in pending]),
            "counters": list(data["counters"]),
            "durations": {int(key): Histogram.from_dict(value) for key, value in data["durations"].items()},
            "self_ns": {int(key): value for key, value in data["self_ns"].items()},
            "sources": {int(key): value for key, value in data["sources"].items()},
            "longest": Longest.from_dict(data["ring"], data["longest"]),
        }
        return cls(**{**data, **restored})


@dataclass(slots=True)
class AgentTotals:
    """What the agent said of itself. An agent that was started again counts its CPU time from zero: the sum goes on."""

    cpu_ns: int = 0
    cpu_last_ns: int = 0
    wall_offset_ns: int | None = None
    cost_ns: float | None = None  # per record, in the trainer, as calibrated
    lags_s: dict[str, float] = field(default_factory=dict)  # sink -> age of the newest record it has delivered

    def take(self, cpu_ns: int, wall_offset_ns: int, cost_ns: float, lags_s: dict[str, float]) -> None:
        """Take an AGENT frame."""
        self.cpu_ns += cpu_ns - self.cpu_last_ns if cpu_ns >= self.cpu_last_ns else cpu_ns
        self.cpu_last_ns = cpu_ns
        self.wall_offset_ns = wall_offset_ns
        self.cost_ns = cost_ns or self.cost_ns  # 0: no ring has said yet
        self.lags_s = lags_s


class Fold:
    """Totals of all frames added so far. One thread; `catalog` is the reader's, which knows the names of a frame before the fold does."""

    def __init__(self, catalog: Catalog, exemplars: int = 0) -> None:
        """Start from nothing; of each series the `exemplars` longest phases or steps are kept (exemplars.py)."""
        self.catalog = catalog
        self.exemplars = exemplars
        self.rings: dict[int, RingTotals] = {}
        self.agent = AgentTotals()
        self.malformed = 0  # frames and records of no known ring; each ring counts its own
        self.time_ns = 0  # of the newest frame

    def add(self, frame: Frame) -> None:
        """Fold one frame; frames of a ring in order. Never raises for what a frame holds: what makes no sense is counted."""
        self.time_ns = max(self.time_ns, frame.time_ns)
        try:
            if frame.kind == FrameKind.AGENT:
                self._take_agent(frame)
            elif frame.kind == FrameKind.NAMES:
                self._ring(frame.ring)
            elif take := _TAKE.get(frame.kind):
                take(self._ring(frame.ring), frame)
        except (ValueError, LookupError, TypeError, AttributeError):
            self.malformed += max(1, frame.count)

    def add_all(self, frames: Sequence[Frame]) -> None:
        """Fold frames in order, with the same totals as `add` one by one; short frames of a ring are folded together, up to 8 x faster."""
        waiting: dict[int, list[Frame]] = {}
        for frame in frames:
            if frame.kind == FrameKind.RECORDS and len(frame.payload) == frame.count * RECORD_BYTES:
                together = waiting.setdefault(frame.ring, [])
                if together and frame.first != together[-1].first + together[-1].count:
                    self._add_records(together)
                    together.clear()
                together.append(frame)
            else:
                self._add_records(waiting.pop(frame.ring, []))
                self.add(frame)
        for together in waiting.values():
            self._add_records(together)

    def forget_longest(self) -> None:
        """Begin the next interval of exemplars."""
        for totals in self.rings.values():
            totals.longest.forget_settled()

    def workers(self) -> dict[tuple[int, str, int], list[tuple[RingTotals, RingNames]]]:
        """Return the rings of each worker by (pid, role, index): one that was made again has several."""
        found: dict[tuple[int, str, int], list[tuple[RingTotals, RingNames]]] = {}
        for ring, totals in self.rings.items():
            worker = self.catalog[ring].worker
            found.setdefault((worker.pid, worker.role, worker.index), []).append((totals, self.catalog[ring]))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return an exact snapshot, ready for JSON."""
        rings = [{**totals.to_dict(), "names": self.catalog[ring].entries} for ring, totals in self.rings.items()]
        agent = {item.name: getattr(self.agent, item.name) for item in fields(self.agent)}
        return {"version": _SNAPSHOT_VERSION, "time_ns": self.time_ns, "malformed": self.malformed, "agent": agent, "rings": rings}

    @classmethod
    def from_dict(cls, data: dict[str, Any], catalog: Catalog, exemplars: int = 0) -> Fold:
        """Return the fold that `to_dict` wrote; names that `catalog` lacks are put into it: closed rings have none in later segments.

        Raises:
            ValueError: Written by another version; fold the recording from its start.
        """
        if data["version"] != _SNAPSHOT_VERSION:
            raise ValueError(f"fold snapshot has version {data['version']}, need {_SNAPSHOT_VERSION}; fold the recording from its start")
        fold = cls(catalog, exemplars)
        fold.time_ns, fold.malformed, fold.agent = data["time_ns"], data["malformed"], AgentTotals(**data["agent"])
        for item in data["rings"]:
            entries = [(kind, text) for kind, text in item["names"]]
            totals = RingTotals.from_dict({key: value for key, value in item.items() if key != "names"})
            fold.rings[totals.ring] = totals
            known = catalog.get(totals.ring)
            if known is None or len(known.entries) < len(entries):
                catalog[totals.ring] = RingNames(totals.ring, entries)
        return fold

    def _ring(self, ring: int) -> RingTotals:
        totals = self.rings.get(ring)
        if totals is None:
            created_ns = self.catalog[ring].worker.created_ns
            totals = self.rings[ring] = RingTotals(ring, created_ns, Coverage(created_ns), created_ns, Longest(ring, self.exemplars))
        return totals

    def _add_records(self, frames: Sequence[Frame]) -> None:
        """Fold RECORDS frames of one ring, each the continuation of the one before."""
        if frames:
            count, payload = sum(frame.count for frame in frames), b"".join(frame.payload for frame in frames)
            self.add(replace(frames[0], count=count, time_ns=max(frame.time_ns for frame in frames), payload=payload))

    def _take_agent(self, frame: Frame) -> None:
        said = frame.json()
        lags_s = {f"{sink}": float(lag_s) for sink, lag_s in said.get("lags_s", {}).items()}
        self.agent.take(said["cpu_ns"], said["wall_offset_ns"], said["cost_ns"], lags_s)
        for ring, totals in self.rings.items():
            totals.fill = float(said["fill"].get(str(ring), 0.0))


def _take_counters(totals: RingTotals, frame: Frame) -> None:
    values = np.frombuffer(frame.payload, "<u8", len(frame.payload) // WORD_BYTES).tolist()[: len(Counter)]
    totals.counters[: len(values)] = values


def _take_closed(totals: RingTotals, frame: Frame) -> None:
    """What was open is cut at the end: time of its state, but no duration that a histogram could count."""
    closed = frame.json()
    end_ns = int(closed["end_ns"])
    for name_id, start_ns in sorted(closed["open"], key=lambda item: -int(item[1])):  # innermost first
        totals.self_ns[name_id] = totals.self_ns.get(name_id, 0) + totals.coverage.cover(start_ns, end_ns)
    totals.coverage.settle(max(end_ns, totals.last_ns))
    totals.last_ns = max(totals.last_ns, end_ns)
    totals.closed = closed


def _take_records(totals: RingTotals, frame: Frame) -> None:
    rows = np.frombuffer(frame.payload, "<u8", len(frame.payload) // RECORD_BYTES * RECORD_WORDS).reshape(-1, RECORD_WORDS)
    seen = min(max(totals.next_sequence - frame.first, 0), len(rows))  # of a frame written twice
    totals.not_recorded += max(frame.first - totals.next_sequence, 0)
    totals.next_sequence = max(totals.next_sequence, frame.first + len(rows))
    totals.records += len(rows) - seen
    sequences = np.arange(frame.first + seen, frame.first + len(rows), dtype=np.uint64)
    rows = rows[seen:]
    good = _well_formed(rows, frame.time_ns)
    bad = len(rows) - int(np.count_nonzero(good))
    if bad:
        totals.malformed += bad
        rows, sequences = rows[good], sequences[good]
    if not len(rows):
        return
    kinds = rows[:, 0] >> np.uint64(KIND_SHIFT) & np.uint64(KIND_MASK)
    steps = kinds == Kind.STEP
    timed = steps | (kinds == Kind.PHASE)
    totals.last_ns = max(totals.last_ns, int(np.where(timed, rows[:, 2], rows[:, 1]).max()))
    _take_steps(totals, rows[steps])
    _take_sources(totals, rows[(kinds == Kind.CONSUMED) | (kinds == Kind.RESUMED)])
    groups = _take_durations(totals, rows[timed], steps[timed])
    totals.longest.look_at(groups, rows, sequences, kinds)


def _well_formed(rows: NDArray[np.uint64], time_ns: int) -> NDArray[np.bool_]:
    """Return which rows can be true: a ring may be torn or written by a stranger."""
    kinds = rows[:, 0] >> np.uint64(KIND_SHIFT) & np.uint64(KIND_MASK)
    starts, ends = rows[:, 1], rows[:, 2]
    timed = (kinds == Kind.PHASE) | (kinds == Kind.STEP)
    latest = np.uint64(min(time_ns + _FUTURE_NS_MAX, WORD_MASK))
    good: NDArray[np.bool_] = np.where(
        timed, (starts <= ends) & (ends <= latest) & (ends - starts < np.uint64(_DURATION_NS_MAX)), starts <= latest
    )
    good &= (kinds >= min(Kind)) & (kinds <= max(Kind))
    return good


def _take_steps(totals: RingTotals, rows: NDArray[np.uint64]) -> None:
    totals.steps += len(rows)
    tokens, loss_tokens = rows[:, 4:6].astype(np.int64).T  # UNSET is negative
    totals.tokens += sum(tokens[tokens > 0].tolist())  # of Python: they may be large
    both = (tokens >= 0) & (loss_tokens >= 0)
    totals.input_tokens += sum(tokens[both].tolist())
    totals.loss_tokens += sum(loss_tokens[both].tolist())


def _take_sources(totals: RingTotals, rows: NDArray[np.uint64]) -> None:
    if not len(rows):
        return
    rings, counts = np.unique(rows[:, 5] & ~np.uint64(SERIAL_MASK), return_counts=True)
    for ring, count in zip(rings.tolist(), counts.tolist(), strict=True):
        key = ring if ring in totals.sources or len(totals.sources) < SOURCES_MAX else 0
        totals.sources[key] = totals.sources.get(key, 0) + count


def _take_durations(totals: RingTotals, rows: NDArray[np.uint64], steps: NDArray[np.bool_]) -> dict[int, Histogram]:
    """Take phases and steps; return their durations by series."""
    starts, ends = rows[:, 1], rows[:, 2]
    keys = rows[:, 0] & np.where(steps, STEP_MASK, KEY_MASK)
    groups = group(keys, ends - starts)
    for key, histogram in groups.items():
        totals.durations.setdefault(key, Histogram()).merge(histogram)
    phases = ~steps
    # Nothing is nested when each phase starts after all that ended before it: then self time is the duration.
    reached = np.maximum.accumulate(np.concatenate(([np.uint64(totals.coverage.reached_ns)], ends)))[:-1]
    if np.any(phases & (starts < reached)):
        _account_nested(totals, keys, starts, ends)
        return groups
    length_ns = 0
    for key, histogram in groups.items():
        if key >> KIND_SHIFT == Kind.PHASE:
            _add_self(totals, key >> NAME_SHIFT & NAME_MASK, histogram.sum_ns)
            length_ns += histogram.sum_ns
    step_positions = np.flatnonzero(steps)
    since = 0
    if len(step_positions):
        since = int(step_positions[-1]) + 1
        totals.coverage.settle(int(ends[:since].max()))
    tail = np.flatnonzero(phases[since:])[-PENDING_MAX - 1 :] + since
    totals.coverage.append(list(zip(starts[tail].tolist(), ends[tail].tolist(), strict=True)), length_ns)
    return groups


def _account_nested(totals: RingTotals, keys: NDArray[np.uint64], starts: NDArray[np.uint64], ends: NDArray[np.uint64]) -> None:
    coverage = totals.coverage
    for key, start_ns, end_ns in zip(keys.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if key >> KIND_SHIFT == Kind.STEP:
            coverage.settle(end_ns)
        else:
            _add_self(totals, key >> NAME_SHIFT & NAME_MASK, coverage.cover(start_ns, end_ns))


def _add_self(totals: RingTotals, name_id: int, own_ns: int) -> None:
    totals.self_ns[name_id] = totals.self_ns.get(name_id, 0) + own_ns


_TAKE: Final = {FrameKind.RECORDS: _take_records, FrameKind.COUNTERS: _take_counters, FrameKind.CLOSED: _take_closed}
