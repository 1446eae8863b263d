"""Headers and certificates from files: what is refused before anything is sent, and what becomes of a file
that changes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import grpc
import pytest
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.trace.export import SpanExportResult

from otel_dflash.config import HEADERS_FILE_VARIABLE, ConfigError
from otel_dflash.otlp.exporters import (
    metric_exporters,
    prepare_environment,
    span_exporters,
    validate_environment,
)
from tests.doctor.doctoring import Doctor, HttpServer, grpc_server, server_context, server_credentials, wrong
from tests.otlp.certificates import Certificates
from tests.otlp.test_exporters import PROTOCOLS, Environ, a_counter, a_span, environ
from tests.otlp_receiver import OtlpReceiver
from tests.processes import clean_environment

__all__ = ["environ"]  # a fixture

CA = "OTEL_EXPORTER_OTLP_CERTIFICATE"
CERTIFICATE = "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"
KEY = "OTEL_EXPORTER_OTLP_CLIENT_KEY"
ROOTS = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
SECURE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4317"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Names -> paths, as the variables below mean them."""
    directory = tmp_path_factory.mktemp("certificates")
    made = Certificates(directory)
    certificate, key = made.issue("client")
    (directory / "both.pem").write_bytes(Path(certificate).read_bytes() + Path(key).read_bytes())
    (directory / "empty.pem").touch()
    # as a shell makes for <(...): to read it waits for a writer, and gives nothing the second time
    os.mkfifo(directory / "fifo")
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
    (
        {CA: "missing"},
        rf"{CA} names a file that cannot be read, got '.*missing' \(No such file or directory\); check its path and mode",
    ),
    ({CA: "directory"}, rf"{CA} names a file that cannot be read, got '.*' \(Is a directory\); check"),
    (
        {CA: "fifo"},
        rf"{CA} must name a file that can be read repeatedly, got '.*fifo'; write it to a regular file",
    ),
    ({CA: "endless"}, rf"{CA} must name a file that can be read repeatedly, got '/dev/zero'; write"),
    (
        {HEADERS_FILE_VARIABLE: "fifo"},
        rf"{HEADERS_FILE_VARIABLE} must name a file that can be read repeatedly, got '.*fifo'; write",
    ),
    ({CA: "empty.pem"}, rf"{CA} must name a PEM file, got '.*empty.pem'; convert"),
    ({CA: "half.pem"}, rf"{CA}: '.*half.pem' contains no CA certificate \(.*\); name a PEM file"),
    (
        {CA: "ca.pem", CERTIFICATE: "missing", KEY: "client.key"},
        rf"{CERTIFICATE} names a file that cannot be read",
    ),
    ({CA: "ca.pem", CERTIFICATE: "client.pem", KEY: "missing"}, rf"{KEY} names a file that cannot be read"),
    (
        {CA: "ca.pem", CERTIFICATE: "client.pem", KEY: "other.key"},
        r"cannot be used with the key '.*other.key' \(KEY_VALUES_MISMATCH\); .* matching",
    ),
    (
        {CA: "ca.pem", CERTIFICATE: "client.pem", KEY: "encrypted.key"},
        r"cannot be used with the key '.*encrypted.key' .* not encrypted",
    ),
    ({CA: "ca.pem", KEY: "client.key"}, rf"{KEY} is set without a client certificate; set {CERTIFICATE} too"),
    # the gRPC exporter would leave these out without a word
    (
        {CERTIFICATE: "client.pem", KEY: "client.key"},
        rf"{CERTIFICATE} has no effect over gRPC without {CA}, got none; set {CA} too",
    ),
    (
        {CA: "ca.pem", CERTIFICATE: "client.pem"},
        rf"{CERTIFICATE} has no effect over gRPC without {KEY}, got none; set {KEY} too",
    ),
    (
        {"OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE": "ca.pem", CERTIFICATE: "client.pem", KEY: "client.key"},
        rf"{CERTIFICATE} has no effect over gRPC without {CA}, got OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE; set",
    ),
    (
        {"OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE": "missing"},
        "OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE names a file",
    ),
    # gRPC would abort the process
    (
        {ROOTS: "missing"},
        rf"{ROOTS} names a file that cannot be read, got '.*missing' \(No such file or directory\); check its path and mode",
    ),
    ({ROOTS: "directory"}, rf"{ROOTS} names a file that cannot be read, got '.*' \(Is a directory\); check"),
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
        ("grpc", {ROOTS: "ca.pem"}),
        ("grpc", {CA: "ca.pem", ROOTS: "missing"}),  # which gRPC does not look at then
        ("http/protobuf", {ROOTS: "missing"}),
        ("grpc", {CA: "ca.pem", CERTIFICATE: "client.pem", KEY: "client.key"}),
        ("http/protobuf", {CA: "directory"}),
        ("http/protobuf", {CERTIFICATE: "client.pem", KEY: "client.key"}),
        ("http/protobuf", {CERTIFICATE: "both.pem"}),
        (
            "http/protobuf",
            {"OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE": "ca.pem", CERTIFICATE: "client.pem", KEY: "client.key"},
        ),
    ],
)
def test_certificates_that_the_exporter_can_use_are_accepted(
    environ: Environ, files: dict[str, str], protocol: str, named: dict[str, str]
) -> None:
    environ(
        **SECURE,
        OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        **{variable: files[name] for variable, name in named.items()},
    )
    validate_environment()


