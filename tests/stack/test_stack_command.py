"""`otel-dflash stack`: what a user types, reads, and finds running. Each test has a state directory and ports
of its own, and no Docker."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import pytest

from otel_dflash.session import process_start
from otel_dflash.stack.engines import ENGINES
from otel_dflash.stack.native import NAMES
from tests.processes import poll
from tests.stack.conftest import free_ports
from tests.stack.host import DEADLINE_S, PORTS, TRAINER, Host, numberless
from tests.stack.jaeger_api import Jaeger


def addresses(ports: Mapping[str, str]) -> str:
    return f"""
OTLP over gRPC  http://127.0.0.1:{ports["OTELCOL_GRPC_PORT"]}
OTLP over HTTP  http://127.0.0.1:{ports["OTELCOL_HTTP_PORT"]}
Jaeger          http://127.0.0.1:{ports["JAEGER_QUERY_HTTP_PORT"]}
Prometheus      http://127.0.0.1:{ports["PROMETHEUS_PORT"]}
Built from their modules, Jaeger and Prometheus have no user interface, only their APIs; their container images have both.

send it a run: otel-dflash run --stack -- python train.py
"""


def lines(word: str) -> str:
    return "".join(f"{name} {ENGINES[name].version} {word}: pid N\n" for name in NAMES)


def test_up_twice_is_up_once_status_shows_it_and_down_ends_it(engines: Host) -> None:
    assert engines.run("stack", "up") == (0, lines("is running") + addresses(engines.ports), "")
    pids = engines.pids()
    assert engines.run("stack", "up") == (0, lines("is already running") + addresses(engines.ports), "")
    assert engines.pids() == pids
    assert engines.state.stat().st_mode & 0o777 == 0o700

    code, out, err = engines.run("stack", "status")
    ports = engines.ports
    assert (code, err) == (0, "")
    assert [re.split(r"  +", line) for line in out.splitlines()[2:]] == [
        ["prometheus", "healthy", "N", "3.16.0", f"http://127.0.0.1:{ports['PROMETHEUS_PORT']}"],
        ["jaeger", "healthy", "N", "2.13.0", f"http://127.0.0.1:{ports['JAEGER_QUERY_HTTP_PORT']}"],
        [
            "otelcol",
            "healthy",
            "N",
            "0.161.0",
            *(f"http://127.0.0.1:{ports[f'OTELCOL_{kind}_PORT']}" for kind in ("GRPC", "HTTP")),
        ],
    ]

    kept = f"data and logs are kept in {engines.state}; remove them: otel-dflash stack down --volumes\n"
    assert engines.run("stack", "down") == (
        0,
        "otelcol stopped\njaeger stopped\nprometheus stopped\n" + kept,
        "",
    )
    assert [pid for pid in pids.values() if process_start(pid)] == []
    assert engines.run("stack", "status")[0] == 1
    assert engines.run("stack", "down") == (0, "nothing to stop\n", "")
    assert (engines.state / "jaeger" / "keys").is_dir()
    removed = f"data and logs removed from {engines.state}\n"
    assert engines.run("stack", "down", "--volumes") == (0, f"nothing to stop\n{removed}", "")
    assert list(engines.state.iterdir()) == []


def test_a_service_that_died_is_started_again_where_it_was_and_the_others_are_left_alone(
    engines: Host,
) -> None:
    engines.run("stack", "up")
    pids = engines.pids()
    os.kill(pids["jaeger"], signal.SIGKILL)
    poll(lambda: process_start(pids["jaeger"]) is None)
    assert re.findall(r"^\w+ +(\w+)", engines.run("stack", "status")[1], re.MULTILINE) == [
        "state",
        "healthy",
        "ended",
        "healthy",
    ]
    for name in PORTS:  # another shell, where nobody chose ports
        del engines.environment[name]
    version = {name: ENGINES[name].version for name in NAMES}
    again = f"prometheus {version['prometheus']} is already running: pid N\njaeger {version['jaeger']} is running: pid N\n"
    again += f"otelcol {version['otelcol']} is already running: pid N\n"
    assert engines.run("stack", "up") == (0, again + addresses(engines.ports), "")
    assert {name: pid for name, pid in engines.pids().items() if name != "jaeger"} == {
        name: pid for name, pid in pids.items() if name != "jaeger"
    }
    assert engines.run("stack", "status")[0] == 0


def test_two_at_once_start_one_stack(engines: Host) -> None:
    both = [engines.begin("stack", "up") for _ in range(2)]
    said = [process.communicate(timeout=DEADLINE_S) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(
        numberless(out).replace("another command is starting or stopping the stack; waiting for it\n", "")
        for out, _ in said
    ) == sorted(
        [
            lines("is running") + addresses(engines.ports),
            lines("is already running") + addresses(engines.ports),
        ]
    )
    assert engines.run("stack", "status")[0] == 0


def test_a_busy_port_is_one_line_and_what_was_started_before_it_is_stopped(engines: Host) -> None:
    port = engines.ports["OTELCOL_HTTP_PORT"]
    with socket.create_server(("127.0.0.1", int(port))):
        code, out, err = engines.run("stack", "up")
    other = int(port) + 20_000 if int(port) < 45_000 else int(port) - 20_000
    assert (code, err) == (
        1,
        f"otel-dflash: otelcol cannot listen at 127.0.0.1:{port}: address already in use; "
        f"stop what listens there (ss -ltnp), or choose another port: OTELCOL_HTTP_PORT={other}\n",
    )
    assert (
        out
        == lines("is running").partition("otelcol")[0]
        + "stopped what this command had started: prometheus, jaeger\n"
    )
    assert engines.pids() == {}
    assert engines.run("stack", "up")[0] == 0


def test_a_service_that_does_not_start_is_said_with_the_end_of_its_log(engines: Host) -> None:
    (engines.state / "jaeger").mkdir(parents=True)
    (engines.state / "jaeger" / "keys").touch()
    code, out, err = engines.run("stack", "up")
    assert (code, out) == (
        1,
        lines("is running").partition("jaeger")[0]
        + "stopped what this command had started: prometheus, jaeger\n",
    )
    assert err.startswith(
        f"otel-dflash: jaeger ended before it was healthy; the end of {engines.state}/jaeger.log:\n  "
    )
    assert "badger" in err
    assert engines.pids() == {}


def test_what_runs_with_other_settings_is_not_taken_for_what_was_asked(engines: Host) -> None:
    engines.run("stack", "up")
    port = engines.ports["OTELCOL_GRPC_PORT"]
    free = str(free_ports(1)[0])
    said = (
        f"otel-dflash: otelcol is running with OTELCOL_GRPC_PORT={port}, not {free}; stop it first: otel-dflash "
        "stack down\n"
    )
    assert engines.run("stack", "up", OTELCOL_GRPC_PORT=free) == (1, "", said)
    said = (
        "otel-dflash: the stack is already running as processes of built engines; stop it first: otel-dflash "
        "stack down\n"
    )
    assert engines.run("stack", "up", "--docker") == (1, "", said)
    assert engines.run("stack", "status")[0] == 0


def test_a_run_brings_the_stack_up_and_its_spans_into_jaeger(engines: Host) -> None:
    variables = {
        "OTEL_DFLASH_EXIT_MS": "30000",
        "http_proxy": "http://127.0.0.1:1",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1",
    }
    code, out, err = engines.run(
        "run", "--stack", "--run-id", "run-1", "--", sys.executable, "-c", TRAINER, **variables
    )
    assert (code, out) == (0, ""), err
    said = numberless(err).splitlines()
    assert said[:4] == [
        *(f"otel-dflash: {line}" for line in lines("is running").splitlines()),
        "otel-dflash: recording run-1 in runs/run-1",
    ]
    views = f"Jaeger http://127.0.0.1:{engines.ports['JAEGER_QUERY_HTTP_PORT']}, Prometheus http://127.0.0.1:{engines.ports['PROMETHEUS_PORT']}"
    assert said[-1] == f"otel-dflash: the stack stays up (otel-dflash stack down stops it): {views}"
    jaeger = Jaeger(f"http://127.0.0.1:{engines.ports['JAEGER_QUERY_HTTP_PORT']}")
    poll(lambda: jaeger.get("/api/services")["data"] == ["dflash-target"])


def test_a_password_in_an_inherited_endpoint_is_refused_before_the_stack_comes_up(planted: Host) -> None:
    code, out, err = planted.run(
        "run", "--stack", "--", "true", OTEL_EXPORTER_OTLP_ENDPOINT="http://me:geheim@collector:4317"
    )
    assert (code, out) == (2, "")
    assert err.startswith("otel-dflash: OTEL_EXPORTER_OTLP_ENDPOINT holds a user or a password, ")
    assert err.count("\n") == 1
    assert not planted.state.exists()


def test_stack_and_endpoint_are_a_usage_error(host: Host) -> None:
    said = (
        "otel-dflash: --stack and --endpoint name two destinations; give only one of them (see: "
        "otel-dflash run --help)\n"
    )
    assert host.run("run", "--stack", "--endpoint", "http://localhost:4317", "--", "true") == (2, "", said)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_an_interrupted_up_stops_what_it_started(number: signal.Signals, code: int, planted: Host) -> None:
    interrupted = planted.begin("stack", "up")
    poll(planted.pids)
    pid = planted.pids()["prometheus"]
    assert process_start(pid)
    interrupted.send_signal(number)
    out, err = interrupted.communicate(timeout=DEADLINE_S)
    assert (interrupted.returncode, out) == (
        code,
        "stopped what this command had started: prometheus\n",
    )
    assert err.strip() == ""
    assert process_start(pid) is None
    assert planted.pids() == {}


def test_neither_engines_nor_docker_is_one_line_with_the_remedies(host: Host) -> None:
    said = (
        "otel-dflash: not built here: prometheus jaeger otelcol; build, once, about 22 minutes: "
        "otel-dflash stack build prometheus jaeger otelcol. Nor can Docker run it: docker is not on PATH\n"
    )
    nowhere = {"XDG_CACHE_HOME": str(host.directory), "PATH": str(host.directory)}
    assert host.run("stack", "up", **nowhere) == (1, "", said)
    assert host.run("run", "--stack", "--", "/bin/true", **nowhere) == (1, "", said)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"JAEGER_HTTP_PORT": "http"},
            "JAEGER_HTTP_PORT must be a port from 1 to 65535, got 'http'; unset it for 14318",
        ),
        (
            {"JAEGER_HTTP_PORT": "4318", "OTELCOL_HTTP_PORT": "4318"},
            "JAEGER_HTTP_PORT and OTELCOL_HTTP_PORT are both 4318; choose another for one of them",
        ),
    ],
)
def test_a_port_that_cannot_work_is_a_usage_error(
    variables: dict[str, str], said: str, planted: Host
) -> None:
    assert planted.run("stack", "up", **variables) == (2, "", f"otel-dflash: {said}\n")


def test_a_state_directory_that_cannot_be_written_is_one_line(host: Host) -> None:
    (host.directory / "file").touch()
    place = host.directory / "file"
    said = f"otel-dflash: {place}/otel-dflash/stack cannot hold the stack's data: not a directory; "
    said += "set XDG_STATE_HOME to a directory that you can write\n"
    assert host.run("stack", "up", "--native", XDG_STATE_HOME=str(place)) == (1, "", said)


def test_a_full_disk_is_one_line_and_nothing_is_started(planted: Host) -> None:
    place = planted.directory / "small"
    place.mkdir()
    own_user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    up = (
        f"mount -t tmpfs -o size=8m tmpfs {place} || exit 99; exec {sys.executable} -m otel_dflash stack "
        "up --native"
    )
    environment = {**planted.environment, "XDG_STATE_HOME": str(place)}
    command = ["unshare", *own_user, "--mount", "sh", "-c", up]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if result.returncode == 99 or result.stderr.startswith("unshare:"):
        pytest.skip(f"this machine allows no tmpfs of our own: {result.stderr.strip()}")
    assert (result.returncode, result.stdout, result.stderr) == (
        1,
        "",
        f"otel-dflash: {place}/otel-dflash/stack has 8 MiB free, and the stack needs 256 MiB to start; "
        "free some space, or set XDG_STATE_HOME to a larger disk\n",
    )
