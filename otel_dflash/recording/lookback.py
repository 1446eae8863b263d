"""Reading past frames again by number: from memory while they are there, else from the segments."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from otel_dflash.recording.catalog import Catalog
from otel_dflash.recording.frames import FRAME_HEAD_BYTES, Frame, FrameKind, decode, payload_bytes, undecoded
from otel_dflash.recording.segments import read_frame, segments
from otel_dflash.recording.writer import RecordingWriter

_FRAMES_PER_MARK: Final = 64


@dataclass(slots=True)
class _Marks:
    """Where some frames of a segment begin, as far as it has been read."""

    numbers: list[int] = field(default_factory=lambda: [0])
    offsets: list[int] = field(default_factory=lambda: [0])
    seen: int = 0
    end: int = 0  # nothing beyond has been read

    def before(self, number: int) -> int:
        """Return the offset from which to search for frame `number`."""
        return self.offsets[bisect_right(self.numbers, number) - 1]

    def pass_by(self, number: int, start: int, end: int) -> bool:
        """Note a frame; return whether it is seen for the first time."""
        if start < self.end:
            return False
        if self.seen % _FRAMES_PER_MARK == 0 and self.seen:
            self.numbers.append(number)
            self.offsets.append(start)
        self.seen += 1
        self.end = end
        return True


class Lookback:
    """Reads single frames again. One thread.

    Names that the catalog lacks are added on the way: a segment repeats all that it needs.
    """

    def __init__(self, directory: Path, live: RecordingWriter | None, catalog: Catalog) -> None:
        """Open nothing yet; with `live`, the newest frames come from memory."""
        self._directory = directory
        self._live = live
        self._catalog = catalog
        self._marks: dict[Path, _Marks] = {}

    def knows(self, ring: int) -> bool:
        """Return whether the ring belongs to this recording, as far as it has been read."""
        return ring in self._catalog

    def frames(self, ring: int, first: int, last: int) -> list[Frame] | None:
        """Return the frames of `ring` from number `first` to `last`, None if one of these two is gone."""
        if self._live is not None:
            recent = self._live.recent.read(first, last - first + 1)
            if recent:
                return [frame for frame in recent if frame.ring == ring]
        found = [frame for frame in self._read(ring, first, last) if frame.ring == ring]
        is_there = bool(found) and (found[0].number, found[-1].number) == (first, last)
        return found if is_there else None

    def _read(self, ring: int, first: int, last: int) -> Iterator[Frame]:
        found = segments(self._directory)
        paths = {path for _, path in found}
        self._marks = {path: marks for path, marks in self._marks.items() if path in paths}
        begin = max(0, bisect_right([number for number, _ in found], first) - 1)
        for number, path in found[begin:]:
            if number > last:
                return
            # an OSError: removed by the size cap, or not readable
            with contextlib.suppress(OSError), path.open("rb") as file:
                for frame in self._scan(file, self._marks.setdefault(path, _Marks()), ring, first):
                    if frame.number > last:
                        return
                    if frame.number >= first:
                        yield frame

    def _scan(self, file: BinaryIO, marks: _Marks, ring: int, first: int) -> Iterator[Frame]:
        """Yield the frames of a segment, from a little before `first` on.

        The records of other rings have no payload.
        """
        start = marks.before(first)
        file.seek(start)
        while True:
            start = file.tell()
            frame = _next(file, ring)
            if frame is None:
                return
            if marks.pass_by(frame.number, start, file.tell()):
                self._catalog.apply(frame)
            yield frame


def _next(file: BinaryIO, ring: int) -> Frame | None:
    """Return the next frame, without the payload if it has records of another ring; skip damaged bytes."""
    start = file.tell()
    head = file.read(FRAME_HEAD_BYTES)
    size = payload_bytes(head)
    if size is not None:
        passing = undecoded(head) if head[4] == FrameKind.RECORDS else None
        if passing is not None and passing.ring != ring:
            file.seek(size, 1)
            return passing
        frame = decode(head, file.read(size))
        if frame is not None:
            return frame
    file.seek(start)
    return read_frame(file)
