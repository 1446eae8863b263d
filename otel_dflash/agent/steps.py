"""Records -> completed steps: holds what a ring said of its open step until the step ends, is cut off, or grows too long.

Records of a ring lie in the order in which things ended, so a phase comes before the phase around it and both before their STEP.
What is held can be written down and taken up again by another process (`held`, `restore`), with the same steps to follow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from otel_dflash.agent.frames import Frame, FrameKind
from otel_dflash.records import ERROR_MASK, KIND_MASK, KIND_SHIFT, NAME_MASK, NAME_SHIFT, SERIAL_MASK, Kind

Words = tuple[int, ...]
"""The eight words of a slot."""

HELD_MAX: Final = 10_000
"""Records held for one open step; with more, its phases go out ahead of it."""

OPEN_SEQUENCE: Final = 1 << 56
"""An open phase has no record: its sequence is this + its name id, beyond any real one and the same after a restart."""

_SLOT: Final = struct.Struct("<8Q")
_HELD_HEAD: Final = struct.Struct("<8sI4x")  # magic, rings
_HELD_RING: Final = struct.Struct("<QQQQQQI4x")  # ring id, newest step, held step or 0, its first frame, first start, last end, records
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


@dataclass(slots=True)
class CompletedStep:
    """A step with all that is known of it, or some phases without a step span (`whole` is False).

    Not whole are: phases outside any step (step == ring), and phases of a step that is too long to be held or already went out.
    """

    ring: int
    step: int
    start_ns: int = 0
    end_ns: int = 0
    phases: list[Phase] = field(default_factory=list)  # in the order they ended
    attributes: list[Words] = field(default_factory=list)
    consumed: list[Words] = field(default_factory=list)
    resumed: Words | None = None  # works on the step this record names: has no span of its own
    record: Words | None = None  # the STEP, None when it was lost or never written
    whole: bool = True
    truncated: bool = False  # start or end is not the step's own
    first_frame: int = -1  # numbers of the first and the last frame that say of it; -1 for what belongs to no open step
    last_frame: int = -1

    @property
    def has_span(self) -> bool:
        """Return whether this brings the step's own span."""
        return self.whole and self.resumed is None

    @property
    def owner(self) -> int:
        """Return the step that the phases belong to: its own id, or that of the step it works on."""
        return self.resumed[5] if self.resumed is not None else self.step

    def origin(self) -> tuple[int, int]:
        """Return (root, producer): the step that began the trace, and the one to be below, 0 for none.

        The first consumed item fixes both, or else the first put the root alone.
        """
        if self.resumed is not None:
            return self.resumed[4], 0
        for record in self.consumed:
            if record[0] & ERROR_MASK and record[4]:
                return record[4], record[5]
        return (self.record[7] if self.record is not None else 0) or self.step, 0


class _Open:
    """What is held of one open step."""

    __slots__ = ("end_ns", "first_frame", "records", "start_ns", "step")

    def __init__(self, step: int, first_frame: int) -> None:
        self.step = step
        self.first_frame = first_frame
        self.records: list[tuple[int, Words]] = []  # sequence, slot
        self.start_ns = 0  # first start and last end of the phases that went out ahead; 0 when none did
        self.end_ns = 0


@dataclass(slots=True)
class _Ring:
    """The state of one ring. A worker has one step at a time, serials only grow."""

    newest: int = 0  # newest step id that was ever held or completed
    open: _Open | None = None


