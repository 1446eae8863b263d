"""A neutral span with everything that one can have, as the SDK's own encoder writes it."""

from __future__ import annotations

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.trace import TraceFlags

from otel_dflash.otlp.span_data import SpanData
from otel_dflash.recording.run_info import RunInfo
from otel_dflash.spans.span import Event, Link, Span, SpanContext, SpanKind, SpanResource

INFO = RunInfo("run-1", "node-1", 0, 0, 0, "0.1.0")
FULL = Span(
    name="drafter.queue_get",
    kind=SpanKind.CONSUMER,
    context=SpanContext(1, 2),
    parent=SpanContext(1, 3, is_remote=True),
    start_ns=10,
    end_ns=20,
    attributes={"text": "a", "count": 1, "ratio": 0.5, "flag": True},
    links=[
        Link(SpanContext(4, 5, is_remote=True, is_sampled=False), {"dflash.trace.sampled": False}),
        Link(SpanContext(6, 7), {}),
    ],
    events=[Event("dflash.queue.item", 15, {"dflash.queue.name": "q"})],
    is_error=True,
    resource=SpanResource("drafter", 42),
    otlp_bytes=300,
)
PLAIN = FULL._replace(kind=SpanKind.INTERNAL, parent=None, attributes={}, links=(), events=(), is_error=False)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


def test_every_field_of_a_span_reaches_the_wire() -> None:
    (resource,) = encode_spans(SpanData(INFO).readable_spans([FULL, PLAIN])).resource_spans
    identity = {pair.key: pair.value for pair in resource.resource.attributes}
    assert (identity["service.name"].string_value, identity["process.pid"].int_value) == (
        "dflash-drafter",
        42,
    )
    (scope,) = resource.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("otel_dflash", "0.1.0")
    local, remote = 0x100, 0x300  # SpanFlags: whether it is known, and whether it is remote
    ids = {"traceId": "AAAAAAAAAAAAAAAAAAAAAQ==", "spanId": "AAAAAAAAAAI="}
    times = {"startTimeUnixNano": "10", "endTimeUnixNano": "20"}
    assert [MessageToDict(span) for span in scope.spans] == [
        {
            **ids,
            **times,
            "name": "drafter.queue_get",
            "kind": "SPAN_KIND_CONSUMER",
            "parentSpanId": "AAAAAAAAAAM=",
            "flags": remote,
            "attributes": [
                {"key": "text", "value": {"stringValue": "a"}},
                {"key": "count", "value": {"intValue": "1"}},
                {"key": "ratio", "value": {"doubleValue": 0.5}},
                {"key": "flag", "value": {"boolValue": True}},
            ],
            "links": [
                {
                    "traceId": "AAAAAAAAAAAAAAAAAAAABA==",
                    "spanId": "AAAAAAAAAAU=",
                    "flags": remote,
                    "attributes": [{"key": "dflash.trace.sampled", "value": {"boolValue": False}}],
                },
                {"traceId": "AAAAAAAAAAAAAAAAAAAABg==", "spanId": "AAAAAAAAAAc=", "flags": local},
            ],
            "events": [
                {
                    "name": "dflash.queue.item",
                    "timeUnixNano": "15",
                    "attributes": [{"key": "dflash.queue.name", "value": {"stringValue": "q"}}],
                }
            ],
            "status": {"code": "STATUS_CODE_ERROR"},
        },
        {
            **ids,
            **times,
            "name": "drafter.queue_get",
            "kind": "SPAN_KIND_INTERNAL",
            "flags": local,
            "status": {},
        },
    ]


def test_trace_flags_and_resources_are_there_for_exporters_that_read_them() -> None:
    first, second = SpanData(INFO).readable_spans([FULL, PLAIN])
    assert [link.context.trace_flags for link in first.links] == [TraceFlags.DEFAULT, TraceFlags.SAMPLED]
    assert first.context is not None
    assert first.context.trace_flags == TraceFlags.SAMPLED
    assert first.resource is second.resource