def test_an_http_url_with_insecure_false_is_refused_because_the_sdk_would_try_tls(environ: Environ) -> None:
    environ(OTEL_EXPORTER_OTLP_ENDPOINT="http://a:4317", OTEL_EXPORTER_OTLP_INSECURE="false")
    with pytest.raises(
        ConfigError,
        match="_INSECURE=false asks for TLS, and OTEL_EXPORTER_OTLP_ENDPOINT begins with http://; begin it",
    ):
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
    said = (
        f"otel-dflash: {CA} has no effect on traces: their endpoint does not begin with https://, so "
        "nothing is encrypted\n"
    )
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
    environ: Environ,
    receiver: OtlpReceiver,
    tmp_path: Path,
    protocol: str,
    capsys: pytest.CaptureFixture[str],
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
            "otel-dflash: the credentials have changed, but the new ones cannot be used: OTEL_DFLASH_OTLP_HEADERS_FILE: "
            f"line 1 of {str(path)!r} is not key=value; write one header per line"
        ]
        * 2
    )
    new = tmp_path / "new"
    new.write_text("authorization=Bearer two\n")
    new.rename(path)
    assert sent() == ["Bearer two", "Bearer two"]
    assert sent() == ["Bearer two", "Bearer two"]
    assert (
        capsys.readouterr().err.splitlines()
        == ["otel-dflash: the credentials have changed and were reloaded"] * 2
    )
    path.unlink()
    assert sent() == ["Bearer two", "Bearer two"]


USER = (
    "holds a user or a password, which others can read there; leave out all up to the @, and put "
    "authorization=Basic BASE64 (of "
)
USER += "user:password) into the file that OTEL_DFLASH_OTLP_HEADERS_FILE names"


