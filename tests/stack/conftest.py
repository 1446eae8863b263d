"""The real engines, each started for a test on free ports with the shipped configuration."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from otel_dflash.stack.engines import ENGINES, collector_directory, find
from otel_dflash.stack.native import NAMES
from otel_dflash.stack.services import SERVICES, Service, launch, wait_healthy
from tests.stack.kafka_build import KAFKA

if TYPE_CHECKING:
    from tests.stack.host import Host

DEADLINE_S = 60.0
BUILT: Final = {**ENGINES, KAFKA.name: KAFKA}
"""What `make engines` builds: the shipped engines, and Kafka for its tests."""
NOWHERE: Final = "http://127.0.0.1:1"
"""Where nobody listens: what a test does not look at must not reach an engine that happens to run here."""
READ: Final = re.compile(r"\$\{env:(\w+)(?::-([^}]*))?\}")
"""A variable that a configuration reads, and its default."""
_KILL_ORPHAN: Final = """
import os, select, signal, sys
process = os.pidfd_open(int(sys.argv[1]))
if sys.stdin in select.select([sys.stdin, process], [], [])[0]:
    signal.pidfd_send_signal(process, signal.SIGKILL)
"""


class Started:
    """A service that runs for a test, and not longer. It can be killed and started again at the same place.

    Whatever it sends goes nowhere, unless `variables` say where.
    """

    def __init__(self, service: Service, directory: Path, variables: Mapping[str, str]) -> None:
        self.service = service
        self.directory = directory
        ports = free_ports(sum(name.endswith("_PORT") for name in service.variables))
        chosen = {name: str(ports.pop()) for name in service.variables if name.endswith("_PORT")}
        nowhere = {name: NOWHERE for name in service.variables if name.endswith(("_ENDPOINT", "_URL"))}
        self.variables = {**chosen, **nowhere, **variables}
        self.values = service.values(self.variables, directory / service.name)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Started:
        """Start it and wait until it is healthy."""
        assert self.process is None
        self.process = launch(self.service, self.directory, self.variables)
        self._guard = end_with_this_process(self.process.pid)
        try:
            wait_healthy(self.service, self.process, self.directory, self.variables)
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """End it as a crash would."""
        self.end(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> None:
        """End it by a signal."""
        assert self.process
        self.process.send_signal(number)
        self.process.wait(DEADLINE_S)
        self.process = None
        self._guard.communicate(timeout=DEADLINE_S)

    def url(self, port: str) -> str:
        """Return http://host:port of one of its ports, such as OTELCOL_GRPC_PORT."""
        host = next(value for name, value in self.values.items() if name.endswith("_HOST"))
        return f"http://{host}:{self.values[port]}"

    @property
    def log(self) -> str:
        return (self.directory / f"{self.service.name}.log").read_text(errors="replace")


class Stack:
    """Starts services and ends them after the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[Started] = []

    def prepare(
        self, name: str, directory: str = "", service: Service | None = None, **variables: str
    ) -> Started:
        """Return a service with ports of its own that is not started yet; `directory` tells two of one name
        apart."""
        service = service or SERVICES[name]
        need_engine(service.engine.name)
        started = Started(service, self._directory / (directory or "stack"), variables)
        self._started.append(started)
        return started

    def start(
        self, name: str, directory: str = "", service: Service | None = None, **variables: str
    ) -> Started:
        """Return a healthy service."""
        return self.prepare(name, directory, service, **variables).start()

    def end(self) -> None:
        for started in reversed(self._started):
            if started.process:
                started.kill()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Services of this test: ``stack.start("jaeger")``."""
    stack = Stack(tmp_path)
    yield stack
    stack.end()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A user's host for `otel-dflash stack`."""
    from tests.stack.host import Host

    host = Host(tmp_path)
    yield host
    host.end()


@pytest.fixture
def engines(host: Host) -> Host:
    """A host where the engines are built."""
    for name in NAMES:
        need_engine(name)
    return host


@pytest.fixture
def planted(host: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host whose engines run but never get healthy."""
    from tests.stack.host import plant_engines

    monkeypatch.setenv("XDG_CACHE_HOME", str(host.directory / "cache"))
    host.environment["XDG_CACHE_HOME"] = str(host.directory / "cache")
    plant_engines()
    return host


def configured(name: str, *laid_over: str) -> Service:
    """Return a collector with another file of collector/ than otelcol.yaml, or with more than one; its
    variables are what they read."""
    node = SERVICES["otelcol"]
    files = [f"{file}.yaml" for file in (name, *laid_over)]
    variables = {
        name: default
        for file in files
        for name, default in READ.findall((collector_directory() / file).read_text())
    }
    arguments = tuple(f"--config={{config}}/{file}" for file in files)
    return Service(
        name, node.engine, arguments, {**variables, "OTELCOL_STORAGE": "{storage}"}, node.health, {}
    )


def need_engine(name: str) -> Path:
    """Return the path of a built engine; without it the test is skipped, and with CI=true it fails."""
    path = find(BUILT[name])
    if path is None:
        remedy = f"{name} {BUILT[name].version} is not built here; build it: make engines"
        if os.environ.get("CI") == "true":
            pytest.fail(remedy)
        pytest.skip(remedy)
    return path


def end_with_this_process(pid: int) -> subprocess.Popen[bytes]:
    """Have a process killed when this one ends, however it ends: an engine has a session of its own, and
    would outlive a killed test run.

    Return the guard; it ends with either of them.
    """
    command = [sys.executable, "-ISc", _KILL_ORPHAN, str(pid)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)


def free_ports(count: int) -> list[int]:
    """Return ports nobody listens at now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
