"""The contexts of a step's spans: in which trace each lies, below which span, and how the traces of one step are linked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from opentelemetry.trace import Link, SpanContext, TraceFlags

from otel_dflash import semconv
from otel_dflash.agent import identity
from otel_dflash.agent.steps import CompletedStep, Phase
from otel_dflash.agent.traces import SPANS_PER_TRACE, Traces

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_NOT_SAMPLED: Final = TraceFlags(TraceFlags.DEFAULT)


class Place(NamedTuple):
    """Where the spans of a step belong."""

    span: SpanContext | None
    """Of the step, or of the step it works on: above its phases; None for a phase outside any step."""
    parent: SpanContext | None
    """Above the step's own span."""
    phases: list[SpanContext]
    continued: list[Link]
    """To the first phase in each further trace."""


class Places:
    """Gives each step its place. One thread."""

    def __init__(self, is_open: Callable[[int], bool]) -> None:
        """Start with empty traces; `is_open` tells whether more is to come of a step."""
        self.traces = Traces()
        self.to_come: set[int] = set()
        """Steps that have ended and are yet to be placed."""
        self._is_open = is_open

    def of(self, step: CompletedStep, key: int) -> Place:
        """Return the place of a step, on the ring with that `identity.ring_key`: its first item, or else its first put, fixed its root."""
        if step.step == step.ring:
            trace_id = identity.lone_trace_id(key, step.phases[0].sequence)
            return Place(None, None, [_phase(trace_id, key, step.phases[0])], [])
        root, producer = step.origin()
        count = len(step.phases)
        home = root
        if step.has_span and step.step != root:
            home = self.traces.join(root, step.step, count + 1)
        elif not step.has_span:
            home = self._locate(root, step.owner)
        trace_id = identity.trace_id(home)
        parent = None
        if step.resumed is not None:
            span = _remote(trace_id, step.owner)
        else:
            span = SpanContext(trace_id, identity.step_span_id(step.step), False, _SAMPLED)
            if producer and self._locate(root, producer) == home:
                parent = _remote(trace_id, producer)
        room = self.traces.take(home, count)
        if room == count:
            phases = [SpanContext(trace_id, identity.phase_span_id(key, phase.sequence), False, _SAMPLED) for phase in step.phases]
            return Place(span, parent, phases, [])
        return Place(span, parent, *_spread(step.phases, key, trace_id, room))

    def remote(self, root: int, step: int, is_sent: bool) -> SpanContext:
        """Return the context of another step's span, for a link."""
        return _remote(identity.trace_id(self._locate(root, step)), step, _SAMPLED if is_sent else _NOT_SAMPLED)

    def _locate(self, root: int, step: int) -> int:
        """Return the root of the trace in which the span of a step lies, or will lie."""
        if step != root and (step in self.to_come or self._is_open(step)):
            return self.traces.join(root, step, 1)
        return self.traces.locate(root, step)


def _remote(trace_id: int, step: int, flags: TraceFlags = _SAMPLED) -> SpanContext:
    return SpanContext(trace_id, identity.step_span_id(step), True, flags)


def _phase(trace_id: int, key: int, phase: Phase) -> SpanContext:
    return SpanContext(trace_id, identity.phase_span_id(key, phase.sequence), False, _SAMPLED)


def _spread(phases: list[Phase], key: int, trace_id: int, room: int) -> tuple[list[SpanContext], list[Link]]:
    """Return the contexts of phases of which only `room` fit into their trace, and a link to the first in each further one.

    In the order of their starts: what is around others goes first, so what has no parent in its trace has nothing else above it there.
    """
    order = sorted(range(len(phases)), key=lambda index: (phases[index].start_ns, -phases[index].end_ns, -index))
    traces = [trace_id] * len(phases)
    firsts = range(room, len(order), SPANS_PER_TRACE)
    for first in firsts:
        further = identity.lone_trace_id(key, phases[order[first]].sequence)
        for index in order[first : first + SPANS_PER_TRACE]:
            traces[index] = further
    contexts = [_phase(trace, key, phase) for trace, phase in zip(traces, phases, strict=True)]
    return contexts, [Link(contexts[order[first]], {semconv.LINK_KIND: semconv.LINK_CONTINUED}) for first in firsts]


def enclosing(phases: list[Phase]) -> list[int]:
    """Return the index of the smallest phase around each, -1 for none.

    Phases lie in the order they ended, so inside a phase are those before it that started no earlier and that no other has taken.
    """
    parents = [-1] * len(phases)
    free: list[int] = []
    for index, phase in enumerate(phases):
        while free and phases[free[-1]].start_ns >= phase.start_ns:
            inner = free.pop()
            if phases[inner].end_ns <= phase.end_ns:
                parents[inner] = index
        free.append(index)
    return parents
