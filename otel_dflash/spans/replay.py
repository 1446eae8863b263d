"""Completed steps -> spans, with their recorded times and with ids that any process computes the same.

Replay is deterministic: the same frames always give equal spans, whoever replays them and whenever. No random
number and no clock is used, and attributes keep one order. Monotonic ns become wall ns here and nowhere else.
A trace that is full continues in linked ones (traces.py).
"""

from __future__ import annotations

import base64
import json
import struct
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from otel_dflash import semconv
from otel_dflash.recording.catalog import Catalog, RingNames, WorkerInfo
from otel_dflash.recording.frames import Frame
from otel_dflash.recording.lookback import Lookback
from otel_dflash.recording.run_info import RunInfo
from otel_dflash.records import OTHER_NAME
from otel_dflash.spans import identity
from otel_dflash.spans.attributes import (
    Attributes,
    item_attributes,
    otlp_bytes,
    step_attributes,
    user_attributes,
)
from otel_dflash.spans.sampling import Sampler, Sampling
from otel_dflash.spans.span import Event, Link, Span, SpanKind, SpanResource
from otel_dflash.spans.span_contexts import SpanContexts, StepContexts, enclosing
from otel_dflash.spans.steps import CompletedStep, Phase, StepAssembler

_STATE_VERSION: Final = 1
_KINDS: Final = {"queue_put": SpanKind.PRODUCER, "queue_get": SpanKind.CONSUMER}
_SPAN_BYTES: Final = 120  # upper estimate of a span's ids, times and flags in OTLP
_ITEM_BYTES: Final = 64  # and of those of a link or an event
_LINK_BYTES: Final = 2 * _ITEM_BYTES  # and of a link to another part of a step


class _PhaseShape(NamedTuple):
    """What all spans of one phase share."""

    name: str
    kind: SpanKind
    attributes: Attributes
    otlp_bytes: int


class _RingShape:
    """What all spans of one ring share."""

    def __init__(self, names: RingNames, worker: WorkerInfo) -> None:
        self.names = names
        self.role = worker.role
        self.step_name = f"{worker.role}.{semconv.STEP_SPAN_SUFFIX}"
        self.resource = SpanResource(worker.role, worker.pid)
        self.key = identity.ring_key(names.ring)
        self.attributes: Attributes = {semconv.WORKER_ROLE: worker.role, semconv.WORKER_ID: str(worker.index)}
        if worker.gpu is not None:
            self.attributes[semconv.GPU_INDEX] = worker.gpu
        self.attributes[semconv.CLOCK_DOMAIN] = semconv.CLOCK_DOMAIN_HOST
        self._phases: dict[int, _PhaseShape] = {}

    def phase(self, name_id: int) -> _PhaseShape:
        """Return what the spans of that phase share."""
        shape = self._phases.get(name_id)
        if shape is None:
            state, phase = self.names.phase(name_id)
            name = f"{self.role}.{phase}"
            attributes = {**self.attributes, semconv.STATE: state.name.lower()}
            kind = _KINDS.get(phase, SpanKind.INTERNAL)
            shape = _PhaseShape(name, kind, attributes, _span_bytes(name, attributes))
            if name_id < len(self.names.entries):  # else a later segment may bring the lost name
                self._phases[name_id] = shape
        return shape


class _Details(NamedTuple):
    """The items and attributes of a step. Spans are numbered: -1 is the step's own, others are indices of its
    phases."""

    carrier: int
    """The span with the attributes and links."""
    attributes: Attributes
    links: list[Link]
    events: dict[int, list[Event]]
    """By span."""

    def item_bytes(self, index: int) -> int:
        """Return an upper estimate of the size in OTLP of the links and events of one span."""
        events = self.events.get(index, ())
        links = self.links if index == self.carrier else ()
        return sum(2 * _ITEM_BYTES + otlp_bytes(item.attributes) for item in (*events, *links))


_NO_DETAILS: Final = _Details(-1, {}, [], {})


