"""Exemplars: the longest phases and steps of each series since the last point, with the ids of their spans.

The trace of a span is known once its step has ended, so a phase of an open step waits for it, over any number
of points. Only phases longer than those kept are examined, so most frames cost one comparison per series.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otel_dflash.metrics.decoding import KEY_MASK, STEP_MASK, Words
from otel_dflash.metrics.histogram import Histogram
from otel_dflash.records import KIND_SHIFT, Kind
from otel_dflash.spans import identity


class Found(NamedTuple):
    """A phase or a step of one ring. Times are monotonic ns."""

    duration_ns: int
    end_ns: int
    sequence: int
    step: int  # that it belongs to; for a step's own record, the step whose span it is
    root: int  # of its trace; 0 while the step is open
    is_step: bool

    def span_of(self, ring: int) -> tuple[int, int]:
        """Return (trace id, span id) as the replay assigns them.

        If the trace is full, the span is in a further one, but the id is that of the full trace.
        """
        if self.is_step:
            return identity.trace_id(self.root), identity.step_span_id(self.step)
        key = identity.ring_key(ring)
        trace_id = (
            identity.lone_trace_id(key, self.sequence) if self.step == ring else identity.trace_id(self.root)
        )
        return trace_id, identity.phase_span_id(key, self.sequence)


@dataclass(slots=True)
class Longest:
    """The longest of each series of one ring, longest first. Pure: the same for the same frames."""

    ring: int
    kept_max: int  # per series; 0 for none
    # by kind, name and error as in word 0 of a slot
    series: dict[int, list[Found]] = field(default_factory=dict)
    resumed: tuple[int, int, int] = 0, 0, 0  # newest step that took over another: its id, root, the other
    open_steps: set[int] = field(default_factory=set)  # awaited by kept phases

    def look_at(self, groups: dict[int, Histogram], rows: Words, sequences: Words, kinds: Words) -> None:
        """Add well-formed records in order; `groups` are their durations by series."""
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
            step, root, other = rows[taken_over[-1], 3:6].tolist()
            self.resumed = step, root, other

    def settled(self, key: int) -> list[Found]:
        """Return the kept entries of a series whose spans are known, longest first."""
        return [found for found in self.series.get(key, []) if found.root]

    def forget_settled(self) -> None:
        """Begin the next interval; phases that wait for their step stay."""
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
        return cls(ring, data["kept_max"], series, tuple(data["resumed"]), _open_steps(series))

    def _admit(self, key: int, rows: Words, sequences: Words) -> None:
        is_step = key >> KIND_SHIFT == Kind.STEP
        mine = np.flatnonzero(rows[:, 0] & (STEP_MASK if is_step else KEY_MASK) == np.uint64(key))
        negative_durations = rows[mine, 1].astype(np.int64) - rows[mine, 2].astype(np.int64)
        # the first of equal ones, wherever a frame begins
        best = mine[np.argsort(negative_durations, kind="stable")[: self.kept_max]]
        kept = list(self.series.get(key, []))
        for start_ns, end_ns, step, sequence in zip(
            *rows[best, 1:4].T.tolist(), sequences[best].tolist(), strict=True
        ):
            alone = step == self.ring
            kept.append(Found(end_ns - start_ns, end_ns, sequence, step, step if alone else 0, is_step))
            if not alone:
                self.open_steps.add(step)
        kept.sort(key=lambda found: -found.duration_ns)
        self.series[key] = kept[: self.kept_max]

    def _settle(
        self, rows: Words, sequences: Words, ends: NDArray[np.intp], taken_over: NDArray[np.intp]
    ) -> None:
        """Find the traces of waiting entries from STEP records.

        Entries of a step whose end was lost are dropped once a later step has ended.
        """
        others = {step: others for step, *others in [self.resumed, *rows[taken_over, 3:6].tolist()]}
        steps = rows[ends, 3]
        awaited = ends[np.isin(steps, np.array(list(self.open_steps), np.uint64))]
        # step -> its record's sequence, root, the step whose span it is
        ended: dict[int, tuple[int, int, int]] = {}
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
    if end is None or end[0] < found.sequence:  # phases after the step's own record are in other spans
        return found
    return found._replace(root=end[1], step=end[2] if found.is_step else found.step)


def _open_steps(series: dict[int, list[Found]]) -> set[int]:
    return {found.step for kept in series.values() for found in kept if not found.root}
