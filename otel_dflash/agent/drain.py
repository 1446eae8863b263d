"""Rings to recording: append what the trainers published, unchanged, then free its slots.

The order makes a kill harmless: the log is written first, then the reader's words in the ring (the newest
recorded entries, and the tail). A restarted drain takes the tail from the log, and reads the records between
the ring's tail and it again without appending them.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Final

from otel_dflash.agent.open_frames import OpenFrames
from otel_dflash.agent.ring_reader import Live, MalformedRingError, RingReader
from otel_dflash.recording.frames import FrameKind
from otel_dflash.recording.payloads import Closed
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.records import Counter, Header
from otel_dflash.session import Session, process_start

COUNTERS_INTERVAL_NS: Final = 1_000_000_000
FRAME_RECORDS_MAX: Final = 4096  # 256 KiB, which a sink turns into spans at once


class Drain:
    """Drains all rings of a session into its recording."""

    def __init__(
        self,
        session: Session,
        recording: RecordingWriter,
        log: Callable[[str], None],
        metric_interval_ns: int,
    ) -> None:
        """Start with no ring; `log` gets one line for each kind of problem."""
        self._session = session
        self._open_frames = OpenFrames(session, metric_interval_ns)
        self._previous_agent_ns = recording.newest_ns
        self._recording = recording
        self._log = log
        self._rings: dict[str, RingReader] = {}
        self._fill: dict[int, float] = {}
        self._costs_ps: dict[int, int] = {}  # by process
        self._malformed: set[str] = set()
        self._logged: set[str] = set()

    def poll(self) -> int:
        """Drain every ring; return the number of records."""
        self._discover()
        now = time.monotonic_ns()
        self._open_frames.begin(now)
        taken = sum(self._drain_safely(ring, now) for ring in list(self._rings.values()))
        if frame := self._open_frames.end():
            self._append(FrameKind.OPEN, 0, 0, frame.rings, frame.payload, frame.time_ns)
        return taken

    def holds_living(self) -> bool:
        """Return whether a living process may still write to a ring held here."""
        return any(
            process_start(ring.word(Header.PID)) == ring.word(Header.PROCESS_START)
            for ring in self._rings.values()
        )

    def figures(self) -> tuple[dict[int, float], float]:
        """Return the largest fill of each ring since the last call, and the mean cost of a phase in ns."""
        fill, self._fill = self._fill, {}
        costs = self._costs_ps.values()
        return fill, sum(costs) / len(costs) / 1000 if costs else 0.0

    def _discover(self) -> None:
        for path in self._session.path.glob("ring-*"):
            if path.name in self._rings or path.name in self._malformed:
                continue
            try:
                ring = RingReader(path)
            except MalformedRingError as error:
                self._malformed.add(path.name)
                self._log(f"{path.name} is not a ring of this version ({error}); it is ignored")
                continue
            except OSError as error:
                self._malformed.add(path.name)
                self._log(
                    f"{path.name} cannot be opened ({error.strerror}); a memfd dies with its process: "
                    "its records are lost"
                )
                continue
            if (
                ring.id in self._recording.closed
            ):  # retired, but the agent was killed before it removed the file
                path.unlink(missing_ok=True)
                self._recording.forget(ring.id)
                continue
            ring.start_at(self._recording.next_sequence(ring.id))
            self._costs_ps[ring.word(Header.PID)] = ring.word(Header.RECORD_COST)
            self._rings[path.name] = ring

    def _drain_safely(self, ring: RingReader, now: int) -> int:
        """Drain a ring. One that fails is ignored from then on; its worker counts what it must drop."""
        try:
            return self._drain(ring, now)
        except Exception as error:  # noqa: BLE001  the error boundary of a turn: other rings continue
            del self._rings[ring.path.name]
            self._malformed.add(ring.path.name)
            where = "" if isinstance(error, MalformedRingError) else f"\n{traceback.format_exc()}"
            self._log(
                f"{ring.path.name} cannot be drained ({type(error).__name__}: {error}); it is ignored{where}"
            )
            return 0

    def _drain(self, ring: RingReader, now: int) -> int:
        killed = process_start(ring.word(Header.PID)) != ring.word(Header.PROCESS_START)
        over = ring.is_over(killed)
        live = ring.live()
        ring.look(over)
        self._take_names(ring, now)
        until_ns = None if over else self._open_frames.until_ns
        taken = 0
        while len(records := ring.published(until_ns)[:FRAME_RECORDS_MAX]):
            self._append(FrameKind.RECORDS, ring.id, ring.tail, len(records), records.tobytes(), now)
            ring.advance(records)
            taken += len(records)
        fill = min(1.0, taken / ring.word(Header.SLOTS))
        self._fill[ring.id] = max(self._fill.get(ring.id, 0.0), fill)
        self._take_counters(ring, now, over)
        if over:
            self._retire(ring, live, killed and not ring.word(Header.CLOSED), now)
        else:
            ring.seen_ns = now
            self._open_frames.add(ring, live)
        return taken

    def _take_names(self, ring: RingReader, now: int) -> None:
        """Append new names. The caller appends the records after them: a record must not be in the log before
        its names."""
        known = self._recording.names(ring.id)
        if ring.names_end > known:
            payload, count = ring.names(known)
            self._append(FrameKind.NAMES, ring.id, known, count, payload, now)
            for line in self._recording.complaints(ring.id, known):
                if line not in self._logged:
                    self._logged.add(line)
                    self._log(f"{line}; what is lost is counted")

    def _take_counters(self, ring: RingReader, now: int, over: bool) -> None:
        if over or now - ring.counters_ns >= COUNTERS_INTERVAL_NS:
            ring.counters_ns = now
            counters = ring.read_counters()
            if counters != ring.counters:
                ring.counters = counters
                self._append(FrameKind.COUNTERS, ring.id, 0, len(Counter), counters, now)

    def _retire(self, ring: RingReader, live: Live, killed: bool, now: int) -> None:
        phases, step = ring.open_work(live, killed)
        end = ring.word(Header.CLOSED) or min(ring.sign_of_life_ns(live), now)
        unseen = killed and not ring.seen_ns
        if unseen:  # by this agent: the one before, if any, saw it alive
            end = max(end, self._previous_agent_ns)
        closed = Closed(end, killed, phases, step, unseen)
        self._append(FrameKind.CLOSED, ring.id, 0, 0, closed.encode(), now)
        del self._rings[ring.path.name]
        ring.path.unlink(missing_ok=True)
        self._recording.forget(ring.id)

    def _append(self, kind: FrameKind, ring: int, first: int, count: int, payload: bytes, now: int) -> None:
        if not self._recording.append(kind, ring, first, count, payload, now) and "disk" not in self._logged:
            self._logged.add("disk")
            self._log(
                f"{self._recording.directory} cannot be written (disk full?): new data is exported, but "
                "not recorded"
            )
