"""Jaeger and Prometheus as the doctor asks them: none there, something else there, or one that takes its
time."""

from __future__ import annotations

import pytest

from otel_dflash.config import ConfigError
from tests.doctor.doctoring import BUSY_S, Doctor, HttpServer, closed_port, dripping_server, wrong
from tests.otlp_receiver import OtlpReceiver


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    return Doctor(monkeypatch)


@pytest.mark.parametrize(
    ("option", "name", "port"), [("jaeger", "Jaeger", 16686), ("prometheus", "Prometheus", 9090)]
)
def test_a_backend_that_is_not_there_or_not_one(
    doctor: Doctor, receiver: OtlpReceiver, option: str, name: str, port: int
) -> None:
    missing = f"http://127.0.0.1:{closed_port()}"
    assert wrong(doctor(receiver.grpc_endpoint, **{option: missing})) == [  # type: ignore[arg-type]
        f"seen in {name}: nothing listens at http://127.0.0.1:PORT; start {name}, or fix --{option}"
    ]
    with HttpServer(200, body=b"<html>") as server:
        (line,) = wrong(doctor(receiver.grpc_endpoint, **{option: server.url}))  # type: ignore[arg-type]
    assert line.endswith(f"(HTTP 200); fix --{option} (usually port {port})")


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_a_user_in_the_url_of_a_backend_is_not_shown(
    doctor: Doctor, receiver: OtlpReceiver, scheme: str
) -> None:
    (line,) = wrong(doctor(receiver.grpc_endpoint, jaeger=f"{scheme}me:geheim@127.0.0.1:{closed_port()}"))
    assert (
        line == "seen in Jaeger: nothing listens at http://***@127.0.0.1:PORT; start Jaeger, or fix --jaeger"
    )


@pytest.mark.parametrize(
    "url", ["http://localhost:abc", "http://localhost:99999", "http://[::1", "ftp://localhost", "http://"]
)
def test_what_is_no_url_of_a_backend_is_refused_at_once(
    doctor: Doctor, receiver: OtlpReceiver, url: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        doctor(receiver.grpc_endpoint, jaeger=url)
    assert (
        str(caught.value)
        == f"--jaeger must be the URL of an HTTP API, got {url.rstrip('/')!r}; try http://localhost:16686"
    )
    assert receiver.spans() == []


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"]
)
def test_a_backend_that_answers_byte_by_byte_ends_in_time(
    doctor: Doctor, receiver: OtlpReceiver, head: bytes
) -> None:
    with dripping_server(head) as url:
        assert wrong(doctor(receiver.grpc_endpoint, jaeger=url, prometheus=url, timeout_s=2)) == [
            (
                f"seen in {name}: http://127.0.0.1:PORT does not answer in time; see the log of {name}, or "
                f"fix --{name.lower()}"
            )
            for name in ("Jaeger", "Prometheus")
        ]
    assert doctor.took_s < 2 + BUSY_S


@pytest.mark.parametrize(
    "body",
    [b'{"status": "success"}', b'{"status": "success", "data": []}', b'{"data": {"result": {}}}', b"[]"],
)
def test_json_of_something_else_is_no_prometheus(doctor: Doctor, receiver: OtlpReceiver, body: bytes) -> None:
    with HttpServer(200, body=body) as server:
        assert wrong(doctor(receiver.grpc_endpoint, prometheus=server.url)) == [
            (
                "seen in Prometheus: http://127.0.0.1:PORT is not Prometheus's API (HTTP 200); fix "
                "--prometheus (usually port 9090)"
            )
        ]


def test_a_host_name_that_cannot_be_one(doctor: Doctor, receiver: OtlpReceiver) -> None:
    assert wrong(doctor(receiver.grpc_endpoint, jaeger="http://a..b:16686")) == [
        "seen in Jaeger: http://a..b:PORT does not answer as Jaeger would (UnicodeError); fix --jaeger"
    ]
