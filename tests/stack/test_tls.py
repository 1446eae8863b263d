"""TLS, client certificates and a bearer token, to the real collector: what is sent arrives; a fault is one
line, and costs nothing."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_dflash.stack.engines import collector_directory
from tests.otlp.certificates import Certificates
from tests.otlp_receiver import OtlpReceiver
from tests.processes import clean_environment
from tests.running import DEADLINE_S, TESTS, Running, death, poll, received_by_name, repeated, spans_by_name
from tests.stack.conftest import READ, Stack, Started, configured, free_ports, need_engine

PROTOCOLS = ["grpc", "http/protobuf"]
TOKEN = "c0ffee-5f1e4b"
COMMAND = (sys.executable, "-m", "otel_dflash")
PAGE = (collector_directory().parent / "docs" / "tls.md").read_text()
SNIPPETS = dict(re.findall(r"```yaml\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))


class Secured:
    """A collector that asks for a certificate and a token, behind it a receiver, and the files of both
    sides."""

    def __init__(
        self, stack: Stack, directory: Path, receiver: OtlpReceiver, tier: str = "otelcol", **variables: str
    ) -> None:
        self.certificates = Certificates(directory / "certificates")
        self.receiver = receiver
        self.headers = directory / "headers"
        self.headers.write_text(f"# of the trainers\nauthorization=Bearer {TOKEN}\n")
        token = directory / "token"
        token.write_text(TOKEN)
        certificate, key = self.certificates.issue("server")
        self.client = self.certificates.issue("client", "trainer.example")
        variables = {"OTELCOL_TRACES_ENDPOINT": receiver.http_endpoint} if tier == "otelcol" else variables
        self.collector: Started = stack.start(
            tier,
            service=configured(tier, "tls"),
            OTELCOL_CERT_FILE=certificate,
            OTELCOL_KEY_FILE=key,
            OTELCOL_CLIENT_CA_FILE=self.certificates.authority(),
            OTELCOL_TOKEN_FILE=str(token),
            OTELCOL_METRICS_ENDPOINT=receiver.http_endpoint,
            **variables,
        )

    def environment(self, protocol: str) -> dict[str, str]:
        """Return the variables by which everything arrives."""
        port = "OTELCOL_GRPC_PORT" if protocol == "grpc" else "OTELCOL_HTTP_PORT"
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.collector.url(port).replace("http://", "https://"),
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": self.certificates.authority(),
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": self.client[0],
            "OTEL_EXPORTER_OTLP_CLIENT_KEY": self.client[1],
            "OTEL_DFLASH_OTLP_HEADERS_FILE": str(self.headers),
        }


@pytest.fixture
def secured(stack: Stack, tmp_path: Path) -> Iterator[Secured]:
    with OtlpReceiver() as receiver:
        yield Secured(stack, tmp_path, receiver)
        stack.end()  # while what it sends to is there


def said(running: Running) -> list[str]:
    """Return the remedies in the agent's log, and the lines without one."""
    return [
        found[1] if (found := re.search(r"\(([^()]*)\)$", line)) else line for line in running.log_lines()
    ]


def assert_all_arrives(running: Running, secured: Secured) -> None:
    counts = running.end_trainer()
    assert death(running.agents[-1]) == 0
    assert [running.delivery()[name]["delivered"] for name in ("spans", "metrics")] == [True, True]
    wanted = spans_by_name(counts)
    assert secured.receiver.wait_for(
        lambda receiver: len(receiver.span_ids()) >= sum(wanted.values()), DEADLINE_S
    )
    assert received_by_name(secured.receiver) == wanted
    assert repeated(secured.receiver) == 0


