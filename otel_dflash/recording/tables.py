"""The recording as tables: numpy arrays, one row for each worker's ring, step, phase and item.

This is the way to read a recording from your own programs::

    from pathlib import Path
    from otel_dflash.recording.tables import read_tables

    tables = read_tables(Path("dflash-runs/night-7"))
    forward = tables.phases.name == tables.text_id("forward")
    print((tables.phases.end_ns - tables.phases.start_ns)[forward].mean() / 1e6, "ms")

Times are monotonic ns of the recording's host; `tables.info.wall_ns` makes wall time of them. Texts are
numbers: positions in `tables.texts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otel_dflash.recording.catalog import Catalog, QueueInfo, RingNames
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.payloads import Closed, OpenWork, PayloadError, decode_open
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import RunInfo
from otel_dflash.records import (
    BUCKET_MASK,
    ERROR_MASK,
    KIND_MASK,
    KIND_SHIFT,
    NAME_MASK,
    NAME_SHIFT,
    NUMBER_SHIFT,
    RECORD_BYTES,
    RECORD_WORDS,
    WORD_BYTES,
    Counter,
    Kind,
    State,
)
from otel_dflash.session import DETAIL_PHASES

Ints = NDArray[np.int64]
Ids = NDArray[np.uint64]

NOT_SET: Final = -(1 << 63)
"""Tokens that a step did not set."""
_READ_FRAMES: Final = 4096


class OpenPhase(NamedTuple):
    """A phase that had not ended."""

    name: str
    state: State
    start_ns: int


@dataclass(frozen=True)
class RingRow:
    """One ring: a worker, or a part of its life if it was made again."""

    id: int
    role: str
    index: int
    gpu: int | None
    pid: int
    created_ns: int
    end_ns: int
    """When it ended; while it lives, until when the recording accounts for its time."""
    closed: Closed | None
    open_phases: tuple[OpenPhase, ...]
    """Those that were open at `end_ns`, outermost first."""
    open_step_ns: int | None
    """The start of the step that was open then, None if none was."""
    counters: tuple[int, ...]
    """In the order of records.Counter."""


@dataclass(frozen=True)
class Phases:
    """Phases in the order of their ends, ring by ring. Nested ones come before those around them."""

    ring: Ints  # position in Tables.rings
    step: Ids  # id of the step, the ring's own id outside steps
    name: Ints  # position in Tables.texts
    state: Ints  # records.State
    start_ns: Ints
    end_ns: Ints
    error: Ints  # text of the exception's type, -1 if none


@dataclass(frozen=True)
class Steps:
    """Steps that ended, in the order of their ends, ring by ring."""

    ring: Ints
    step: Ids
    number: Ints  # that the user gave it, -1 if none
    start_ns: Ints
    end_ns: Ints
    tokens: Ints  # NOT_SET if not set
    loss_tokens: Ints
    bucket: Ints  # text, -1 if none
    error: Ints  # text, -1 if none
    root: Ids  # id of the step whose trace this one belongs to


@dataclass(frozen=True)
class Items:
    """Items that a step took out of a queue, or that it continued to work on (`resumed`)."""

    ring: Ints  # of the step that took it
    step: Ids
    queue: Ints  # position in Tables.queues, -1 if not known
    bucket: Ints  # text, -1 if none
    put_ns: Ints  # monotonic of this host, from anchored wall time; 0 if not known
    get_ns: Ints
    producer: Ids  # id of the step that put it, 0 if it was put outside a step
    resumed: NDArray[np.bool_]


@dataclass(frozen=True)
class Captured:
    """From when on phases were captured, or were not."""

    time_ns: int
    is_captured: bool


@dataclass(frozen=True)
class Tables:
    """A whole recording."""

    info: RunInfo
    texts: Sequence[str]
    queues: Sequence[QueueInfo]
    rings: Sequence[RingRow]
    phases: Phases
    steps: Steps
    items: Items
    captured: Sequence[Captured]
    """Each change of the capture detail, as far as it is known; phases are captured before the first."""
    missing_frames: int

    def text_id(self, text: str) -> int:
        """Return the position of a text, -1 if nothing has it."""
        return self.texts.index(text) if text in self.texts else -1


def read_tables(directory: Path) -> Tables:
    """Read the recording of a run that has ended or is running. What is malformed is left out.

    Raises:
        RecordingError: There is no recording, or it cannot be read.
    """
    reader = RecordingReader(directory)
    try:
        found = TableBuilder(reader.info, reader.catalog)
        while frames := reader.read(_READ_FRAMES):
            for frame in frames:
                found.add(frame)
        return found.tables(reader.missing_frames)
    finally:
        reader.close()


class _Ring:
    def __init__(self, names: RingNames) -> None:
        self.names = names
        self.rows: list[Ids] = []
        self.next_sequence = 0
        self.last_ns = names.worker.created_ns
        self.closed: Closed | None = None
        self.open: OpenWork | None = None
        self.counters: tuple[int, ...] = (0,) * len(Counter)


class _Texts(dict[str, int]):
    """Text -> its position."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


