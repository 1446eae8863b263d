"""`otel-dflash doctor` against the real collector, Jaeger and Prometheus: the good path, and faults behind the first hop."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.certificates import Certificates
from tests.doctoring import GRPC, HTTP, Doctor, HttpServer, closed_port, run_doctor, wrong
from tests.stack.conftest import Stack, Started, configured

TOKEN = "c0ffee-5f1e4b"
SEEN = ["ok seen in Jaeger: trace ID", "ok seen in Prometheus: dflash_doctor_canary_seconds"]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    return Doctor(monkeypatch)


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
    backends = {"jaeger": jaeger.url("JAEGER_QUERY_HTTP_PORT"), "prometheus": prometheus.url("PROMETHEUS_PORT")}
    for port, protocol in (("OTELCOL_GRPC_PORT", GRPC), ("OTELCOL_HTTP_PORT", HTTP)):
        lines = doctor(collector.url(port), protocol, **backends, timeout_s=30)  # type: ignore[arg-type]
        assert [line for line in lines if line.split()[0] != "ok"] == []
        assert sorted(line for line in lines if "seen" in line) == SEEN
        assert sorted(line for line in lines if "clock" in line)[:2] == [
            "ok clock: Jaeger agrees within 5 s",
            "ok clock: Prometheus agrees within 5 s",
        ]
    options = [f"--{name}={url}" for name, url in backends.items()]
    code, out, err = run_doctor(tmp_path, "--endpoint", collector.url("OTELCOL_GRPC_PORT"), "--timeout", "30", *options)
    assert (code, err) == (0, "")
    assert out.endswith("\nall right\n")
    assert "\x1b" not in out


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
        f"seen in {hung}: http://127.0.0.1:PORT does not answer in time; see the log of {hung}, or mend --{hung.lower()}"
    ]
    assert [line for line in SEEN if line in lines] == [line for line in SEEN if hung not in line]
    assert doctor.took_s < 8


def test_a_collector_whose_exporter_is_refused(doctor: Doctor, stack: Stack) -> None:
    """It drops the span and counts it, in metrics of its own that it pushes to Prometheus every 10 s."""
    prometheus = stack.start("prometheus")
    jaeger = stack.start("jaeger", JAEGER_PROMETHEUS_URL=prometheus.url("PROMETHEUS_PORT"))
    with HttpServer(400) as refusing:
        collector = stack.start(
            "otelcol", OTELCOL_TRACES_ENDPOINT=refusing.url, OTELCOL_METRICS_ENDPOINT=f"{prometheus.url('PROMETHEUS_PORT')}/api/v1/otlp"
        )
        backends = {"jaeger": jaeger.url("JAEGER_QUERY_HTTP_PORT"), "prometheus": prometheus.url("PROMETHEUS_PORT")}
        lines = doctor(collector.url("OTELCOL_GRPC_PORT"), **backends, timeout_s=14)  # type: ignore[arg-type]
        stack.end()
    assert wrong(lines) == [
        "seen in Jaeger: the collector took the span and dropped it: what its exporter otlp_http/traces sends to refuses it; "
        "mend that exporter's endpoint or credentials (the collector's log says why)"
    ]


def test_a_collector_whose_exporter_fails(doctor: Doctor, stack: Stack) -> None:
    """It pushes its own metrics to Prometheus every 10 s, where the doctor finds the queue that grows."""
    prometheus = stack.start("prometheus")
    collector = stack.start(
        "otelcol",
        OTELCOL_TRACES_ENDPOINT=f"http://127.0.0.1:{closed_port()}",
        OTELCOL_METRICS_ENDPOINT=f"{prometheus.url('PROMETHEUS_PORT')}/api/v1/otlp",
    )
    missing = stack.start("jaeger", JAEGER_PROMETHEUS_URL=prometheus.url("PROMETHEUS_PORT"))  # healthy, and nobody sends to it
    url = collector.url("OTELCOL_GRPC_PORT")
    backends = {"jaeger": missing.url("JAEGER_QUERY_HTTP_PORT"), "prometheus": prometheus.url("PROMETHEUS_PORT")}
    assert wrong(doctor(url, **backends, timeout_s=14)) == [  # type: ignore[arg-type]
        "seen in Jaeger: the collector took the span and cannot pass it on: it waits in the queue of its exporter otlp_http/traces, "
        "and nothing is sent; start what that sends to, or mend its endpoint (the collector's log says why)"
    ]
    assert wrong(doctor(url, jaeger=backends["jaeger"], timeout_s=2)) == [
        "seen in Jaeger: the collector took the span, and Jaeger has not shown it within 2 s; look at the collector's exporter and log, "
        "whether it samples, and whether it sends to this Jaeger"
    ]


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
    endpoint = collector.url("OTELCOL_GRPC_PORT" if protocol == GRPC else "OTELCOL_HTTP_PORT").replace("http:", "https:")

    def with_token(text: str, **variables: str) -> list[str]:
        (tmp_path / "headers").write_text(f"authorization=Bearer {text}")
        authority = {"OTEL_EXPORTER_OTLP_CERTIFICATE": certificates.authority()}
        return wrong(
            doctor(endpoint, protocol, OTEL_DFLASH_OTLP_HEADERS_FILE=str(tmp_path / "headers"), **{**authority, **variables})  # type: ignore[arg-type]
        )

    pair = {"OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": client[0], "OTEL_EXPORTER_OTLP_CLIENT_KEY": client[1]}
    assert with_token(TOKEN, **pair) == []
    refused = with_token("another", **pair)
    assert [line.split(":")[0] for line in refused] == ["span accepted", "metric accepted"]
    assert all("the collector does not take the token" in line and "another" not in line for line in refused)
    assert [line.partition("; ")[0] for line in with_token(TOKEN)] == ["protocol spoken: the collector wants a client certificate"]


def test_the_running_stack_is_where_to_look(doctor: Doctor, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from otel_dflash.doctor.stack import addresses
    from otel_dflash.session import process_start
    from otel_dflash.stack import state

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    collector, jaeger, prometheus = start_all(stack)
    state.directory().mkdir(parents=True)
    started = {}
    for one in (collector, jaeger, prometheus):
        assert one.process
        started[one.service.name] = state.Started(one.process.pid, process_start(one.process.pid) or 0, "1", one.values)
    state.write(state.Stack(started))
    local = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url("OTELCOL_HTTP_PORT")}
    urls = {"Jaeger": jaeger.url("JAEGER_QUERY_HTTP_PORT"), "Prometheus": prometheus.url("PROMETHEUS_PORT")}
    assert addresses(local) == urls
    assert addresses({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.example:4317"}) == {}, "what goes elsewhere is not seen here"
    jaeger.kill()
    assert addresses(local) == urls, "what has ended is looked for too, and found missing"
