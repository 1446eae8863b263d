"""The intervals of metric points. Each ends where the recording states what was open: with an OPEN frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.run_info import RunInfo


class Intervals:
    """Cuts frames into intervals: the same ones, in whatever portions the frames are read.

    An interval ends with the first OPEN frame at or after a whole multiple of its length since the run's
    anchor. Every worker has accounted for all of its time then, so an interval never holds more than its
    length.
    """

    def __init__(self, info: RunInfo, length_ns: int, end_ns: int = 0) -> None:
        """Continue in the interval that ends at `end_ns`, 0 for the one of the first frame."""
        self._anchor_ns = info.anchor_mono_ns
        self._length_ns = length_ns
        self.end_ns = end_ns
        """Monotonic; 0 before the first frame."""

    def cut(self, frames: Sequence[Frame]) -> Iterator[tuple[list[Frame], bool]]:
        """Yield frames in parts, each with whether it ends the interval."""
        part: list[Frame] = []
        for frame in frames:
            part.append(frame)
            is_end = frame.kind == FrameKind.OPEN and 0 < self.end_ns <= frame.time_ns
            if is_end or not self.end_ns:
                self.end_ns = self._end_after(frame.time_ns)
            if is_end:
                yield part, True
                part = []
        if part:
            yield part, False

    def _end_after(self, time_ns: int) -> int:
        passed = (time_ns - self._anchor_ns) // self._length_ns
        return self._anchor_ns + (passed + 1) * self._length_ns
