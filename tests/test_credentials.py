"""Headers and certificates from files: what is refused before anything is sent, and what becomes of a file that changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.trace.export import SpanExportResult

from otel_dflash.agent.exporters import metric_exporters, span_exporters, validate_environment
from otel_dflash.config import HEADERS_FILE_VARIABLE, ConfigError
from tests.certificates import Certificates
from tests.otlp_receiver import OtlpReceiver
from tests.test_exporters import PROTOCOLS, Environ, a_counter, a_span, environ

__all__ = ["environ"]  # a fixture

CA = "OTEL_EXPORTER_OTLP_CERTIFICATE"
CERTIFICATE = "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"
KEY = "OTEL_EXPORTER_OTLP_CLIENT_KEY"
SECURE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4317"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Names -> paths, as the variables below mean them."""
    directory = tmp_path_factory.mktemp("certificates")
    made = Certificates(directory)
    certificate, key = made.issue("client")
    (directory / "both.pem").write_bytes(Path(certificate).read_bytes() + Path(key).read_bytes())
    (directory / "empty.pem").touch()
    os.mkfifo(directory / "fifo")  # as a shell makes for <(...): to read it waits for a writer, and gives nothing the second time
    (directory / "half.pem").write_bytes(Path(certificate).read_bytes()[:200])
    return {
        **{path.name: str(path) for path in directory.iterdir()},
        "other.key": made.issue("other", by="other-ca")[1],
        "encrypted.key": made.encrypted("client"),
        "directory": str(directory),
        "endless": "/dev/zero",
        "missing": str(directory / "missing"),
    }


REFUSED = [
    ({CA: "missing"}, rf"{CA} names a file that cannot be read, got '.*missing' \(No such file or directory\); check path and mode"),
    ({CA: "directory"}, rf"{CA} names a file that cannot be read, got '.*' \(Is a directory\); check"),
    ({CA: "fifo"}, rf"{CA} must name a file that can be read again and again, got '.*fifo'; write it to a regular file"),
    ({CA: "endless"}, rf"{CA} must name a file that can be read again and again, got '/dev/zero'; write"),
    ({HEADERS_FILE_VARIABLE: "fifo"}, rf"{HEADERS_FILE_VARIABLE} must name a file that can be read again and again, got '.*fifo'; write"),
    ({CA: "empty.pem"}, rf"{CA} must name a PEM file, got '.*empty.pem'; convert"),
    ({CA: "half.pem"}, rf"{CA} has no certificate of an authority in '.*half.pem' \(.*\); name a PEM file"),
    ({CA: "ca.pem", CERTIFICATE: "missing", KEY: "client.key"}, rf"{CERTIFICATE} names a file that cannot be read"),
    ({CA: "ca.pem", CERTIFICATE: "client.pem", KEY: "missing"}, rf"{KEY} names a file that cannot be read"),
    (
        {CA: "ca.pem", CERTIFICATE: "client.pem", KEY: "other.key"},
        r"cannot be used with the key '.*other.key' \(KEY_VALUES_MISMATCH\); .* belong",
    ),
    ({CA: "ca.pem", CERTIFICATE: "client.pem", KEY: "encrypted.key"}, r"cannot be used with the key '.*encrypted.key' .* not encrypted"),
    ({CA: "ca.pem", KEY: "client.key"}, rf"{KEY} is set without a client certificate; set {CERTIFICATE} too"),
    # the gRPC exporter would leave these out without a word
    ({CERTIFICATE: "client.pem", KEY: "client.key"}, rf"{CERTIFICATE} has no effect over gRPC without {CA}, got none; set {CA} too"),
    ({CA: "ca.pem", CERTIFICATE: "client.pem"}, rf"{CERTIFICATE} has no effect over gRPC without {KEY}, got none; set {KEY} too"),
    (
        {"OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE": "ca.pem", CERTIFICATE: "client.pem", KEY: "client.key"},
        rf"{CERTIFICATE} has no effect over gRPC without {CA}, got OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE; set",
    ),
    ({"OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE": "missing"}, "OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE names a file"),
]


@pytest.mark.parametrize(("named", "message"), REFUSED)
def test_certificates_that_cannot_work_are_refused_before_training(
    environ: Environ, files: dict[str, str], named: dict[str, str], message: str
) -> None:
    environ(**SECURE, **{variable: files[name] for variable, name in named.items()})
    with pytest.raises(ConfigError, match=message) as raised:
        validate_environment()
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=message):  # the agent of a trainer that was started without `run`
        span_exporters() and metric_exporters()


