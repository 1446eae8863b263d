"""`otel-dflash stack` with Docker: a stand-in notes what it is asked and says what containers there are.
Whether the file is right is tests/collector/test_compose.py's part."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from otel_dflash.stack.engines import ENGINES, collector_directory
from otel_dflash.stack.native import NAMES
from tests.stack.conftest import free_ports
from tests.stack.host import PORTS, Host, stand_in

COMPOSE_FILE = collector_directory() / "compose.yaml"
GATEWAY_FILE = collector_directory() / "compose.gateway.yaml"
OTHERS = {
    "GRAFANA_ADMIN_PASSWORD": "secret",
    "JAEGER_PROMETHEUS_URL": "http://mimir:9009",
    "OTELCOL_MEMORY_MIB": "4096",
    "OTELCOL_METRICS_ENDPOINT": "http://mimir:9009/otlp",
    "OTELCOL_QUEUE_BYTES": "1000000000",
    "OTELCOL_TRACES_ENDPOINT": "http://tempo:4318",
}
"""What compose.yaml reads besides ports."""
SCRIPT = """
echo "$@" >> {directory}/asked
case "$*" in
    *--images*) echo "a:1"; echo "b:2";;
    ps*) cat {directory}/containers;;
    info*) cat {directory}/root;;
    *" up "*) env >> {directory}/given; echo >> {directory}/given;;
esac
"""


class Docker:
    """The stand-in, on a host without built engines."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.grafana_port = str(free_ports(1)[0])
        self._directory = host.directory
        stand_in(host, SCRIPT.format(directory=host.directory))
        host.environment |= {
            "PATH": f"{host.directory}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(host.directory),
        }
        (host.directory / "root").write_text(f"{host.directory}/in-a-virtual-machine")
        self.has()

    def has(self, *files: Path, ports: str = "") -> None:
        """From now on there are containers made from these files, and one of them publishes ports."""
        label = ",".join(map(str, files))
        (self._directory / "containers").write_text(f"{label}\t{ports}\n{label}\t\n" if files else "")

    def is_full(self) -> None:
        """From now on Docker's data lies where nothing is free."""
        (self._directory / "root").write_text("/proc")

    @property
    def asked(self) -> list[str]:
        file = self._directory / "asked"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def changes(self) -> list[str]:
        """What it was asked that changes what runs."""
        return [
            line.partition(f"{COMPOSE_FILE} ")[2] for line in self.asked if re.search(r" (up|down)\b", line)
        ]

    @property
    def given(self) -> list[dict[str, str]]:
        """What each `up` got of compose.yaml's variables, and the project's name."""
        environments = (self._directory / "given").read_text().split("\n\n")[:-1]
        pairs = [dict(line.partition("=")[::2] for line in one.splitlines()) for one in environments]
        return [
            {
                name: value
                for name, value in one.items()
                if name in {*PORTS, "GRAFANA_PORT", *OTHERS, "COMPOSE_PROJECT_NAME"}
            }
            for one in pairs
        ]


@pytest.fixture
def docker(host: Host) -> Iterator[Docker]:
    return Docker(host)


def addresses(docker: Docker) -> str:
    ports = docker.host.ports
    return f"""
OTLP over gRPC  http://127.0.0.1:{ports["OTELCOL_GRPC_PORT"]}
OTLP over HTTP  http://127.0.0.1:{ports["OTELCOL_HTTP_PORT"]}
Jaeger          http://127.0.0.1:{ports["JAEGER_QUERY_HTTP_PORT"]}
Prometheus      http://127.0.0.1:{ports["PROMETHEUS_PORT"]}
Grafana         http://127.0.0.1:{docker.grafana_port}

send it a run: otel-dflash run --stack -- python train.py
"""


