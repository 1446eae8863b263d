"""Appending to a recording. It has one writer; each reader continues from a frame number of its own.

A recording is a directory::

    node, run.json                the name of the node that records (session.py); RunInfo
    segment-<first frame>.rec     frames; the first gives each ring's next sequence and all counts; then all
                                  names and series are repeated, so a segment can be read alone and the
                                  oldest can be removed; it gets its name when these are written
    overview.json                 the counts at the end (overview.py)
    cursor-<sink>.json            how far a sink has come (cursor.py)
    cursor-spans-<exporter>.state what later spans depend on, too (agent/sinks/spans.py)
    delivery.json, agent.log      what the agent reports at its end, and on the way

Segments are only appended to, and cut only at a torn end, so reading needs no lock, live or later. If the
disk is full, frames go to memory only: live readers get the newest frames either way.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from otel_dflash.recording.catalog import Catalog
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.overview import Overview, keep_overview, overview_before
from otel_dflash.recording.payloads import Sample, Series, encode_samples, encode_series, series_id
from otel_dflash.recording.recent import RecentFrames
from otel_dflash.recording.segments import read_frame, segment_path, segments

SEGMENT_BYTES_MAX: Final = 64 << 20
RETRY_NS: Final = 1_000_000_000  # how long to leave a full disk alone
_DRAFT: Final = "segment.tmp"


class RecordingWriter:
    """Appends frames. One per recording and thread; only `recent` is for every thread."""

    def __init__(
        self, directory: Path, limit_bytes: int, first_number: int = 0, segment_bytes: int = SEGMENT_BYTES_MAX
    ) -> None:
        """Open a recording for appending, cut a torn end, and learn where each ring continues.

        Frame numbers start at `first_number` or later: sinks may have read frames from memory that are not on
        disk.

        Raises:
            OSError: It cannot be opened or read.
        """
        self.directory = directory
        self.closed: set[int] = set()
        """Rings that are retired, until `forget`: no frame of theirs follows."""
        self.lost_frames = 0
        """Frames that are not on disk, because it was full."""
        self.removed_segments = 0
        """Oldest segments removed to keep to the size cap."""
        self.newest_ns = 0
        """Time of the newest frame, monotonic; at first of what was there when it was opened."""
        self.recent = RecentFrames()
        self._limit_bytes = limit_bytes
        self._segment_bytes = min(segment_bytes, max(limit_bytes // 4, 1 << 18))
        self._catalog = Catalog()
        self._overview = Overview()  # of the frames that are on disk
        self._next_sequence: dict[int, int] = {}
        self._next_number = 0
        # the open segment: its first frame's number, its size, and how much of that only repeats
        self._fd = -1
        self._first = 0
        self._size = 0
        self._head_bytes = 0
        self._retry_ns = 0  # the disk was full: do not try again before this time
        self._recover()
        self._next_number = max(self._next_number, first_number)

    @property
    def next_number(self) -> int:
        """Return the number of the next frame."""
        return self._next_number

    def next_sequence(self, ring: int) -> int:
        """Return the sequence after the last record of `ring` in the log, 0 for an unknown ring."""
        return self._next_sequence.get(ring, 0)

    def forget(self, ring: int) -> None:
        """Forget a retired ring whose file is gone."""
        self.closed.discard(ring)

    def names(self, ring: int) -> int:
        """Return how many names of `ring` are in the log."""
        known = self._catalog.get(ring)
        return len(known.entries) if known else 0

    def complaints(self, ring: int, first: int) -> list[str]:
        """Return RingNames.complaints of a ring."""
        return self._catalog[ring].complaints(first)

    def append(
        self, kind: FrameKind, ring: int, first: int, count: int, payload: bytes, time_ns: int
    ) -> bool:
        """Append a frame; return whether it is on disk. It reaches live readers either way."""
        if self._fd < 0 or self._size >= self._segment_bytes:
            self._roll(time_ns)
        frame = Frame(self._next_number, kind, ring, first, count, time_ns, payload)
        written = self._write(frame, time_ns)
        if not written:
            self.lost_frames += 1
        self._publish(frame, written)
        return written

    def append_samples(self, samples: Sequence[Sample], time_ns: int, ring: int = 0) -> bool:
        """Append samples of a ring or of none, after a description of each new series; return as `append`."""
        ids = {series: number for number, series in self._catalog.series.items()}
        new: dict[int, Series] = {}
        for series, _, _ in samples:
            if series not in ids:
                ids[series] = series_id(series, {*self._catalog.series, *new})
                new[ids[series]] = series
        if new:
            self.append(FrameKind.SERIES, 0, 0, len(new), encode_series(new), time_ns)
        return self.append(FrameKind.SAMPLES, ring, 0, len(samples), encode_samples(samples, ids), time_ns)

    def close(self) -> None:
        """Close the recording and save its overview; everything appended is in the kernel already."""
        self._close_segment()
        keep_overview(self.directory, self._overview)

    def _close_segment(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # a network file system may report a failed write only now
                os.close(fd)

    def _write(self, frame: Frame, time_ns: int) -> bool:
        """Write a frame whole or not at all.

        A failed write ends the segment: the frame may have held names, which the next segment repeats.
        """
        if self._fd < 0:
            return False
        data = frame.encode()
        try:
            _write_all(self._fd, data)
        except OSError:  # disk full, or gone: counted here, reported by the drain
            with contextlib.suppress(OSError):
                # a short write before ENOSPC must not look like a torn end
                os.ftruncate(self._fd, self._size)
            self._close_segment()
            if self._size == self._head_bytes:
                with contextlib.suppress(OSError):
                    segment_path(self.directory, self._first).unlink()
            self._retry_ns = time_ns + RETRY_NS
            return False
        self._size += len(data)
        return True

    def _publish(self, frame: Frame, written: bool) -> None:
        """Give the frame, which has the next number, to live readers."""
        self._note(frame, written)
        self._next_number = frame.number + 1
        self.recent.add(frame)

    def _note(self, frame: Frame, written: bool) -> None:
        self.newest_ns = max(self.newest_ns, frame.time_ns)
        self._catalog.apply(frame)
        if written:
            self._overview.add(frame, self._catalog)
        if frame.kind == FrameKind.RECORDS:
            self._next_sequence[frame.ring] = frame.first + frame.count
        elif frame.kind == FrameKind.CLOSED:
            self._retire(frame.ring)
        elif frame.kind == FrameKind.SEGMENT:
            state = frame.json()
            for ring, sequence in state["next"].items():
                self._next_sequence[int(ring)] = max(sequence, self._next_sequence.get(int(ring), 0))
            for closed in state["closed"]:
                self._retire(closed)

    def _retire(self, ring: int) -> None:
        self.closed.add(ring)
        self._catalog.pop(ring, None)
        self._next_sequence.pop(ring, None)

    def _recover(self) -> None:
        """Continue the newest segment that has a frame: it repeats what matters from earlier ones."""
        for first, path in reversed(segments(self.directory)):
            self._overview = overview_before(path) or Overview()
            with open(path, "rb") as file:
                while frame := read_frame(file):
                    self._note(frame, written=True)
                    self._next_number = frame.number + 1
                self._size = file.tell()
            if self._size:
                self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                os.ftruncate(self._fd, self._size)
                return
            self._next_number = max(self._next_number, first)
            path.unlink()

    def _roll(self, time_ns: int) -> None:
        """Start a segment that can be read alone, and remove the oldest ones beyond the size cap."""
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
            # a reader never sees a half-made segment
            draft.replace(segment_path(self.directory, self._next_number))
        except OSError:  # an open segment is continued
            self._retry_ns = time_ns + RETRY_NS
            with contextlib.suppress(OSError):
                os.close(fd)
            with contextlib.suppress(OSError):
                draft.unlink()
            return
        self._close_segment()
        self._fd, self._first, self._size, self._head_bytes = fd, self._next_number, len(data), len(data)
        for frame in frames:
            self._publish(frame, written=True)
        self._remove_oldest()

    def _first_frames(self, time_ns: int) -> list[Frame]:
        state = {
            "next": self._next_sequence,
            "closed": sorted(self.closed),
            "overview": self._overview.encode(),
        }
        payload = json.dumps(state).encode()
        frames = [Frame(self._next_number, FrameKind.SEGMENT, 0, 0, 0, time_ns, payload)]
        for ring, names in self._catalog.items():
            number = self._next_number + len(frames)
            payload = names.encode()
            frames.append(Frame(number, FrameKind.NAMES, ring, 0, len(names.entries), time_ns, payload))
        if series := self._catalog.series:
            number = self._next_number + len(frames)
            frames.append(Frame(number, FrameKind.SERIES, 0, 0, len(series), time_ns, encode_series(series)))
        return frames

    def _remove_oldest(self) -> None:
        try:
            found = segments(self.directory)
            sizes = [path.stat().st_size for _, path in found]
            while len(found) > 1 and sum(sizes) + self._segment_bytes > self._limit_bytes:
                found.pop(0)[1].unlink()
                sizes.pop(0)
                self.removed_segments += 1
        except OSError:  # somebody else changed the directory: try again at the next roll
            return


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
