"""Records -> completed steps: holds the records of a ring's open step until the step ends, is cut off, or
grows too long.

Records of a ring lie in the order in which things ended: a phase comes before the phase around it, and both
come before their STEP. What is held can be saved and restored by another process (`held`, `restore`), which
then completes the same steps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.payloads import Closed, PayloadError
from otel_dflash.recording.record_types import (
    AttributeRecord,
    ConsumedRecord,
    ResumedRecord,
    StepRecord,
    Words,
    kind_of,
)
from otel_dflash.records import ERROR_MASK, NAME_MASK, NAME_SHIFT, SERIAL_MASK, Kind

HELD_MAX: Final = 10_000
"""Records held for one open step; with more, its phases go out ahead of it."""

OPEN_SEQUENCE: Final = 1 << 56
"""A phase that was open at the end has no record. Its sequence is this + its name id: beyond any real one,
and the same after a restart."""

_SLOT: Final = struct.Struct("<8Q")
_HELD_HEAD: Final = struct.Struct("<8sI4x")  # magic, rings
# ring id, newest step, held step or 0, its first frame, first start, last end, records
_HELD_RING: Final = struct.Struct("<QQQQQQI4x")
_HELD_RECORD: Final = struct.Struct("<9Q")  # sequence, slot
_HELD_MAGIC: Final = b"odheld02"


class Phase(NamedTuple):
    """A phase that ended, or was open when its process ended. Times are monotonic ns."""

    sequence: int
    name: int  # name id
    start_ns: int
    end_ns: int
    error: int  # name id of the error type, 0 for none
    truncated: bool = False

    @classmethod
    def decode(cls, sequence: int, words: Words) -> Phase:
        """Return the phase of a slot of kind PHASE."""
        head, start_ns, end_ns, _, _, _, _, _ = words
        return cls(sequence, head >> NAME_SHIFT & NAME_MASK, start_ns, end_ns, head & ERROR_MASK)


@dataclass(slots=True)
class CompletedStep:
    """A step with all that is known of it, or some phases without a step span (`whole` is False).

    Not whole are phases outside any step (step == ring), and phases of a step that is too long to be held or
    has already gone out.
    """

    ring: int
    step: int
    start_ns: int = 0
    end_ns: int = 0
    phases: list[Phase] = field(default_factory=list)
    """In the order in which they ended."""
    attributes: list[AttributeRecord] = field(default_factory=list)
    consumed: list[ConsumedRecord] = field(default_factory=list)
    resumed: ResumedRecord | None = None
    """Names the step that this one continues; such a step has no span of its own."""
    record: StepRecord | None = None
    """The STEP, None when it was lost or never written."""
    whole: bool = True
    truncated: bool = False
    """Whether its start or its end is not the step's own."""
    first_frame: int = -1
    """Number of the first frame with a record of the step; -1 for what belongs to no open step."""
    last_frame: int = -1
    """Number of the last frame with a record of the step."""

    @property
    def has_span(self) -> bool:
        """Return whether this brings the step's own span."""
        return self.whole and self.resumed is None

    @property
    def span_count(self) -> int:
        """Return how many spans this becomes."""
        return len(self.phases) + self.has_span

    @property
    def failed(self) -> bool:
        """Return whether the step's own record names an error."""
        return self.record is not None and self.record.error != 0

    @property
    def owner(self) -> int:
        """Return the step that the phases belong to: its own id, or that of the step it continues."""
        return self.resumed.resumed_step if self.resumed is not None else self.step

    def origin(self) -> tuple[int, int]:
        """Return (root, producer): the step that began the trace, and the parent step or 0.

        The first consumed item determines both; without one, the first put determines the root alone.
        """
        if self.resumed is not None:
            return self.resumed.root, 0
        for item in self.consumed:
            if item.fixed_root and item.root:
                return item.root, item.producer
        return (self.record.root if self.record is not None else 0) or self.step, 0


@dataclass(slots=True)
class _OpenStep:
    """What is held of one open step."""

    step: int
    first_frame: int
    records: list[tuple[int, Words]] = field(default_factory=list)
    """(sequence, slot): slots stay as they are until the step completes, and are saved as they are."""
    start_ns: int = 0
    """First start of the phases that went out ahead, 0 when none did."""
    end_ns: int = 0
    """Last end of the phases that went out ahead, 0 when none did."""


