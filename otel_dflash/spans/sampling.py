"""Which traces are sent: those that the standard sampler variables select, and beyond them those of slow or
failed steps and of the items they consumed.

The variables select a trace by its id alone, as the SDK's TraceIdRatioBased does, so every agent decides the
same. ``--keep`` adds traces later, when a slow or failed step ends: the step's own trace and those of the
items it consumed. Their spans that were left out before are read again from the recording, and their later
spans are sent too. Metrics are not sampled.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from otel_dflash.config import KEEP_VARIABLE, ConfigError
from otel_dflash.recording.delivery import SampledSpans
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.lookback import Lookback
from otel_dflash.recording.record_types import HEAD_WORD, STEP_WORD, kind_of
from otel_dflash.records import RECORD_BYTES, RECORD_WORDS, SERIAL_MASK, Kind
from otel_dflash.spans import identity
from otel_dflash.spans.state_codec import decode_bytes, decode_words, encode_bytes, encode_words
from otel_dflash.spans.steps import CompletedStep, StepAssembler

SAMPLER_VARIABLE: Final = "OTEL_TRACES_SAMPLER"
ARGUMENT_VARIABLE: Final = "OTEL_TRACES_SAMPLER_ARG"
SAMPLERS: Final = (
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
)
SLOW: Final = "slow"
ERROR: Final = "error"
TRUNCATED: Final = "truncated"
KEEP: Final = (SLOW, ERROR)

WINDOW_STEPS: Final = 1000
"""A step is slow beyond the p99 of this many steps of its role before it."""
WINDOW_STEPS_MIN: Final = 100
"""No step is slow before its role has this many."""
LEFT_OUT_STEPS_MAX: Final = 1 << 16
KEPT_TRACES_MAX: Final = 1 << 14

_SAMPLED_ID_RANGE: Final = 1 << 64  # of the low half of a trace id, which alone decides
# A step that was left out: its id, its first frame, and how many frames later its last one is.
_ENTRY: Final = struct.Struct("<QQI")
_STEPS_PER_TRACE_MAX: Final = 256
_HEAD: Final = struct.Struct("<QI")  # root, bytes of entries


class Sampling(NamedTuple):
    """The sampling that the environment configures."""

    bound: int
    """A trace is sent when the low 64 bits of its id are below this: 0..2**64."""
    keep: frozenset[str]
    """Of KEEP: what is sent whatever the ratio."""
    description: str
    """The sampler, such as ``traceidratio 0.1``."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Sampling:
        """Read the standard sampler variables as the SDK does, and OTEL_DFLASH_KEEP.

        Contexts in the pipeline carry no decision of a parent, so ``parentbased_x`` is ``x``.

        Raises:
            ConfigError: A variable has a value that cannot work.
        """
        environ = os.environ if environ is None else environ
        name = environ.get(SAMPLER_VARIABLE, "").strip().lower() or SAMPLERS[0]
        if name not in SAMPLERS:
            raise ConfigError(
                f"{SAMPLER_VARIABLE} must be one of {', '.join(SAMPLERS)}, got {name!r}; unset it to "
                "send every trace"
            )
        kind = name.removeprefix("parentbased_")
        rate = {"always_on": 1.0, "always_off": 0.0}.get(kind)
        if rate is None:
            rate = _ratio(environ)
            name = f"{name} {rate:g}"
        return cls(round(rate * _SAMPLED_ID_RANGE), _keep(environ), name)

    def sends(self, trace_id: int) -> bool:
        """Return whether the sampler variables alone send the trace with that id."""
        return trace_id % _SAMPLED_ID_RANGE < self.bound

    @property
    def sends_all(self) -> bool:
        """Return whether nothing is left out."""
        return self.bound == _SAMPLED_ID_RANGE