class TableBuilder:
    """Gathers rows ring by ring; the names are read at the end, when all are known."""

    def __init__(self, info: RunInfo, catalog: Catalog) -> None:
        """Begin without rows; `catalog` is the reader's."""
        self._info = info
        self._catalog = catalog
        self._rings: dict[int, _Ring] = {}
        self._captured: list[Captured] = []
        self._texts = _Texts()
        self._queues: dict[QueueInfo, int] = {}

    def add(self, frame: Frame) -> None:
        """Add the next frame. What is malformed is left out."""
        try:
            if frame.kind == FrameKind.RECORDS:
                self._add_records(self._ring(frame.ring), frame)
            elif frame.kind == FrameKind.COUNTERS:
                words = np.frombuffer(frame.payload, "<u8", len(frame.payload) // WORD_BYTES).tolist()
                self._ring(frame.ring).counters = (*words, *(0,) * len(Counter))[: len(Counter)]
            elif frame.kind == FrameKind.CLOSED:
                ring = self._ring(frame.ring)
                ring.closed = Closed.decode(frame.payload)
                ring.last_ns = max(ring.last_ns, ring.closed.end_ns)
                ring.open = OpenWork(ring.closed.step, ring.closed.open)
            elif frame.kind == FrameKind.OPEN:
                self._add_open(frame)
            elif frame.kind == FrameKind.NAMES:
                self._ring(frame.ring)
        except (PayloadError, LookupError, ValueError):
            return  # a summary counts it

    def _ring(self, ring_id: int) -> _Ring:
        if ring_id not in self._rings:
            self._rings[ring_id] = _Ring(self._catalog[ring_id])
        return self._rings[ring_id]

    def _add_records(self, ring: _Ring, frame: Frame) -> None:
        words = np.frombuffer(frame.payload, "<u8", len(frame.payload) // RECORD_BYTES * RECORD_WORDS)
        rows = words.reshape(-1, RECORD_WORDS)[max(ring.next_sequence - frame.first, 0) :]
        ring.next_sequence = max(ring.next_sequence, frame.first + len(words) // RECORD_WORDS)
        kinds = _kinds(rows)
        is_timed = (kinds == Kind.PHASE) | (kinds == Kind.STEP)
        ends = np.where(is_timed, rows[:, 2], rows[:, 1])
        rows = rows[(rows[:, 1] <= ends) & (ends <= np.uint64(frame.time_ns))]
        if len(rows):
            ring.rows.append(rows)
            ring.last_ns = max(ring.last_ns, int(min(ends.max(), frame.time_ns)))
            ring.open = None

    def _add_open(self, frame: Frame) -> None:
        detail, rings = decode_open(frame.payload)
        is_captured = detail == DETAIL_PHASES
        if is_captured != (self._captured[-1].is_captured if self._captured else True):
            self._captured.append(Captured(frame.time_ns, is_captured))
        for ring_id, work in rings.items():
            ring = self._ring(ring_id)
            ring.last_ns = max(ring.last_ns, frame.time_ns)
            ring.open = work

    def tables(self, missing_frames: int = 0) -> Tables:
        """Return all that was added, once: the rows are let go."""
        rings = list(self._rings.values())
        found: dict[str, list[list[NDArray[Any]]]] = {"phases": [], "steps": [], "items": []}
        for place, ring in enumerate(rings):
            rows = np.concatenate(ring.rows) if ring.rows else np.empty((0, RECORD_WORDS), np.uint64)
            kinds = _kinds(rows)
            places = np.full(len(rows), place)
            for name, columns, chosen in (
                ("phases", self._phases, kinds == Kind.PHASE),
                ("steps", self._steps, kinds == Kind.STEP),
                ("items", self._items, (kinds == Kind.CONSUMED) | (kinds == Kind.RESUMED)),
            ):
                found[name].append([places[chosen], *columns(rows[chosen], ring.names)])
            ring.rows.clear()

        def joined(name: str, empty: Sequence[Any]) -> list[NDArray[Any]]:
            parts = found[name] or [[np.empty(0, kind) for kind in empty]]
            return [np.concatenate(column) for column in zip(*parts, strict=True)]

        i, u, b = np.int64, np.uint64, np.bool_
        phases = Phases(*joined("phases", (i, u, i, i, i, i, i)))
        steps = Steps(*joined("steps", (i, u, i, i, i, i, i, i, i, u)))
        items = Items(*joined("items", (i, u, i, i, i, i, u, b)))
        return Tables(
            self._info,
            list(self._texts),
            list(self._queues),
            [_ring_row(ring_id, ring) for ring_id, ring in self._rings.items()],
            phases,
            steps,
            items,
            self._captured,
            missing_frames,
        )

    def _phases(self, rows: Ids, names: RingNames) -> list[NDArray[Any]]:
        known = [names.phase(name_id) for name_id in range(len(names.entries) + 1)]
        ids = _part(rows[:, 0], NAME_SHIFT, NAME_MASK).clip(max=len(names.entries))
        texts = np.array([self._texts[name] for _, name in known], np.int64)
        states = np.array([state for state, _ in known], np.int64)
        start_ns, end_ns = rows[:, 1].astype(np.int64), rows[:, 2].astype(np.int64)
        return [rows[:, 3], texts[ids], states[ids], start_ns, end_ns, self._errors(rows, names)]

    def _steps(self, rows: Ids, names: RingNames) -> list[NDArray[Any]]:
        start_ns, end_ns, tokens, loss_tokens = (rows[:, word].astype(np.int64) for word in (1, 2, 4, 5))
        number = (rows[:, 6] >> np.uint64(NUMBER_SHIFT)).astype(np.int64) - 1
        bucket = self._text_of(_part(rows[:, 6], 0, BUCKET_MASK), names)
        root = np.where(rows[:, 7] == 0, rows[:, 3], rows[:, 7])
        errors = self._errors(rows, names)
        return [rows[:, 3], number, start_ns, end_ns, tokens, loss_tokens, bucket, errors, root]

    def _items(self, rows: Ids, names: RingNames) -> list[NDArray[Any]]:
        resumed = _kinds(rows) == Kind.RESUMED
        queues = [-1]
        for name_id in range(1, len(names.entries)):
            info = names.queue(name_id)
            queues.append(-1 if info is None else self._queues.setdefault(info, len(self._queues)))
        ids = np.where(resumed, 0, _part(rows[:, 0], NAME_SHIFT, NAME_MASK))
        queue = np.array([*queues, -1], np.int64)[ids.clip(max=len(queues))]
        bucket = self._text_of(np.where(resumed, 0, _part(rows[:, 6], 0, BUCKET_MASK)), names)
        to_mono_ns = self._info.anchor_mono_ns - self._info.anchor_wall_ns
        put_ns = rows[:, 2].astype(np.int64)
        put_ns = np.where(put_ns == 0, 0, put_ns + to_mono_ns)
        return [rows[:, 3], queue, bucket, put_ns, rows[:, 1].astype(np.int64), rows[:, 5], resumed]

    def _errors(self, rows: Ids, names: RingNames) -> Ints:
        return self._text_of(_part(rows[:, 0], 0, ERROR_MASK), names)

    def _text_of(self, ids: Ints, names: RingNames) -> Ints:
        """Return the texts of name ids, -1 for id 0."""
        found = np.full(len(ids), -1)
        for name_id in np.unique(ids[ids > 0]).tolist():
            found[ids == name_id] = self._texts[names.text(name_id)]
        return found


def _kinds(rows: Ids) -> Ints:
    return _part(rows[:, 0], KIND_SHIFT, KIND_MASK)


def _part(words: Ids, shift: int, mask: int) -> Ints:
    found: Ints = (words >> np.uint64(shift) & np.uint64(mask)).astype(np.int64)
    return found


def _ring_row(ring_id: int, ring: _Ring) -> RingRow:
    info = ring.names.worker
    place = (info.role, info.index, info.gpu, info.pid, info.created_ns)
    step, phases = ring.open or OpenWork(None, ())
    named = [(*ring.names.phase(phase.id), phase.start_ns) for phase in phases]
    open_phases = tuple(OpenPhase(name, state, start_ns) for state, name, start_ns in named)
    step_ns = step.start_ns if step else None
    return RingRow(ring_id, *place, ring.last_ns, ring.closed, open_phases, step_ns, ring.counters)
