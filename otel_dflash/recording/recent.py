"""The newest frames in memory, for live readers: a full disk loses the recording, not the export."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from otel_dflash.recording.frames import FRAME_HEAD_BYTES, Frame

RECENT_BYTES_MAX: Final = 8 << 20


class RecentFrames:
    """Frames in order, without gaps; the oldest are dropped beyond RECENT_BYTES_MAX.

    One thread adds, any thread reads.
    """

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._changed = threading.Condition()

    def add(self, frame: Frame) -> None:
        """Add the next frame."""
        with self._changed:
            self._frames.append(frame)
            self._bytes += _size(frame)
            while self._bytes > RECENT_BYTES_MAX and len(self._frames) > 1:
                self._bytes -= _size(self._frames.popleft())
            self._changed.notify_all()

    def read(self, position: int, limit: int, or_later: bool = False) -> list[Frame] | None:
        """Return frames from number `position` on, [] if there is none yet, None if it is no longer here.

        With `or_later`, return later frames instead of None.
        """
        with self._changed:
            if not self._frames:
                return None
            skip = position - self._frames[0].number
            if skip < 0 and not or_later:
                return None
            skip = max(0, skip)
            return [self._frames[i] for i in range(skip, min(skip + limit, len(self._frames)))]

    def wait(self, position: int, timeout_s: float) -> None:
        """Wait until a frame at `position` exists, at most `timeout_s`; `wake` ends it early."""
        with self._changed:
            if not self._frames or self._frames[-1].number < position:
                self._changed.wait(timeout_s)

    def wake(self) -> None:
        """Wake every waiting reader."""
        with self._changed:
            self._changed.notify_all()


def _size(frame: Frame) -> int:
    return len(frame.payload) + FRAME_HEAD_BYTES