@dataclass(slots=True)
class _Window:
    """The durations of the last steps of a role."""

    recent: deque[int]
    """In the order of the recording."""
    ranked: list[int]
    """By size."""

    @classmethod
    def of(cls, durations: Iterator[int] | tuple[int, ...]) -> _Window:
        recent = deque(durations, WINDOW_STEPS)
        return cls(recent, sorted(recent))

    def exceeds(self, duration_ns: int) -> bool:
        """Add a duration; return whether it is beyond the p99 (nearest rank) of those before it."""
        count = len(self.ranked)
        is_slow = count >= WINDOW_STEPS_MIN and duration_ns > self.ranked[-(-99 * count // 100) - 1]
        if count == WINDOW_STEPS:
            del self.ranked[bisect_left(self.ranked, self.recent[0])]
        self.recent.append(duration_ns)
        insort(self.ranked, duration_ns)
        return is_slow


class Sampler:
    """Takes completed steps in the order of the recording, returns those to send. One thread.

    The same recording always gives the same answers.
    """

    def __init__(self, sampling: Sampling, lookback: Lookback, is_open: Callable[[int], bool]) -> None:
        """Start with nothing kept. `lookback` reads what was left out; `is_open` returns whether more records
        of a step are to come."""
        self._sampling = sampling
        self._lookback = lookback
        self._is_open = is_open
        self._windows: dict[str, _Window] = {}
        self._left_out: OrderedDict[int, bytes] = OrderedDict()
        """Root -> entries of its steps, the oldest trace first."""
        self._left_out_bytes = 0
        self._kept: OrderedDict[int, bool] = OrderedDict()
        """Root -> whether all of it that was recorded here is sent."""
        self.left_out_spans = 0
        """Spans that are not sent."""
        self.kept_steps = {SLOW: 0, ERROR: 0, TRUNCATED: 0}
        """Steps that were slow, failed or truncated, whether or not the ratio selects them."""
        self.lost_traces = 0
        """Traces that were to be kept but could not be read again whole."""

    def admit(self, step: CompletedStep, role: str) -> list[CompletedStep]:
        """Return what to send now: nothing, the step, or earlier steps and the step."""
        reason = self._reason(step, role)
        if step.step == step.ring:  # a phase outside any step: a trace alone
            if reason or self._sampling.sends(
                identity.lone_trace_id(identity.ring_key(step.ring), step.phases[0].sequence)
            ):
                return [step]
            self.left_out_spans += 1
            return []
        root, _ = step.origin()
        if reason:
            self.kept_steps[reason] += 1
            roots = dict.fromkeys([root, *(item.root for item in step.consumed if item.producer)])
            before = [found for kept in roots for found in self._bring_back(kept, step)]
            return [*before, step]
        if self._sampling.sends(identity.trace_id(root)):
            return [step]
        if root in self._kept:
            self._kept.move_to_end(root)
            return [step]
        self._leave_out(root, step)
        return []

    def is_sent(self, root: int) -> bool:
        """Return whether the trace of that root is sent, as far as it is known now."""
        return self._sampling.sends(identity.trace_id(root)) or self._kept.get(root, False)

    def _reason(self, step: CompletedStep, role: str) -> str:
        """Return why a step is kept whatever the ratio, '' when it is not."""
        keep = self._sampling.keep
        is_slow = False
        if SLOW in keep and step.whole and step.record is not None:
            window = self._windows.get(role)
            if window is None:
                window = self._windows[role] = _Window.of(())
            is_slow = window.exceeds(step.end_ns - step.start_ns)
        if ERROR in keep:
            if step.truncated or any(phase.truncated for phase in step.phases):
                return TRUNCATED
            if step.failed or any(phase.error for phase in step.phases):
                return ERROR
        return SLOW if is_slow else ""

    def _leave_out(self, root: int, step: CompletedStep) -> None:
        self.left_out_spans += step.span_count
        if not self._sampling.keep or step.first_frame < 0:
            return
        before = entries = self._left_out.get(root, b"")
        if not entries and step.step != root and self._has_passed(root):
            return  # its entries are gone: the trace would not be whole
        if entries:  # replace the entry of an earlier part of the step
            entries = b"".join(
                _ENTRY.pack(*entry) for entry in _ENTRY.iter_unpack(entries) if entry[0] != step.step
            )
        if len(entries) < _STEPS_PER_TRACE_MAX * _ENTRY.size:
            entries += _ENTRY.pack(step.step, step.first_frame, step.last_frame - step.first_frame)
        self._left_out[root] = entries
        self._left_out_bytes += len(entries) - len(before)
        while self._left_out_bytes > LEFT_OUT_STEPS_MAX * _ENTRY.size:
            self._left_out_bytes -= len(self._left_out.popitem(last=False)[1])

    def _has_passed(self, root: int) -> bool:
        """Return whether a root step is of this recording, not another agent's, and has ended."""
        return self._lookback.knows(root & ~SERIAL_MASK) and not self._is_open(root)

    def _bring_back(self, root: int, now: CompletedStep) -> list[CompletedStep]:
        """Keep the trace of `root`; return what was left out of it before `now`."""
        if self._sampling.sends(identity.trace_id(root)):
            return []
        if root in self._kept:
            self._kept.move_to_end(root)
            return []
        data = self._left_out.pop(root, b"")
        self._left_out_bytes -= len(data)
        entries = list(_ENTRY.iter_unpack(data))
        found: list[CompletedStep] = []
        is_whole = root == now.step or any(step == root for step, _, _ in entries) or self._is_open(root)
        is_ours = is_whole or self._lookback.knows(root & ~SERIAL_MASK)
        is_whole = is_whole and len(entries) < _STEPS_PER_TRACE_MAX  # else some may have no entry
        for step, first, length in entries:
            again = self._read_again(step, first, first + length)
            is_whole = is_whole and bool(again)
            # A frame may hold several parts of `now` itself.
            found += [part for part in again if step != now.step or _ends_before(part, now)]
        self.lost_traces += is_ours and not is_whole  # any other is counted by the agent of its root
        self.left_out_spans -= sum(part.span_count for part in found)
        self._kept[root] = is_whole
        if len(self._kept) > KEPT_TRACES_MAX:
            self._kept.popitem(last=False)
        return found

    def _read_again(self, step: int, first: int, last: int) -> list[CompletedStep]:
        """Return a step, or its parts so far, from the frames of its ring; [] when they are gone."""
        assembler = StepAssembler()
        frames = self._lookback.frames(step & ~SERIAL_MASK, first, last) or ()
        return [
            found for frame in frames for found in assembler.add(_narrowed(frame, step)) if found.step == step
        ]

    def state(self) -> dict[str, Any]:
        """Return all that a restart needs, ready for JSON."""
        left_out = b"".join(
            _HEAD.pack(root, len(entries)) + entries for root, entries in self._left_out.items()
        )
        return {
            "windows": {role: encode_words(window.recent) for role, window in self._windows.items()},
            "left_out": encode_bytes(left_out),
            "kept": encode_words(self._kept),
            "whole": encode_bytes(self._kept.values()),
            "left_out_spans": self.left_out_spans,
            "kept_steps": self.kept_steps,
            "lost_traces": self.lost_traces,
        }

    def restore(self, state: Any) -> None:
        """Replace the state by what `state` returned.

        Raises:
            ValueError: A text in it is damaged.
            TypeError: A value in it has the wrong type.
            LookupError: A key is missing.
            struct.error: An entry is cut short.
        """
        self._windows = {role: _Window.of(decode_words(text)) for role, text in state["windows"].items()}
        self._left_out = OrderedDict(_read_left_out(decode_bytes(state["left_out"])))
        self._left_out_bytes = sum(map(len, self._left_out.values()))
        self._kept = OrderedDict(
            zip(decode_words(state["kept"]), map(bool, decode_bytes(state["whole"])), strict=True)
        )
        self.left_out_spans, self.lost_traces = int(state["left_out_spans"]), int(state["lost_traces"])
        self.kept_steps = {reason: int(state["kept_steps"][reason]) for reason in self.kept_steps}

    def report(self) -> SampledSpans:
        """Return what delivery.json reports about sampling."""
        return SampledSpans(
            sampler=self._sampling.description,
            keep=sorted(self._sampling.keep),
            left_out_spans=self.left_out_spans,
            kept_steps=self.kept_steps,
            lost_traces=self.lost_traces,
        )


def _read_left_out(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset < len(data):
        root, size = _HEAD.unpack_from(data, offset)
        offset += _HEAD.size
        yield root, data[offset : offset + size]
        offset += size


def _narrowed(frame: Frame, step: int) -> Frame:
    """Return a frame without the records before and after those of `step`: a large frame holds thousands of
    steps."""
    if frame.kind != FrameKind.RECORDS:
        return frame
    rows = np.frombuffer(frame.payload, "<u8").reshape(-1, RECORD_WORDS)
    mine = np.flatnonzero(rows[:, STEP_WORD] == step)
    if not len(mine):
        return frame
    start, last = int(mine[0]), int(mine[-1])
    is_ended = kind_of(int(rows[last, HEAD_WORD])) == Kind.STEP
    end = last + 1 if is_ended else len(rows)  # a lost STEP: the records of a later step end it
    return replace(
        frame,
        first=frame.first + start,
        count=end - start,
        payload=frame.payload[start * RECORD_BYTES : end * RECORD_BYTES],
    )


def _ends_before(part: CompletedStep, now: CompletedStep) -> bool:
    """Return whether a part of a step went out ahead of `now`: of another part, or of the step itself."""
    return not part.whole and (
        (now.whole and not now.phases) or part.phases[-1].sequence < now.phases[0].sequence
    )


def _ratio(environ: Mapping[str, str]) -> float:
    """Return the ratio of OTEL_TRACES_SAMPLER_ARG, 1.0 when it is unset."""
    text = environ.get(ARGUMENT_VARIABLE, "").strip()
    try:
        rate = float(text or 1.0)
    except ValueError:
        rate = -1.0
    if not 0.0 <= rate <= 1.0:
        raise ConfigError(
            f"{ARGUMENT_VARIABLE} must be a ratio from 0 to 1, got {text!r}; try 0.1 for every tenth trace"
        )
    return rate


def _keep(environ: Mapping[str, str]) -> frozenset[str]:
    text = environ.get(KEEP_VARIABLE, "").strip().lower()
    words = frozenset(filter(None, (word.strip() for word in text.split(","))))
    if words - set(KEEP):
        raise ConfigError(
            f"{KEEP_VARIABLE} (--keep) takes slow, error, or slow,error, got {text!r}; unset it to go "
            "by the sampler alone"
        )
    return words