class SpanReplay:
    """Frames in, spans out. One thread."""

    def __init__(
        self,
        info: RunInfo,
        catalog: Catalog,
        sampling: Sampling | None = None,
        lookback: Lookback | None = None,
    ) -> None:
        """Replay the recording of `info`. `catalog` holds the names of every frame added, `lookback` reads
        earlier frames."""
        self._catalog = catalog
        self._wall_offset_ns = info.wall_ns(0)
        self._assembler = StepAssembler()
        self._contexts = SpanContexts(self._assembler.is_open)
        self.sampler: Sampler | None = None
        """Decides which traces are left out; None when all are sent."""
        if sampling is not None and lookback is not None and not sampling.sends_all:
            self.sampler = Sampler(sampling, lookback, self._assembler.is_open)
        self._rings: dict[int, _RingShape] = {}

    @property
    def unusable_records(self) -> int:
        """Records that no span can show (StepAssembler)."""
        return self._assembler.unusable_records

    def add(self, frame: Frame) -> list[Span]:
        """Return the spans that `frame` completes, each step before its phases."""
        spans: list[Span] = []
        completed = self._assembler.add(frame)
        self._contexts.to_come = {step.step for step in completed}
        for step in completed:
            if self.sampler is None:
                self._add_step(spans, step)
                continue
            admitted = self.sampler.admit(step, self._ring(step.ring).role)
            self._contexts.to_come.update(sent.step for sent in admitted)
            for sent in admitted:
                self._add_step(spans, sent)
        return spans

    def forget(self, ring: int) -> None:
        """Forget the names of a ring that has ended, unless the sampler may read its steps again."""
        if self.sampler is None:
            self._rings.pop(ring, None)
            self._catalog.pop(ring, None)

    def state(self) -> bytes:
        """Return the open steps and all that decides about later ones. Together with the position after the
        last added frame this is all that a restart needs."""
        state = {
            "version": _STATE_VERSION,
            "held": base64.b64encode(self._assembler.held()).decode(),
            "traces": self._contexts.traces.state(),
            "sampler": None if self.sampler is None else self.sampler.state(),
        }
        return json.dumps(state).encode()

    def restore(self, data: bytes) -> None:
        """Replace the state by what `state` returned.

        Raises:
            ValueError: `data` is damaged, or from another version.
        """
        try:
            state: Any = json.loads(data)
            if state["version"] != _STATE_VERSION:
                raise ValueError(f"version {state['version']}, not {_STATE_VERSION}")
            self._assembler.restore(base64.b64decode(state["held"], validate=True))
            self._contexts.traces.restore(state["traces"])
            if self.sampler is not None and state["sampler"] is not None:
                self.sampler.restore(state["sampler"])
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error) as error:
            raise ValueError(f"the state cannot be read: {error}") from None

    def _add_step(self, spans: list[Span], step: CompletedStep) -> None:
        ring = self._ring(step.ring)
        contexts = self._contexts.of(step, ring.key)
        details = _NO_DETAILS
        # Items and attributes of a step that goes out in parts all come with its own span.
        if step.whole and (step.consumed or step.attributes):
            details = self._details(step, ring)
        if step.has_span:
            if contexts.continued:
                details = details._replace(links=details.links + contexts.continued)
            spans.append(self._step_span(step, ring, contexts, details))
        self._add_phases(spans, step, ring, contexts, details)

    def _step_span(
        self, step: CompletedStep, ring: _RingShape, contexts: StepContexts, details: _Details
    ) -> Span:
        assert contexts.span is not None  # only phases outside any step have none
        attributes = ring.attributes.copy()
        if step.record is not None:
            attributes.update(step_attributes(step.record, ring.names))
        if step.consumed:
            attributes[semconv.BATCH_ITEM_COUNT] = len(step.consumed)
        if step.truncated:
            attributes[semconv.SPAN_TRUNCATED] = True
        if contexts.continued:
            attributes[semconv.TRACE_CONTINUED] = len(contexts.continued)
        attributes.update(details.attributes)
        return Span(
            ring.step_name,
            SpanKind.INTERNAL,
            contexts.span,
            contexts.parent,
            step.start_ns + self._wall_offset_ns,
            step.end_ns + self._wall_offset_ns,
            attributes,
            details.links,
            details.events.get(-1, ()),
            step.failed,
            ring.resource,
            _span_bytes(ring.step_name, attributes) + details.item_bytes(-1),
        )

    def _add_phases(
        self,
        spans: list[Span],
        step: CompletedStep,
        ring: _RingShape,
        contexts: StepContexts,
        details: _Details,
    ) -> None:
        """Append the spans of a step's phases. The parent of each is the smallest phase around it, else the
        step."""
        parents = enclosing(step.phases)
        offset_ns = self._wall_offset_ns
        for index, phase in enumerate(step.phases):
            shape = ring.phase(phase.name)
            attributes, size = shape.attributes, shape.otlp_bytes
            is_carrier = index == details.carrier
            if phase.truncated or phase.error or is_carrier:
                attributes = self._phase_attributes(phase, ring, details.attributes if is_carrier else {})
                size = _span_bytes(shape.name, attributes)
            context = contexts.phases[index]
            parent = contexts.phases[parents[index]] if parents[index] >= 0 else contexts.span
            links: Sequence[Link] = details.links if is_carrier else ()
            if parent is not None and parent.trace_id != context.trace_id:
                links = [*links, Link(parent, {semconv.LINK_KIND: semconv.LINK_CONTINUES})]
                size += _LINK_BYTES
                parent = None
            spans.append(
                Span(
                    shape.name,
                    shape.kind,
                    context,
                    parent,
                    phase.start_ns + offset_ns,
                    phase.end_ns + offset_ns,
                    attributes,
                    links,
                    details.events.get(index, ()),
                    phase.error != 0,
                    ring.resource,
                    size + details.item_bytes(index) if details.events else size,
                )
            )

    @staticmethod
    def _phase_attributes(phase: Phase, ring: _RingShape, more: Attributes) -> Attributes:
        attributes = ring.phase(phase.name).attributes.copy()
        if phase.truncated:
            attributes[semconv.SPAN_TRUNCATED] = True
        if phase.error:
            attributes[semconv.ERROR_TYPE] = ring.names.text(phase.error)
        attributes.update(more)
        return attributes

    def _details(self, step: CompletedStep, ring: _RingShape) -> _Details:
        """Return the items and attributes of a step: each item on the span of its get, the rest on the step's
        own span.

        A step that continues another step has no span of its own: there the rest is on its earliest phase.
        """
        carrier = -1
        if step.resumed is not None and step.phases:
            carrier = min(range(len(step.phases)), key=lambda index: step.phases[index].start_ns)
        parent_step = step.resumed.resumed_step if step.resumed is not None else 0
        gets = sorted(
            (phase.start_ns, index)
            for index, phase in enumerate(step.phases)
            if ring.phase(phase.name).kind is SpanKind.CONSUMER
        )
        starts_ns = [start_ns for start_ns, _ in gets]
        links: list[Link] = []
        events: dict[int, list[Event]] = {}
        for item in step.consumed:
            get_ns, root, producer = item.get_ns, item.root, item.producer
            attributes = item_attributes(item, ring.names, self._wall_offset_ns)
            is_sent = self.sampler is None or not producer or self.sampler.is_sent(root)
            if not is_sent:
                attributes[semconv.TRACE_SAMPLED] = False
            before = bisect_right(starts_ns, get_ns) - 1
            index = (
                gets[before][1] if before >= 0 and get_ns <= step.phases[gets[before][1]].end_ns else carrier
            )
            events.setdefault(index, []).append(
                Event(semconv.QUEUE_ITEM_EVENT, get_ns + self._wall_offset_ns, attributes)
            )
            if producer and producer != parent_step:  # a phase needs no link to its parent
                links.append(Link(self._contexts.remote(root, producer, is_sent), attributes))
        return _Details(carrier, user_attributes(step.attributes, ring.names), links, events)

    def _ring(self, ring_id: int) -> _RingShape:
        ring = self._rings.get(ring_id)
        if ring is None:
            names = self._catalog.get(ring_id)
            if names is None or not names.entries:  # lost, but a later segment may bring them
                return _RingShape(RingNames(ring_id), WorkerInfo(OTHER_NAME, 0, None, 0, 0))
            ring = self._rings[ring_id] = _RingShape(names, names.worker)
        return ring


def _span_bytes(name: str, attributes: Attributes) -> int:
    return _SPAN_BYTES + len(name) + otlp_bytes(attributes)
