"""A user's host for the tests of `otel-dflash stack`: a state directory and ports of its own, and no
Docker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from otel_dflash.session import process_start
from otel_dflash.stack.engines import ENGINES, program_path
from otel_dflash.stack.native import NAMES
from otel_dflash.stack.services import SERVICES
from tests.processes import clean_environment, poll
from tests.stack.conftest import end_with_this_process, free_ports

DEADLINE_S = 100
PORTS = [name for service in NAMES for name in SERVICES[service].variables if name.endswith("_PORT")]
NEVER_HEALTHY = "#!/bin/sh\nexec sleep 600\n"
TRAINER = """
import otel_dflash
worker = otel_dflash.start().worker("target", 0)
for _ in range(3):
    with worker.step() as step, worker.forward:
        step.set(tokens=1)
"""


class Host:
    """A user's environment, and what they start in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
        self.environment: dict[str, str] = {
            **clean_environment(),
            **self.ports,
            "XDG_STATE_HOME": str(directory / "state"),
            "OTEL_DFLASH_DIR": str(directory / "runs"),
            "DOCKER_HOST": f"unix://{directory}/no-docker.sock",
            "COLUMNS": "80",
        }
        self.state = directory / "state" / "otel-dflash" / "stack"
        self.begun: list[subprocess.Popen[str]] = []
        self._guards: dict[int, subprocess.Popen[bytes]] = {}

    def begin(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start `otel-dflash` with these arguments."""
        process = subprocess.Popen(
            [sys.executable, "-m", "otel_dflash", *arguments],
            env={**self.environment, **variables},
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.begun.append(process)
        return process

    def run(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr of `otel-dflash`; pids as N."""
        process = self.begin(*arguments, **variables)
        out, err = process.communicate(timeout=DEADLINE_S)
        for pid in set(self.pids().values()) - set(self._guards):
            self._guards[pid] = end_with_this_process(pid)
        return process.returncode, numberless(out), err

    def pids(self) -> dict[str, int]:
        """Return what stack.json says."""
        file = self.state / "stack.json"
        services = json.loads(file.read_text())["services"] if file.exists() else {}
        return {name: service["pid"] for name, service in services.items()}

    def end(self) -> None:
        for process in self.begun:
            process.kill()
            process.communicate()
        for pid in self.pids().values():
            if process_start(pid):
                os.kill(pid, signal.SIGKILL)
        for guard in self._guards.values():
            guard.communicate(timeout=DEADLINE_S)


def numberless(text: str) -> str:
    text = re.sub(r"pid \d+", "pid N", text)
    return re.sub(r"(?m)^(\w+ +(?:healthy|not healthy|ended) +)\d+( +)", r"\1N\2", text)


def stand_in(host: Host, script: str) -> None:
    """Put a `docker` into the host's directory."""
    docker = host.directory / "docker"
    docker.write_text(f"#!/bin/sh\n{script}\n")
    docker.chmod(0o755)


def plant_engines() -> None:
    """Put programs that run and never get healthy where built engines would be."""
    for name in NAMES:
        path = program_path(ENGINES[name])
        path.parent.mkdir(parents=True)
        path.write_text(NEVER_HEALTHY)
        path.chmod(0o755)


@contextmanager
def sleeping(before: str = ":") -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that sleeps, after a shell did `before` in it."""
    with subprocess.Popen(["sh", "-c", f"{before}; exec sleep 600"]) as process:
        poll(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
        try:
            yield process
        finally:
            process.kill()
