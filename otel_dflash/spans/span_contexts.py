"""The contexts of a step's spans: the trace and the parent of each, and the links between the traces of one
step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from otel_dflash import semconv
from otel_dflash.spans import identity
from otel_dflash.spans.span import Link, SpanContext
from otel_dflash.spans.steps import CompletedStep, Phase
from otel_dflash.spans.traces import SPANS_PER_TRACE, Traces


class StepContexts(NamedTuple):
    """The contexts of the spans of one step."""

    span: SpanContext | None
    """Of the step, or of the step it continues: the parent of its phases. None for a phase outside any
    step."""
    parent: SpanContext | None
    """Of the parent of the step's own span."""
    phases: list[SpanContext]
    """Of each phase."""
    continued: list[Link]
    """To the first phase in each further trace."""


class SpanContexts:
    """Gives the spans of each step their contexts. One thread."""

    def __init__(self, is_open: Callable[[int], bool]) -> None:
        """Start with empty traces; `is_open` returns whether more records of a step are to come."""
        self.traces = Traces()
        self.to_come: set[int] = set()
        """Steps that have ended and whose contexts are yet to be asked for."""
        self._is_open = is_open

    def of(self, step: CompletedStep, key: int) -> StepContexts:
        """Return the contexts of a step on the ring with that `identity.ring_key`."""
        if step.step == step.ring:
            trace_id = identity.lone_trace_id(key, step.phases[0].sequence)
            return StepContexts(None, None, [_phase_context(trace_id, key, step.phases[0])], [])
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
            span = _remote_context(trace_id, step.owner)
        else:
            span = SpanContext(trace_id, identity.step_span_id(step.step))
            if producer and self._locate(root, producer) == home:
                parent = _remote_context(trace_id, producer)
        room = self.traces.take(home, count)
        if room == count:
            return StepContexts(
                span, parent, [_phase_context(trace_id, key, phase) for phase in step.phases], []
            )
        return StepContexts(span, parent, *_spread(step.phases, key, trace_id, room))

    def remote(self, root: int, step: int, is_sampled: bool) -> SpanContext:
        """Return the context of another step's span, for a link."""
        return _remote_context(identity.trace_id(self._locate(root, step)), step, is_sampled)

    def _locate(self, root: int, step: int) -> int:
        """Return the root of the trace in which the span of a step lies, or will lie."""
        if step != root and (step in self.to_come or self._is_open(step)):
            return self.traces.join(root, step, 1)
        return self.traces.locate(root, step)


def _remote_context(trace_id: int, step: int, is_sampled: bool = True) -> SpanContext:
    return SpanContext(trace_id, identity.step_span_id(step), True, is_sampled)


def _phase_context(trace_id: int, key: int, phase: Phase) -> SpanContext:
    return SpanContext(trace_id, identity.phase_span_id(key, phase.sequence))


def _spread(phases: list[Phase], key: int, trace_id: int, room: int) -> tuple[list[SpanContext], list[Link]]:
    """Return the contexts of phases of which only `room` fit into their trace, and a link to the first phase
    in each further trace.

    Phases are spread in the order of their starts, outer ones first: so a phase without a parent in its trace
    has nothing else around it there.
    """
    order = sorted(
        range(len(phases)), key=lambda index: (phases[index].start_ns, -phases[index].end_ns, -index)
    )
    traces = [trace_id] * len(phases)
    firsts = range(room, len(order), SPANS_PER_TRACE)
    for first in firsts:
        further = identity.lone_trace_id(key, phases[order[first]].sequence)
        for index in order[first : first + SPANS_PER_TRACE]:
            traces[index] = further
    contexts = [_phase_context(trace, key, phase) for trace, phase in zip(traces, phases, strict=True)]
    return contexts, [
        Link(contexts[order[first]], {semconv.LINK_KIND: semconv.LINK_CONTINUED}) for first in firsts
    ]


def enclosing(phases: list[Phase]) -> list[int]:
    """Return the index of the smallest phase around each, -1 for none.

    Phases lie in the order they ended: inside a phase are those before it that started no earlier and that no
    other phase has taken.
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
