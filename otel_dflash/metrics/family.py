"""A metric family: totals by ring, folded from frames, with points and a snapshot of its own.

A new family is a file in families/ and a line in the registry there. A family whose snapshot cannot be used
folds the recording again by itself, from the oldest frame there is. If older ones were removed, its series
start at that frame.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Generic, TypeVar, get_type_hints

from otel_dflash.metrics.decoding import Records, Ring
from otel_dflash.metrics.ended import Names
from otel_dflash.metrics.points import Attributes, Metric, NumberPoint
from otel_dflash.metrics.typed import check
from otel_dflash.recording.catalog import OF_ROLE, Catalog
from otel_dflash.recording.payloads import Closed, OpenWork, Sample
from otel_dflash.recording.run_info import RunInfo

T = TypeVar("T")
Sends = Callable[[int], bool]
"""Whether the spans of a trace id are sent."""


@dataclass(frozen=True)
class Worker:
    """One worker: all rings of a role and index in one process. One that was recreated has several."""

    pid: int
    role: str
    index: int
    attributes: Attributes
    rings: list[Ring]


@dataclass(frozen=True)
class Moment:
    """One end time to make points for, and the workers created by then."""

    info: RunInfo
    time_ns: int  # wall
    sends: Sends
    catalog: Catalog
    workers: list[Worker]  # in the order of pid, role and index; the past of a role first (ended.py)


@dataclass(frozen=True)
class Member(Generic[T]):
    """One worker in one family. Times are wall ns."""

    worker: Worker
    rings: list[tuple[Ring, T]]
    created_ns: int
    start_ns: int  # of the family's totals
    time_ns: int

    def sum(self, value: Callable[[T], int]) -> int:
        """Return the sum over the worker's rings."""
        return sum(value(totals) for _, totals in self.rings)

    def point(
        self, value: int | float, extra: Attributes | None = None, start_ns: int | None = None
    ) -> NumberPoint:
        """Return a point of this worker, from the family's start unless `start_ns` is given."""
        attributes = {**self.worker.attributes, **extra} if extra else self.worker.attributes
        return NumberPoint(attributes, self.start_ns if start_ns is None else start_ns, self.time_ns, value)


class Family(ABC, Generic[T]):
    """Metrics that are made from the same totals `T` of each ring. Of one fold; one thread."""

    name: ClassVar[str]
    """The key of its snapshot."""
    version: ClassVar[int]
    """Of its snapshot and of what the totals mean: a change of either raises it."""
    sources: ClassVar[frozenset[str]] = frozenset()
    """Whose samples it takes."""

    def __init__(self) -> None:
        self.since_ns = 0
        """Monotonic time of the oldest frame folded, 0 if it is the recording's first."""
        self.rings: dict[int, T] = {}

    @abstractmethod
    def open(self, ring: Ring) -> T:
        """Return the totals of a new ring."""

    @abstractmethod
    def dump(self, totals: T) -> Any:
        """Return totals ready for JSON."""

    @abstractmethod
    def load(self, ring: int, data: Any) -> T:
        """Return what `dump` was given. The types inside are checked against the return annotation.

        Raises ValueError, LookupError, TypeError or AttributeError if the data is not from `dump`.
        """

    @abstractmethod
    def points(self, moment: Moment) -> Iterator[Metric]:
        """Yield the family's metrics; the fold drops those without points."""

    def take_records(self, ring: Ring, records: Records) -> None:
        """Add records of a ring."""

    def take_counters(self, ring: Ring, counters: Sequence[int]) -> None:
        """Take the cumulative counters of a ring in the order of records.Counter; the last may be absent."""

    def take_closed(self, ring: Ring, closed: Closed, was_captured: bool) -> None:
        """Take the end of a ring; `was_captured` as for `take_open`."""

    def take_open(self, ring: Ring, time_ns: int, work: OpenWork, was_captured: bool) -> None:
        """Take what was open in a ring at a monotonic time.

        All records that ended by then were taken before. `was_captured` tells whether phases were captured
        since the OPEN frame before.
        """

    def take_samples(self, ring: Ring | None, samples: Sequence[Sample]) -> None:
        """Take finite samples of the family's sources, from one frame of a ring or of none."""

    @abstractmethod
    def merge(self, past: T, totals: T, names: Names) -> None:
        """Add the totals of a closed ring to those of a past (ended.py); `names` maps its name ids."""

    def begin_interval(self) -> None:
        """Drop what belongs to the interval that ended: exemplars."""

    def of(self, ring: Ring) -> T:
        """Return the totals of a ring."""
        totals = self.rings.get(ring.id)
        if totals is None:
            totals = self.rings[ring.id] = self.open(ring)
        return totals

    def start_of(self, ring: Ring) -> int:
        """Return when the totals of a ring start, monotonic."""
        return max(ring.created_ns, self.since_ns)

    def members(self, moment: Moment, with_past: bool = False) -> list[Member[T]]:
        """Return the workers that this family knows; `with_past`, also the pasts of roles, for sums."""
        found = []
        for worker in moment.workers:
            if worker.index == OF_ROLE and not with_past:
                continue
            rings = [(ring, self.rings[ring.id]) for ring in worker.rings if ring.id in self.rings]
            if rings:
                created_ns = min(ring.created_ns for ring, _ in rings)
                start_ns = max(created_ns, self.since_ns)
                wall_ns = moment.info.wall_ns
                found.append(Member(worker, rings, wall_ns(created_ns), wall_ns(start_ns), moment.time_ns))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot, ready for JSON."""
        rings = [[ring, self.dump(totals)] for ring, totals in self.rings.items()]
        return {"version": self.version, "since_ns": self.since_ns, "rings": rings}

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the snapshot that `to_dict` made. A snapshot that cannot be used changes nothing.

        Raises:
            ValueError: The snapshot is from another version.
            LookupError, TypeError, AttributeError: The snapshot is damaged.
        """
        if data["version"] != self.version:
            raise ValueError(f"{self.name} has version {data['version']}, need {self.version}")
        since_ns, rings = data["since_ns"], {ring: self.load(ring, item) for ring, item in data["rings"]}
        totals = get_type_hints(self.load)["return"]
        check((since_ns, rings), tuple[int, dict[int, totals]])  # type: ignore[valid-type]
        self.since_ns, self.rings = since_ns, rings


def by_process(members: Sequence[Member[T]]) -> Iterator[tuple[int, list[Member[T]]]]:
    """Yield each process and its workers."""
    for pid, found in groupby(members, key=lambda member: member.worker.pid):
        yield pid, list(found)


def by_role(members: Sequence[Member[T]]) -> Iterator[tuple[str, list[Member[T]]]]:
    """Yield each role of one process and its workers."""
    for role, found in groupby(members, key=lambda member: member.worker.role):
        yield role, list(found)
