"""How much of a worker's time lies in phases. Each ns counts once, for the innermost of nested phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

PENDING_MAX: Final = 256  # top-level phases since the last step that a later phase may still enclose


@dataclass(slots=True)
class Coverage:
    """How much of a ring's time lies in phases.

    Everything up to `floor_ns` is settled; `pending` are disjoint intervals after it.
    """

    floor_ns: int
    covered_ns: int = 0
    pending: list[tuple[int, int]] = field(default_factory=list)

    @property
    def reached_ns(self) -> int:
        """Return the end of the newest interval: a phase that starts before it may enclose others."""
        return self.pending[-1][1] if self.pending else self.floor_ns

    @property
    def settled_ns(self) -> int:
        """Return how much of the time up to `floor_ns` lies in phases."""
        return self.covered_ns - sum(end - start for start, end in self.pending)

    def cover(self, start_ns: int, end_ns: int) -> int:
        """Add one phase; return its self time, which no phase before it covered."""
        later = []  # a signal handler's phases lie between this one's end and its record
        while self.pending and self.pending[-1][0] >= end_ns:
            later.append(self.pending.pop())
        start = max(start_ns, self.floor_ns)
        enclosed_ns = 0
        while self.pending and self.pending[-1][0] >= start:
            inner = self.pending.pop()
            enclosed_ns += inner[1] - inner[0]
            end_ns = max(end_ns, inner[1])
        start = max(start, self.reached_ns)
        own_ns = max(end_ns - start, 0) - enclosed_ns
        if end_ns > start:
            self.pending.append((start, end_ns))
            self.covered_ns += own_ns
        self.pending.extend(reversed(later))
        self._limit()
        return own_ns

    def append(self, intervals: Sequence[tuple[int, int]], length_ns: int) -> None:
        """Add disjoint phases that all start after `reached_ns`.

        `length_ns` is the sum of those given and of any left out.
        """
        self.pending.extend(intervals)
        self.covered_ns += length_ns
        self._limit()

    def settle(self, end_ns: int) -> None:
        """End a step: nothing recorded later starts before `end_ns`."""
        self.floor_ns = max(self.reached_ns, end_ns)
        self.pending.clear()

    def _limit(self) -> None:
        if len(self.pending) > PENDING_MAX:
            self.floor_ns = self.pending[-PENDING_MAX - 1][1]
            del self.pending[:-PENDING_MAX]