class StepAssembler:
    """Takes frames in order, gives completed steps. One thread; pure: no clock, no I/O."""

    def __init__(self) -> None:
        self._rings: dict[int, _Ring] = {}
        self.unusable_records = 0
        """Records that no span can show: malformed, of an unknown kind, beyond HELD_MAX in one step, or of a step that already went out."""

    def add(self, frame: Frame) -> list[CompletedStep]:
        """Return the steps that `frame` completes; frames of other kinds complete none."""
        if frame.kind == FrameKind.RECORDS:
            completed = self._add_records(frame)
        elif frame.kind == FrameKind.CLOSED:
            completed = self._close(frame)
        else:
            if frame.kind == FrameKind.NAMES:  # all of its steps are to come
                self._rings.setdefault(frame.ring, _Ring())
            return []
        for step in completed:
            step.last_frame = frame.number
        return completed

    def is_open(self, step: int) -> bool:
        """Return whether more is to come of a step of this recording."""
        state = self._rings.get(step & ~SERIAL_MASK)
        return state is not None and (step > state.newest or (state.open is not None and state.open.step == step))

    def held(self) -> bytes:
        """Return all that is held, for `restore`."""
        parts = [_HELD_HEAD.pack(_HELD_MAGIC, len(self._rings))]
        for ring, state in self._rings.items():
            held = state.open or _Open(0, 0)
            times = (held.first_frame, held.start_ns, held.end_ns)
            parts.append(_HELD_RING.pack(ring, state.newest, held.step, *times, len(held.records)))
            parts.extend(_HELD_RECORD.pack(sequence, *words) for sequence, words in held.records)
        return b"".join(parts)

    def restore(self, data: bytes) -> None:
        """Take up what `held` returned; what was held before is gone.

        Raises:
            ValueError: Not what `held` returns.
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
            step = words[3]
            kind = words[0] >> KIND_SHIFT & KIND_MASK
            if kind <= Kind.STEP and words[2] < words[1]:  # ends before it starts: the fold leaves it out too
                self.unusable_records += 1
                continue
            if held is None or step != held.step:
                if step <= state.newest or step == ring:
                    self._add_stepless(completed, ring, step, kind, sequence, words)
                    continue
                if held is not None:  # its STEP was lost: a worker has one step at a time
                    completed.append(_complete(ring, held, None))
                held = _Open(step, frame.number)
                state.newest = step
            if kind == Kind.STEP:
                completed.append(_complete(ring, held, words))
                held = None
            elif len(held.records) < HELD_MAX or self._make_room(completed, ring, held):
                held.records.append((sequence, words))
            else:
                self.unusable_records += 1
        state.open = held
        return completed

    def _add_stepless(self, completed: list[CompletedStep], ring: int, step: int, kind: int, sequence: int, words: Words) -> None:
        """A phase outside any step, or one that comes after its step went out, goes out alone; nothing else can."""
        if kind == Kind.PHASE:
            completed.append(CompletedStep(ring, step, phases=[_phase(sequence, words)], whole=False))
        else:
            self.unusable_records += 1

    @staticmethod
    def _make_room(completed: list[CompletedStep], ring: int, held: _Open) -> bool:
        """Let the held phases go out ahead of their step; return whether there were any. The rest is for the step's own span."""
        part = _complete(ring, held, None)
        part.whole = part.truncated = False
        part.attributes = []
        if not part.phases:
            return False
        completed.append(part)
        held.start_ns, held.end_ns = part.start_ns, part.end_ns
        held.records = [entry for entry in held.records if entry[1][0] >> KIND_SHIFT & KIND_MASK != Kind.PHASE]
        return True

    def _close(self, frame: Frame) -> list[CompletedStep]:
        """The ring is retired: all that is open ends now."""
        state = self._rings.pop(frame.ring, _Ring())
        closed = frame.json()
        end_ns: int = closed["end_ns"]
        step, step_start_ns = closed["step"] or (0, 0)
        completed = []
        held = state.open
        if held is not None and held.step != step:
            completed.append(_complete(frame.ring, held, None))
            held = None
        if step <= state.newest and held is None:  # no step is open, or it went out already
            step = 0
        # Inner phases start later and end first. Live words are per phase name, so equal starts have no order to keep.
        inner_first = sorted(closed["open"], key=lambda entry: (-entry[1], entry[0]))
        phases = [Phase(OPEN_SEQUENCE + name, name, start_ns, max(end_ns, start_ns), 0, True) for name, start_ns in inner_first]
        inside = [phase for phase in phases if step and phase.start_ns >= step_start_ns]
        alone = [phase for phase in phases if phase not in inside]
        completed += [CompletedStep(frame.ring, frame.ring, phases=[phase], whole=False) for phase in alone]
        if step:
            last = _complete(frame.ring, held or _Open(step, frame.number), None)
            last.start_ns, last.end_ns = step_start_ns, max(end_ns, step_start_ns)
            last.phases += inside
            completed.append(last)
        return completed


def _phase(sequence: int, words: Words) -> Phase:
    head = words[0]
    return Phase(sequence, head >> NAME_SHIFT & NAME_MASK, words[1], words[2], head & ERROR_MASK)


def _complete(ring: int, held: _Open, record: Words | None) -> CompletedStep:
    """Return the step of what is held and its STEP record; without one its times are those of its phases."""
    step = CompletedStep(ring, held.step, record=record, truncated=record is None, first_frame=held.first_frame)
    for sequence, words in held.records:
        kind = words[0] >> KIND_SHIFT & KIND_MASK
        if kind == Kind.PHASE:
            step.phases.append(_phase(sequence, words))
        elif kind == Kind.CONSUMED:
            step.consumed.append(words)
        elif kind == Kind.ATTRIBUTE:
            step.attributes.append(words)
        elif kind == Kind.RESUMED:
            step.resumed = words
    if record is not None:
        step.start_ns, step.end_ns = record[1], record[2]
    else:
        step.start_ns, step.end_ns = _known_times(step.phases, held)
    return step


def _known_times(phases: list[Phase], held: _Open) -> tuple[int, int]:
    """Return the first start and the last end that are known; of a step without phases, the times of its other records."""
    starts = [phase.start_ns for phase in phases]
    ends = [phase.end_ns for phase in phases]
    if held.end_ns:
        starts.append(held.start_ns)
        ends.append(held.end_ns)
    if not starts:
        starts = ends = [words[1] for _, words in held.records] or [0]
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
            state.open = _Open(step, first_frame)
            state.open.start_ns, state.open.end_ns = start_ns, end_ns
            for _ in range(records):
                sequence, *words = _HELD_RECORD.unpack_from(data, offset)
                offset += _HELD_RECORD.size
                state.open.records.append((sequence, tuple(words)))
        yield ring, state
