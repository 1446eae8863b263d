"""Ended workers: the totals of their rings are merged, so that memory is bounded by the workers that live.

The rings that a worker has closed become one, its *past*, which belongs to no ring file. A worker without a
ring for RETIRED_NS leaves: its series end, and its past is merged into the past of its role, which the sums
over a role still hold. A role's past goes with the last worker of its process. All of this happens at the
ends of intervals, at recorded times, so the same frames always lead to the same points.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Final

from otel_dflash.metrics.decoding import Ring
from otel_dflash.recording.catalog import OF_ROLE, RingNames, WorkerInfo
from otel_dflash.records import OTHER_NAME, NameKind

RETIRED_NS: Final = 300_000_000_000

Key = tuple[int, str, int]
"""Pid, role and index of a worker; index OF_ROLE for a role."""


def key_of(info: WorkerInfo) -> Key:
    """Return the key of a ring's worker."""
    return info.pid, info.role, info.index


def past_id(key: Key) -> int:
    """Return the id of a past: negative, so unlike that of any ring."""
    return -1 - int.from_bytes(blake2b(repr(key).encode(), digest_size=7).digest(), "big")


def is_past(ring: Ring) -> bool:
    """Return whether a ring is a past."""
    return ring.id < 0


def begin_past(key: Key, first: Ring, info: WorkerInfo) -> tuple[Ring, RingNames]:
    """Return a past without any ring, and its names; `first` is the first ring to be merged into it."""
    pid, role, index = key
    worker = {"role": role, "index": index, "gpu": info.gpu, "pid": pid, "created_ns": first.created_ns}
    entries = [(int(NameKind.WORKER), json.dumps(worker)), (int(NameKind.TEXT), OTHER_NAME)]
    past = Ring(past_id(key), first.created_ns, first.created_ns, closed=first.closed)
    past.workers = 0 if index == OF_ROLE else 1
    return past, RingNames(past.id, entries)


def merge_ring(past: Ring, ring: Ring, is_role: bool) -> None:
    """Add a closed ring to a past."""
    wall_ns = past.wall_ns + ring.wall_ns
    past.created_ns, past.last_ns = min(past.created_ns, ring.created_ns), max(past.last_ns, ring.last_ns)
    past.gap_ns = past.last_ns - past.created_ns - wall_ns
    past.closed = ring.closed
    past.workers += ring.workers if is_role else 0


class Names:
    """Names of a ring in the table of a past."""

    def __init__(self, past: RingNames, ring: RingNames) -> None:
        self._entries = past.entries
        self._ids = {entry: name_id for name_id, entry in enumerate(past.entries)}
        self._ring = ring.entries

    def __call__(self, name_id: int) -> int:
        """Return the id in the past's table of a name of the ring; 0 stands for none."""
        if not 0 < name_id < len(self._ring):
            return name_id and 1
        entry = self._ring[name_id]
        if entry not in self._ids:
            self._ids[entry] = len(self._entries)
            self._entries.append(entry)
        return self._ids[entry]
