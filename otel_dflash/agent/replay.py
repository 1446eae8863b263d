"""Completed steps -> the SDK's ReadableSpans, with their recorded times and with ids that any process computes the same.

The same frames give the same spans to the byte, whoever replays them and whenever: nothing is drawn, no clock is read, and
attributes keep one order. Monotonic ns become wall ns here and nowhere else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from otel_dflash import semconv
from otel_dflash.agent import identity
from otel_dflash.agent.attributes import Attributes, encoded_bytes, item_attributes, step_attributes, user_attributes
from otel_dflash.agent.catalog import Catalog, RingNames, WorkerInfo
from otel_dflash.agent.frames import Frame
from otel_dflash.agent.recording import RunInfo
from otel_dflash.agent.resources import Resources
from otel_dflash.agent.steps import CompletedStep, Phase, StepAssembler
from otel_dflash.records import ERROR_MASK, OTHER_NAME

SPANS_PER_BATCH: Final = 512
BYTES_PER_BATCH: Final = 1 << 20  # a gRPC receiver takes 4 MiB unless told otherwise

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSET: Final = Status(StatusCode.UNSET)
_ERROR: Final = Status(StatusCode.ERROR)
_QUEUE_GET: Final = "queue_get"
_KINDS: Final = {"queue_put": SpanKind.PRODUCER, _QUEUE_GET: SpanKind.CONSUMER}
_SPAN_BYTES: Final = 120  # upper estimate of a span's ids, times and flags in OTLP
_ITEM_BYTES: Final = 64  # and of those of a link or an event


class ReplayedSpan(ReadableSpan):
    """A ReadableSpan that knows about how large it gets."""

    encoded_bytes: int = 0
    """Upper estimate of the span's size in OTLP, without its resource."""


class _PhaseShape(NamedTuple):
    """What all spans of one phase share."""

    name: str
    kind: SpanKind
    attributes: Attributes
    encoded_bytes: int


class _RingShape:
    """What all spans of one ring share."""

    def __init__(self, names: RingNames, worker: WorkerInfo, resource: Resource) -> None:
        self.names = names
        self.role = worker.role
        self.step_name = f"{worker.role}.{semconv.STEP_SPAN_SUFFIX}"
        self.resource = resource
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
            shape = _PhaseShape(name, _KINDS.get(phase, SpanKind.INTERNAL), attributes, _size(name, attributes))
            if name_id < len(self.names.entries):  # else the recording lost its name, so far
                self._phases[name_id] = shape
        return shape


class _Place(NamedTuple):
    """Where the spans of a step belong."""

    trace_id: int
    span: SpanContext | None  # of the step, or of the step it works on: above its phases; None for a phase outside any step
    parent: SpanContext | None  # above the step's own span


class _Details(NamedTuple):
    """What hangs on single spans of a step; -1 is the step's own span, others are indices of its phases."""

    carrier: int
    attributes: Attributes
    links: list[Link]
    events: dict[int, list[Event]]

    def size_at(self, index: int) -> int:
        """Return an upper estimate of the encoded size of what hangs on one span, its attributes excepted."""
        events = self.events.get(index, ())
        links = self.links if index == self.carrier else ()
        return sum(2 * _ITEM_BYTES + encoded_bytes(item.attributes or {}) for item in (*events, *links))


_NO_DETAILS: Final = _Details(-1, {}, [], {})