@pytest.mark.parametrize(
    ("docker", "reason", "way"),
    [
        ("echo not running >&2; exit 1", "the Docker daemon does not answer (not running)", "--docker"),
        (
            "test $1 != compose || { echo unknown command >&2; exit 1; }",
            "Docker has no Compose plugin (unknown command)",
            "--docker",
        ),
        (
            "test $1 != image",
            f"its images are not here yet; fetch them: docker compose --file {COMPOSE_FILE} pull",
            "",
        ),
    ],
)
def test_why_docker_cannot_run_it_is_said(docker: str, reason: str, way: str, host: Host) -> None:
    stand_in(host, docker)
    variables = {"XDG_CACHE_HOME": str(host.directory), "PATH": f"{host.directory}:{os.environ['PATH']}"}
    code, out, err = host.run("stack", "up", **variables)
    assert (code, out) == (1, "")
    assert err.endswith(
        f"otel-dflash stack build prometheus jaeger otelcol. Nor can Docker run it: {reason}\n"
    )
    if way:
        remedy = "start Docker, or use the built engines: otel-dflash stack up --native"
        assert host.run("stack", "up", way, **variables) == (
            1,
            "",
            f"otel-dflash: Docker cannot run the stack: {reason}; {remedy}\n",
        )
        assert host.pids() == {}


def test_where_docker_answers_and_has_the_images_compose_is_asked(docker: Docker) -> None:
    host = docker.host
    assert host.run("stack", "up", GRAFANA_PORT=docker.grafana_port) == (0, addresses(docker), "")
    rows = [line.split() for line in host.run("stack", "status")[1].splitlines()[2:]]
    assert [row[:4] for row in rows] == [[name, "not", "healthy", ENGINES[name].version] for name in NAMES]
    looked_at = ("PROMETHEUS_PORT", "JAEGER_QUERY_HTTP_PORT", "OTELCOL_GRPC_PORT")
    assert [row[4] for row in rows] == [f"http://127.0.0.1:{host.ports[name]}" for name in looked_at]
    assert host.run("stack", "down", "--volumes") == (0, "", "")
    assert host.run("stack", "down") == (0, "nothing to stop\n", "")
    compose = f"compose --file {COMPOSE_FILE}"
    label = '{{.Label "com.docker.compose.project.config_files"}}'
    ps = f"ps --all --filter label=com.docker.compose.project=otel-dflash --format {label}\t{{{{.Ports}}}}"
    assert docker.asked == [
        "version --format {{.Server.Version}}",
        f"{compose} config --images",
        "image inspect --format {{.Id}} a:1 b:2",
        ps,
        "info --format {{.DockerRootDir}}",
        f"{compose} up --detach --wait",
        ps,
        f"{compose} down --volumes",
    ]


def test_containers_keep_what_they_were_given_when_another_shell_gives_nothing(docker: Docker) -> None:
    host = docker.host
    given = {**host.ports, "GRAFANA_PORT": docker.grafana_port, **OTHERS}
    assert sorted(given) == sorted(re.findall(r"\$\{?(\w+)", COMPOSE_FILE.read_text())), (
        "what compose.yaml reads"
    )
    assert host.run("stack", "up", **given) == (0, addresses(docker), "")
    first, *others = host.ports.values()
    held = [
        f"127.0.0.1:{int(first) - 1}-{first}->4317-4318/tcp",
        *(f"127.0.0.1:{port}->1/tcp" for port in (*others, docker.grafana_port)),
    ]
    docker.has(COMPOSE_FILE, ports=", ".join(held))
    for name in PORTS:
        del host.environment[name]
    with ExitStack() as sockets:
        for port in (*host.ports.values(), docker.grafana_port):  # as containers do
            sockets.enter_context(socket.create_server(("127.0.0.1", int(port))))
        assert host.run("stack", "up") == (0, addresses(docker), "")
        assert host.run("stack", "up", OTELCOL_MEMORY_MIB="4096", GRAFANA_PORT="") == (
            0,
            addresses(docker),
            "",
        )
        assert host.run("stack", "up", COMPOSE_PROJECT_NAME="mine") == (0, addresses(docker), "")
        assert host.run("run", "--stack", "--quiet", "--", "true", OTEL_DFLASH_EXIT_MS="100")[0] == 0
    project = re.findall(r"(?m)^name: (.*)", COMPOSE_FILE.read_text())[0]
    assert docker.given == [{**given, "COMPOSE_PROJECT_NAME": project}] * 5


