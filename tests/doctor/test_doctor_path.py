"""`otel-dflash doctor`: every fault on the way to a collector, planted with real sockets and servers, is
named with its remedy."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

import grpc
import pytest

from tests.doctor.doctoring import (
    BUSY_S,
    GRPC,
    HTTP,
    Doctor,
    HttpServer,
    banner_server,
    closed_port,
    dripping_server,
    full_listener,
    grpc_server,
    server_context,
    server_credentials,
    wrong,
)
from tests.otlp.certificates import Certificates
from tests.otlp_receiver import OtlpReceiver, SilentServer

PROTOCOLS = [GRPC, HTTP]
NAMES = {GRPC: "gRPC", HTTP: "HTTP"}


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    return Doctor(monkeypatch)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def endpoint_of(receiver: OtlpReceiver, protocol: str) -> str:
    return receiver.grpc_endpoint if protocol == GRPC else receiver.http_endpoint


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_hop_of_a_good_path_is_a_line_and_the_canary_arrives(
    doctor: Doctor, receiver: OtlpReceiver, protocol: str
) -> None:
    name = NAMES[protocol]
    clock = "ok clock: the collector agrees within 5 s"
    if protocol == GRPC:
        clock = "- clock: not compared: no response had a Date header (gRPC has none)"
    assert doctor(endpoint_of(receiver, protocol), protocol) == [
        f"ok route: traces and metrics to http://127.0.0.1:PORT by OTLP over {name}",
        "ok name resolved: 127.0.0.1",
        "ok TCP connect: 127.0.0.1:PORT",
        f"ok protocol spoken: {name}",
        "ok span accepted: ",
        "ok metric accepted: ",
        "- seen in Jaeger: not checked: give --jaeger URL",
        "- seen in Prometheus: not checked: give --prometheus URL",
        clock,
    ]
    (span,) = receiver.spans()
    (point,) = receiver.points()
    assert (span.name, span.resource["service.name"], span.attributes) == (
        "dflash.doctor",
        "dflash-doctor",
        {},
    )
    assert (point.name, point.kind, point.attributes, point.resource) == (
        "dflash.doctor.canary",
        "gauge",
        {},
        span.resource,
    )
    assert point.value == point.time_ns / 1e9
    assert sorted(span.resource) == ["host.name", "service.instance.id", "service.name"], (
        "no data of the user, and one series a host"
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_listens(doctor: Doctor, protocol: str) -> None:
    assert wrong(doctor(f"http://127.0.0.1:{closed_port()}", protocol)) == [
        (
            "TCP connect: nothing listens at 127.0.0.1:PORT; start the collector (here: otel-dflash stack "
            "up), or fix the endpoint"
        )
    ]


def test_the_other_protocols_port(doctor: Doctor, receiver: OtlpReceiver) -> None:
    assert wrong(doctor(receiver.http_endpoint, GRPC)) == [
        (
            "protocol spoken: 127.0.0.1:PORT speaks HTTP, not gRPC; use --protocol http/protobuf, or the "
            "port for gRPC (usually 4317)"
        )
    ]
    assert wrong(doctor(receiver.grpc_endpoint, HTTP)) == [
        (
            "protocol spoken: 127.0.0.1:PORT speaks gRPC, not HTTP; use --protocol grpc, or the port for "
            "HTTP (usually 4318)"
        )
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tls_to_a_plain_port(doctor: Doctor, receiver: OtlpReceiver, protocol: str) -> None:
    endpoint = endpoint_of(receiver, protocol).replace("http:", "https:")
    assert wrong(doctor(endpoint, protocol)) == [
        "TLS handshake: 127.0.0.1:PORT does not speak TLS; begin the URL with http://"
    ]


def test_plain_to_a_tls_port(doctor: Doctor, certificates: Certificates) -> None:
    pair = certificates.issue("server")
    expected = ["protocol spoken: 127.0.0.1:PORT speaks TLS; begin the URL with https://"]
    with grpc_server(credentials=server_credentials(pair)) as url:
        assert wrong(doctor(url.replace("https:", "http:"), GRPC)) == expected
    with HttpServer(tls=server_context(pair)) as server:
        assert wrong(doctor(server.url.replace("https:", "http:"), HTTP)) == expected
    authority = certificates.authority()  # whose clients must show a certificate, which is seen later
    with grpc_server(credentials=server_credentials(pair, authority)) as url:
        assert wrong(doctor(url.replace("https:", "http:"), GRPC)) == expected
    with HttpServer(tls=server_context(pair, authority, ssl.TLSVersion.TLSv1_2)) as server:
        assert wrong(doctor(server.url.replace("https:", "http:"), HTTP)) == expected


def test_both_are_wrong_at_once(doctor: Doctor, certificates: Certificates) -> None:
    with HttpServer(tls=server_context(certificates.issue("server"))) as server:
        assert wrong(doctor(server.url.replace("https:", "http:"), GRPC)) == [
            "protocol spoken: 127.0.0.1:PORT speaks TLS and speaks HTTP, not gRPC; begin the URL with "
            "https:// and "
            "use --protocol http/protobuf, or the port for gRPC (usually 4317)"
        ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("authority", "identity", "days", "said"),
    [
        ("ca", "127.0.0.1", 1, ""),
        (
            "other-ca",
            "127.0.0.1",
            1,
            "the collector's certificate is from another CA than 'other-ca.pem' (unable to get local "
            "issuer certificate); "
            "set OTEL_EXPORTER_OTLP_CERTIFICATE to the file of its CA",
        ),
        (
            "ca",
            "elsewhere.example",
            1,
            "the collector's certificate is not for '127.0.0.1'; use the name that it is for",
        ),
        (
            "ca",
            "127.0.0.1",
            -1,
            "certificate has expired (the collector's, by this machine's clock); renew it, or set the clock",
        ),
    ],
)
def test_the_collectors_certificate(
    doctor: Doctor,
    certificates: Certificates,
    protocol: str,
    authority: str,
    identity: str,
    days: int,
    said: str,
) -> None:
    pair = certificates.issue("server", identity, days=days)
    name = certificates.authority(authority)
    if protocol == GRPC:
        with grpc_server(grpc.StatusCode.PERMISSION_DENIED, server_credentials(pair)) as url:
            found = wrong(doctor(url, protocol, OTEL_EXPORTER_OTLP_CERTIFICATE=name))
    else:
        with HttpServer(200, tls=server_context(pair)) as server:
            found = wrong(doctor(server.url, protocol, OTEL_EXPORTER_OTLP_CERTIFICATE=name))
    if said:
        assert [line.replace(str(Path(name).parent) + "/", "") for line in found] == [
            f"TLS handshake: {said}"
        ]
    else:
        assert [line for line in found if not line.startswith(("span", "metric"))] == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_client_certificate_is_wanted(doctor: Doctor, certificates: Certificates, protocol: str) -> None:
    pair = certificates.issue("server")
    authority = certificates.authority()
    variables = {"OTEL_EXPORTER_OTLP_CERTIFICATE": authority}
    stranger = dict(
        zip(
            ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_KEY"),
            certificates.issue("stranger", by="other-ca"),
            strict=True,
        )
    )
    friend = dict(zip(stranger, certificates.issue("friend"), strict=True))

    def three(url: str) -> list[list[str]]:
        return [wrong(doctor(url, protocol, **variables, **more)) for more in ({}, stranger, friend)]

    if protocol == GRPC:
        with grpc_server(credentials=server_credentials(pair, authority)) as url:
            found = three(url)
    else:
        with HttpServer(tls=server_context(pair, authority)) as server:
            found = three(server.url)
    beside = (
        " (gRPC reads them only together with OTEL_EXPORTER_OTLP_CERTIFICATE)" if protocol == GRPC else ""
    )
    assert found[0] == [
        "protocol spoken: the collector wants a client certificate; "
        f"set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY{beside}"
    ]
    assert len(found[1]) == 1
    assert found[1][0].startswith("protocol spoken: the collector does not accept the client certificate '")
    assert [line for line in found[2] if not line.startswith(("span", "metric"))] == []


def test_a_client_certificate_is_wanted_by_tls_1_2(doctor: Doctor, certificates: Certificates) -> None:
    authority = certificates.authority()
    with HttpServer(
        tls=server_context(certificates.issue("server"), authority, ssl.TLSVersion.TLSv1_2)
    ) as server:
        assert wrong(doctor(server.url, HTTP, OTEL_EXPORTER_OTLP_CERTIFICATE=authority)) == [
            "TLS handshake: the collector wants a client certificate; "
            "set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY"
        ]


def test_a_certificate_for_another_host_name(doctor: Doctor, certificates: Certificates) -> None:
    with HttpServer(tls=server_context(certificates.issue("server", "elsewhere.example"))) as server:
        endpoint = server.url.replace("127.0.0.1", "localhost")
        assert wrong(doctor(endpoint, HTTP, OTEL_EXPORTER_OTLP_CERTIFICATE=certificates.authority())) == [
            ("TLS handshake: the collector's certificate is not for 'localhost'; use the name that it is for")
        ]


REFUSALS = [
    (
        401,
        grpc.StatusCode.UNAUTHENTICATED,
        "(the collector rejects the token; put authorization=Bearer TOKEN into the file of",
    ),
    (
        403,
        grpc.StatusCode.PERMISSION_DENIED,
        "(the collector accepts the token, but it has no permission to write here; ask whoever runs it)",
    ),
    (
        503,
        grpc.StatusCode.UNAVAILABLE,
        "the collector is up but accepts nothing now: its queue, memory or storage is full; see its log (",
    ),
]


@pytest.mark.parametrize(("status", "code", "said"), REFUSALS)
def test_a_refusal_is_explained(doctor: Doctor, status: int, code: grpc.StatusCode, said: str) -> None:
    with grpc_server(code) as url:
        over_grpc = wrong(doctor(url, GRPC))
    with HttpServer(status) as server:
        over_http = wrong(doctor(server.url, HTTP))
    for lines in (over_grpc, over_http):
        assert [line.split(":")[0] for line in lines] == ["span accepted", "metric accepted"]
        assert [line for line in lines if said not in line] == []


def test_a_wrong_path(doctor: Doctor, receiver: OtlpReceiver) -> None:
    assert wrong(doctor(f"{receiver.http_endpoint}/v1/traces", HTTP))[0] == (
        "span accepted: 404: Not Found (nothing accepts OTLP at that path; give the base URL, without "
        "/v1/traces); "
        "if only traces are refused, that receiver accepts none: set OTEL_TRACES_EXPORTER=none"
    )


def test_credentials_are_never_shown(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "headers").write_text("authorization=Bearer geheim-7")
    with HttpServer(401) as server:
        variables = {
            "OTEL_DFLASH_OTLP_HEADERS_FILE": str(tmp_path / "headers"),
            "OTEL_EXPORTER_OTLP_HEADERS": "x-key=geheim-9",
        }
        lines = doctor(server.url, HTTP, jaeger=server.url.replace("//", "//user:geheim-8@"), **variables)
    assert wrong(lines) != []
    assert [line for line in lines if "geheim" in line] == []


@pytest.mark.parametrize(
    ("protocol", "variable", "bypass"),
    [
        (GRPC, "http_proxy", "no_proxy"),
        (GRPC, "grpc_proxy", "no_proxy"),
        (HTTP, "HTTP_PROXY", "NO_PROXY"),
        (HTTP, "http_proxy", "NO_PROXY"),
        (HTTP, "ALL_PROXY", "NO_PROXY"),
    ],
)
def test_a_proxy_in_the_way(
    doctor: Doctor, receiver: OtlpReceiver, protocol: str, variable: str, bypass: str
) -> None:
    endpoint = endpoint_of(receiver, protocol)
    proxy = {variable: f"http://127.0.0.1:{closed_port()}"}
    assert wrong(doctor(endpoint, protocol, **proxy)) == [
        f"proxy: {variable} sends OTLP for 127.0.0.1 through 127.0.0.1:PORT, where no proxy answers; "
        f"{bypass}=127.0.0.1 keeps it off the proxy"
    ]
    assert wrong(doctor(endpoint, protocol, **proxy, **{bypass: "example.com, 127.0.0.1"})) == []


@pytest.mark.parametrize(
    "variables",
    [
        {"HTTP_PROXY": "http://127.0.0.1:1"},
        {"http_proxy": "socks5://127.0.0.1:1"},
        {"all_proxy": "http://127.0.0.1:1"},
    ],
)
def test_what_grpc_does_not_take_for_a_proxy_is_none(
    doctor: Doctor, receiver: OtlpReceiver, variables: dict[str, str]
) -> None:
    assert wrong(doctor(receiver.grpc_endpoint, GRPC, **variables)) == []
    assert len(receiver.spans()) == 1


@pytest.mark.parametrize("bypass", [{"NO_PROXY": "127.0.0.1"}, {"no_proxy": "*"}])
def test_what_grpc_does_not_take_for_a_bypass_is_none(
    doctor: Doctor, receiver: OtlpReceiver, bypass: dict[str, str]
) -> None:
    lines = doctor(receiver.grpc_endpoint, GRPC, http_proxy=f"http://127.0.0.1:{closed_port()}", **bypass)
    assert [line.split(":")[0] for line in wrong(lines)] == ["proxy"]


def test_a_proxy_that_answers_and_does_not_lead_there(doctor: Doctor, receiver: OtlpReceiver) -> None:
    with HttpServer(502) as proxy:
        lines = doctor(receiver.http_endpoint, HTTP, timeout_s=3, HTTP_PROXY=proxy.url)
    assert lines[1] == (
        "warn proxy: HTTP_PROXY sends OTLP for 127.0.0.1 through 127.0.0.1:PORT; "
        "NO_PROXY=127.0.0.1 keeps it off the proxy, unless it must go there"
    )
    assert [line.split(":")[0] for line in wrong(lines)] == ["span accepted", "metric accepted"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_name_without_an_address(doctor: Doctor, protocol: str) -> None:
    (line,) = wrong(doctor("http://collector.invalid:4317", protocol))
    assert line.startswith("name resolved: the name 'collector.invalid' has no address here (")
    assert line.endswith("); fix the endpoint, or DNS or /etc/hosts")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_black_hole_ends_in_time(doctor: Doctor, protocol: str) -> None:
    with SilentServer() as server:
        assert wrong(doctor(server.endpoint, protocol, timeout_s=1)) == [
            (
                "protocol spoken: 127.0.0.1:PORT takes connections and never answers: it hangs, or is not "
                "a collector; restart it"
            )
        ]
    assert doctor.took_s < 1 + BUSY_S
    with full_listener() as url:
        assert wrong(doctor(url, protocol, timeout_s=1)) == [
            (
                "TCP connect: no answer from 127.0.0.1:PORT: a firewall drops the packets, or the "
                "host is down; ask whoever runs it"
            )
        ]
    assert doctor.took_s < 1 + BUSY_S


def test_a_collector_that_takes_the_canary_and_never_answers(doctor: Doctor) -> None:
    with HttpServer(is_silent=True) as server:
        assert wrong(doctor(server.url, HTTP, timeout_s=2)) == [
            f"{what} accepted: the collector does not answer; see its log (no success before the timeout)"
            for what in ("span", "metric")
        ]
    assert doctor.took_s < 2 + BUSY_S


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_server_that_answers_byte_by_byte_ends_in_time(doctor: Doctor, protocol: str) -> None:
    with dripping_server(b"HTTP") as url:
        (line,) = wrong(doctor(url, protocol, timeout_s=1))
    # how many bytes came within the second is the machine's affair
    assert re.sub("HTTPx*", "HTTP", line) == (
        "protocol spoken: 127.0.0.1:PORT speaks neither gRPC nor HTTP: it sent b'HTTP'; "
        "give the port of the collector's OTLP receiver"
    )
    assert doctor.took_s < 1 + BUSY_S


def test_something_else_listens_there(doctor: Doctor) -> None:
    with banner_server(b"SSH-2.0-OpenSSH_9.6\r\n") as url:
        assert wrong(doctor(url, GRPC)) == [
            "protocol spoken: 127.0.0.1:PORT speaks neither gRPC nor HTTP: it sent "
            "b'SSH-2.0-OpenSSH_9.6\\r\\n'; "
            "give the port of the collector's OTLP receiver"
        ]


@pytest.mark.parametrize(("offset_s", "side"), [(3600, "3600 s ahead of"), (-90, "90 s behind")])
def test_a_clock_that_is_off(doctor: Doctor, offset_s: int, side: str) -> None:
    with HttpServer(offset_s=offset_s) as server:
        assert wrong(doctor(server.url, HTTP)) == [
            f"clock: the clock of the collector is {side} this machine's; let both follow NTP (timedatectl)"
        ]


def test_a_clock_within_five_seconds_is_right(doctor: Doctor) -> None:
    for offset_s in (-4, 4):
        with HttpServer(offset_s=offset_s) as server:
            assert wrong(doctor(server.url, HTTP)) == []


def test_sampled_out(doctor: Doctor, receiver: OtlpReceiver) -> None:
    lines = doctor(receiver.grpc_endpoint, OTEL_TRACES_SAMPLER="always_off")
    assert wrong(lines) == [
        "sampling: OTEL_TRACES_SAMPLER=always_off leaves out every trace of a run (the canary is sent "
        "anyway); "
        "unset it, or set a ratio"
    ]
    assert "ok span accepted: " in lines
    lines = doctor(
        receiver.grpc_endpoint,
        OTEL_TRACES_SAMPLER="traceidratio",
        OTEL_TRACES_SAMPLER_ARG="0.25",
        OTEL_DFLASH_KEEP="slow",
    )
    assert wrong(lines) == []
    assert [line for line in lines if "sampling" in line] == [
        "warn sampling: OTEL_TRACES_SAMPLER=traceidratio 0.25 leaves out traces of a run, except those that "
        "OTEL_DFLASH_KEEP=slow keeps "
        "(the canary is sent anyway); unset it to send all"
    ]


def test_no_route_and_half_a_route(doctor: Doctor, receiver: OtlpReceiver, tmp_path: Path) -> None:
    assert doctor(None, XDG_STATE_HOME=str(tmp_path)) == [
        "warn route: no endpoint is set: runs are recorded, but nothing is sent; "
        "give --endpoint http://localhost:PORT, or set OTEL_EXPORTER_OTLP_ENDPOINT"
    ]
    lines = doctor(receiver.grpc_endpoint, OTEL_METRICS_EXPORTER="none")
    assert (
        lines[0] == "warn route: no metrics are sent: OTEL_METRICS_EXPORTER or the endpoint leaves them out"
    )
    assert "- seen in Prometheus: not checked: the metric was not sent" in lines


def test_two_signals_by_two_routes(doctor: Doctor, receiver: OtlpReceiver) -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": receiver.grpc_endpoint,
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{receiver.http_endpoint}/v1/metrics",
        "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": HTTP,
    }
    lines = doctor(None, None, **variables)  # type: ignore[arg-type]
    assert [line for line in lines if "route" in line or "accepted" in line] == [
        "ok route: traces to http://127.0.0.1:PORT by OTLP over gRPC",
        "ok route: metrics to http://127.0.0.1:PORT/v1/metrics by OTLP over HTTP",
        "ok span accepted: ",
        "ok metric accepted: ",
    ]


def test_what_one_signal_meets_does_not_keep_the_other_from_being_sent(
    doctor: Doctor, receiver: OtlpReceiver
) -> None:
    endpoints = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc_endpoint,
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"http://127.0.0.1:{closed_port()}",
    }
    lines = doctor(None, **endpoints)  # type: ignore[arg-type]
    assert [line.split(":")[0] for line in wrong(lines)] == ["TCP connect"]
    assert "ok span accepted: " in lines
    assert "- seen in Prometheus: not checked: the metric was not sent" in lines
