"""Exporters by the standard environment, to a real receiver over gRPC and HTTP, and the SDK's log as single
lines."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

from otel_dflash.config import ConfigError
from otel_dflash.otlp.exporters import (
    metric_exporters,
    prepare_environment,
    span_exporters,
    validate_environment,
)
from otel_dflash.otlp.failures import describe, reason_of
from otel_dflash.otlp.sdk_log import SdkLog
from tests.otlp_receiver import OtlpReceiver, SilentServer

PROTOCOLS = ["grpc", "http/protobuf"]
Environ = Callable[..., None]


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> Environ:
    """Start from an environment without OTEL_*; return what sets a part of it."""
    import os

    for name in list(os.environ):
        if name.startswith("OTEL_") or name.endswith("_CA_BUNDLE") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)

    def change(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return change


def a_span(number: int = 1) -> ReadableSpan:
    resource = Resource({"service.name": "dflash-target"})
    scope = InstrumentationScope("otel_dflash")
    return ReadableSpan(
        "target.step",
        SpanContext(7, number, False),
        resource=resource,
        start_time=1,
        end_time=2,
        instrumentation_scope=scope,
    )


def a_counter() -> MetricsData:
    point = NumberDataPoint({"dflash.worker.role": "target"}, 10, 20, 42)
    metric = Metric(
        "dflash.worker.batches", "", "{batch}", Sum([point], AggregationTemporality.CUMULATIVE, True)
    )
    scope = ScopeMetrics(InstrumentationScope("otel_dflash"), [metric], "")
    return MetricsData([ResourceMetrics(Resource({"service.name": "dflash"}), [scope], "")])


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_spans_and_metrics_arrive(
    environ: Environ, receiver: OtlpReceiver, protocol: str, compression: str
) -> None:
    environ(**receiver.environment(protocol), OTEL_EXPORTER_OTLP_HEADERS="x-token=abc")
    if compression == "gzip" or protocol != "grpc":  # the gRPC exporter knows no "none"
        environ(OTEL_EXPORTER_OTLP_COMPRESSION=compression)
    (spans,) = span_exporters().values()
    (metrics,) = metric_exporters().values()
    assert spans.export([a_span(1), a_span(2)]) is SpanExportResult.SUCCESS
    assert metrics.export(a_counter()) is MetricExportResult.SUCCESS
    spans.shutdown()
    metrics.shutdown()
    assert receiver.span_ids() == {"0000000000000001", "0000000000000002"}
    assert receiver.tree() == [{"name": "target.step", "service": "dflash-target"}] * 2
    (point,) = receiver.points("dflash.worker.batches", {"dflash.worker.role": "target"})
    assert (point.kind, point.cumulative, point.monotonic, point.value, point.start_ns, point.time_ns) == (
        "sum",
        True,
        True,
        42,
        10,
        20,
    )
    assert [request["x-token"] for request in receiver.requests] == ["abc", "abc"]
    assert {request["protocol"] for request in receiver.requests} == {protocol}


def test_nothing_is_sent_without_an_endpoint(environ: Environ) -> None:
    assert (span_exporters(), metric_exporters()) == ({}, {})
    environ(OTEL_TRACES_EXPORTER="none", OTEL_EXPORTER_OTLP_ENDPOINT="http://localhost:4317")
    assert span_exporters() == {}
    assert list(metric_exporters()) == ["otlp"]


def test_a_signals_own_endpoint_and_protocol_win(environ: Environ, receiver: OtlpReceiver) -> None:
    endpoint = f"{receiver.http_endpoint}/v1/traces"
    environ(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=endpoint, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf")
    assert metric_exporters() == {}
    (spans,) = span_exporters().values()
    assert spans.export([a_span()]) is SpanExportResult.SUCCESS
    assert receiver.requests[0]["protocol"] == "http/protobuf"


def test_several_exporters_and_plugins_are_made_by_name(environ: Environ) -> None:
    environ(OTEL_TRACES_EXPORTER="console, otlp_proto_http", OTEL_METRICS_EXPORTER="console")
    made = span_exporters()
    assert list(made) == ["console", "otlp_proto_http"]
    assert isinstance(made["console"], ConsoleSpanExporter)
    assert isinstance(made["otlp_proto_http"], SpanExporter)
    assert isinstance(metric_exporters()["console"], MetricExporter)


WRONG = [
    (
        {"OTEL_TRACES_EXPORTER": "zipkin9"},
        r"OTEL_TRACES_EXPORTER .* got 'zipkin9'; use one of console, none, otlp",
    ),
    ({"OTEL_METRICS_EXPORTER": "none,otlp"}, r"OTEL_METRICS_EXPORTER .* got 'none,otlp'; leave out one"),
    (
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
        r"_PROTOCOL must be .* got 'http/json'; unset",
    ),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://host:port"}, r"gRPC can use, got 'http://host:port'; try"),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http:/localhost:4317"}, r"got 'http:/localhost:4317'; try"),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "grpc://localhost:4317"}, r"got 'grpc://localhost:4317'; try http://"),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://local host"}, r"got 'http://local host'; try"),
    (
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:secret@:1/"},
        r"_ENDPOINT holds a user or a password, .*; leave out all up to the @",
    ),
    (
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
        r"HTTP can use, got 'localhost",
    ),
    (
        {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"},
        r"must be cumulative, got 'delta': .*; unset it",
    ),
    (
        {"OTEL_DFLASH_OTLP_HEADERS_FILE": "/no/such/file"},
        r"got '/no/such/file' \(No such file or directory\); check",
    ),
]


@pytest.mark.parametrize(("variables", "message"), WRONG)
def test_what_cannot_work_is_refused_in_one_line_before_training(
    environ: Environ, variables: dict[str, str], message: str
) -> None:
    environ(**variables)
    with pytest.raises(ConfigError, match=message) as raised:
        validate_environment()
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://localhost:4317",
        "https://a.example",
        "localhost:4317",
        "[::1]:4317",
        "unix:/run/otel",
        "dns:///a:1",
    ],
)
def test_every_way_to_name_a_grpc_target_is_accepted(environ: Environ, endpoint: str) -> None:
    environ(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    validate_environment()


def test_a_delta_preference_is_fine_when_no_metrics_are_sent(environ: Environ) -> None:
    environ(OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE="delta", OTEL_TRACES_EXPORTER="otlp")
    validate_environment()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_headers_come_from_their_file(
    environ: Environ, receiver: OtlpReceiver, tmp_path: Path, protocol: str
) -> None:
    path = tmp_path / "headers"
    path.write_text("# who may write\nauthorization=Basic dTpwdw==\n\nx-tenant = llm , x-both=file\n")
    environ(
        **receiver.environment(protocol),
        OTEL_DFLASH_OTLP_HEADERS_FILE=str(path),
        OTEL_EXPORTER_OTLP_HEADERS="x-both=env,x-env=1",
    )
    (spans,) = span_exporters().values()
    assert spans.export([a_span()]) is SpanExportResult.SUCCESS
    (headers,) = receiver.requests
    got = {name: headers[name] for name in ("authorization", "x-tenant", "x-both", "x-env")}
    assert got == {"authorization": "Basic dTpwdw==", "x-tenant": "llm", "x-both": "file", "x-env": "1"}


@pytest.mark.parametrize(
    "text", ["x-token=ok\nc0ffee-secret\n", "x=1\ntwo words=c0ffee\n", "a=b\nc=c0ffee\x07\n"]
)
def test_a_bad_headers_file_is_refused_without_showing_its_text(
    environ: Environ, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "headers"
    path.write_text(text)
    environ(OTEL_DFLASH_OTLP_HEADERS_FILE=str(path))
    with pytest.raises(ConfigError, match=r"line 2 of .* is not key=value") as raised:
        validate_environment()
    assert "c0ffee" not in str(raised.value)


def test_other_ca_bundles_give_way_to_the_otlp_certificate() -> None:
    bundles = {"REQUESTS_CA_BUNDLE": "/a", "CURL_CA_BUNDLE": "/b"}
    environ = {**bundles, "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE": "/c"}
    prepare_environment(environ)
    assert environ == {"OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE": "/c", "GRPC_VERBOSITY": "NONE"}
    environ = {**bundles, "GRPC_VERBOSITY": "DEBUG"}
    prepare_environment(environ)
    assert environ == {**bundles, "GRPC_VERBOSITY": "DEBUG"}


def test_an_empty_variable_is_an_unset_one() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_INSECURE": "",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": " ",
        "OTEL_EXPORTER_OTLP_ENDPOINT": " http://a:1\n",
    }
    prepare_environment(environ)
    assert environ == {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "GRPC_VERBOSITY": "NONE"}


# -- the SDK's log -----------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_receiver_that_is_down_is_said_once_with_the_reason(
    environ: Environ, receiver: OtlpReceiver, protocol: str
) -> None:
    # one retry: its backoff is up to 1.2 s
    environ(**receiver.environment(protocol), OTEL_EXPORTER_OTLP_TIMEOUT="1.6")
    receiver.down = True
    (spans,) = span_exporters().values()
    stream = io.StringIO()
    with SdkLog(stream) as noise:
        for _ in range(3):
            assert spans.export([a_span()]) is SpanExportResult.FAILURE
        reason = "UNAVAILABLE: the receiver is down" if protocol == "grpc" else "Service Unavailable"
        assert noise.reasons == {threading.current_thread().name: reason}
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1, lines
    assert all(line.startswith("otel-dflash: ") for line in lines)
    spans.shutdown()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nobody_listening_and_a_black_hole_have_a_short_reason(environ: Environ, protocol: str) -> None:
    reasons = []
    with SilentServer() as silent, SdkLog(io.StringIO()) as noise:
        with OtlpReceiver() as gone:
            endpoints = [gone.environment(protocol)["OTEL_EXPORTER_OTLP_ENDPOINT"], silent.endpoint]
        for endpoint in endpoints:
            environ(
                OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
                OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
                OTEL_EXPORTER_OTLP_TIMEOUT="1.6",
            )
            (spans,) = span_exporters().values()
            noise.reasons.clear()
            assert spans.export([a_span()]) is SpanExportResult.FAILURE
            reasons += noise.reasons.values()
            spans.shutdown()
        assert silent.wait_for_connection()
    assert "Connection refused" in reasons[0]
    assert reasons[1] in ("DEADLINE_EXCEEDED: Deadline Exceeded", "no success before the timeout")
    assert all(len(reason) < 140 and "object at 0x" not in reason for reason in reasons), reasons


def test_a_kind_of_failure_is_said_at_once_and_again_with_its_count_after_30_s() -> None:
    now_s = 100.0
    stream = io.StringIO()
    logger = logging.getLogger("opentelemetry.exporter.x")
    with SdkLog(stream, clock=lambda: now_s):
        for attempt in range(5):
            logger.error(
                "Failed to export %s to %s, error code: %s, error details: %s",
                "traces",
                "h",
                "UNAVAILABLE",
                f"port {attempt}",
            )
        logger.error(
            "Failed to export %s to %s, error code: %s, error details: %s",
            "traces",
            "h",
            "INTERNAL",
            "no luck",
        )
        now_s = 131.0
        logger.error(
            "Failed to export %s to %s, error code: %s, error details: %s",
            "traces",
            "h",
            "UNAVAILABLE",
            "port 9",
        )
    assert stream.getvalue().splitlines() == [
        "otel-dflash: Failed to export traces to h: UNAVAILABLE: port 0",
        "otel-dflash: Failed to export traces to h: INTERNAL: no luck",
        "otel-dflash: Failed to export traces to h: UNAVAILABLE: port 9 (6 times)",
    ]


def test_an_export_that_ends_without_a_reason_is_said_unless_its_retries_had_one() -> None:
    stream = io.StringIO()
    logger = logging.getLogger("opentelemetry.exporter.x")
    with SdkLog(stream) as noise:
        logger.warning(
            "Transient error %s encountered while exporting %s batch, retrying in %.2fs.",
            "Bad Gateway",
            "spans",
            1,
        )
        logger.error("Failed to export %s batch due to timeout, max retries or shutdown.", "spans")
        assert noise.reasons == {threading.current_thread().name: "Bad Gateway"}
        logger.error("Failed to export %s batch due to timeout, max retries or shutdown.", "spans")
        assert noise.reasons == {threading.current_thread().name: "no success before the timeout"}
    assert stream.getvalue().splitlines() == [
        "otel-dflash: Export is retried: Bad Gateway",
        "otel-dflash: Failed to export spans batch due to timeout, max retries or shutdown.",
    ]


def test_no_traceback_no_credential_and_nothing_below_warning_is_said(
    capsys: pytest.CaptureFixture[str], environ: Environ
) -> None:
    stream = io.StringIO()
    logger = logging.getLogger("opentelemetry.exporter.x")
    environ(OTEL_EXPORTER_OTLP_ENDPOINT="http://localhost:1", OTEL_EXPORTER_OTLP_HEADERS="token: c0ffee")
    with SdkLog(stream):
        span_exporters()  # warns about the header, and shows it
        logger.info("nothing")
        try:
            raise RuntimeError("two\nlines")
        except RuntimeError:
            logger.exception("Failed at http://me:c0ffee@host")
    said = stream.getvalue()
    assert len(said.splitlines()) == 2
    assert "Header format invalid" in said
    assert "Failed at http://***@host" in said
    assert "c0ffee" not in said
    assert "Traceback" not in said
    assert capsys.readouterr().err == ""


def test_after_the_filter_the_sdks_log_is_as_before() -> None:
    logger = logging.getLogger("opentelemetry")
    before = (logger.propagate, logger.level, list(logger.handlers))
    with SdkLog(io.StringIO()):
        assert not logger.propagate
    assert (logger.propagate, logger.level, list(logger.handlers)) == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Failed to export spans batch code: 409, reason: Conflict", "409: Conflict"),
        (
            "Failed to export spans batch code: 401, reason: Unauthorized",
            "401: Unauthorized (the collector rejects the token; put authorization=Bearer TOKEN "
            "into the file of "
            "OTEL_DFLASH_OTLP_HEADERS_FILE)",
        ),
        (
            "Failed to export traces to h:1, error code: StatusCode.UNAVAILABLE, error details: failed "
            "to connect to all addresses; "
            "last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: connect: "
            "Connection refused (111)",
            "ipv4:127.0.0.1:1: Failed to connect to remote host: connect: Connection refused (111)",
        ),
        ("Failed to export spans batch due to timeout, max retries or shutdown.", None),
    ],
)
def test_the_reason_is_taken_out_of_what_the_sdk_says(text: str, reason: Any) -> None:
    assert reason_of(text) == reason


def test_a_header_that_http_refuses_is_not_shown(environ: Environ, receiver: OtlpReceiver) -> None:
    environ(**receiver.environment("http/protobuf"), OTEL_EXPORTER_OTLP_HEADERS="authorization=a%0Ac0ffee")
    (spans,) = span_exporters().values()
    stream = io.StringIO()
    with SdkLog(stream) as noise:
        assert spans.export([a_span()]) is SpanExportResult.FAILURE
    assert "header value: ***" in stream.getvalue()
    assert "c0ffee" not in f"{stream.getvalue()}{noise.reasons}"


def test_an_error_is_told_in_one_line_without_credentials() -> None:
    assert describe(OSError("no route to http://u:p@h\nx")) == "OSError: no route to http://***@h x"
    assert describe(OSError("no route to http://u:p@c0f/fee@h")) == "OSError: no route to http://***@h"
    assert describe(ValueError("Invalid header value: b'c0ffee'")) == "ValueError: Invalid header value: ***"
    assert describe(KeyError()) == "KeyError"