@pytest.mark.parametrize(
    ("protocol", "named"),
    [
        ("grpc", {}),
        ("grpc", {CA: "ca.pem"}),
        ("grpc", {CA: "ca.pem", CERTIFICATE: "client.pem", KEY: "client.key"}),
        ("http/protobuf", {CA: "directory"}),
        ("http/protobuf", {CERTIFICATE: "client.pem", KEY: "client.key"}),
        ("http/protobuf", {CERTIFICATE: "both.pem"}),
        ("http/protobuf", {"OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE": "ca.pem", CERTIFICATE: "client.pem", KEY: "client.key"}),
    ],
)
def test_certificates_that_the_exporter_can_use_are_accepted(
    environ: Environ, files: dict[str, str], protocol: str, named: dict[str, str]
) -> None:
    environ(**SECURE, OTEL_EXPORTER_OTLP_PROTOCOL=protocol, **{variable: files[name] for variable, name in named.items()})
    validate_environment()


def test_an_http_url_with_insecure_false_is_refused_because_the_sdk_would_try_tls(environ: Environ) -> None:
    environ(OTEL_EXPORTER_OTLP_ENDPOINT="http://a:4317", OTEL_EXPORTER_OTLP_INSECURE="false")
    with pytest.raises(ConfigError, match="_INSECURE=false asks for TLS, and OTEL_EXPORTER_OTLP_ENDPOINT begins with http://; begin it"):
        validate_environment()
    environ(OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf")  # which does not read it
    validate_environment()


def test_a_certificate_beside_a_plain_endpoint_is_said_not_refused(
    environ: Environ, receiver: OtlpReceiver, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    environ(**receiver.environment("grpc"), OTEL_EXPORTER_OTLP_CERTIFICATE=files["missing"])
    validate_environment()
    (spans,) = span_exporters().values()
    assert spans.export([a_span()]) is SpanExportResult.SUCCESS
    said = f"otel-dflash: {CA} has no effect on traces: their endpoint does not begin with https://, so nothing is encrypted\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"])
def test_the_file_adds_to_the_variable_that_the_exporter_reads_and_only_while_it_is_made(
    environ: Environ, receiver: OtlpReceiver, tmp_path: Path, variable: str
) -> None:
    path = tmp_path / "headers"
    path.write_text("authorization=Bearer c0ffee\n")
    environ(**receiver.environment("grpc"), OTEL_DFLASH_OTLP_HEADERS_FILE=str(path), **{variable: "x-env=1"})
    before = dict(os.environ)
    (spans,) = span_exporters().values()
    assert dict(os.environ) == before
    spans.export([a_span()])
    (headers,) = receiver.requests
    assert (headers["authorization"], headers["x-env"]) == ("Bearer c0ffee", "1")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_token_that_changes_is_taken_up_and_one_that_cannot_be_read_is_not(
    environ: Environ, receiver: OtlpReceiver, tmp_path: Path, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "headers"
    path.write_text("authorization=Bearer one\n")
    environ(**receiver.environment(protocol), OTEL_DFLASH_OTLP_HEADERS_FILE=str(path))
    (spans,) = span_exporters().values()
    (metrics,) = metric_exporters().values()

    def sent() -> list[str]:
        receiver.clear()
        assert spans.export([a_span()]) is SpanExportResult.SUCCESS
        assert metrics.export(a_counter()) is MetricExportResult.SUCCESS
        return [request["authorization"] for request in receiver.requests]

    assert sent() == ["Bearer one", "Bearer one"]
    path.write_text("c0ffee")  # half written
    assert sent() == ["Bearer one", "Bearer one"]
    said = capsys.readouterr().err
    assert (
        said.splitlines()
        == [
            "otel-dflash: credentials have changed and are not taken up: OTEL_DFLASH_OTLP_HEADERS_FILE: "
            f"line 1 of {str(path)!r} is not key=value; write one header a line"
        ]
        * 2
    )
    new = tmp_path / "new"
    new.write_text("authorization=Bearer two\n")
    new.rename(path)
    assert sent() == ["Bearer two", "Bearer two"]
    assert sent() == ["Bearer two", "Bearer two"]
    assert capsys.readouterr().err.splitlines() == ["otel-dflash: credentials have changed and were read again"] * 2
    path.unlink()
    assert sent() == ["Bearer two", "Bearer two"]
