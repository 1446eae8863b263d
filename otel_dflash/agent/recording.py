"""The recording: the agent is a log. One writer appends frames; every reader goes on from a frame number of its own.

A recording is a directory::

    run.json                      RunInfo
    segment-<first frame>.rec     frames; the first says the next sequence of each ring, then all names are repeated,
                                  so a segment can be read alone and the oldest can be removed
    cursor-<sink>.json            how far a sink has come (sinks.py)
    delivery.json, agent.log      what the agent says at its end, and on the way

Files are never changed but by appending, and cut only at a torn end, so reading needs no lock, live or later.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final

from otel_dflash.agent.catalog import Catalog
from otel_dflash.agent.frames import FRAME_HEAD_BYTES, Frame, FrameKind, decode, payload_bytes, undecoded

RUN_FILE: Final = "run.json"
FORMAT: Final = 1
SEGMENT_BYTES_MAX: Final = 64 << 20
RECENT_BYTES_MAX: Final = 8 << 20


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
        info = RunInfo(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise RecordingError(f"{directory} is not a recording: it has no {RUN_FILE}; `otel-dflash runs` lists recordings") from None
    except (OSError, ValueError, TypeError) as error:
        raise RecordingError(f"{path} cannot be read: {error}") from None
    if info.format > FORMAT:
        raise RecordingError(f"{directory} has format {info.format}, this version reads up to {FORMAT}; install a newer otel-dflash")
    return info


def list_recordings(base: Path) -> list[Path]:
    """Return the recordings below `base`, oldest name first; none when there is no such directory."""
    return sorted(path.parent for path in base.glob(f"*/{RUN_FILE}"))


def segments(directory: Path) -> list[tuple[int, Path]]:
    """Return (first frame number, path) of each segment in order."""
    found = []
    for path in directory.glob("segment-*.rec"):
        digits = path.stem.removeprefix("segment-")
        if digits.isdigit():
            found.append((int(digits), path))
    return sorted(found)


def read_frame(file: BinaryIO, skip_payload_of: FrameKind | None = None) -> Frame | None:
    """Return the next frame, or None and the file where it was: end, torn or damaged."""
    start = file.tell()
    head = file.read(FRAME_HEAD_BYTES)
    size = payload_bytes(head)
    frame = None
    if size is not None:
        if skip_payload_of is not None and head[4] == skip_payload_of:
            return _skip(file, head, size, start)
        frame = decode(head, file.read(size))
    if frame is None:
        file.seek(start)
    return frame


def _skip(file: BinaryIO, head: bytes, size: int, start: int) -> Frame | None:
    """Step over a payload unread; the frame keeps its head only, and its CRC is not checked."""
    if start + FRAME_HEAD_BYTES + size > os.fstat(file.fileno()).st_size:
        file.seek(start)
        return None
    file.seek(size, os.SEEK_CUR)
    return undecoded(head)


class RecordingReader:
    """Reads frames in order from a position. One thread; safe while a writer appends."""

    def __init__(self, directory: Path, position: int = 0, live: RecordingWriter | None = None) -> None:
        """Open the recording at frame number `position`; with `live`, its newest frames come from memory.

        Raises:
            RecordingError: Not a recording.
        """
        self.directory = directory
        self.info = read_info(directory)
        self.catalog = Catalog()
        self.position = 0
        self.missing_frames = 0
        self._live = live
        self._file: BinaryIO | None = None
        self._first = -1  # first frame number of the open segment
        self._open_at(position)

    def read(self, limit: int = 256) -> list[Frame]:
        """Return up to `limit` next frames, [] at the end. Their names are in the catalog."""
        while frames := self._next_frames(limit):
            for frame in frames:
                self.missing_frames += max(0, frame.number - self.position)
                self.position = frame.number + 1
                self.catalog.apply(frame)
            content = [frame for frame in frames if frame.kind != FrameKind.SEGMENT]
            if content:
                return content
        return []

    def _next_frames(self, limit: int) -> list[Frame]:
        frames = self._live.recent(self.position, limit) if self._live else None
        return self._read_files(limit) if frames is None else frames

    def close(self) -> None:
        """Close the open segment."""
        if self._file:
            self._file.close()
            self._file = None

    def _open_at(self, position: int) -> None:
        """Learn the names up to `position`: the segment that holds it repeats all that are older."""
        before = [entry for entry in segments(self.directory) if entry[0] <= position]
        if not before:
            self.position = position
            return
        self._open(*before[-1])
        assert self._file
        while True:
            at = self._file.tell()
            frame = read_frame(self._file, skip_payload_of=FrameKind.RECORDS)
            if frame is None or frame.number >= position:
                self._file.seek(at)
                break
            self.catalog.apply(frame)
        self.position = position

    def _open(self, first: int, path: Path) -> None:
        self.close()
        self._file = path.open("rb")
        self._first = first

    def _read_files(self, limit: int) -> list[Frame]:
        frames: list[Frame] = []
        while len(frames) < limit:
            frame = read_frame(self._file) if self._file else None
            if frame is None:
                if not self._next_segment():
                    break
            elif frame.number >= self.position:
                frames.append(frame)
        return frames

    def _next_segment(self) -> bool:
        """Open the segment after this one. What the open one still held is beyond damage: the numbers tell how much."""
        later = [entry for entry in segments(self.directory) if entry[0] > self._first]
        while later:
            try:
                self._open(*later.pop(0))
            except FileNotFoundError:  # removed by the size cap meanwhile
                continue
            return True
        return False


class RecordingWriter:
    """Appends frames. One per recording; `append` is for the drain thread, `recent` for any."""

    def __init__(self, directory: Path, limit_bytes: int, first_number: int = 0, segment_bytes: int = SEGMENT_BYTES_MAX) -> None:
        """Open a recording for appending, cut a torn end, and learn where each ring goes on.

        Numbers go on from `first_number` at least: sinks may have read frames from memory that no disk had room for.

        Raises:
            OSError: It cannot be opened or read.
        """
        self.directory = directory
        self.lost_frames = 0  # not written: disk full
        self.removed_segments = 0
        self._limit_bytes = limit_bytes
        self._segment_bytes = min(segment_bytes, max(limit_bytes // 4, 1 << 18))
        self._catalog = Catalog()
        self._next_sequence: dict[int, int] = {}
        self.closed: set[int] = set()
        self._recent: deque[Frame] = deque()
        self._recent_bytes = 0
        self._appended = threading.Condition()
        self._next_number = 0
        self._size = 0
        self._fd = -1
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

    def append(self, kind: FrameKind, ring: int, first: int, count: int, payload: bytes, time_ns: int) -> bool:
        """Append a frame; return whether it is on disk. It reaches live readers either way."""
        if self._fd < 0 or self._size >= self._segment_bytes:
            self._roll(time_ns)
        return self._write(Frame(self._next_number, kind, ring, first, count, time_ns, payload))

    def recent(self, position: int, limit: int) -> list[Frame] | None:
        """Return frames from `position` on out of memory, None when they are only on disk."""
        with self._appended:
            if position >= self._next_number:
                return []
            if not self._recent or position < self._recent[0].number:
                return None
            skip = position - self._recent[0].number
            return [self._recent[i] for i in range(skip, min(skip + limit, len(self._recent)))]

    def wait(self, position: int, timeout_s: float) -> None:
        """Wait until a frame at `position` exists, at most `timeout_s`."""
        with self._appended:
            self._appended.wait_for(lambda: self._next_number > position, timeout_s)

    def wake(self) -> None:
        """Let every waiting reader look again."""
        with self._appended:
            self._appended.notify_all()

    def close(self) -> None:
        """Close the segment; everything appended is with the kernel already."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, frame: Frame) -> bool:
        written = False
        data = frame.encode()
        try:
            if self._fd >= 0:
                written = self._write_all(data)
        except OSError:  # disk full: counted here, said by the drain
            os.ftruncate(self._fd, self._size)  # a short write before ENOSPC must not look like a torn end
        if written:
            self._size += len(data)
        else:
            self.lost_frames += 1
        self._note(frame)
        with self._appended:
            self._next_number = frame.number + 1
            self._recent.append(frame)
            self._recent_bytes += len(data)
            while self._recent_bytes > RECENT_BYTES_MAX and len(self._recent) > 1:
                self._recent_bytes -= len(self._recent.popleft().payload) + FRAME_HEAD_BYTES
            self._appended.notify_all()
        return written

    def _write_all(self, data: bytes) -> bool:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        return True

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
        found = segments(self.directory)
        if not found:
            return
        self._next_number, path = found[-1]
        with open(path, "rb") as file:
            while frame := read_frame(file):
                self._note(frame)
                self._next_number = frame.number + 1
            self._size = file.tell()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._fd, self._size)
        if self._size == 0:  # the segment's own first frame was torn: what it repeats is in the one before
            self.close()
            path.unlink()
            self._recover()

    def _roll(self, time_ns: int) -> None:
        """Start a segment with all that a reader of it alone must know, and remove the oldest beyond the cap."""
        if self._fd >= 0:
            os.fsync(self._fd)
            self.close()
        path = self.directory / f"segment-{self._next_number:012d}.rec"
        self._size = 0
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError:
            self._fd = -1  # counted frame by frame; the next append tries again
        live = {ring: sequence for ring, sequence in self._next_sequence.items() if ring not in self.closed}
        state = json.dumps({"next": live, "closed": sorted(self.closed)}).encode()
        whole = self._write(Frame(self._next_number, FrameKind.SEGMENT, 0, 0, 0, time_ns, state))
        for ring, names in self._catalog.items():
            if ring not in self.closed:
                frame = Frame(self._next_number, FrameKind.NAMES, ring, 0, len(names.entries), time_ns, names.encode())
                whole = self._write(frame) and whole
        if whole:
            self._remove_oldest()
        elif self._fd >= 0:  # a segment that does not know its names is worse than none
            self.close()
            path.unlink()

    def _remove_oldest(self) -> None:
        found = segments(self.directory)
        sizes = [path.stat().st_size for _, path in found]
        while len(found) > 1 and sum(sizes) + self._segment_bytes > self._limit_bytes:
            found.pop(0)[1].unlink()
            sizes.pop(0)
            self.removed_segments += 1
