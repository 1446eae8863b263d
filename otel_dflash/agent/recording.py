"""The recording: the agent is a log. One writer appends frames; every reader goes on from a frame number of its own.

A recording is a directory::

    node, run.json                the name of the node that makes it (session.py); RunInfo
    segment-<first frame>.rec     frames; the first says the next sequence of each ring, then all names are repeated,
                                  so a segment can be read alone and the oldest can be removed; it gets its name
                                  when these are written
    cursor-<sink>.json            how far a sink has come (sinks.py)
    cursor-spans-<exporter>.state what spans to come hang on besides (span_sink.py)
    delivery.json, agent.log      what the agent says at its end, and on the way

Segments are never changed but by appending, and cut only at a torn end, so reading needs no lock, live or later. Where the disk has no
room, frames go to memory alone: the newest ones are there for live readers either way.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO, Final

from otel_dflash.agent.catalog import Catalog
from otel_dflash.agent.frames import Frame, FrameKind
from otel_dflash.agent.recent import RecentFrames
from otel_dflash.agent.segments import read_frame, segment_path, segments

RUN_FILE: Final = "run.json"
FORMAT: Final = 1
SEGMENT_BYTES_MAX: Final = 64 << 20
RETRY_NS: Final = 1_000_000_000  # how long to leave a disk alone that had no room
_DRAFT: Final = "segment.tmp"
_NOT_FOR_READERS: Final = (FrameKind.SEGMENT, FrameKind.UNKNOWN)


class RecordingError(Exception):
    """A recording that cannot be read or written; the text says what, the value, and the remedy."""


@dataclass(frozen=True)
class RunInfo:
    """What a recording says of its run. The anchor ties monotonic to wall time once, for all of the run."""

    run: str
    host: str
    anchor_wall_ns: int
    anchor_mono_ns: int
    created_ns: int  # wall
    version: str
    format: int = FORMAT

    def wall_ns(self, mono_ns: int) -> int:
        """Return anchored wall time of a monotonic time."""
        return mono_ns - self.anchor_mono_ns + self.anchor_wall_ns


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file: a reader sees the old bytes or the new ones. A kill in between leaves a temporary file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def create_recording(directory: Path, info: RunInfo) -> None:
    """Create the directory and its run.json; an existing recording stays as it is.

    Raises:
        OSError: It cannot be created.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / RUN_FILE).exists():
        write_atomically(directory / RUN_FILE, json.dumps(asdict(info), indent=1).encode())


def read_info(directory: Path) -> RunInfo:
    """Return what the recording says of its run.

    Raises:
        RecordingError: Not a recording, or of a newer format.
    """
    path = directory / RUN_FILE
    try:
        said = json.loads(path.read_bytes())
        if isinstance(said["format"], int) and said["format"] > FORMAT:
            raise RecordingError(f"{directory} has format {said['format']}, this version reads up to {FORMAT}; install a newer otel-dflash")
        info = RunInfo(**{item.name: said[item.name] for item in fields(RunInfo)})
        wrong = [item.name for item in fields(RunInfo) if type(said[item.name]).__name__ != item.type]
    except FileNotFoundError:
        raise RecordingError(f"{directory} is not a recording: it has no {RUN_FILE}; `otel-dflash runs` lists recordings") from None
    except KeyError as error:
        raise RecordingError(f"{path} cannot be read: it does not say {error}") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RecordingError(f"{path} cannot be read: {error}") from None
    if wrong:
        raise RecordingError(f"{path} cannot be read: {', '.join(wrong)} is of the wrong type")
    return info


def list_recordings(base: Path) -> list[Path]:
    """Return the recordings below `base`, oldest name first; none when there is no such directory."""
    return sorted(path.parent for path in base.glob(f"*/{RUN_FILE}"))


