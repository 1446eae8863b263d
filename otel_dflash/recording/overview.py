"""What a list of recordings shows of each: counted as frames are written, saved when the run ends.

Every segment begins with the counts of those before it (writer.py), so the newest segment is enough to count
a recording, after a kill or while the run is running. At the end they are saved in overview.json::

    {"segment": name of the newest segment, "bytes": its size, "overview": Overview.encode()}

The file is valid as long as it names the newest segment with its size; else the recording is counted again.
"""

from __future__ import annotations

import json
import struct
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from otel_dflash.recording.atomic_file import write_atomically
from otel_dflash.recording.catalog import Catalog, WorkerInfo
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.payloads import Closed, is_word
from otel_dflash.recording.segments import read_frame, segments
from otel_dflash.records import KIND_MASK, KIND_SHIFT, RECORD_BYTES, Kind

OVERVIEW_FILE: Final = "overview.json"
QUIET_S: Final = 60.0  # an agent appends its own figures once a second
_TIMES: Final = struct.Struct("<3Q")  # the first words of a slot: kind and times
_MALFORMED: Final = (ValueError, LookupError, TypeError, AttributeError)


@dataclass
class WorkerOverview:
    """One worker: all rings of a role and index in one process."""

    pid: int
    role: str
    index: int
    killed: bool = False
    open_rings: list[int] = field(default_factory=list)


@dataclass
class Overview:
    """Counts of what a run has recorded, including what the size cap has removed since.

    Times are monotonic ns: the first worker's creation, and the last record's or worker's end, or a later
    OPEN frame while there is a worker.
    """

    records: int = 0
    first_ns: int = 0
    last_ns: int = 0
    workers: dict[tuple[int, str, int], WorkerOverview] = field(default_factory=dict)
    _open: dict[int, WorkerOverview] = field(default_factory=dict, compare=False)  # by ring

    @property
    def unfinished(self) -> int:
        """Return how many workers have a ring that is not closed."""
        return sum(bool(worker.open_rings) for worker in self.workers.values())

    @property
    def killed(self) -> int:
        """Return how many workers were killed."""
        return sum(worker.killed for worker in self.workers.values())

    def add(self, frame: Frame, catalog: Catalog) -> None:
        """Count the next frame of the log; `catalog` has its names. Never raises: skips a malformed frame."""
        worker = self._open.get(frame.ring)
        try:
            if frame.kind == FrameKind.RECORDS and worker is not None:
                self.records += frame.count
                self.last_ns = max(self.last_ns, _last_end_ns(frame))
            elif frame.kind == FrameKind.NAMES and worker is None:
                self._open_ring(frame.ring, catalog[frame.ring].worker)
            elif frame.kind == FrameKind.CLOSED and worker is not None:
                closed = Closed.decode(frame.payload)
                self.last_ns = max(self.last_ns, closed.end_ns)
                worker.killed |= closed.killed
                worker.open_rings.remove(frame.ring)
                del self._open[frame.ring]
            elif frame.kind == FrameKind.OPEN and self._open:
                self.last_ns = max(self.last_ns, frame.time_ns)
        except _MALFORMED:
            return

    def encode(self) -> dict[str, Any]:
        """Return what `decode` takes, ready for JSON."""
        return {
            "records": self.records,
            "first_ns": self.first_ns,
            "last_ns": self.last_ns,
            "workers": [asdict(worker) for worker in self.workers.values()],
        }

    @classmethod
    def decode(cls, data: Any) -> Overview:
        """Return the overview that `encode` wrote.

        Raises:
            ValueError: The data is damaged or from another version.
        """
        try:
            workers = [WorkerOverview(**item) for item in data["workers"]]
            overview = cls(data["records"], data["first_ns"], data["last_ns"])
            numbers = [overview.records, overview.first_ns, overview.last_ns]
            for worker in workers:
                numbers += [worker.pid, worker.index, *worker.open_rings]
                if not isinstance(worker.role, str) or not isinstance(worker.killed, bool):
                    raise ValueError(worker)
                overview.workers[worker.pid, worker.role, worker.index] = worker
                overview._open.update(dict.fromkeys(worker.open_rings, worker))
            is_whole = all(map(is_word, numbers))
        except _MALFORMED as error:
            raise ValueError(f"not an overview: {error!r}") from None
        if not is_whole:
            raise ValueError(f"not an overview: {data!r}")
        return overview

    def _open_ring(self, ring: int, info: WorkerInfo) -> None:
        self.first_ns = min(self.first_ns, info.created_ns) if self.workers else info.created_ns
        self.last_ns = max(self.last_ns, info.created_ns)
        key = info.pid, info.role, info.index
        worker = self._open[ring] = self.workers.setdefault(key, WorkerOverview(*key))
        worker.open_rings.append(ring)


def read_overview(directory: Path) -> Overview:
    """Return the overview of a recording, whether its run has ended or is running.

    If none is saved, the recording is counted, and the result saved if nothing was appended for QUIET_S.

    Raises:
        OSError: The segments cannot be read.
    """
    found = segments(directory)
    if not found:
        return Overview()
    newest = found[-1][1]
    status = newest.stat()
    with suppress(OSError, RecursionError, *_MALFORMED):
        kept = json.loads((directory / OVERVIEW_FILE).read_bytes())
        if (kept["segment"], kept["bytes"]) == (newest.name, status.st_size):
            return Overview.decode(kept["overview"])
    overview = _count(directory)
    if time.time() - status.st_mtime > QUIET_S:
        _keep(directory, newest, status.st_size, overview)
    return overview


def keep_overview(directory: Path, overview: Overview) -> None:
    """Save the overview of a complete recording. Best effort: it can be counted again."""
    with suppress(OSError):
        if found := segments(directory):
            newest = found[-1][1]
            _keep(directory, newest, newest.stat().st_size, overview)


def overview_before(segment: Path) -> Overview | None:
    """Return the overview of everything recorded before a segment, None if its first frame has none.

    Raises:
        OSError: The segment cannot be read.
    """
    with open(segment, "rb") as file:
        frame = read_frame(file)
    try:
        return Overview.decode(frame.json()["overview"]) if frame else None
    except _MALFORMED:
        return None


def _count(directory: Path) -> Overview:
    """Count the newest segment, and earlier ones back to the first that has the counts before it."""
    to_read: list[Path] = []
    overview = None
    for _, path in reversed(segments(directory)):
        to_read.insert(0, path)
        overview = overview_before(path)
        if overview is not None:
            break
    overview = overview or Overview()
    catalog = Catalog()
    for path in to_read:
        with open(path, "rb") as file:
            while frame := read_frame(file):
                catalog.apply(frame)
                overview.add(frame, catalog)
    return overview


def _keep(directory: Path, newest: Path, size_bytes: int, overview: Overview) -> None:
    kept = {"segment": newest.name, "bytes": size_bytes, "overview": overview.encode()}
    with suppress(OSError):
        write_atomically(directory / OVERVIEW_FILE, json.dumps(kept, indent=1).encode())


def _last_end_ns(frame: Frame) -> int:
    """Return the end of the newest record of a RECORDS frame: records are in the order of their ends."""
    if len(frame.payload) < RECORD_BYTES:
        return 0
    word: int
    first_ns: int
    second_ns: int
    word, first_ns, second_ns = _TIMES.unpack_from(frame.payload, len(frame.payload) - RECORD_BYTES)
    has_end = word >> KIND_SHIFT & KIND_MASK in (Kind.PHASE, Kind.STEP)
    return min(second_ns if has_end else first_ns, frame.time_ns)
