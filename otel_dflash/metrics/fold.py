"""Frames to totals: the one fold that metrics, summary and report share, so that they agree.

Pure: no I/O, no clock. Each frame is decoded once and given to every family (family.py). What all families
need to know about a ring is kept here. A snapshot (`to_dict`) holds that, the names, and each family's own
snapshot, so another process can continue exactly where folding stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from otel_dflash import semconv
from otel_dflash.metrics.decoding import Records, Ring
from otel_dflash.metrics.ended import (
    RETIRED_NS,
    Key,
    Names,
    begin_past,
    is_past,
    key_of,
    merge_ring,
    past_id,
)
from otel_dflash.metrics.family import Family, Moment, Sends, Worker
from otel_dflash.metrics.points import Attributes, Metric
from otel_dflash.metrics.typed import check
from otel_dflash.recording.catalog import OF_ROLE, Catalog, RingNames
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.payloads import Closed, PayloadError, decode_open, decode_samples
from otel_dflash.recording.run_info import RunInfo
from otel_dflash.records import RECORD_BYTES, WORD_BYTES, Counter
from otel_dflash.session import DETAIL_PHASES

_SNAPSHOT_VERSION: Final = 4


class Fold:
    """Totals of all frames added so far. One thread.

    `catalog` is the reader's: it has a frame's names before the frame is added.
    """

    def __init__(
        self,
        catalog: Catalog,
        families: Sequence[Family[Any]],
        past_names: Mapping[int, RingNames] = MappingProxyType({}),
    ) -> None:
        """Start from nothing; the families are new.

        `past_names` are those of the fold that the families belong to, if it is another: the ids in their
        totals are of its tables, which get the names that they lack.
        """
        self.catalog = catalog
        self._given_past_names = past_names
        self.families = families
        self.rings: dict[int, Ring] = {}
        self.malformed = 0  # frames, samples, and records of no known ring; families count those of a ring
        self.time_ns = 0  # of the newest frame
        self.is_captured = True  # phases, since the newest OPEN frame; each change of that has one
        self._take: Mapping[FrameKind, Callable[[Frame], None]] = {
            FrameKind.NAMES: self._take_names,
            FrameKind.RECORDS: self._take_records,
            FrameKind.COUNTERS: self._take_counters,
            FrameKind.CLOSED: self._take_closed,
            FrameKind.OPEN: self._take_open,
            FrameKind.SAMPLES: self._take_samples,
        }

    def begin_at(self, frame: Frame) -> None:
        """Let the series of all families start at `frame`, the oldest there is.

        The recording's first frame, after frame 0 for its writer, changes nothing.
        """
        if frame.number > 1:
            for family in self.families:
                family.since_ns = frame.time_ns

    def add(self, frame: Frame) -> None:
        """Fold one frame; frames of a ring come in order. Malformed content never raises: it is counted."""
        self.time_ns = max(self.time_ns, frame.time_ns)
        if take := self._take.get(frame.kind):
            try:
                take(frame)
            except (ValueError, LookupError):  # PayloadError, or a ring without names
                self.malformed += max(1, frame.count)

    def add_all(self, frames: Sequence[Frame]) -> None:
        """Fold frames in order, with the same totals as `add` one by one.

        Short frames of a ring are folded together, up to 8 x faster.
        """
        waiting: dict[int, list[Frame]] = {}
        for frame in frames:
            if frame.kind == FrameKind.RECORDS and len(frame.payload) == frame.count * RECORD_BYTES:
                joined = waiting.setdefault(frame.ring, [])
                if joined and frame.first != joined[-1].first + joined[-1].count:
                    self._add_joined(joined)
                    joined.clear()
                joined.append(frame)
            elif frame.kind == FrameKind.OPEN:
                for joined in waiting.values():
                    self._add_joined(joined)
                waiting.clear()
                self.add(frame)
            else:
                self._add_joined(waiting.pop(frame.ring, []))
                self.add(frame)
        for joined in waiting.values():
            self._add_joined(joined)

    def begin_interval(self) -> None:
        """Begin the next interval of exemplars."""
        for family in self.families:
            family.begin_interval()

    def merge_ended(self, time_ns: int) -> None:
        """Merge the rings that have closed into the pasts of their workers, at the end of an interval.

        Workers without a ring for RETIRED_NS leave (ended.py). Call it once their points are sent.
        """
        living = set()
        for ring in list(self.rings.values()):
            key = key_of(self.catalog[ring.id].worker)
            if ring.closed is None:
                living.add(key)
            elif not is_past(ring):
                self._merge(ring, key)
        for past in [ring for ring in self.rings.values() if is_past(ring)]:
            pid, role, index = key_of(self.catalog[past.id].worker)
            is_old = time_ns - past.last_ns >= RETIRED_NS
            if index != OF_ROLE and is_old and (pid, role, index) not in living:
                self._merge(past, (pid, role, OF_ROLE))
        infos = {ring_id: self.catalog[ring_id].worker for ring_id in self.rings}
        pids = {info.pid for info in infos.values() if info.index != OF_ROLE}
        for ring_id, info in infos.items():
            if info.pid not in pids:
                self._forget(ring_id)

    @property
    def past_names(self) -> dict[int, RingNames]:
        """Return the names of every past (ended.py)."""
        return {ring.id: self.catalog[ring.id] for ring in self.rings.values() if is_past(ring)}

    def workers(self) -> list[Worker]:
        """Return all workers in the order of pid, role and index."""
        found: dict[tuple[int, str, int], list[Ring]] = {}
        for ring in self.rings.values():
            info = self.catalog[ring.id].worker
            found.setdefault((info.pid, info.role, info.index), []).append(ring)
        return [Worker(*key, self._attributes(rings), rings) for key, rings in sorted(found.items())]

    def points(self, info: RunInfo, time_ns: int, sends: Sends = lambda trace_id: True) -> list[Metric]:
        """Return one point of every series, resource by resource.

        Args:
            info: The recording's run.
            time_ns: End of the interval the points stand for, monotonic. A worker created later has no
                point yet.
            sends: Whether the spans of a trace id are sent: exemplars lead only to these.
        """
        workers = [
            worker for worker in self.workers() if min(ring.created_ns for ring in worker.rings) <= time_ns
        ]
        moment = Moment(info, info.wall_ns(time_ns), sends, self.catalog, workers)
        metrics = [metric for family in self.families for metric in family.points(moment) if metric.points]
        return sorted(metrics, key=lambda metric: (metric.pid is None, metric.pid or 0))

    def to_dict(self) -> dict[str, Any]:
        """Return an exact snapshot, ready for JSON."""
        return {
            "version": _SNAPSHOT_VERSION,
            "time_ns": self.time_ns,
            "malformed": self.malformed,
            "is_captured": self.is_captured,
            "rings": [
                {
                    "ring": ring.id,
                    "created_ns": ring.created_ns,
                    "last_ns": ring.last_ns,
                    "next_sequence": ring.next_sequence,
                    "closed": ring.closed and ring.closed.encode().decode(),
                    "gap_ns": ring.gap_ns,
                    "workers": ring.workers,
                    "names": self.catalog[ring.id].entries,
                }
                for ring in self.rings.values()
            ],
            "families": {family.name: family.to_dict() for family in self.families},
        }

    def restore(self, data: dict[str, Any]) -> dict[Family[Any], Exception]:
        """Restore a snapshot; return the families that cannot use their part, and why.

        Those families must fold again all that was folded before. Names that the catalog lacks are added to
        it, because later segments do not repeat those of closed rings.

        Raises:
            ValueError: The snapshot is from another version.
            LookupError, TypeError, AttributeError: The snapshot is damaged.
        """
        if data["version"] != _SNAPSHOT_VERSION:
            raise ValueError(f"fold snapshot has version {data['version']}, need {_SNAPSHOT_VERSION}")
        for item in data["rings"]:
            entries = [(kind, text) for kind, text in item["names"]]
            check(entries, list[tuple[int, str]])
            known = self.catalog.get(item["ring"])
            if known is None or len(known.entries) < len(entries):
                known = self.catalog[item["ring"]] = RingNames(item["ring"], entries)
            ring = Ring(
                known.ring,
                item["created_ns"],
                item["last_ns"],
                item["next_sequence"],
                Closed.decode(item["closed"]) if item["closed"] else None,
                item["gap_ns"],
                item["workers"],
            )
            _ = known.worker  # it raises if the names are not of a ring
            check(ring, Ring)
            self.rings[ring.id] = ring
        self.time_ns, self.malformed = data["time_ns"], data["malformed"]
        self.is_captured = data["is_captured"]
        check((self.time_ns, self.malformed, self.is_captured), tuple[int, int, bool])
        unusable: dict[Family[Any], Exception] = {}
        for family in self.families:
            try:
                family.restore(data["families"][family.name])
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                unusable[family] = error
        return unusable

    def _ring(self, ring_id: int) -> Ring:
        ring = self.rings.get(ring_id)
        if ring is None:
            created_ns = self.catalog[ring_id].worker.created_ns
            ring = self.rings[ring_id] = Ring(ring_id, created_ns, created_ns)
            for family in self.families:
                family.of(ring)
        return ring

    def _merge(self, ring: Ring, key: Key) -> None:
        names = self.catalog[ring.id]
        past = self.rings.get(past_id(key))
        if past is None:
            past, table = begin_past(key, ring, names.worker)
            self.rings[past.id] = past
            self.catalog[past.id] = self._given_past_names.get(past.id, table)
        merge_ring(past, ring, is_role=key[2] == OF_ROLE)
        mapped = Names(self.catalog[past.id], names)
        for family in self.families:
            if (totals := family.rings.get(ring.id)) is not None:
                family.merge(family.of(past), totals, mapped)
        self._forget(ring.id)

    def _forget(self, ring: int) -> None:
        del self.rings[ring]
        self.catalog.pop(ring, None)
        for family in self.families:
            family.rings.pop(ring, None)

    def _attributes(self, rings: Sequence[Ring]) -> Attributes:
        info = self.catalog[min(rings, key=lambda ring: ring.created_ns).id].worker
        attributes = {semconv.WORKER_ROLE: info.role, semconv.WORKER_ID: str(info.index)}
        if info.gpu is None:
            return attributes
        return {**attributes, semconv.GPU_INDEX: info.gpu}  # the first's, if the worker was created again

    def _add_joined(self, frames: Sequence[Frame]) -> None:
        """Fold RECORDS frames of one ring, each the continuation of the one before."""
        if frames:
            count, payload = sum(frame.count for frame in frames), b"".join(frame.payload for frame in frames)
            time_ns = max(frame.time_ns for frame in frames)
            self.add(replace(frames[0], count=count, time_ns=time_ns, payload=payload))

    def _take_names(self, frame: Frame) -> None:
        self._ring(frame.ring)

    def _take_records(self, frame: Frame) -> None:
        ring = self._ring(frame.ring)
        records = Records(frame, ring)
        for family in self.families:
            family.take_records(ring, records)

    def _take_counters(self, frame: Frame) -> None:
        ring = self._ring(frame.ring)
        words = np.frombuffer(frame.payload, "<u8", len(frame.payload) // WORD_BYTES)
        counters = words.tolist()[: len(Counter)]
        if len(counters) <= Counter.TOKENS:
            raise PayloadError(f"{len(counters)} counters")
        for family in self.families:
            family.take_counters(ring, counters)

    def _take_closed(self, frame: Frame) -> None:
        ring, closed = self._ring(frame.ring), Closed.decode(frame.payload)
        for family in self.families:
            family.take_closed(ring, closed, self.is_captured)
        ring.last_ns = max(ring.last_ns, closed.end_ns)
        ring.closed = closed

    def _take_open(self, frame: Frame) -> None:
        detail, rings = decode_open(frame.payload)
        for ring_id, work in rings.items():
            if ring_id not in self.catalog:
                self.malformed += 1
                continue
            ring = self._ring(ring_id)
            for family in self.families:
                family.take_open(ring, frame.time_ns, work, self.is_captured)
            ring.last_ns = max(ring.last_ns, frame.time_ns)
        self.is_captured = detail == DETAIL_PHASES

    def _take_samples(self, frame: Frame) -> None:
        ring = self.rings[frame.ring] if frame.ring else None  # one that was merged is not begun again
        found = decode_samples(frame.payload, self.catalog.series)
        samples = [sample for sample in found if math.isfinite(sample.value)]
        self.malformed += frame.count - len(samples)
        for family in self.families:
            if mine := [sample for sample in samples if sample.series.source in family.sources]:
                family.take_samples(ring, mine)
