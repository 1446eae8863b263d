"""The real engines, each started for a test on free ports with the shipped configuration."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from otel_dflash.stack.engines import ENGINES, find
from otel_dflash.stack.services import SERVICES, Service, launch, wait_healthy

DEADLINE_S = 60.0


class Started:
    """A service that runs for a test. It can be killed and started again at the same place."""

    def __init__(self, service: Service, directory: Path, variables: Mapping[str, str]) -> None:
        self.service = service
        self.directory = directory
        ports = free_ports(sum(name.endswith("_PORT") for name in service.variables))
        chosen = {name: str(ports.pop()) for name in service.variables if name.endswith("_PORT")}
        self.variables = {**chosen, **variables}
        self.values = service.values(self.variables, directory / service.name)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Started:
        """Start it and wait until it is healthy."""
        assert self.process is None
        self.process = launch(self.service, self.directory, self.variables)
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

    def prepare(self, name: str, directory: str = "", service: Service | None = None, **variables: str) -> Started:
        """Return a service with ports of its own that is not started yet; `directory` tells two of one name apart."""
        service = service or SERVICES[name]
        need_engine(service.engine.name)
        started = Started(service, self._directory / (directory or "stack"), variables)
        self._started.append(started)
        return started

    def start(self, name: str, directory: str = "", service: Service | None = None, **variables: str) -> Started:
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


def need_engine(name: str) -> Path:
    """Return the path of a built engine; without it the test is skipped, and with CI=true it fails."""
    path = find(ENGINES[name])
    if path is None:
        remedy = f"{name} {ENGINES[name].version} is not built here; build it: make engines"
        if os.environ.get("CI") == "true":
            pytest.fail(remedy)
        pytest.skip(remedy)
    return path


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