class RecordingReader:
    """Reads frames in order from a position. One thread; safe while a writer appends."""

    def __init__(self, directory: Path, position: int = 0, live: RecordingWriter | None = None) -> None:
        """Open the recording at frame number `position`; with `live`, its newest frames come from memory.

        Raises:
            RecordingError: Not a recording, or it cannot be read.
        """
        self.directory = directory
        self.info = read_info(directory)
        self.catalog = Catalog()
        self.position = position
        self.missing_frames = 0
        self._live = live
        self._file: BinaryIO | None = None
        self._first = -1  # first frame number of the open segment
        self._learn_names()

    def read(self, limit: int = 256) -> list[Frame]:
        """Return up to `limit` next frames, [] at the end. Their names are in the catalog.

        Raises:
            RecordingError: It cannot be read any more.
        """
        while True:
            frames = self._next(limit)
            for frame in frames:
                self.missing_frames += max(0, frame.number - self.position)
                self.position = frame.number + 1
                self.catalog.apply(frame)
            wanted = [frame for frame in frames if frame.kind not in _NOT_FOR_READERS]
            if wanted or not frames:
                return wanted

    def close(self) -> None:
        """Close the open segment."""
        if self._file:
            self._file.close()
            self._file = None

    def _next(self, limit: int) -> list[Frame]:
        if self._live is None:
            return self._read_files(limit)
        recent = self._live.recent.read(self.position, limit)
        if recent is not None:
            return recent
        return self._read_files(limit) or self._live.recent.read(self.position, limit, or_later=True) or []

    def _learn_names(self) -> None:
        """Learn the names before the position: the segment that holds it repeats all that are older."""
        if not self._open_last_before(self.position):
            return
        assert self._file
        try:
            while True:
                at = self._file.tell()
                frame = read_frame(self._file, skip_payload_of=FrameKind.RECORDS)
                if frame is None or frame.number >= self.position:
                    self._file.seek(at)
                    return
                self.catalog.apply(frame)
        except OSError as error:
            raise self._unreadable(error) from None

    def _read_files(self, limit: int) -> list[Frame]:
        self._open_last_before(self.position)  # frames from memory may have led far beyond the open segment
        frames: list[Frame] = []
        try:
            while len(frames) < limit:
                frame = self._read_on()
                if frame is None:
                    break
                if frame.number >= self.position:
                    frames.append(frame)
                else:
                    self.catalog.apply(frame)
        except OSError as error:
            raise self._unreadable(error) from None
        return frames

    def _read_on(self) -> Frame | None:
        """Return the next frame in the files. What the open segment holds no more is beyond damage: the numbers tell how much."""
        while True:
            frame = read_frame(self._file) if self._file else None
            if frame is not None:
                return frame
            later = [entry for entry in segments(self.directory) if entry[0] > self._first]
            if not later:
                return None
            # The writer appended to this one until it made the next: only now is this one's end known.
            frame = read_frame(self._file) if self._file else None
            if frame is not None:
                return frame
            if not self._open_first_of(later):
                return None

    def _open_last_before(self, position: int) -> bool:
        """Open the segment that holds `position`, unless that or a later one is open; return whether it was opened."""
        if self._file is not None and self._first >= position:
            return False
        before = [entry for entry in segments(self.directory) if self._first < entry[0] <= position]
        return self._open_first_of(before[::-1])

    def _open_first_of(self, found: list[tuple[int, Path]]) -> bool:
        for first, path in found:
            try:
                file = path.open("rb")
            except FileNotFoundError:  # removed by the size cap meanwhile
                continue
            except OSError as error:
                raise self._unreadable(error) from None
            self.close()
            self._file, self._first = file, first
            return True
        return False

    def _unreadable(self, error: OSError) -> RecordingError:
        return RecordingError(f"{self.directory} cannot be read: {error.strerror}; check the disk and the file modes")


