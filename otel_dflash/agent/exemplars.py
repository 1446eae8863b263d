"""Which phases and steps a histogram points at: the longest of each series since the last point, with the ids of their spans.

The trace of a span is known once its step has ended, so what belongs to an open step waits for that, over any number of points. Only
what is longer than what is kept is looked at, so most frames cost one comparison per series.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otel_dflash.agent import identity
from otel_dflash.agent.histogram import Histogram
from otel_dflash.records import ERROR_MASK, KIND_MASK, KIND_SHIFT, Kind

KEY_MASK: Final = np.uint64((1 << (KIND_SHIFT + 8)) - 1)  # kind, name, error: all of word 0 but the lap
STEP_MASK: Final = np.uint64((KIND_MASK << KIND_SHIFT) | ERROR_MASK)  # a step's name is its thread

Words = NDArray[np.uint64]


class Found(NamedTuple):
    """A phase or a step of one ring. Times are monotonic ns."""

    duration_ns: int
    end_ns: int
    sequence: int
    step: int  # that it belongs to; of a step's own record the one whose span it is
    root: int  # of its trace; 0 while the step is open
    is_step: bool

    def span_of(self, ring: int) -> tuple[int, int]:
        """Return (trace id, span id), the same that the replay gives the span; of one that its full trace has no room for, that trace."""
        if self.is_step:
            return identity.trace_id(self.root), identity.step_span_id(self.step)
        key = identity.ring_key(ring)
        trace_id = identity.lone_trace_id(key, self.sequence) if self.step == ring else identity.trace_id(self.root)
        return trace_id, identity.phase_span_id(key, self.sequence)


@dataclass(slots=True)
class Longest:
    """The longest of each series of one ring, longest first. Pure: the same for the same frames."""

    ring: int
    kept_max: int  # of each series; 0: nobody asks
    series: dict[int, list[Found]] = field(default_factory=dict)  # by kind, name and error as in word 0 of a slot
    resumed: list[int] = field(default_factory=lambda: [0, 0, 0])  # newest step that took over another: its id, root, the other
    open_steps: set[int] = field(default_factory=set)  # that something kept waits for

    def look_at(self, groups: dict[int, Histogram], rows: Words, sequences: Words, kinds: Words) -> None:
        """Take well-formed records in order; `groups` are the durations of their phases and steps by series."""
        if not self.kept_max:
            return
        for key, histogram in groups.items():
            kept = self.series.get(key, [])
            if len(kept) < self.kept_max or histogram.max_ns > kept[-1].duration_ns:
                self._admit(key, rows, sequences)
        taken_over = np.flatnonzero(kinds == Kind.RESUMED)
        if self.open_steps:
            ends = np.flatnonzero(kinds == Kind.STEP)
            if len(ends):
                self._settle(rows, sequences, ends, taken_over)
        if len(taken_over):
            self.resumed = rows[taken_over[-1], 3:6].tolist()

    def settled(self, key: int) -> list[Found]:
        """Return what is kept of a series and has a known span, longest first."""
        return [found for found in self.series.get(key, []) if found.root]

    def forget_settled(self) -> None:
        """Begin the next interval. What waits for its step goes on into it."""
        waiting = {key: [found for found in kept if not found.root] for key, kept in self.series.items()}
        self.series = {key: kept for key, kept in waiting.items() if kept}

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` takes, ready for JSON."""
        series = {str(key): [list(found) for found in kept] for key, kept in self.series.items()}
        return {"kept_max": self.kept_max, "series": series, "resumed": self.resumed}

    @classmethod
    def from_dict(cls, ring: int, data: dict[str, Any]) -> Longest:
        """Return what `to_dict` wrote."""
        series = {int(key): [Found(*found) for found in kept] for key, kept in data["series"].items()}
        return cls(ring, data["kept_max"], series, data["resumed"], _open_steps(series))

    def _admit(self, key: int, rows: Words, sequences: Words) -> None:
        is_step = key >> KIND_SHIFT == Kind.STEP
        mine = np.flatnonzero(rows[:, 0] & (STEP_MASK if is_step else KEY_MASK) == np.uint64(key))
        negative_durations = rows[mine, 1].astype(np.int64) - rows[mine, 2].astype(np.int64)
        best = mine[np.argsort(negative_durations, kind="stable")[: self.kept_max]]  # of equal ones the first, wherever a frame begins
        kept = list(self.series.get(key, []))
        for start_ns, end_ns, step, sequence in zip(*rows[best, 1:4].T.tolist(), sequences[best].tolist(), strict=True):
            alone = step == self.ring
            kept.append(Found(end_ns - start_ns, end_ns, sequence, step, step if alone else 0, is_step))
            if not alone:
                self.open_steps.add(step)
        kept.sort(key=lambda found: -found.duration_ns)
        self.series[key] = kept[: self.kept_max]

    def _settle(self, rows: Words, sequences: Words, ends: NDArray[np.intp], taken_over: NDArray[np.intp]) -> None:
        """Find the traces of what waits, by STEP records. A step whose end was lost is let go: a later one has ended."""
        others = {self.resumed[0]: self.resumed[1:]} | {step: others for step, *others in rows[taken_over, 3:6].tolist()}
        steps = rows[ends, 3]
        awaited = ends[np.isin(steps, np.array(list(self.open_steps), np.uint64))]
        ended: dict[int, tuple[int, int, int]] = {}  # step -> its record's sequence, root, the step whose span it is
        for words, sequence in zip(rows[awaited].tolist(), sequences[awaited].tolist(), strict=True):
            step = words[3]
            root, shown = others.get(step, (words[7] or step, step))
            ended[step] = sequence, root, shown
        newest = int(steps[-1])
        for key, kept in self.series.items():
            settled = (found if found.root else _settled(found, ended.get(found.step)) for found in kept)
            self.series[key] = [found for found in settled if found.root or found.step > newest]
        self.open_steps = _open_steps(self.series)


def _settled(found: Found, end: tuple[int, int, int] | None) -> Found:
    if end is None or end[0] < found.sequence:  # what came after the step's own record is shown elsewhere
        return found
    return found._replace(root=end[1], step=end[2] if found.is_step else found.step)


def _open_steps(series: dict[int, list[Found]]) -> set[int]:
    return {found.step for kept in series.values() for found in kept if not found.root}
