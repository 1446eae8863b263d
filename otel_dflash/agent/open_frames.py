"""OPEN frames: what was open in each ring at one time. So readers know how time passes while workers wait.

The drain appends at most one a second, and one at the end of each interval of metrics. Records that ended
later than its time come after it in the log, and those published by then before it. Where stores may be seen
out of order, a frame takes a few polls, until all that was published by its time was seen.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from otel_dflash.agent import ring_reader
from otel_dflash.agent.ring_reader import Live, RingReader
from otel_dflash.recording.payloads import OpenWork, encode_open
from otel_dflash.session import Session, map_control

INTERVAL_NS: Final = 1_000_000_000
LONG_NS: Final = 1_000_000_000


class OpenFrame(NamedTuple):
    """What the drain appends."""

    time_ns: int
    rings: int
    payload: bytes


class OpenFrames:
    """When the next OPEN frame is due, and what is in it. Of one drain.

    One lists rings in which nothing has ended for LONG_NS, or a phase has been open for so long. It lists all
    rings where an interval of metrics ends, and after a change of the capture detail.
    """

    def __init__(self, session: Session, metric_interval_ns: int) -> None:
        """List all rings first."""
        self._control = map_control(session)
        self._anchor_ns = session.anchor_mono_ns
        self._metric_interval_ns = metric_interval_ns
        self._detail = -1
        self._next_ns = self._next_whole_ns = 0
        # of the frame that is being made
        self._time_ns = 0
        self._is_made = self._is_whole = False
        self._polls_left = 0
        self._live: dict[int, Live] = {}
        self._rings: dict[int, OpenWork] = {}

    def begin(self, time_ns: int) -> None:
        """Begin a poll at `time_ns`."""
        if self._polls_left:
            self._polls_left -= 1
            return
        detail = self._control[0]
        self._is_whole = time_ns >= self._next_whole_ns or detail != self._detail
        self._is_made = self._is_whole or time_ns >= self._next_ns
        if self._is_made and not ring_reader.STORES_IN_ORDER:
            self._polls_left = ring_reader.POLLS_TO_TAKE
        self._time_ns, self._detail = time_ns, detail
        self._live, self._rings = {}, {}

    @property
    def until_ns(self) -> int | None:
        """Return the time up to which this poll takes records, None for all."""
        return self._time_ns if self._is_made else None

    def add(self, ring: RingReader, live: Live) -> None:
        """Add a ring after its records were taken; `live` was read in this poll, before them."""
        if not self._is_made:
            return
        live = self._live.setdefault(ring.id, live)
        if self._polls_left:
            return
        work = ring.open_at(live, self._time_ns)
        since_ns = min([ring.ended_ns, *(phase.start_ns for phase in work.phases)])
        if self._is_whole or self._time_ns - since_ns >= LONG_NS:
            self._rings[ring.id] = work

    def end(self) -> OpenFrame | None:
        """End the poll; return the frame to append, if any."""
        if not self._is_made or self._polls_left:
            return None
        self._next_ns = self._time_ns + INTERVAL_NS
        if self._is_whole:
            interval_ns = self._metric_interval_ns
            intervals = (self._time_ns - self._anchor_ns) // interval_ns + 1
            self._next_whole_ns = self._anchor_ns + intervals * interval_ns
        elif not self._rings:
            return None
        return OpenFrame(self._time_ns, len(self._rings), encode_open(self._detail, self._rings))