AUTHORITY = (
    "the collector's certificate is not from a trusted authority; name its CA's PEM file in "
    "OTEL_EXPORTER_OTLP_CERTIFICATE"
)
CLIENT = (
    "the collector wants a client certificate that it trusts and that is not expired; "
    "see OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY"
)
REFUSED = (
    "the collector rejects the token; put authorization=Bearer TOKEN into the file of "
    "OTEL_DFLASH_OTLP_HEADERS_FILE"
)
NAME = "the collector's certificate is for another name; use that name, or issue a certificate for this one"
EXPIRED = "the collector's certificate has expired, or this host's clock is wrong"
AGAIN = ": the credentials have changed and were reloaded"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_fault_of_ours_is_one_line_and_once_mended_all_arrives(
    secured: Secured, protocol: str, tmp_path: Path
) -> None:
    """The agent runs on: a file that changes is taken up."""
    ca = tmp_path / "ca.pem"
    ca.write_bytes(Path(secured.certificates.authority("other-ca")).read_bytes())
    good = [Path(name).read_bytes() for name in secured.client]
    secured.certificates.issue("client", "trainer.example", by="other-ca")
    secured.headers.write_text("authorization=Bearer another-token\n")
    with Running(
        tmp_path, **{**secured.environment(protocol), "OTEL_EXPORTER_OTLP_CERTIFICATE": str(ca)}
    ) as running:
        running.start_agent()
        running.start_trainer()
        assert running.ask("steps 20") == "done"
        poll(lambda: said(running)[:1] == [AUTHORITY])
        ca.write_bytes(Path(secured.certificates.authority()).read_bytes())
        poll(lambda: CLIENT in said(running))
        for name, content in zip(secured.client, good, strict=True):
            Path(name).write_bytes(content)
        poll(lambda: REFUSED in said(running))
        assert secured.receiver.spans() == []
        assert running.ask("steps 20") == "done"
        secured.headers.write_text(f"authorization=Bearer {TOKEN}\n")
        assert_all_arrives(running, secured)
        lines = said(running)
        assert [line for line in lines if not line.startswith(": the credentials have changed")] == [
            AUTHORITY,
            CLIENT,
            REFUSED,
        ]
        assert AGAIN in lines
        assert "another-token" not in running.log.read_text()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_fault_of_the_collectors_is_one_line_and_once_mended_all_arrives(
    secured: Secured, protocol: str, tmp_path: Path
) -> None:
    def present(identity: str, days: int) -> None:
        secured.collector.kill()
        secured.certificates.issue("server", identity, days=days)
        secured.collector.start()

    present("collector.example", 1)
    with Running(tmp_path, **secured.environment(protocol)) as running:
        running.start_agent()
        running.start_trainer()
        assert running.ask("steps 20") == "done"
        poll(lambda: said(running)[:1] == [NAME])
        present("127.0.0.1", -1)
        poll(lambda: EXPIRED in said(running))
        assert secured.receiver.spans() == []
        present("127.0.0.1", 1)
        assert running.ask("steps 20") == "done"
        assert_all_arrives(running, secured)
        remedies = [
            line for line in said(running) if "Connection refused" not in line and "Socket closed" not in line
        ]
        assert remedies == [NAME, EXPIRED]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("fault", ["no client certificate", "an expired client certificate", "no token"])
