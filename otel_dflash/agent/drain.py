"""Rings to recording: what the trainers published is appended as it is, then their memory is given back.

Order is what makes a kill harmless: the log is written first, then the reader's words in the ring (what was recorded last, and the
tail). A drain that starts over takes the tail from the log and reads what lies between again, from the ring, without appending it.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import stat
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from otel_dflash.agent.catalog import Catalog, names_bytes
from otel_dflash.agent.frames import Frame, FrameKind
from otel_dflash.agent.recording import RecordingWriter
from otel_dflash.records import (
    HEADER_BYTES,
    KIND_MASK,
    KIND_SHIFT,
    LAP_MASK,
    LAP_SHIFT,
    LIVE_OFFSET,
    MAGIC,
    NAME_MASK,
    NAME_SHIFT,
    NAMES_MAX,
    NAMES_OFFSET,
    RECORD_BYTES,
    RECORD_WORDS,
    RECORDED_OFFSET,
    SERIAL_MASK,
    SLOTS_OFFSET,
    WORD_BYTES,
    Counter,
    Header,
    Kind,
)
from otel_dflash.session import Session, process_start

STORES_IN_ORDER: Final = platform.machine() in ("x86_64", "AMD64", "i686")  # elsewhere a record is taken one poll after it was seen
COUNTERS_INTERVAL_NS: Final = 1_000_000_000
FRAME_RECORDS_MAX: Final = 4096  # 256 KiB: what a sink turns into spans at once


class MalformedRingError(Exception):
    """A file that is no ring of this version."""


class RingReader:
    """The reader's end of one ring file. One per ring and session: the agent's lock sees to that."""

    def __init__(self, path: Path) -> None:
        """Open the file, or follow the link to a memfd.

        Raises:
            MalformedRingError: It is no ring.
            OSError: It is gone.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            self._memory = mmap.mmap(fd, _checked_size(fd))
        finally:
            os.close(fd)
        self._words = np.frombuffer(self._memory, "<u8")
        self._records = self._words[SLOTS_OFFSET // WORD_BYTES :].reshape(-1, RECORD_WORDS)
        self._live = self._words[LIVE_OFFSET // WORD_BYTES : RECORDED_OFFSET // WORD_BYTES]
        self._recorded = self._words[RECORDED_OFFSET // WORD_BYTES : NAMES_OFFSET // WORD_BYTES]
        self.path = path
        self.id = self.word(Header.RING_ID)
        _check_worker(self.id, self.names(0))
        self.counters = b""
        self.counters_ns = 0
        self._visible = self.tail = self.word(Header.TAIL)
        self._words[Header.ATTACHED] = 1

    def word(self, index: int) -> int:
        """Return one header word."""
        return int(self._words[index])

    def start_at(self, sequence: int) -> None:
        """Go on at `sequence`: the log has what lies between the tail and it."""
        if sequence > self.tail:
            while self.tail < sequence:
                position = self.tail % len(self._records)
                count = min(sequence - self.tail, len(self._records) - position)
                self.advance(self._records[position : position + count])
            self._visible = self.tail

    def published(self, over: bool = False) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return the records published from the tail on, up to the end of the lap. `over`: their writer has stopped."""
        position = self.tail % len(self._records)
        lap = 1 + self.tail // len(self._records) % LAP_MASK
        ready = self._records[position:, 0] >> LAP_SHIFT == lap
        count = len(ready) if ready.all() else int(np.argmin(ready))
        if not STORES_IN_ORDER and not over:
            count, self._visible = max(0, min(count, self._visible - self.tail)), self.tail + count
        return self._records[position : position + count]

    def advance(self, records: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        """Say that these records, the first from the tail, are in the log."""
        kinds = records[:, 0] >> KIND_SHIFT & KIND_MASK
        phases = records[kinds == Kind.PHASE]
        np.maximum.at(self._recorded, phases[:, 0] >> NAME_SHIFT & NAME_MASK & NAMES_MAX - 1, phases[:, 1])
        steps = records[kinds == Kind.STEP]
        if len(steps):
            self._words[Header.RECORDED_STEP] = steps[-1, 3]
        self.tail += len(records)
        self._words[Header.TAIL] = self.tail

    def names(self, known: int) -> tuple[bytes, int]:
        """Return the entries after the first `known`, and how many.

        Raises:
            MalformedRingError: The name region makes no sense.
        """
        try:
            return names_bytes(self._memory[NAMES_OFFSET:SLOTS_OFFSET], known, min(self.word(Header.NAMES), NAMES_MAX))
        except ValueError as error:
            raise MalformedRingError(str(error)) from None

    def read_counters(self) -> bytes:
        """Return the cumulative counters."""
        return self._words[Header.COUNTERS : Header.COUNTERS + len(Counter)].tobytes()

    def live(self) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], int, int]:
        """Return the live words: newest start of each phase, newest step and its start. Read them before the records."""
        return self._live.copy(), self.word(Header.STEP_ID), self.word(Header.STEP_START)

    def open_work(
        self, live: tuple[np.ndarray[Any, np.dtype[np.uint64]], int, int], killed: bool
    ) -> tuple[list[list[int]], list[int] | None]:
        """Return what was going on, [[name id, start]] and [step id, start], given live words older than the last drain."""
        starts, step_id, step_start = live
        step = [step_id, step_start] if step_id > self.word(Header.RECORDED_STEP) else None
        if self.word(Header.COUNTERS + Counter.DROPPED_RING_FULL) and self.word(Header.COUNTERS + Counter.STEPS) == step_id & SERIAL_MASK:
            return [], None  # every step ended: what has no record found no room for it
        names = np.flatnonzero(starts > self._recorded)
        phases = [[int(name), int(starts[name])] for name in names]
        if step:
            phases = [phase for phase in phases if killed or phase[1] >= step_start]
        return sorted(phases, key=lambda phase: phase[1]) if step or killed else [], step


def _checked_size(fd: int) -> int:
    """Return the size of an open ring file; looked at by reading, because a store into a foreign map may be SIGBUS.

    Raises:
        MalformedRingError: It is no ring.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= SLOTS_OFFSET or status.st_size % RECORD_BYTES:
        raise MalformedRingError(f"{status.st_size} bytes")
    head = np.frombuffer(os.pread(fd, HEADER_BYTES, 0), "<u8")
    if head[Header.MAGIC] != MAGIC or head[Header.SLOTS] != (status.st_size - SLOTS_OFFSET) // RECORD_BYTES:
        raise MalformedRingError(f"magic {int(head[Header.MAGIC]):#x}, {head[Header.SLOTS]} slots in {status.st_size} bytes")
    return status.st_size


def _check_worker(ring: int, names: tuple[bytes, int]) -> None:
    """Look at the first name, which says whose ring it is.

    Raises:
        MalformedRingError: It does not.
    """
    catalog = Catalog()
    catalog.apply(Frame(0, FrameKind.NAMES, ring, 0, names[1], 0, names[0]))
    try:
        _ = catalog[ring].worker
    except (ValueError, LookupError) as error:
        raise MalformedRingError(f"it does not say whose it is: {error}") from None


class Drain:
    """Takes all rings of a session to its recording."""

    def __init__(self, session: Session, recording: RecordingWriter, say: Callable[[str], None]) -> None:
        """Start with no ring; `say` gets one line for each kind of trouble."""
        self._session = session
        self._recording = recording
        self._say = say
        self._rings: dict[str, RingReader] = {}
        self._fill: dict[str, float] = {}
        self._costs_ps: dict[int, int] = {}  # by process
        self._malformed: set[str] = set()
        self._said: set[str] = set()

    def poll(self) -> int:
        """Take what every ring has; return the number of records."""
        self._discover()
        return sum(self._drain_safely(ring) for ring in list(self._rings.values()))

    def holds_living(self) -> bool:
        """Return whether a process that lives may still write to a ring held here."""
        return any(process_start(ring.word(Header.PID)) == ring.word(Header.PROCESS_START) for ring in self._rings.values())

    def figures(self) -> tuple[dict[str, float], float]:
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
                self._say(f"{path.name} is no ring of this version ({error}); it is left alone")
                continue
            except OSError as error:
                self._malformed.add(path.name)
                self._say(f"{path.name} cannot be opened ({error.strerror}); a memfd dies with its process: its records are lost")
                continue
            if ring.id in self._recording.closed:  # retired, and killed before the file was removed
                path.unlink(missing_ok=True)
                continue
            ring.start_at(self._recording.next_sequence(ring.id))
            self._costs_ps[ring.word(Header.PID)] = ring.word(Header.RECORD_COST)
            self._rings[path.name] = ring

    def _drain_safely(self, ring: RingReader) -> int:
        """Drain a ring; one that makes trouble is left alone, and its worker counts what finds no room."""
        try:
            return self._drain(ring)
        except Exception as error:  # noqa: BLE001  the error boundary of a turn: other rings go on
            del self._rings[ring.path.name]
            self._malformed.add(ring.path.name)
            where = "" if isinstance(error, MalformedRingError) else f"\n{traceback.format_exc()}"
            self._say(f"{ring.path.name} cannot be drained ({type(error).__name__}: {error}); it is left alone{where}")
            return 0

    def _drain(self, ring: RingReader) -> int:
        killed = process_start(ring.word(Header.PID)) != ring.word(Header.PROCESS_START)
        over = killed or ring.word(Header.CLOSED) != 0  # before the last look at the records
        live = ring.live()
        now = time.monotonic_ns()
        taken = 0
        more = True
        while more:
            records = ring.published(over)[:FRAME_RECORDS_MAX]
            self._take_names(ring, now)
            if len(records):
                self._append(FrameKind.RECORDS, ring.id, ring.tail, len(records), records.tobytes(), now)
                ring.advance(records)
                taken += len(records)
            # Once more where the end of a frame or a lap cut it, but not for what came meanwhile: a fast worker would never let go.
            cut = len(records) == FRAME_RECORDS_MAX or ring.tail % ring.word(Header.SLOTS) == 0
            more = len(records) > 0 and (over or (cut and taken < ring.word(Header.SLOTS)))
        self._fill[str(ring.id)] = round(max(self._fill.get(str(ring.id), 0.0), min(1.0, taken / ring.word(Header.SLOTS))), 6)
        self._take_counters(ring, now, over)
        if over:
            self._retire(ring, live, killed and not ring.word(Header.CLOSED), now)
        return taken

    def _take_names(self, ring: RingReader, now: int) -> None:
        """Names first: a record must not be in the log before its names. The caller has looked at the records before."""
        known = self._recording.names(ring.id)
        if ring.word(Header.NAMES) > known:
            payload, count = ring.names(known)
            self._append(FrameKind.NAMES, ring.id, known, count, payload, now)
            for value in self._recording.refused(ring.id, known):
                if value not in self._said:
                    self._said.add(value)
                    self._say(f"step.set() did not read {value}: give it an int, float, str or bool in range; refusals are counted")

    def _take_counters(self, ring: RingReader, now: int, over: bool) -> None:
        if over or now - ring.counters_ns >= COUNTERS_INTERVAL_NS:
            ring.counters_ns = now
            counters = ring.read_counters()
            if counters != ring.counters:
                ring.counters = counters
                self._append(FrameKind.COUNTERS, ring.id, 0, len(Counter), counters, now)

    def _retire(self, ring: RingReader, live: tuple[np.ndarray[Any, np.dtype[np.uint64]], int, int], killed: bool, now: int) -> None:
        phases, step = ring.open_work(live, killed)
        end = ring.word(Header.CLOSED) or now
        payload = json.dumps({"end_ns": end, "killed": killed, "open": phases, "step": step}).encode()
        self._append(FrameKind.CLOSED, ring.id, 0, 0, payload, now)
        del self._rings[ring.path.name]
        ring.path.unlink(missing_ok=True)

    def _append(self, kind: FrameKind, ring: int, first: int, count: int, payload: bytes, now: int) -> None:
        if not self._recording.append(kind, ring, first, count, payload, now) and "disk" not in self._said:
            self._said.add("disk")
            self._say(f"{self._recording.directory} cannot be written (disk full?): what comes now is exported, but not recorded")
