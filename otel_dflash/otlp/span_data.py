"""Spans to the SDK's ReadableSpans, which any SpanExporter accepts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Final

from opentelemetry import trace
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Status, StatusCode, TraceFlags

from otel_dflash import semconv
from otel_dflash.otlp.resources import Resources
from otel_dflash.recording.run_info import RunInfo
from otel_dflash.spans import span as neutral
from otel_dflash.spans.span import Span, SpanContext, SpanKind

_KINDS: Final = {kind.value: trace.SpanKind[kind.name] for kind in SpanKind}
_STATUS: Final = {False: Status(StatusCode.UNSET), True: Status(StatusCode.ERROR)}
_FLAGS: Final = {False: TraceFlags(TraceFlags.DEFAULT), True: TraceFlags(TraceFlags.SAMPLED)}


class SpanData:
    """Converts the spans of one run to ReadableSpans. One thread."""

    def __init__(self, info: RunInfo) -> None:
        """Read the environment, for resources."""
        self._resource = cache(Resources(info).for_role)
        self._scope = InstrumentationScope(semconv.SCOPE_NAME, info.version)

    def readable_spans(self, spans: Iterable[Span]) -> list[ReadableSpan]:
        """Return the spans as ReadableSpans, in the same order."""
        return [self._readable_span(span) for span in spans]

    def _readable_span(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.context),
            parent=span.parent and _context(span.parent),
            resource=self._resource(*span.resource),
            attributes=span.attributes,
            events=tuple(map(_event, span.events)),
            links=tuple(map(_link, span.links)),
            kind=_KINDS[span.kind],
            status=_STATUS[span.is_error],
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


@lru_cache(maxsize=256)  # the spans of a step share their parent
def _context(context: SpanContext) -> trace.SpanContext:
    trace_id, span_id, is_remote, is_sampled = context
    return trace.SpanContext(trace_id, span_id, is_remote, _FLAGS[is_sampled])


def _event(event: neutral.Event) -> Event:
    return Event(event.name, event.attributes, event.time_ns)


def _link(link: neutral.Link) -> Link:
    return Link(_context(link.context), link.attributes)