@dataclass(slots=True)
class _Ring:
    """The state of one ring. A worker has one step at a time, and serials only grow."""

    newest: int = 0
    """Newest step id that was ever held or completed."""
    open: _OpenStep | None = None


class StepAssembler:
    """Takes frames in order, returns completed steps. One thread; pure: no clock, no I/O."""

    def __init__(self) -> None:
        self._rings: dict[int, _Ring] = {}
        self.unusable_records = 0
        """Records that no span can show: malformed, of an unknown kind, beyond HELD_MAX in one step, or of a
        step that has already gone out."""

    def add(self, frame: Frame) -> list[CompletedStep]:
        """Return the steps that `frame` completes; frames of other kinds complete none."""
        if frame.kind == FrameKind.RECORDS:
            completed = self._add_records(frame)
        elif frame.kind == FrameKind.CLOSED:
            completed = self._close(frame)
        else:
            if frame.kind == FrameKind.NAMES:  # a new ring: all of its steps are still to come
                self._rings.setdefault(frame.ring, _Ring())
            return []
        for step in completed:
            step.last_frame = frame.number
        return completed

    def is_open(self, step: int) -> bool:
        """Return whether more records of a step of this recording are to come."""
        state = self._rings.get(step & ~SERIAL_MASK)
        return state is not None and (
            step > state.newest or (state.open is not None and state.open.step == step)
        )

    def held(self) -> bytes:
        """Return all that is held, for `restore`."""
        parts = [_HELD_HEAD.pack(_HELD_MAGIC, len(self._rings))]
        for ring, state in self._rings.items():
            held = state.open or _OpenStep(0, 0)
            times = (held.first_frame, held.start_ns, held.end_ns)
            parts.append(_HELD_RING.pack(ring, state.newest, held.step, *times, len(held.records)))
            parts.extend(_HELD_RECORD.pack(sequence, *words) for sequence, words in held.records)
        return b"".join(parts)

    def restore(self, data: bytes) -> None:
        """Replace what is held by what `held` returned.

        Raises:
            ValueError: `data` is damaged, or was not returned by `held`.
        """
        try:
            self._rings = dict(_read_held(data))
        except struct.error as error:
            raise ValueError(f"held records cannot be read: {error} ({len(data)} bytes)") from None

    def _add_records(self, frame: Frame) -> list[CompletedStep]:
        completed: list[CompletedStep] = []
        ring = frame.ring
        state = self._rings.get(ring)
        if state is None:
            state = self._rings[ring] = _Ring()
        held = state.open
        for sequence, words in enumerate(_SLOT.iter_unpack(frame.payload), frame.first):
            head, start_ns, end_ns, step, _, _, _, _ = words
            kind = kind_of(head)
            if kind <= Kind.STEP and end_ns < start_ns:  # the fold leaves it out too
                self.unusable_records += 1
                continue
            if held is None or step != held.step:
                if step <= state.newest or step == ring:
                    self._add_lone_record(completed, ring, step, sequence, words)
                    continue
                if held is not None:  # its STEP was lost: a worker has one step at a time
                    completed.append(_complete(ring, held, None))
                held = _OpenStep(step, frame.number)
                state.newest = step
            if kind == Kind.STEP:
                completed.append(_complete(ring, held, StepRecord.decode(words)))
                held = None
            elif kind == Kind.CANCELLED:
                phases = _complete(ring, held, None).phases
                completed += [CompletedStep(ring, ring, phases=[phase], whole=False) for phase in phases]
                held = None
            elif len(held.records) < HELD_MAX or self._release_phases(completed, ring, held):
                held.records.append((sequence, words))
            else:
                self.unusable_records += 1
        state.open = held
        return completed

    def _add_lone_record(
        self, completed: list[CompletedStep], ring: int, step: int, sequence: int, words: Words
    ) -> None:
        """Add a record of no open step: outside any step, or after its step has gone out. A phase goes out
        alone; no other kind can be shown."""
        if kind_of(words[0]) == Kind.PHASE:
            completed.append(CompletedStep(ring, step, phases=[Phase.decode(sequence, words)], whole=False))
        else:
            self.unusable_records += 1

    @staticmethod
    def _release_phases(completed: list[CompletedStep], ring: int, held: _OpenStep) -> bool:
        """Send the held phases ahead of their step; return whether there were any. The other records stay for
        the step's own span."""
        part = _complete(ring, held, None)
        part.whole = part.truncated = False
        part.attributes = []
        if not part.phases:
            return False
        completed.append(part)
        held.start_ns, held.end_ns = part.start_ns, part.end_ns
        held.records = [
            (sequence, words) for sequence, words in held.records if kind_of(words[0]) != Kind.PHASE
        ]
        return True

    def _close(self, frame: Frame) -> list[CompletedStep]:
        """Retire the ring: all that is open ends now."""
        try:
            closed = Closed.decode(frame.payload)
        except PayloadError:
            self.unusable_records += 1
            return []
        state = self._rings.pop(frame.ring, _Ring())
        end_ns = closed.end_ns
        step, step_start_ns = closed.step or (0, 0)
        completed = []
        held = state.open
        if held is not None and held.step != step:
            completed.append(_complete(frame.ring, held, None))
            held = None
        if step <= state.newest and held is None:  # no step is open, or it has already gone out
            step = 0
        # Inner phases start later and end first. Live words are per phase name, so phases with equal starts
        # have no order to keep.
        inner_first = sorted(closed.open, key=lambda entry: (-entry[1], entry[0]))
        phases = [
            Phase(OPEN_SEQUENCE + name, name, start_ns, max(end_ns, start_ns), 0, True)
            for name, start_ns in inner_first
        ]
        inside = [phase for phase in phases if step and phase.start_ns >= step_start_ns]
        alone = [phase for phase in phases if phase not in inside]
        completed += [CompletedStep(frame.ring, frame.ring, phases=[phase], whole=False) for phase in alone]
        if step:
            last = _complete(frame.ring, held or _OpenStep(step, frame.number), None)
            last.start_ns, last.end_ns = step_start_ns, max(end_ns, step_start_ns)
            last.phases += inside
            completed.append(last)
        return completed


