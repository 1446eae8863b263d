"""`otel-dflash doctor` against the real collector, Jaeger and Prometheus: the good path, and faults behind
the first hop."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.doctor.doctoring import GRPC, HTTP, Doctor, HttpServer, alone, busy, closed_port, run_doctor, wrong
from tests.otlp.certificates import Certificates
from tests.stack.conftest import Stack, Started, configured, need_engine

TOKEN = "c0ffee-5f1e4b"
HOPS = [
    "TCP connect",
    "metric accepted",
    "name resolved",
    "protocol spoken",
    "seen in Jaeger",
    "seen in Prometheus",
    "span accepted",
]
SHOWN = re.compile(r"(?m)^  ok +(\S+(?: \S+)*)(?: +(\d+\.\d) ms)?(?:  |$)")
"""A line as it is printed: the check, and the ms it took if it says so."""
SEEN = ["ok seen in Jaeger: trace ID", "ok seen in Prometheus: dflash_doctor_canary_seconds"]


NOT_SHOWN = (
    "seen in Jaeger: the collector accepted the span, but Jaeger has not shown it within 2 s; check the "
    "collector's exporter and log, "
    "whether it samples, and whether it sends to this Jaeger"
)
PLAIN = """
extensions: {health_check: {endpoint: "${env:OTELCOL_HOST:-127.0.0.1}:${env:OTELCOL_HEALTH_PORT:-13133}"}}
receivers: {otlp: {protocols: {grpc: {endpoint: "${env:OTELCOL_HOST:-127.0.0.1}:${env:OTELCOL_GRPC_PORT:-4317}"}}}}
exporters: {otlp_http: {endpoint: "http://127.0.0.1:1"}}
service:
  extensions: [health_check]
  pipelines:
    traces: {receivers: [otlp], exporters: [otlp_http]}
    metrics: {receivers: [otlp], exporters: [otlp_http]}
"""
IN_A_NETWORK_OF_ITS_OWN = """
import dataclasses, fcntl, socket, struct, sys
from pathlib import Path

import pytest

from otel_dflash.stack.services import SERVICES
from tests.doctor.doctoring import Doctor, HttpServer, wrong
from tests.stack.conftest import Stack

