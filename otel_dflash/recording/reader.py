"""Reading a recording: frames in order, from disk or from the writer's memory."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Final

from otel_dflash.recording.catalog import Catalog
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.run_info import RecordingError, read_info
from otel_dflash.recording.segments import read_frame, segments
from otel_dflash.recording.writer import RecordingWriter

_NOT_FOR_READERS: Final = (FrameKind.SEGMENT, FrameKind.UNKNOWN)


class RecordingReader:
    """Reads frames in order from a position. One thread; safe while a writer appends."""

    def __init__(self, directory: Path, position: int = 0, live: RecordingWriter | None = None) -> None:
        """Open the recording at frame number `position`; with `live`, its newest frames come from memory.

        Raises:
            RecordingError: The directory is not a recording, or it cannot be read.
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
            RecordingError: The recording cannot be read any more.
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
        """Read the names before the position: its segment repeats all that are older."""
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
        self._open_last_before(self.position)  # the frames from memory may be far beyond the open segment
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
        """Return the next frame in the files.

        Frames that a damaged segment lacks are skipped: the frame numbers show how many.
        """
        while True:
            frame = read_frame(self._file) if self._file else None
            if frame is not None:
                return frame
            later = [entry for entry in segments(self.directory) if entry[0] > self._first]
            if not later:
                return None
            # The writer appended to this segment until it made the next: only now is its end known.
            frame = read_frame(self._file) if self._file else None
            if frame is not None:
                return frame
            if not self._open_first_of(later):
                return None

    def _open_last_before(self, position: int) -> bool:
        """Open the segment that holds `position`; return False if that or a later one is already open."""
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
        return RecordingError(
            f"{self.directory} cannot be read: {error.strerror}; check the disk and the file modes"
        )