def test_what_is_missing_is_told_in_delivery_json_and_a_replay_delivers(
    secured: Secured, protocol: str, fault: str, tmp_path: Path
) -> None:
    environment = secured.environment(protocol)
    whole = dict(environment)
    if fault == "no client certificate":
        del environment["OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"], environment["OTEL_EXPORTER_OTLP_CLIENT_KEY"]
    elif fault == "no token":
        del environment["OTEL_DFLASH_OTLP_HEADERS_FILE"]
    else:
        names = secured.certificates.issue("old", "trainer.example", days=-1)
        environment["OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"], environment["OTEL_EXPORTER_OTLP_CLIENT_KEY"] = (
            names
        )
    remedy = REFUSED if fault == "no token" else CLIENT
    with Running(tmp_path, **{**environment, "OTEL_DFLASH_EXIT_MS": "300"}) as running:
        running.start_agent()
        running.start_trainer()
        assert running.ask("steps 20") == "done"
        poll(lambda: said(running) == [remedy])
        counts = running.end_trainer()
        assert death(running.agents[-1]) == 0
        for name in ("spans", "metrics"):
            state = running.delivery()[name]
            assert (state["delivered"], state["reason"].endswith(f"({remedy})")) == (False, True), state
        assert secured.receiver.spans() == []
        replayed = subprocess.run(
            [*COMMAND, "replay", str(running.recording)],
            env={**running.environment, **whole},
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert (replayed.returncode, replayed.stderr) == (0, b"")
    wanted = spans_by_name(counts)
    assert secured.receiver.wait_for(
        lambda receiver: len(receiver.span_ids()) >= sum(wanted.values()), DEADLINE_S
    )
    assert received_by_name(secured.receiver) == wanted


def test_a_ca_bundle_of_the_users_counts_where_no_certificate_is_set(
    secured: Secured, tmp_path: Path
) -> None:
    environment = secured.environment("http/protobuf")
    environment["REQUESTS_CA_BUNDLE"] = environment.pop("OTEL_EXPORTER_OTLP_CERTIFICATE")
    with Running(tmp_path, **environment) as running:
        running.start_agent()
        running.start_trainer()
        assert running.ask("steps 20") == "done"
        assert_all_arrives(running, secured)
        assert running.log_lines() == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("place", ["file", "environment"])
def test_a_token_is_shown_nowhere_and_a_ca_bundle_of_the_users_does_not_win(
    secured: Secured, place: str, protocol: str, tmp_path: Path
) -> None:
    environment = clean_environment(**secured.environment(protocol))
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        environment[name] = secured.certificates.authority("other-ca")
    if place == "environment":
        del environment["OTEL_DFLASH_OTLP_HEADERS_FILE"]
        environment["OTEL_EXPORTER_OTLP_HEADERS"] = f"authorization=Bearer {TOKEN}"
    environment["OTEL_DFLASH_EXIT_MS"] = "60000"
    run = subprocess.Popen(
        [
            *COMMAND,
            "run",
            "--run-id",
            "run-1",
            "--dir",
            str(tmp_path),
            "--",
            sys.executable,
            str(TESTS / "counting_trainer.py"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    try:
        assert run.stdin
        assert run.stdout
        assert run.stdout.readline() == b"ready\n"
        run.stdin.write(b"steps 50\n")
        run.stdin.flush()
        assert run.stdout.readline() == b"done\n"
        assert secured.receiver.wait_for(lambda receiver: receiver.spans(), DEADLINE_S)
        trainer = next(
            pid
            for pid, line in command_lines().items()
            if "counting_trainer.py" in line and parent(pid) == run.pid
        )
        assert not {pid: line for pid, line in command_lines().items() if TOKEN in line}
        assert TOKEN.encode() not in Path(f"/proc/{trainer}/environ").read_bytes()
        out, err = run.communicate(b"end\n", timeout=DEADLINE_S)
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == 0
    counts = json.loads(out.splitlines()[-1])
    wanted = spans_by_name(counts)
    assert secured.receiver.wait_for(
        lambda receiver: len(receiver.span_ids()) >= sum(wanted.values()), DEADLINE_S
    )
    assert received_by_name(secured.receiver) == wanted
    assert repeated(secured.receiver) == 0
    written = {str(path): path.read_bytes() for path in (tmp_path / "run-1").rglob("*") if path.is_file()}
    assert {"agent.log", "delivery.json"} <= {Path(name).name for name in written}
    written.update(out=out, err=err)
    assert [name for name, content in written.items() if TOKEN.encode() in content] == []


def test_a_node_sends_to_a_secured_gateway_by_the_snippet_of_the_page(
    stack: Stack, tmp_path: Path, receiver: OtlpReceiver
) -> None:
    secured = Secured(
        stack,
        tmp_path,
        receiver,
        "gateway",
        GATEWAY_BACKENDS=f"[{receiver.grpc_endpoint.removeprefix('http://')}]",
    )
    gateway = secured.collector.url("OTELCOL_HTTP_PORT").replace("http://", "https://")
    snippet = tmp_path / "to-gateway.yaml"
    snippet.write_text(SNIPPETS[snippet.name])
    node = configured("otelcol")
    service = replace(
        node,
        arguments=(*node.arguments, f"--config={snippet}"),
        variables={
            **node.variables,
            **dict(READ.findall(SNIPPETS[snippet.name])),
            "OTELCOL_METRICS_ENDPOINT": "",
        },
    )
    files = {
        **dict(zip(("OTELCOL_CERT_FILE", "OTELCOL_KEY_FILE"), secured.client, strict=True)),
        **{name: secured.collector.values[name] for name in ("OTELCOL_CLIENT_CA_FILE", "OTELCOL_TOKEN_FILE")},
    }
    started = stack.start(
        "otelcol", "node", service, OTELCOL_TRACES_ENDPOINT=gateway, OTELCOL_METRICS_ENDPOINT=gateway, **files
    )
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": started.url("OTELCOL_GRPC_PORT"),
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
    }
    with Running(tmp_path, **variables) as running:
        running.start_agent()
        running.start_trainer()
        assert running.ask("steps 20") == "done"
        assert_all_arrives(running, secured)
        assert running.log_lines() == []
    own = {"service.name": "otelcol"}
    assert receiver.wait_for(
        lambda receiver: any(own.items() <= point.resource.items() for point in receiver.points()), DEADLINE_S
    )
    stack.end()


OVERLAYS = [
    *(((tier, "tls"), ()) for tier in ("otelcol", "gateway", "kafka-node", "tail-sampling")),
    (("otelcol",), ("to-gateway.yaml",)),
    (("otelcol", "tls"), ("to-gateway.yaml",)),
    (("kafka-node",), ("to-kafka.yaml",)),
    (("kafka-node", "tls"), ("to-kafka.yaml",)),
    (("kafka-gateway",), ("from-kafka.yaml",)),
]


@pytest.mark.parametrize(("files", "snippets"), OVERLAYS)
def test_the_collector_takes_each_overlay(
    files: tuple[str, ...], snippets: tuple[str, ...], tmp_path: Path
) -> None:
    for name in snippets:
        (tmp_path / name).write_text(SNIPPETS[name])
    configurations = [
        *(collector_directory() / f"{file}.yaml" for file in files),
        *(tmp_path / name for name in snippets),
    ]
    (tmp_path / "token").write_text(TOKEN)
    result = subprocess.run(
        [
            need_engine("otelcol"),
            "validate",
            *(f"--config={configuration}" for configuration in configurations),
        ],
        env={
            "OTELCOL_TOKEN_FILE": str(tmp_path / "token"),
            "OTELCOL_METRICS_ENDPOINT": "https://localhost:4318",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_every_snippet_of_the_page_is_laid_over_something() -> None:
    assert {name for _, snippets in OVERLAYS for name in snippets} == set(SNIPPETS)


TIERS: dict[str, Any] = {
    path.name: yaml.safe_load(path.read_text())
    for path in collector_directory().glob("*.yaml")
    if "memory_limiter:" in path.read_text()
}
LISTENING = {name for name, content in TIERS.items() if "otlp" in content["receivers"]}


def test_the_overlay_is_said_to_be_for_every_collector_that_listens() -> None:
    said = re.findall(
        r"`([\w-]+\.yaml)`",
        PAGE.partition("`collector/tls.yaml` is laid over ")[2].partition("which take OTLP")[0],
    )
    assert (
        {*said}
        == LISTENING
        == {f"{files[0]}.yaml" for files, snippets in OVERLAYS if files[1:] == ("tls",) and not snippets}
    )
    assert {*TIERS} - LISTENING == {"kafka-gateway.yaml"}
    row = re.search(r"^\| `tls\.yaml` \|.*", (collector_directory() / "README.md").read_text(), re.MULTILINE)
    assert row
    assert row[0].endswith("all but `kafka-gateway.yaml` |")


@pytest.mark.parametrize("tier", sorted(LISTENING))
def test_the_overlay_secures_every_receiver_and_keeps_every_extension_because_a_list_replaces_a_list(
    tier: str,
) -> None:
    overlay = yaml.safe_load((collector_directory() / "tls.yaml").read_text())
    content = TIERS[tier]
    assert overlay["service"]["extensions"] == ["bearertokenauth", *content["service"]["extensions"]]
    assert {*content["receivers"]} == {*overlay["receivers"]}
    protocols, secured = content["receivers"]["otlp"]["protocols"], overlay["receivers"]["otlp"]["protocols"]
    assert {*protocols} == {*secured}
    assert all({*settings} == {"tls", "auth"} for settings in secured.values())


def test_the_snippet_to_a_gateway_keeps_every_extension_with_tls_and_without() -> None:
    snippet = yaml.safe_load(SNIPPETS["to-gateway.yaml"])
    overlay = yaml.safe_load((collector_directory() / "tls.yaml").read_text())
    assert snippet["service"]["extensions"] == overlay["service"]["extensions"]
    assert snippet["extensions"] == overlay["extensions"]


def test_the_pages_way_to_try_it_works_and_leaves_nothing_behind(
    receiver: OtlpReceiver, tmp_path: Path
) -> None:
    need_engine("otelcol")
    (walk,) = [block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "openssl" in block]
    checkout, temporary = tmp_path / "checkout", tmp_path / "temporary"
    checkout.mkdir()
    temporary.mkdir()
    (checkout / "collector").symlink_to(collector_directory())
    ports = dict(
        zip(
            ("OTELCOL_GRPC_PORT", "OTELCOL_HTTP_PORT", "OTELCOL_HEALTH_PORT"),
            map(str, free_ports(3)),
            strict=True,
        )
    )
    result = subprocess.run(
        # ends the collector too
        [
            "timeout",
            "-k",
            "5",
            "100",
            "sh",
            "-c",
            f"{walk}status=$?; pwd; umask; exit $status",
        ],
        cwd=checkout,
        env=clean_environment(
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            TMPDIR=str(temporary),
            XDG_STATE_HOME=str(tmp_path / "state"),
            OTELCOL_TRACES_ENDPOINT=receiver.http_endpoint,
            OTELCOL_METRICS_ENDPOINT=receiver.http_endpoint,
            **ports,
        ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    before = subprocess.run(["sh", "-c", "umask"], capture_output=True, text=True, check=True).stdout
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(f"\nall right\n{checkout}\n{before}"), result.stdout
    assert re.search(r"ok +TLS handshake", result.stdout)
    assert ([path.name for path in checkout.iterdir()], list(temporary.iterdir())) == (["collector"], [])
    with socket.socket() as connection:
        assert connection.connect_ex(("127.0.0.1", int(ports["OTELCOL_GRPC_PORT"]))) != 0, (
            "the collector has ended"
        )


def command_lines() -> dict[int, str]:
    """Return every process's command line."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            found[int(entry.name)] = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