with socket.socket() as one:
    fcntl.ioctl(one, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
directory = Path(sys.argv[1])
stack = Stack(directory)
try:
    plain = dataclasses.replace(SERVICES["otelcol"], arguments=(f"--config={directory}/plain.yaml",))
    collector = stack.start("otelcol", service=plain)
    with pytest.MonkeyPatch.context() as patch, HttpServer(404, body=b"{}") as empty:
        print(*wrong(Doctor(patch)(collector.url("OTELCOL_GRPC_PORT"), jaeger=empty.url, timeout_s=3)), sep="\\n")
finally:
    stack.end()
"""


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    return Doctor(monkeypatch)


def name_of(collector: Started) -> str:
    """Return what the doctor calls it: the id is on each line of its log."""
    found = re.search(r'"service.instance.id": "([^"]+)"', collector.log)
    assert found
    return f"otelcol {found[1]}"


def start_all(stack: Stack, **variables: str) -> tuple[Started, Started, Started]:
    """Start collector, Jaeger and Prometheus, each sending to the next."""
    prometheus = stack.start("prometheus")
    jaeger = stack.start("jaeger", JAEGER_PROMETHEUS_URL=prometheus.url("PROMETHEUS_PORT"))
    collector = stack.start(
        "otelcol",
        OTELCOL_TRACES_ENDPOINT=jaeger.url("JAEGER_HTTP_PORT"),
        OTELCOL_METRICS_ENDPOINT=f"{prometheus.url('PROMETHEUS_PORT')}/api/v1/otlp",
        **variables,
    )
    return collector, jaeger, prometheus


def test_the_whole_path(doctor: Doctor, stack: Stack, places: Path, tmp_path: Path) -> None:
    collector, jaeger, prometheus = start_all(stack)
    backends = {
        "jaeger": jaeger.url("JAEGER_QUERY_HTTP_PORT"),
        "prometheus": prometheus.url("PROMETHEUS_PORT"),
    }
    for port, protocol in (("OTELCOL_GRPC_PORT", GRPC), ("OTELCOL_HTTP_PORT", HTTP)):
        lines = doctor(collector.url(port), protocol, **backends, timeout_s=30)  # type: ignore[arg-type]
        assert [line for line in lines if line.split()[0] != "ok"] == []
        assert sorted(line for line in lines if "seen" in line) == SEEN
        assert sorted(line for line in lines if "clock" in line)[:2] == [
            "ok clock: Jaeger agrees within 5 s",
            "ok clock: Prometheus agrees within 5 s",
        ]
    options = [f"--{name}={url}" for name, url in backends.items()]
    start = time.monotonic()
    code, out, err = run_doctor(
        tmp_path, "--endpoint", collector.url("OTELCOL_GRPC_PORT"), "--timeout", "30", *options
    )
    assert (code, err) == (0, "")
    assert out.endswith("\nall right\n")
    assert "\x1b" not in out
    took_ms: dict[str, str] = dict(SHOWN.findall(out.partition("\nthe path\n")[2]))
    assert sorted(check for check, took in took_ms.items() if not took) == ["clock", "route"]
    assert sorted(check for check, took in took_ms.items() if took) == HOPS
    assert 1 < max(float(took) for took in took_ms.values() if took) < (time.monotonic() - start) * 1e3


@pytest.mark.parametrize("hung", ["Jaeger", "Prometheus"])
def test_one_that_hangs_is_named_and_no_other(doctor: Doctor, stack: Stack, hung: str) -> None:
    collector, jaeger, prometheus = start_all(stack)
    one = {"Jaeger": jaeger, "Prometheus": prometheus}[hung]
    assert one.process
    one.process.send_signal(signal.SIGSTOP)
    lines = doctor(
        collector.url("OTELCOL_GRPC_PORT"),
        jaeger=jaeger.url("JAEGER_QUERY_HTTP_PORT"),
        prometheus=prometheus.url("PROMETHEUS_PORT"),
        timeout_s=6,
    )
    assert wrong(lines) == [
        (
            f"seen in {hung}: http://127.0.0.1:PORT does not answer in time; see the log of {hung}, or fix "
            f"--{hung.lower()}"
        )
    ]
    assert [line for line in SEEN if line in lines] == [line for line in SEEN if hung not in line]
    assert doctor.took_s < 8


def test_a_collector_whose_exporter_is_refused(doctor: Doctor, stack: Stack) -> None:
    """It drops the span and counts it, in metrics of its own that it pushes to Prometheus every 10 s."""
    prometheus = stack.start("prometheus")
    jaeger = stack.start("jaeger", JAEGER_PROMETHEUS_URL=prometheus.url("PROMETHEUS_PORT"))
    with HttpServer(400) as refusing:
        collector = stack.start(
            "otelcol",
            OTELCOL_TRACES_ENDPOINT=refusing.url,
            OTELCOL_METRICS_ENDPOINT=f"{prometheus.url('PROMETHEUS_PORT')}/api/v1/otlp",
        )
        backends = {
            "jaeger": jaeger.url("JAEGER_QUERY_HTTP_PORT"),
            "prometheus": prometheus.url("PROMETHEUS_PORT"),
        }
        lines = doctor(collector.url("OTELCOL_GRPC_PORT"), **backends, timeout_s=14)  # type: ignore[arg-type]
        stack.end()
    assert wrong(lines) == [
        "seen in Jaeger: the collector accepted the span, but spans are dropped by exporter "
        f"otlp_http/traces of {name_of(collector)}: "
        "its destination refuses them; fix that exporter's endpoint or credentials (that "
        "collector's log has the reason)"
    ]


def test_a_collector_whose_exporter_fails(doctor: Doctor, stack: Stack) -> None:
    """It pushes its own metrics to Prometheus every 10 s, where the doctor finds the queue that grows, beside
    one that is busy."""
    prometheus = stack.start("prometheus")
    pushed = f"{prometheus.url('PROMETHEUS_PORT')}/api/v1/otlp"
    jaeger = stack.start("jaeger", JAEGER_PROMETHEUS_URL=prometheus.url("PROMETHEUS_PORT"))
    working = stack.start(
        "otelcol",
        "working",
        OTELCOL_TRACES_ENDPOINT=jaeger.url("JAEGER_HTTP_PORT"),
        OTELCOL_METRICS_ENDPOINT=pushed,
    )
    failing = stack.start(
        "otelcol",
        OTELCOL_TRACES_ENDPOINT=f"http://127.0.0.1:{closed_port()}",
        OTELCOL_METRICS_ENDPOINT=pushed,
    )
    url = failing.url("OTELCOL_GRPC_PORT")
    backends = {
        "jaeger": jaeger.url("JAEGER_QUERY_HTTP_PORT"),
        "prometheus": prometheus.url("PROMETHEUS_PORT"),
    }
    with busy(working.url("OTELCOL_HTTP_PORT")):
        assert wrong(doctor(url, **backends, timeout_s=14)) == [  # type: ignore[arg-type]
            "seen in Jaeger: the collector accepted the span, but spans wait in the queue of exporter "
            f"otlp_http/traces of {name_of(failing)}, "
            "which sends none; start its destination, or fix its endpoint (that collector's log has the reason)"
        ]
    assert wrong(doctor(url, jaeger=backends["jaeger"], timeout_s=2)) == [NOT_SHOWN]
    failing.kill()
    with HttpServer(404, body=b"{}") as empty:
        found = wrong(
            doctor(
                working.url("OTELCOL_GRPC_PORT"),
                jaeger=empty.url,
                prometheus=backends["prometheus"],
                timeout_s=2,
            )
        )
    assert [line for line in found if "Jaeger" in line] == [NOT_SHOWN], (
        "what has ended is not what holds this span"
    )


def test_a_collector_that_shows_its_own_metrics(tmp_path: Path) -> None:
    """Which is what one does that is not told otherwise, at port 8888 of its host: in a network of this
    test's own, where that is free."""
    need_engine("otelcol")
    (tmp_path / "plain.yaml").write_text(PLAIN)
    result = alone("--net", IN_A_NETWORK_OF_ITS_OWN, str(tmp_path))
    assert (result.stderr, result.stdout.splitlines()) == (
        "",
        [
            "seen in Jaeger: the collector accepted the span, but spans wait in the queue of exporter "
            "otlp_http of the collector at "
            "127.0.0.1:PORT, which sends none; start its destination, or fix its endpoint (that "
            "collector's log has the reason)"
        ],
    )


@pytest.mark.parametrize("protocol", [GRPC, HTTP])
def test_a_bearer_token(doctor: Doctor, stack: Stack, tmp_path: Path, protocol: str) -> None:
    certificates = Certificates(tmp_path / "certificates")
    certificate, key = certificates.issue("server")
    (tmp_path / "token").write_text(TOKEN)
    collector = stack.start(
        "otelcol",
        service=configured("otelcol", "tls"),
        OTELCOL_CERT_FILE=certificate,
        OTELCOL_KEY_FILE=key,
        OTELCOL_CLIENT_CA_FILE=certificates.authority(),
        OTELCOL_TOKEN_FILE=str(tmp_path / "token"),
    )
    client = certificates.issue("client")
    endpoint = collector.url("OTELCOL_GRPC_PORT" if protocol == GRPC else "OTELCOL_HTTP_PORT").replace(
        "http:", "https:"
    )

    def with_token(text: str, **variables: str) -> list[str]:
        (tmp_path / "headers").write_text(f"authorization=Bearer {text}")
        authority = {"OTEL_EXPORTER_OTLP_CERTIFICATE": certificates.authority()}
        return wrong(
            doctor(
                endpoint,
                protocol,
                OTEL_DFLASH_OTLP_HEADERS_FILE=str(tmp_path / "headers"),
                **{**authority, **variables},
            )  # type: ignore[arg-type]
        )

    pair = {"OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": client[0], "OTEL_EXPORTER_OTLP_CLIENT_KEY": client[1]}
    assert with_token(TOKEN, **pair) == []
    refused = with_token("another", **pair)
    assert [line.split(":")[0] for line in refused] == ["span accepted", "metric accepted"]
    assert all("the collector rejects the token" in line and "another" not in line for line in refused)
    assert [line.partition("; ")[0] for line in with_token(TOKEN)] == [
        "protocol spoken: the collector wants a client certificate"
    ]


def test_the_running_stack_is_where_to_look(
    doctor: Doctor, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from otel_dflash.doctor.local_stack import addresses
    from otel_dflash.session import process_start
    from otel_dflash.stack import state

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    collector, jaeger, prometheus = start_all(stack)
    state.directory().mkdir(parents=True)
    started = {}
    for one in (collector, jaeger, prometheus):
        assert one.process
        started[one.service.name] = state.Started(
            one.process.pid, process_start(one.process.pid) or 0, "1", one.values
        )
    state.write(state.Stack(started))
    local = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url("OTELCOL_HTTP_PORT")}
    urls = {"Jaeger": jaeger.url("JAEGER_QUERY_HTTP_PORT"), "Prometheus": prometheus.url("PROMETHEUS_PORT")}
    assert addresses(local) == urls
    assert addresses({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.example:4317"}) == {}, (
        "what goes elsewhere is not seen here"
    )
    jaeger.kill()
    assert addresses(local) == urls, "what has ended is looked for too, and found missing"


def test_without_an_endpoint_the_running_stacks_is_named_and_nothing_is_said_to_be_right(
    stack: Stack, places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from otel_dflash.session import process_start
    from otel_dflash.stack import state

    def doctor_without_endpoint(*arguments: str) -> tuple[int, list[str]]:
        code, out, err = run_doctor(tmp_path, *arguments)
        assert err == ""
        return code, [line.strip() for line in out.partition("\nthe path\n")[2].splitlines() if line]

    unchecked = "nothing is wrong here; the path was not checked"
    route = (
        "warn   route                           no endpoint is set: runs are recorded, but nothing is sent; "
    )
    usual = f"{route}give --endpoint http://localhost:4317, or set OTEL_EXPORTER_OTLP_ENDPOINT"
    assert doctor_without_endpoint() == (0, [usual, unchecked])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # run_doctor's
    collector = stack.start("otelcol")
    assert collector.process
    state.directory().mkdir(parents=True)
    started = state.Started(
        collector.process.pid, process_start(collector.process.pid) or 0, "1", collector.values
    )
    state.write(state.Stack({"otelcol": started}))
    for arguments, port in (
        ((), "OTELCOL_GRPC_PORT"),
        (("--protocol", "http/protobuf"), "OTELCOL_HTTP_PORT"),
    ):
        here = (
            f"the stack of this host accepts it: give --endpoint {collector.url(port)}, or set "
            "OTEL_EXPORTER_OTLP_ENDPOINT"
        )
        assert doctor_without_endpoint(*arguments) == (0, [f"{route}{here}", unchecked])
    collector.kill()
    assert doctor_without_endpoint() == (0, [usual, unchecked])
