"""The agent's side of a ring file."""

from __future__ import annotations

import mmap
import os
import platform
import stat
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from otel_dflash.recording.catalog import Catalog, names_bytes
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.payloads import Open, OpenWork
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
    SLOTS_OFFSET,
    WORD_BYTES,
    Counter,
    Header,
    Kind,
)

# Other machines may show a store before an earlier one, but not as much as a poll before it.
STORES_IN_ORDER: Final = platform.machine() in ("x86_64", "AMD64", "i686")
# A store is seen one poll after it at the latest, and a record is taken two polls after it was seen.
POLLS_TO_TAKE: Final = 3
SCAN_SLOTS: Final = 1024  # published words compared at once: most polls find few records


Words = np.ndarray[Any, np.dtype[np.uint64]]


class MalformedRingError(Exception):
    """A file that is not a ring of this version."""


class Live(NamedTuple):
    """What a worker entered last. Times are monotonic ns."""

    starts: Words
    """Newest start of each phase, by name id."""
    step: int
    step_start_ns: int


class RingReader:
    """The reader of one ring file. One per ring and session, which the agent's lock ensures."""

    def __init__(self, path: Path) -> None:
        """Open the file, or follow the link to a memfd.

        Raises:
            MalformedRingError: The file is not a ring.
            OSError: The file is gone.
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
        self._closed = False  # as of the last poll
        # Names before this one may be taken. The first, the worker's, was there before the file was.
        self.names_end = self._seen_names_end = 1
        _check_worker(self.id, self.names(0))
        self.counters = b""
        self.counters_ns = 0
        self.seen_ns = 0
        """When its process was last seen alive; 0 if never."""
        self.ended_ns = 0
        """When the newest of its records ended."""
        self._resume_at(self.word(Header.TAIL))
        self._words[Header.ATTACHED] = 1

    def word(self, index: int) -> int:
        """Return one header word."""
        return int(self._words[index])

    def start_at(self, sequence: int) -> None:
        """Continue at `sequence`: the log has the records between the tail and it."""
        if sequence > self.tail:
            while self.tail < sequence:
                position = self.tail % len(self._records)
                count = min(sequence - self.tail, len(self._records) - position)
                self.advance(self._records[position : position + count])
            self._resume_at(sequence)

    def is_over(self, killed: bool) -> bool:
        """Return whether the worker has stored all that it will. Call it once a poll, before `look`."""
        before, self._closed = self._closed, self.word(Header.CLOSED) != 0
        return killed or (self._closed if STORES_IN_ORDER else before)

    def look(self, over: bool) -> None:
        """Fix what may be taken until the next look, which is in the next poll.

        Where stores may be seen out of order, what was stored before a word is whole in the poll after the
        one that first saw the word. So a name is taken one poll after its number was seen, and a record two:
        its names were stored before it. What is `over` is whole.
        """
        seen_end, seen_names_end = self._published_end(), min(self.word(Header.NAMES), NAMES_MAX)
        if STORES_IN_ORDER or over:
            self._ends = [seen_end]
            self.names_end = seen_names_end
        else:
            self._ends = [*self._ends[-2:], seen_end]
            self.names_end, self._seen_names_end = self._seen_names_end, seen_names_end

    def published(self, until_ns: int | None = None) -> Words:
        """Return the records from the tail on that may be taken, to the end of the lap at most.

        With `until_ns`, stop before the first that ended later.
        """
        position = self.tail % len(self._records)
        found = self._records[position : position + self._ends[0] - self.tail]
        if until_ns is not None and (later := _end_times(found) > until_ns).any():
            return found[: int(np.argmax(later))]
        return found

    def _resume_at(self, sequence: int) -> None:
        """Take nothing before the next look."""
        self.tail = sequence
        self._ends = [sequence]  # of the records, as the last looks saw them: the first may be taken

    def _published_end(self) -> int:
        """Return the sequence after the last of the records that are published one after another."""
        slots = len(self._records)
        end = self.tail
        while end < self.tail + slots:  # a malformed ring may repeat itself
            position = end % slots
            laps = self._records[position : position + SCAN_SLOTS, 0] >> LAP_SHIFT
            ready = laps == 1 + end // slots % LAP_MASK
            if not ready.all():
                return end + int(np.argmin(ready))
            end += len(ready)
        return self.tail + slots

    def advance(self, records: Words) -> None:
        """Free these records, the first from the tail: they are in the log."""
        kinds = records[:, 0] >> KIND_SHIFT & KIND_MASK
        phases = records[kinds == Kind.PHASE]
        np.maximum.at(self._recorded, phases[:, 0] >> NAME_SHIFT & NAME_MASK & NAMES_MAX - 1, phases[:, 1])
        ended = records[(kinds == Kind.STEP) | (kinds == Kind.CANCELLED)]
        if len(ended):
            self._words[Header.RECORDED_STEP] = ended[-1, 3]
            self._words[Header.RECORDED_END] = _end_times(ended[-1:])[0]
        self.tail += len(records)
        self._words[Header.TAIL] = self.tail
        if len(records):
            self.ended_ns = max(self.ended_ns, int(_end_times(records).max()))

    def names(self, known: int) -> tuple[bytes, int]:
        """Return the entries from `known` to `names_end`, and how many.

        Raises:
            MalformedRingError: The name region is malformed.
        """
        try:
            return names_bytes(self._memory[NAMES_OFFSET:SLOTS_OFFSET], known, self.names_end)
        except ValueError as error:
            raise MalformedRingError(str(error)) from None

    def read_counters(self) -> bytes:
        """Return the cumulative counters."""
        return self._words[Header.COUNTERS : Header.COUNTERS + len(Counter)].tobytes()

    def live(self) -> Live:
        """Return the live words. Read them before the records."""
        return Live(self._live.copy(), self.word(Header.STEP_ID), self.word(Header.STEP_START))

    def open_at(self, live: Live, time_ns: int) -> OpenWork:
        """Return what was open at `time_ns`, up to which all records were taken, and none that ended later.

        `live` was read after that time. A phase that encloses a whole step is left out.
        """
        starts, step_id, step_start = live
        rows = self.published()  # they ended later
        kinds, names = rows[:, 0] >> KIND_SHIFT & KIND_MASK, rows[:, 0] >> NAME_SHIFT & NAME_MASK
        began = rows[:, 1] <= time_ns
        steps = rows[(kinds == Kind.STEP) & began]
        step = None
        if len(steps):
            step = Open(int(steps[0, 3]), int(steps[0, 1]))
        elif (newest := self._open_step(step_id, step_start)) and step_start <= time_ns:
            step = newest
        since_ns = step.start_ns if step else self.word(Header.RECORDED_END)
        ended_later = (kinds == Kind.PHASE) & began
        found = {*zip(names[ended_later].tolist(), rows[ended_later, 1].tolist(), strict=True)}
        found |= {(name, int(starts[name])) for name in np.flatnonzero(starts > self._recorded).tolist()}
        phases = [Open(name, start_ns) for name, start_ns in found if since_ns <= start_ns <= time_ns]
        return OpenWork(step, tuple(sorted(phases, key=lambda phase: phase.start_ns)))

    def sign_of_life_ns(self, live: Live) -> int:
        """Return the newest time at which the worker is known to have been alive."""
        return max(self.seen_ns, self.ended_ns, int(live.starts.max()), live.step_start_ns)

    def open_work(self, live: Live, killed: bool) -> tuple[tuple[Open, ...], Open | None]:
        """Return the phases and the step that were open, given live words older than the last drain."""
        starts, step_id, step_start = live
        step = self._open_step(step_id, step_start)
        names = np.flatnonzero(starts > self._recorded)
        phases = [Open(int(name), int(starts[name])) for name in names]
        if step:
            phases = [phase for phase in phases if killed or phase.start_ns >= step_start]
        return tuple(sorted(phases, key=lambda phase: phase.start_ns)) if step or killed else (), step

    def _open_step(self, step_id: int, start_ns: int) -> Open | None:
        """Return the newest step, None if it has ended, also where its end found no slot."""
        if step_id <= max(self.word(Header.RECORDED_STEP), self.word(Header.STEP_DROPPED)):
            return None
        return Open(step_id, start_ns)


def _end_times(records: Words) -> Words:
    """Return when each record ended."""
    kinds = records[:, 0] >> KIND_SHIFT & KIND_MASK
    return np.where((kinds == Kind.PHASE) | (kinds == Kind.STEP), records[:, 2], records[:, 1])


def _checked_size(fd: int) -> int:
    """Return the size of an open ring file, in bytes.

    Checked by reading, because a store into a foreign map may raise SIGBUS.

    Raises:
        MalformedRingError: The file is not a ring.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= SLOTS_OFFSET or status.st_size % RECORD_BYTES:
        raise MalformedRingError(f"{status.st_size} bytes")
    head = np.frombuffer(os.pread(fd, HEADER_BYTES, 0), "<u8")
    if head[Header.MAGIC] != MAGIC or head[Header.SLOTS] != (status.st_size - SLOTS_OFFSET) // RECORD_BYTES:
        raise MalformedRingError(
            f"magic {int(head[Header.MAGIC]):#x}, {head[Header.SLOTS]} slots in {status.st_size} bytes"
        )
    return status.st_size


def _check_worker(ring: int, names: tuple[bytes, int]) -> None:
    """Check the first name, which describes the ring's worker.

    Raises:
        MalformedRingError: The name is missing or does not describe a worker.
    """
    catalog = Catalog()
    catalog.apply(Frame(0, FrameKind.NAMES, ring, 0, names[1], 0, names[0]))
    try:
        _ = catalog[ring].worker
    except (ValueError, LookupError) as error:
        raise MalformedRingError(f"it does not name its worker: {error}") from None
