"""RECORDS frames to arrays: decoded once, shared by all families."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from otel_dflash.metrics.histogram import Histogram, group
from otel_dflash.recording.frames import Frame
from otel_dflash.recording.payloads import Closed
from otel_dflash.records import (
    ERROR_MASK,
    KIND_MASK,
    KIND_SHIFT,
    RECORD_BYTES,
    RECORD_WORDS,
    WORD_MASK,
    Kind,
)

KEY_MASK: Final = np.uint64((1 << (KIND_SHIFT + 8)) - 1)  # kind, name, error: all of word 0 but the lap
STEP_MASK: Final = np.uint64((KIND_MASK << KIND_SHIFT) | ERROR_MASK)  # a step's name is its thread
# a record that ends later than this after its frame was written is torn
_FUTURE_NS_MAX: Final = 60_000_000_000
_DURATION_NS_MAX: Final = 1 << 53  # 104 days

Words = NDArray[np.uint64]


@dataclass(slots=True)
class Ring:
    """What all families share about a ring. Times are monotonic ns."""

    id: int
    created_ns: int
    last_ns: int  # end of its newest record, or its own
    next_sequence: int = 0
    closed: Closed | None = None
    gap_ns: int = 0
    """Between the rings that were merged into this one (ended.py); negative where they overlapped."""
    workers: int = 1
    """That it stands for: more if it is the past of a role."""

    @property
    def wall_ns(self) -> int:
        """Return the time this ring accounts for."""
        return self.last_ns - self.created_ns - self.gap_ns


class Records:
    """New records of one ring, in order; the arrays hold the well-formed ones."""

    def __init__(self, frame: Frame, ring: Ring) -> None:
        """Decode a RECORDS frame, without records that were in an earlier frame."""
        words = np.frombuffer(frame.payload, "<u8", len(frame.payload) // RECORD_BYTES * RECORD_WORDS)
        rows = words.reshape(-1, RECORD_WORDS)
        end = frame.first + len(rows)
        seen = min(max(ring.next_sequence - frame.first, 0), len(rows))  # of a frame written twice
        self.missing = max(frame.first - ring.next_sequence, 0)
        """Sequence numbers before these that the recording lacks."""
        self.count = len(rows) - seen
        """New records, malformed ones too."""
        ring.next_sequence = max(ring.next_sequence, end)
        rows = rows[seen:]
        sequences = np.arange(frame.first + seen, end, dtype=np.uint64)
        kinds = rows[:, 0] >> np.uint64(KIND_SHIFT) & np.uint64(KIND_MASK)
        good = _well_formed(rows, kinds, frame.time_ns)
        self.malformed = self.count - int(np.count_nonzero(good))
        if self.malformed:
            rows, sequences, kinds = rows[good], sequences[good], kinds[good]
        self.rows: Words = rows
        self.sequences: Words = sequences
        self.kinds: Words = kinds
        if len(rows):
            ring.last_ns = max(ring.last_ns, int(np.where(self.is_timed, rows[:, 2], rows[:, 1]).max()))

    @cached_property
    def is_step(self) -> NDArray[np.bool_]:
        """Return which rows are steps."""
        found: NDArray[np.bool_] = self.kinds == Kind.STEP
        return found

    @cached_property
    def is_timed(self) -> NDArray[np.bool_]:
        """Return which rows are phases or steps: they have a start and an end."""
        found: NDArray[np.bool_] = self.is_step | (self.kinds == Kind.PHASE)
        return found

    @cached_property
    def timed(self) -> Timed:
        """Return the phases and steps."""
        return Timed(self.rows[self.is_timed], self.is_step[self.is_timed])

    @cached_property
    def step_tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens and loss tokens of each step, negative if not set."""
        tokens, loss_tokens = self.rows[self.is_step, 4:6].astype(np.int64).T
        return tokens, loss_tokens


class Timed:
    """Phases and steps in the order of their records."""

    def __init__(self, rows: Words, is_step: NDArray[np.bool_]) -> None:
        self.is_step = is_step
        self.starts: Words = rows[:, 1]
        self.ends: Words = rows[:, 2]
        self.keys: Words = rows[:, 0] & np.where(is_step, STEP_MASK, KEY_MASK)
        self.durations: dict[int, Histogram] = group(self.keys, self.ends - self.starts)
        """By kind, name and error as in word 0 of a slot; a step has name 0."""


def _well_formed(rows: Words, kinds: Words, time_ns: int) -> NDArray[np.bool_]:
    """Return which rows are plausible: a ring may be torn, or written by another program."""
    starts, ends = rows[:, 1], rows[:, 2]
    timed = (kinds == Kind.PHASE) | (kinds == Kind.STEP)
    latest = np.uint64(min(time_ns + _FUTURE_NS_MAX, WORD_MASK))
    good: NDArray[np.bool_] = np.where(
        timed,
        (starts <= ends) & (ends <= latest) & (ends - starts < np.uint64(_DURATION_NS_MAX)),
        starts <= latest,
    )
    good &= (kinds >= min(Kind)) & (kinds <= max(Kind))
    return good
