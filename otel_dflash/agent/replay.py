"""Completed steps -> the SDK's ReadableSpans, with their recorded times and with ids that any process computes the same.

The same frames give the same spans to the byte, whoever replays them and whenever: nothing is drawn, no clock is read, and
attributes keep one order. Monotonic ns become wall ns here and nowhere else. A trace that is full goes on in linked ones (traces.py).
"""

from __future__ import annotations

import base64
import json
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from otel_dflash import semconv
from otel_dflash.agent import identity
from otel_dflash.agent.attributes import Attributes, encoded_bytes, item_attributes, step_attributes, user_attributes
from otel_dflash.agent.catalog import Catalog, RingNames, WorkerInfo
from otel_dflash.agent.frames import Frame
from otel_dflash.agent.lookback import Lookback
from otel_dflash.agent.places import Place, Places, enclosing
from otel_dflash.agent.recording import RunInfo
from otel_dflash.agent.resources import Resources
from otel_dflash.agent.sampling import Sampler, Sampling
from otel_dflash.agent.steps import CompletedStep, Phase, StepAssembler
from otel_dflash.records import ERROR_MASK, OTHER_NAME

SPANS_PER_BATCH: Final = 512
BYTES_PER_BATCH: Final = 1 << 20  # a gRPC receiver takes 4 MiB unless told otherwise

_STATE_VERSION: Final = 1
_UNSET: Final = Status(StatusCode.UNSET)
_ERROR: Final = Status(StatusCode.ERROR)
_QUEUE_GET: Final = "queue_get"
_KINDS: Final = {"queue_put": SpanKind.PRODUCER, _QUEUE_GET: SpanKind.CONSUMER}
_SPAN_BYTES: Final = 120  # upper estimate of a span's ids, times and flags in OTLP
_ITEM_BYTES: Final = 64  # and of those of a link or an event
_LINK_BYTES: Final = 2 * _ITEM_BYTES  # and of a link to another part of a step


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

    def __init__(self, info: RunInfo, catalog: Catalog, sampling: Sampling | None = None, lookback: Lookback | None = None) -> None:
        """Replay the recording of `info`; `catalog` holds the names of every frame added, `lookback` reads the frames before."""
        self._info = info
        self._catalog = catalog
        self._wall_offset_ns = info.wall_ns(0)
        self._assembler = StepAssembler()
        self._places = Places(self._assembler.is_open)
        self.sampler: Sampler | None = None
        """What leaves traces out, None when all are sent."""
        if sampling is not None and lookback is not None and not sampling.sends_all:
            self.sampler = Sampler(sampling, lookback, self._assembler.is_open)
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
        completed = self._assembler.add(frame)
        self._places.to_come = {step.step for step in completed}
        for step in completed:
            if self.sampler is None:
                self._add_step(spans, step)
                continue
            admitted = self.sampler.admit(step, self._ring(step.ring).role)
            self._places.to_come.update(sent.step for sent in admitted)
            for sent in admitted:
                self._add_step(spans, sent)
        return spans

    def state(self) -> bytes:
        """Return open steps and what the fate of later ones hangs on: with the position after the last added frame, all a restart needs."""
        state = {
            "version": _STATE_VERSION,
            "held": base64.b64encode(self._assembler.held()).decode(),
            "traces": self._places.traces.state(),
            "sampler": None if self.sampler is None else self.sampler.state(),
        }
        return json.dumps(state).encode()

    def restore(self, data: bytes) -> None:
        """Take up what `state` returned.

        Raises:
            ValueError: Not what `state` returns.
        """
        try:
            state: Any = json.loads(data)
            if state["version"] != _STATE_VERSION:
                raise ValueError(f"version {state['version']}, not {_STATE_VERSION}")
            self._assembler.restore(base64.b64decode(state["held"], validate=True))
            self._places.traces.restore(state["traces"])
            if self.sampler is not None and state["sampler"] is not None:
                self.sampler.restore(state["sampler"])
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error) as error:
            raise ValueError(f"the state cannot be read: {error}") from None

    def _add_step(self, spans: list[ReplayedSpan], step: CompletedStep) -> None:
        ring = self._ring(step.ring)
        place = self._places.of(step, ring.key)
        details = _NO_DETAILS
        # A part of a step carries no items and attributes: the step's own span comes with all of them.
        if step.whole and (step.consumed or step.attributes):
            details = self._details(step, ring)
        if step.has_span:
            if place.continued:
                details = details._replace(links=details.links + place.continued)
            spans.append(self._step_span(step, ring, place, details))
        self._add_phases(spans, step, ring, place, details)

    def _step_span(self, step: CompletedStep, ring: _RingShape, place: Place, details: _Details) -> ReplayedSpan:
        attributes = ring.attributes.copy()
        if step.record is not None:
            attributes.update(step_attributes(step.record, ring.names))
        if step.consumed:
            attributes[semconv.BATCH_ITEM_COUNT] = len(step.consumed)
        if step.truncated:
            attributes[semconv.SPAN_TRUNCATED] = True
        if place.continued:
            attributes[semconv.TRACE_CONTINUED] = len(place.continued)
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

    def _add_phases(self, spans: list[ReplayedSpan], step: CompletedStep, ring: _RingShape, place: Place, details: _Details) -> None:
        """Append the spans of a step's phases, each a child of the smallest phase around it, else of the step."""
        contexts = place.phases
        parents = enclosing(step.phases)
        for index, phase in enumerate(step.phases):
            shape = ring.phase(phase.name)
            attributes, size = shape.attributes, shape.encoded_bytes
            is_carrier = index == details.carrier
            if phase.truncated or phase.error or is_carrier:
                attributes = self._phase_attributes(phase, ring, details.attributes if is_carrier else {})
                size = _size(shape.name, attributes)
            parent = contexts[parents[index]] if parents[index] >= 0 else place.span
            links: Sequence[Link] = details.links if is_carrier else ()
            if parent is not None and parent.trace_id != contexts[index].trace_id:
                links = [*links, Link(parent, {semconv.LINK_KIND: semconv.LINK_CONTINUES})]
                size += _LINK_BYTES
                parent = None
            span = ReplayedSpan(
                name=shape.name,
                context=contexts[index],
                parent=parent,
                resource=ring.resource,
                attributes=attributes,
                events=details.events.get(index, ()),
                links=links,
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
            is_sent = self.sampler is None or not producer or self.sampler.is_sent(root)
            if not is_sent:
                attributes[semconv.TRACE_SAMPLED] = False
            before = bisect_right(starts_ns, get_ns) - 1
            index = gets[before][1] if before >= 0 and get_ns <= step.phases[gets[before][1]].end_ns else carrier
            events.setdefault(index, []).append(Event(semconv.QUEUE_ITEM_EVENT, attributes, get_ns + self._wall_offset_ns))
            if producer and producer != parent_step:  # a phase needs no link to its parent
                links.append(Link(self._places.remote(root, producer, is_sent), attributes))
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


def _size(name: str, attributes: Attributes) -> int:
    return _SPAN_BYTES + len(name) + encoded_bytes(attributes)
