"""The stack as containers: Docker Compose with collector/compose.yaml, if Docker and the images are here."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from otel_dflash.stack import native, state
from otel_dflash.stack.engines import EngineError, collector_directory
from otel_dflash.stack.services import another_port, try_port
from otel_dflash.stack.state import Stack

ANSWER_S: Final = 10.0
"""How long Docker may take to answer a question about itself."""

_PROJECT: Final = "otel-dflash"  # as compose.yaml names it
_VARIABLE: Final = re.compile(r"\$\{(\w+):-([^}]*)\}")
_CONTAINERS: Final = (
    *("ps", "--all", "--filter", f"label=com.docker.compose.project={_PROJECT}"),
    *("--format", '{{.Label "com.docker.compose.project.config_files"}}\t{{.Ports}}'),
)
_PUBLISHED: Final = re.compile(r":(\d+)(?:-(\d+))?->")  # 127.0.0.1:4317-4318->4317-4318/tcp


class Containers(NamedTuple):
    """The containers of the project, whoever started them."""

    files: tuple[str, ...]
    """The compose files that they were started from, several when some are laid over the first; empty when
    there are no containers."""
    ports: frozenset[int]
    """The published ports of the running ones."""

    def foreign(self, started: bool) -> str | None:
        """Return what to do about containers that are not ours; None when there are none.

        `started`: whether we have started containers.
        """
        if not self.files or (started and {Path(one).name for one in self.files} == {file().name}):
            return None
        remove = shlex.join(
            ["docker", "compose", *(word for one in self.files for word in ("--file", one)), "down"]
        )
        return (
            f"there are containers of {', '.join(self.files)} that `otel-dflash stack` did not start "
            "and leaves alone; "
            f"send to them with --endpoint, or remove them, which keeps their data: {remove}"
        )


def file() -> Path:
    """Return the compose file."""
    return collector_directory() / "compose.yaml"


def defaults() -> dict[str, str]:
    """Return the variables that the compose file reads, with their defaults."""
    return dict(_VARIABLE.findall(file().read_text()))


def problem(*, may_fetch: bool) -> str | None:
    """Return why Docker cannot run the stack now, None when it can. Unless it may fetch images, they must all
    be here."""
    if shutil.which("docker") is None:
        return "docker is not on PATH"
    code, version = _ask("version", "--format", "{{.Server.Version}}")
    if code:
        return f"the Docker daemon does not answer ({version})"
    code, images = _ask(*_compose("config", "--images"))
    if code:
        return f"Docker has no Compose plugin ({images})"
    if not may_fetch and _ask("image", "inspect", "--format", "{{.Id}}", *images.split())[0]:
        return f"its images are not here yet; fetch them: docker {' '.join(_compose('pull'))}"
    return None


def up(environment: Mapping[str, str]) -> dict[str, str]:
    """Start the containers, wait until they are healthy, and return the variables. The caller holds the lock.

    A variable has the value of the environment, else the one the containers were started with, else the
    default; so a second call changes nothing.

    Raises:
        ConfigError: A port is not a number from 1 to 65535, or two are the same.
        EngineError: Containers run that are not ours or have other settings, a port is busy, the disk is
            full, or Docker Compose failed.
    """
    recorded = state.read().compose
    known = defaults()
    given = {name: environment[name] for name in known if environment.get(name)}
    before = {**known, **(recorded or {})}
    values = {**before, **given}
    native.check_ports(values, known)
    containers = _containers()
    if foreign := containers.foreign(recorded is not None):
        raise EngineError(foreign)
    if containers.ports:
        for name in given:
            if given[name] != before[name]:  # without the values: one may be a password
                raise EngineError(
                    f"the containers run with another {name} than the one given; stop them first: "
                    "otel-dflash stack down"
                )
    _require_room_and_ports(values, containers)
    own = {**(recorded or {}), **given}
    state.write(Stack(compose=own))  # before: a call that fails leaves something for `down`
    _run("up", "--detach", "--wait", variables=own)
    return values


def down(*, volumes: bool) -> None:
    """Stop and remove the containers, and with `volumes` their data. The caller holds the lock.

    Raises:
        EngineError: The containers were started from other files too, or Docker failed; Compose printed why.
    """
    try:
        if not (foreign := _containers().foreign(started=True)):
            _run("down", *(["--volumes"] if volumes else []))
    except EngineError as error:
        raise EngineError(
            f"{error}; if Docker is gone for good: rm {state.directory() / state.STACK_FILE}"
        ) from None
    if foreign:
        raise EngineError(foreign)
    state.write(Stack())


def _containers() -> Containers:
    code, output = _ask(*_CONTAINERS)
    if code:
        raise EngineError(f"Docker cannot list its containers ({output})")
    rows = [line.partition("\t") for line in output.splitlines()]
    files = max((label for label, _, _ in rows), key=len, default="")
    ranges = [found for _, _, ports in rows for found in _PUBLISHED.findall(ports)]
    return Containers(
        tuple(files.split(",")) if files else (),
        frozenset(port for first, last in ranges for port in range(int(first), int(last or first) + 1)),
    )


def _require_room_and_ports(values: Mapping[str, str], containers: Containers) -> None:
    """Find a full disk or a busy port before Docker does, whose message has no remedy."""
    wanted = {
        name: int(value)
        for name, value in values.items()
        if name.endswith("_PORT") and int(value) not in containers.ports
    }
    if not wanted:
        return
    code, root = _ask("info", "--format", "{{.DockerRootDir}}")
    with suppress(OSError):  # not on this host: Docker has a virtual machine
        if root and not code:
            native.require_room(Path(root), "free some space; docker system df shows what uses it")
    for name, port in wanted.items():
        try:
            try_port("127.0.0.1", port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # a port that we may not use, the daemon may
                remedy = f"stop what listens there (ss -ltnp), or {another_port(name, port)}"
                raise EngineError(
                    f"Docker cannot publish 127.0.0.1:{port}: address already in use; {remedy}"
                ) from None


def _compose(*arguments: str) -> tuple[str, ...]:
    return ("compose", "--file", str(file()), *arguments)


def _run(*arguments: str, variables: Mapping[str, str] = MappingProxyType({})) -> None:
    command = ("docker", *_compose(*arguments))
    # a user's own name would be another stack
    environment = {
        **os.environ,
        "COMPOSE_PROJECT_NAME": _PROJECT,
        **variables,
    }
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=False).returncode
    except OSError as error:
        raise EngineError(
            f"docker cannot be started: {error.strerror}; install Docker, or build the engines: "
            "otel-dflash stack build"
        ) from None
    if code:
        raise EngineError(f"`{' '.join(command)}` failed with exit code {code}; its output is above")


def _ask(*arguments: str) -> tuple[int, str]:
    """Return the exit code of a docker command and its output; of a failure, the last line."""
    try:
        result = subprocess.run(
            ("docker", *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {ANSWER_S:g} s"
    except OSError as error:
        return 1, error.strerror or str(error)
    if result.returncode == 0:
        return 0, result.stdout.strip()
    return result.returncode, (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