class RecordingWriter:
    """Appends frames. One per recording and thread; only `recent` is for every thread."""

    def __init__(self, directory: Path, limit_bytes: int, first_number: int = 0, segment_bytes: int = SEGMENT_BYTES_MAX) -> None:
        """Open a recording for appending, cut a torn end, and learn where each ring goes on.

        Numbers go on from `first_number` at least: sinks may have read frames from memory that no disk had room for.

        Raises:
            OSError: It cannot be opened or read.
        """
        self.directory = directory
        self.closed: set[int] = set()
        """Rings that are retired: nothing of them follows."""
        self.lost_frames = 0
        """Frames that are not on disk: it had no room."""
        self.removed_segments = 0
        """Oldest segments removed to keep to the size cap."""
        self.recent = RecentFrames()
        self._limit_bytes = limit_bytes
        self._segment_bytes = min(segment_bytes, max(limit_bytes // 4, 1 << 18))
        self._catalog = Catalog()
        self._next_sequence: dict[int, int] = {}
        self._next_number = 0
        self._fd = -1  # the open segment: its first frame's number, its size, and how much of that only repeats
        self._first = 0
        self._size = 0
        self._head_bytes = 0
        self._retry_ns = 0  # the disk had no room: not before this time again
        self._recover()
        self._next_number = max(self._next_number, first_number)

    @property
    def next_number(self) -> int:
        """Return the number of the next frame."""
        return self._next_number

    def next_sequence(self, ring: int) -> int:
        """Return the sequence after the last record of `ring` in the log, 0 for an unknown ring."""
        return self._next_sequence.get(ring, 0)

    def names(self, ring: int) -> int:
        """Return how many names of `ring` are in the log."""
        known = self._catalog.get(ring)
        return len(known.entries) if known else 0

    def refused(self, ring: int, first: int) -> list[str]:
        """Return what RingNames.refused does."""
        return self._catalog[ring].refused(first)

    def append(self, kind: FrameKind, ring: int, first: int, count: int, payload: bytes, time_ns: int) -> bool:
        """Append a frame; return whether it is on disk. It reaches live readers either way."""
        if self._fd < 0 or self._size >= self._segment_bytes:
            self._roll(time_ns)
        frame = Frame(self._next_number, kind, ring, first, count, time_ns, payload)
        written = self._write(frame, time_ns)
        if not written:
            self.lost_frames += 1
        self._publish(frame)
        return written

    def close(self) -> None:
        """Close the segment; everything appended is with the kernel already."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # a network file system may say only now what it did not write
                os.close(fd)

    def _write(self, frame: Frame, time_ns: int) -> bool:
        """Write a frame whole or not at all. A segment that lacks one ends: names may be lost with it, and the next repeats them."""
        if self._fd < 0:
            return False
        data = frame.encode()
        try:
            _write_all(self._fd, data)
        except OSError:  # disk full, or gone: counted here, said by the drain
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # a short write before ENOSPC must not look like a torn end
            self.close()
            if self._size == self._head_bytes:
                with contextlib.suppress(OSError):
                    segment_path(self.directory, self._first).unlink()
            self._retry_ns = time_ns + RETRY_NS
            return False
        self._size += len(data)
        return True

    def _publish(self, frame: Frame) -> None:
        """Let live readers have the frame, whose number is the next."""
        self._note(frame)
        self._next_number = frame.number + 1
        self.recent.add(frame)

    def _note(self, frame: Frame) -> None:
        self._catalog.apply(frame)
        if frame.kind == FrameKind.RECORDS:
            self._next_sequence[frame.ring] = frame.first + frame.count
        elif frame.kind == FrameKind.CLOSED:
            self.closed.add(frame.ring)
        elif frame.kind == FrameKind.SEGMENT:
            state = frame.json()
            for ring, sequence in state["next"].items():
                self._next_sequence[int(ring)] = max(sequence, self._next_sequence.get(int(ring), 0))
            self.closed.update(state["closed"])

    def _recover(self) -> None:
        """Take up the newest segment that holds a frame: it says all that is to be known of those before."""
        for first, path in reversed(segments(self.directory)):
            with open(path, "rb") as file:
                while frame := read_frame(file):
                    self._note(frame)
                    self._next_number = frame.number + 1
                self._size = file.tell()
            if self._size:
                self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                os.ftruncate(self._fd, self._size)
                return
            self._next_number = max(self._next_number, first)
            path.unlink()

    def _roll(self, time_ns: int) -> None:
        """Start a segment with all that a reader of it alone must know, and remove the oldest beyond the cap."""
        if time_ns < self._retry_ns:
            return
        frames = self._first_frames(time_ns)
        data = b"".join(frame.encode() for frame in frames)
        draft = self.directory / _DRAFT
        fd = -1
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
            _write_all(fd, data)
            if self._fd >= 0:
                os.fsync(self._fd)
            draft.replace(segment_path(self.directory, self._next_number))  # a reader never sees a half-made segment
        except OSError:  # an open segment goes on
            self._retry_ns = time_ns + RETRY_NS
            with contextlib.suppress(OSError):
                os.close(fd)
            with contextlib.suppress(OSError):
                draft.unlink()
            return
        self.close()
        self._fd, self._first, self._size, self._head_bytes = fd, self._next_number, len(data), len(data)
        for frame in frames:
            self._publish(frame)
        self._remove_oldest()

    def _first_frames(self, time_ns: int) -> list[Frame]:
        live = {ring: sequence for ring, sequence in self._next_sequence.items() if ring not in self.closed}
        state = json.dumps({"next": live, "closed": sorted(self.closed)}).encode()
        frames = [Frame(self._next_number, FrameKind.SEGMENT, 0, 0, 0, time_ns, state)]
        for ring, names in self._catalog.items():
            if ring not in self.closed:
                number = self._next_number + len(frames)
                frames.append(Frame(number, FrameKind.NAMES, ring, 0, len(names.entries), time_ns, names.encode()))
        return frames

    def _remove_oldest(self) -> None:
        try:
            found = segments(self.directory)
            sizes = [path.stat().st_size for _, path in found]
            while len(found) > 1 and sum(sizes) + self._segment_bytes > self._limit_bytes:
                found.pop(0)[1].unlink()
                sizes.pop(0)
                self.removed_segments += 1
        except OSError:  # somebody else's hand in the directory: at the next roll again
            return


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