class SpanReplay:
    """Frames in, spans out. One thread."""

    def __init__(self, info: RunInfo, catalog: Catalog) -> None:
        """Replay the recording of `info`; `catalog` holds the names of every frame added."""
        self._info = info
        self._catalog = catalog
        self._wall_offset_ns = info.wall_ns(0)
        self._assembler = StepAssembler()
        self._rings: dict[int, _RingShape] = {}
        self._resources = Resources(info)
        self._roles: dict[tuple[str, int], Resource] = {}
        self._scope = InstrumentationScope(semconv.SCOPE_NAME, info.version)

    @property
    def unusable_records(self) -> int:
        """Records that no span can show (StepAssembler)."""
        return self._assembler.unusable_records

    def add(self, frame: Frame) -> list[ReplayedSpan]:
        """Return the spans that `frame` completes, each step before its phases."""
        spans: list[ReplayedSpan] = []
        for step in self._assembler.add(frame):
            self._add_step(spans, step)
        return spans

    def held(self) -> bytes:
        """Return the records of open steps: with the position after the last added frame, all that a restart needs."""
        return self._assembler.held()

    def restore(self, data: bytes) -> None:
        """Take up what `held` returned.

        Raises:
            ValueError: Not what `held` returns.
        """
        self._assembler.restore(data)

    def _add_step(self, spans: list[ReplayedSpan], step: CompletedStep) -> None:
        ring = self._ring(step.ring)
        place = _place(step, ring)
        details = _NO_DETAILS
        # A part of a step carries no items and attributes: the step's own span comes with all of them.
        if step.whole and (step.consumed or step.attributes):
            details = self._details(step, ring)
        if step.whole and step.resumed is None:
            spans.append(self._step_span(step, ring, place, details))
        self._add_phases(spans, step, ring, place, details)

    def _step_span(self, step: CompletedStep, ring: _RingShape, place: _Place, details: _Details) -> ReplayedSpan:
        attributes = ring.attributes.copy()
        if step.record is not None:
            attributes.update(step_attributes(step.record, ring.names))
        if step.consumed:
            attributes[semconv.BATCH_ITEM_COUNT] = len(step.consumed)
        if step.truncated:
            attributes[semconv.SPAN_TRUNCATED] = True
        attributes.update(details.attributes)
        span = ReplayedSpan(
            name=ring.step_name,
            context=place.span,
            parent=place.parent,
            resource=ring.resource,
            attributes=attributes,
            events=details.events.get(-1, ()),
            links=details.links,
            status=_ERROR if step.record is not None and step.record[0] & ERROR_MASK else _UNSET,
            start_time=step.start_ns + self._wall_offset_ns,
            end_time=step.end_ns + self._wall_offset_ns,
            instrumentation_scope=self._scope,
        )
        span.encoded_bytes = _size(ring.step_name, attributes) + details.size_at(-1)
        return span

    def _add_phases(self, spans: list[ReplayedSpan], step: CompletedStep, ring: _RingShape, place: _Place, details: _Details) -> None:
        """Append the spans of a step's phases, each a child of the smallest phase around it, else of the step."""
        contexts = [SpanContext(place.trace_id, identity.phase_span_id(ring.key, phase.sequence), False, _SAMPLED) for phase in step.phases]
        parents = _enclosing(step.phases)
        for index, phase in enumerate(step.phases):
            shape = ring.phase(phase.name)
            attributes, size = shape.attributes, shape.encoded_bytes
            is_carrier = index == details.carrier
            if phase.truncated or phase.error or is_carrier:
                attributes = self._phase_attributes(phase, ring, details.attributes if is_carrier else {})
                size = _size(shape.name, attributes)
            span = ReplayedSpan(
                name=shape.name,
                context=contexts[index],
                parent=contexts[parents[index]] if parents[index] >= 0 else place.span,
                resource=ring.resource,
                attributes=attributes,
                events=details.events.get(index, ()),
                links=details.links if is_carrier else (),
                kind=shape.kind,
                status=_ERROR if phase.error else _UNSET,
                start_time=phase.start_ns + self._wall_offset_ns,
                end_time=phase.end_ns + self._wall_offset_ns,
                instrumentation_scope=self._scope,
            )
            span.encoded_bytes = size + details.size_at(index) if details.events else size
            spans.append(span)

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
        """Return the items and attributes of a step: items on the span of their get, the rest on the step's span.

        A step that works on another step's item has no span of its own and leaves the rest to its earliest phase.
        """
        carrier = -1
        if step.resumed is not None and step.phases:
            carrier = min(range(len(step.phases)), key=lambda index: step.phases[index].start_ns)
        parent_step = step.resumed[5] if step.resumed is not None else 0
        gets = sorted(
            (phase.start_ns, index) for index, phase in enumerate(step.phases) if ring.phase(phase.name).kind is SpanKind.CONSUMER
        )
        starts_ns = [start_ns for start_ns, _ in gets]
        links: list[Link] = []
        events: dict[int, list[Event]] = {}
        for record in step.consumed:
            get_ns, root, producer = record[1], record[4], record[5]
            attributes = item_attributes(record, ring.names, self._wall_offset_ns)
            before = bisect_right(starts_ns, get_ns) - 1
            index = gets[before][1] if before >= 0 and get_ns <= step.phases[gets[before][1]].end_ns else carrier
            events.setdefault(index, []).append(Event(semconv.QUEUE_ITEM_EVENT, attributes, get_ns + self._wall_offset_ns))
            if producer and producer != parent_step:  # a phase needs no link to its parent
                links.append(Link(_remote(identity.trace_id(root), producer), attributes))
        return _Details(carrier, user_attributes(step.attributes, ring.names), links, events)

    def _ring(self, ring_id: int) -> _RingShape:
        ring = self._rings.get(ring_id)
        if ring is None:
            names = self._catalog.get(ring_id)
            if names is None or not names.entries:  # the recording lost them, so far
                return _RingShape(RingNames(ring_id), WorkerInfo(OTHER_NAME, 0, None, 0, 0), self._resource(OTHER_NAME, 0))
            worker = names.worker
            ring = self._rings[ring_id] = _RingShape(names, worker, self._resource(worker.role, worker.pid))
        return ring

    def _resource(self, role: str, pid: int) -> Resource:
        resource = self._roles.get((role, pid))
        if resource is None:
            resource = self._roles[role, pid] = self._resources.for_role(role, pid)
        return resource