def _complete(ring: int, held: _OpenStep, record: StepRecord | None) -> CompletedStep:
    """Return the step of what is held and its STEP record; without one its times are those of its phases."""
    step = CompletedStep(
        ring, held.step, record=record, truncated=record is None, first_frame=held.first_frame
    )
    for sequence, words in held.records:
        kind = kind_of(words[0])
        if kind == Kind.PHASE:
            step.phases.append(Phase.decode(sequence, words))
        elif kind == Kind.CONSUMED:
            step.consumed.append(ConsumedRecord.decode(words))
        elif kind == Kind.ATTRIBUTE:
            step.attributes.append(AttributeRecord.decode(words))
        elif kind == Kind.RESUMED:
            step.resumed = ResumedRecord.decode(words)
    if record is not None:
        step.start_ns, step.end_ns = record.start_ns, record.end_ns
    else:
        step.start_ns, step.end_ns = _known_times(step.phases, held)
    return step


def _known_times(phases: list[Phase], held: _OpenStep) -> tuple[int, int]:
    """Return the first start and the last end that are known; of a step without phases, the times of its
    other records."""
    starts = [phase.start_ns for phase in phases]
    ends = [phase.end_ns for phase in phases]
    if held.end_ns:
        starts.append(held.start_ns)
        ends.append(held.end_ns)
    if not starts:
        starts = ends = [time_ns for _, (_, time_ns, *_) in held.records] or [0]
    return min(starts), max(ends)


def _read_held(data: bytes) -> Iterator[tuple[int, _Ring]]:
    magic, rings = _HELD_HEAD.unpack_from(data)
    if magic != _HELD_MAGIC:
        raise ValueError(f"held records cannot be read: they start with {magic!r}, not {_HELD_MAGIC!r}")
    offset = _HELD_HEAD.size
    for _ in range(rings):
        ring, newest, step, first_frame, start_ns, end_ns, records = _HELD_RING.unpack_from(data, offset)
        offset += _HELD_RING.size
        state = _Ring(newest)
        if step:
            state.open = _OpenStep(step, first_frame, [], start_ns, end_ns)
            for _ in range(records):
                sequence, *words = _HELD_RECORD.unpack_from(data, offset)
                offset += _HELD_RECORD.size
                state.open.records.append((sequence, tuple(words)))
        yield ring, state