def test_other_settings_than_those_it_runs_with_are_refused_and_taken_once_it_is_down(docker: Docker) -> None:
    host = docker.host
    chosen = {"OTELCOL_MEMORY_MIB": "2048", "GRAFANA_ADMIN_PASSWORD": "better"}
    host.run("stack", "up", GRAFANA_PORT=docker.grafana_port)
    docker.has(COMPOSE_FILE, ports=f"127.0.0.1:{docker.grafana_port}->3000/tcp")
    for name, value in chosen.items():
        said = (
            f"otel-dflash: the containers run with another {name} than the one given; stop them first: "
            "otel-dflash stack down\n"
        )
        assert host.run("stack", "up", **{name: value}) == (1, "", said)
    assert host.run("stack", "up", OTELCOL_MEMORY_MIB="1024") == (0, addresses(docker), ""), (
        "the default, as it runs"
    )
    docker.has(COMPOSE_FILE)  # stopped, as after a boot
    assert host.run("stack", "up", **chosen) == (0, addresses(docker), "")
    assert {**docker.given[-1], **chosen, "GRAFANA_PORT": docker.grafana_port} == docker.given[-1]


@pytest.mark.parametrize("files", [(COMPOSE_FILE,), (COMPOSE_FILE, GATEWAY_FILE)])
def test_containers_that_somebody_else_started_are_left_alone(
    files: tuple[Path, ...], docker: Docker
) -> None:
    docker.has(*files)
    for command in (["stack", "up"], ["stack", "up", "--docker"], ["run", "--stack", "--", "true"]):
        assert docker.host.run(*command) == (1, "", foreign(*files))
    assert docker.host.run("stack", "down", "--volumes")[:2] == (
        0,
        f"nothing to stop\ndata and logs removed from {docker.host.state}\n",
    )
    assert docker.changes == []


def test_what_was_laid_over_the_containers_is_left_alone(docker: Docker) -> None:
    docker.host.run("stack", "up", GRAFANA_PORT=docker.grafana_port)
    docker.has(COMPOSE_FILE, GATEWAY_FILE)
    for command in ("up", "down"):
        assert docker.host.run("stack", command) == (1, "", foreign(COMPOSE_FILE, GATEWAY_FILE))
    assert docker.changes == ["up --detach --wait"]
    docker.has()
    assert docker.host.run("stack", "down") == (0, "", "")


def foreign(*files: Path) -> str:
    named = " ".join(f"--file {file}" for file in files)
    return (
        f"otel-dflash: there are containers of {', '.join(map(str, files))} that `otel-dflash stack` "
        "did not start and leaves alone; "
        f"send to them with --endpoint, or remove them, which keeps their data: docker compose {named} down\n"
    )


def test_a_busy_port_is_one_line_and_no_container_is_started(docker: Docker) -> None:
    port = int(docker.grafana_port)
    with socket.create_server(("127.0.0.1", port)):
        said = docker.host.run("stack", "up", GRAFANA_PORT=docker.grafana_port)
    other = port + 20_000 if port < 45_000 else port - 20_000
    assert said == (
        1,
        "",
        f"otel-dflash: Docker cannot publish 127.0.0.1:{port}: address already in use; "
        f"stop what listens there (ss -ltnp), or choose another port: GRAFANA_PORT={other}\n",
    )
    assert docker.changes == []
    assert docker.host.run("stack", "down") == (0, "nothing to stop\n", "")


def test_a_full_disk_of_docker_is_one_line_and_no_container_is_started(docker: Docker) -> None:
    docker.is_full()
    said = (
        "/proc has 0 MiB free, and the stack needs 256 MiB to start; free some space; docker system "
        "df shows what uses it"
    )
    assert docker.host.run("stack", "up") == (1, "", f"otel-dflash: {said}\n")
    assert docker.changes == []


def test_a_port_that_cannot_work_is_a_usage_error(docker: Docker) -> None:
    said = "GRAFANA_PORT must be a port from 1 to 65535, got 'http'; unset it for 3000"
    assert docker.host.run("stack", "up", GRAFANA_PORT="http") == (2, "", f"otel-dflash: {said}\n")
    assert docker.changes == []


def test_without_docker_what_it_runs_cannot_be_stopped_and_how_to_forget_it_is_said(docker: Docker) -> None:
    docker.host.run("stack", "up", GRAFANA_PORT=docker.grafana_port)
    stand_in(docker.host, "echo no daemon >&2; exit 1")
    said = "otel-dflash: Docker cannot list its containers (no daemon); if Docker is gone for good: rm "
    assert docker.host.run("stack", "down") == (1, "", f"{said}{docker.host.state}/stack.json\n")