def batches(
    spans: Iterable[ReplayedSpan], count_max: int = SPANS_PER_BATCH, bytes_max: int = BYTES_PER_BATCH
) -> Iterator[list[ReplayedSpan]]:
    """Cut spans into requests of at most `count_max` spans and about `bytes_max` bytes; a larger span goes alone."""
    batch: list[ReplayedSpan] = []
    size = 0
    for span in spans:
        if batch and (len(batch) >= count_max or size + span.encoded_bytes > bytes_max):
            yield batch
            batch, size = [], 0
        batch.append(span)
        size += span.encoded_bytes
    if batch:
        yield batch


def _place(step: CompletedStep, ring: _RingShape) -> _Place:
    """Return where a step's spans belong: its first consumed item, or else its first put, fixed its root."""
    if step.step == step.ring:
        return _Place(identity.lone_trace_id(ring.key, step.phases[0].sequence), None, None)
    if step.resumed is not None:
        trace_id = identity.trace_id(step.resumed[4])
        return _Place(trace_id, _remote(trace_id, step.resumed[5]), None)
    root = step.record[7] if step.record is not None else 0
    producer = 0
    for record in step.consumed:
        if record[0] & ERROR_MASK and record[4]:
            root, producer = record[4], record[5]
            break
    trace_id = identity.trace_id(root or step.step)
    span = SpanContext(trace_id, identity.step_span_id(step.step), False, _SAMPLED)
    return _Place(trace_id, span, _remote(trace_id, producer) if producer else None)


def _remote(trace_id: int, step: int) -> SpanContext:
    return SpanContext(trace_id, identity.step_span_id(step), True, _SAMPLED)


def _enclosing(phases: list[Phase]) -> list[int]:
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


def _size(name: str, attributes: Attributes) -> int:
    return _SPAN_BYTES + len(name) + encoded_bytes(attributes)