@pytest.mark.parametrize("command", ["run", "replay", "doctor"])
@pytest.mark.parametrize(
    ("place", "endpoint"),
    [
        ("--endpoint", "http://me:geheim@localhost:4317"),
        ("--endpoint", "me:geheim@localhost:4317"),
        ("--endpoint", "http://me:ge/heim@localhost:4317"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:geheim@localhost:4317"),
        ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://me:geheim@localhost:4317"),
    ],
)
def test_a_password_in_an_endpoint_is_refused_unseen(
    tmp_path: Path, command: str, place: str, endpoint: str
) -> None:
    arguments = {"run": ["--", "touch", str(tmp_path / "trained")], "replay": [str(tmp_path)], "doctor": []}[
        command
    ]
    if place == "--endpoint":
        arguments = [place, endpoint, *arguments]
    elif command == "run":
        # the command would inherit the variable all the same
        arguments = [
            "--endpoint",
            "http://localhost:4317",
            *arguments,
        ]
    result = subprocess.run(
        [sys.executable, "-m", "otel_dflash", command, *arguments],
        env={
            **clean_environment(OTEL_DFLASH_DIR=str(tmp_path / "runs")),
            **({place: endpoint} if place != "--endpoint" else {}),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"otel-dflash: {place} {USER}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_password_in_an_endpoint_is_refused_by_an_agent_that_was_started_without_run(
    environ: Environ,
) -> None:
    environ(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://me:geheim@localhost:4317")
    with pytest.raises(ConfigError) as raised:
        span_exporters()
    assert str(raised.value) == f"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT {USER}"


class Proxy(BaseHTTPRequestHandler):
    """Takes what comes without TLS for delivered, as gRPC never sends it, and opens no tunnel."""

    seen: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200)

    def do_CONNECT(self) -> None:
        self.answer(407)

    def answer(self, status: int) -> None:
        self.seen.add(self.headers["Proxy-Authorization"])
        self.send_response_only(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_password_of_a_proxy_is_used_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    Proxy.seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        url = f"http://me:gehe%40im@127.0.0.1:{server.server_port}"
        lines = Doctor(monkeypatch)("http://collector.invalid:4318", protocol, timeout_s=3, http_proxy=url)
        server.shutdown()
        thread.join()
    assert {base64.b64decode(seen.removeprefix("Basic ")) for seen in Proxy.seen} == {b"me:gehe@im"}
    assert lines[1].startswith(
        "warn proxy: http_proxy sends OTLP for collector.invalid through 127.0.0.1:PORT; "
    )
    assert [line.split(":")[0] for line in wrong(lines)] == (
        [] if protocol != "grpc" else ["span accepted", "metric accepted"]
    )
    assert [line for line in lines if "gehe" in line] == []


def test_a_ca_bundle_of_the_users_counts_for_the_signal_that_has_no_certificate_and_for_no_other(
    environ: Environ, tmp_path: Path
) -> None:
    made = Certificates(tmp_path)
    with (
        HttpServer(200, tls=server_context(made.issue("traces", by="ca"))) as traces,
        HttpServer(200, tls=server_context(made.issue("metrics", by="other-ca"))) as metrics,
    ):
        environ(
            OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
            OTEL_EXPORTER_OTLP_TIMEOUT="2",
            OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=traces.url,
            OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=metrics.url,
            OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE=made.authority("ca"),
            OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE="",
            REQUESTS_CA_BUNDLE=made.authority("other-ca"),
            GRPC_VERBOSITY="NONE",
        )
        prepare_environment()
        (span_exporter,), (metric_exporter,) = span_exporters().values(), metric_exporters().values()
        assert span_exporter.export([a_span()]) is SpanExportResult.SUCCESS
        assert metric_exporter.export(a_counter()) is MetricExportResult.SUCCESS


TRUST = """
import io, json, os, threading, time
from otel_dflash.otlp.exporters import prepare_environment, span_exporters
from otel_dflash.otlp.sdk_log import SdkLog
from otel_dflash.doctor.clock import Clock
from otel_dflash.doctor.hops import Hops
from otel_dflash.doctor.route import routes
from tests.otlp.test_exporters import a_span
prepare_environment()
(route,) = routes(os.environ)
lines = list(Hops(route, Clock(), time.monotonic() + 10).probe())
(exporter,) = span_exporters().values()
with SdkLog(io.StringIO()) as noise:
    exporter.export([a_span()])
reason = noise.reasons.get(threading.current_thread().name, "")
print(json.dumps([[line.text for line in lines if line.check == "TLS handshake" and line.status.value == "WRONG"], reason]))
"""
UNKNOWN_CA = (
    "the collector's certificate is from another CA than the public ones (unable to get local issuer "
    "certificate); "
)
UNKNOWN_CA += "set OTEL_EXPORTER_OTLP_CERTIFICATE to the file of its CA"


@pytest.mark.parametrize(
    ("variable", "trusted_by"),
    [
        ("SSL_CERT_FILE", []),  # where OpenSSL looks for the authorities of the system
        (CA, PROTOCOLS),
        (ROOTS, ["grpc"]),
        ("REQUESTS_CA_BUNDLE", ["http/protobuf"]),
        ("CURL_CA_BUNDLE", ["http/protobuf"]),
    ],
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_which_variable_names_an_authority_and_the_doctor_trusts_whom_the_exporter_trusts(
    tmp_path: Path, protocol: str, variable: str, trusted_by: list[str]
) -> None:
    made = Certificates(tmp_path)
    pair = made.issue("server")
    server = HttpServer(403, tls=server_context(pair))
    with server, grpc_server(grpc.StatusCode.PERMISSION_DENIED, server_credentials(pair)) as grpc_url:
        told = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": grpc_url if protocol == "grpc" else server.url,
            variable: made.authority(),
        }
        environment = {
            name: value
            for name, value in clean_environment().items()
            if not name.endswith(("_CA_BUNDLE", "SSL_CERT_FILE"))
        }
        environment |= {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "OTEL_EXPORTER_OTLP_TIMEOUT": "2", **told}
        result = subprocess.run(
            [sys.executable, "-c", TRUST],
            env=environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    distrusted, reason = json.loads(result.stdout)
    if protocol in trusted_by:
        assert distrusted == []
        assert reason.endswith(
            "(the collector accepts the token, but it has no permission to write here; ask whoever runs it)"
        )
    else:
        assert distrusted == [UNKNOWN_CA]
        assert reason.endswith(
            "(the collector's certificate is not from a trusted authority; name its CA's PEM file in "
            "OTEL_EXPORTER_OTLP_CERTIFICATE)"
        )
