"""The stack as containers: Docker Compose with collector/compose.yaml, where Docker and the images are."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from otel_dflash.stack.engines import EngineError, collector_directory

ANSWER_S: Final = 10.0
"""How long Docker may take for a question about itself."""


def file() -> Path:
    """Return the compose file."""
    return collector_directory() / "compose.yaml"


def problem(*, may_fetch: bool) -> str | None:
    """Return why Docker cannot run the stack now, None when it can. Unless it may fetch images, all must be here."""
    if shutil.which("docker") is None:
        return "docker is not on PATH"
    if (said := _ask("version", "--format", "{{.Server.Version}}"))[0]:
        return f"the Docker daemon does not answer ({said[1]})"
    code, images = _ask(*_compose("config", "--images"))
    if code:
        return f"Docker has no Compose plugin ({images})"
    if not may_fetch and _ask("image", "inspect", "--format", "{{.Id}}", *images.split())[0]:
        return f"its images are not here yet; fetch them: docker {' '.join(_compose('pull'))}"
    return None


def up(ports: Mapping[str, str]) -> None:
    """Start the containers with these variables and wait until they are healthy; a second time changes nothing.

    Raises:
        EngineError: Docker Compose failed; it said why itself.
    """
    _run("up", "--detach", "--wait", variables=ports)


def down(*, volumes: bool) -> None:
    """Stop and remove the containers, and with `volumes` their data.

    Raises:
        EngineError: Docker Compose failed; it said why itself.
    """
    _run("down", *(["--volumes"] if volumes else []))


def _compose(*arguments: str) -> tuple[str, ...]:
    return ("compose", "--file", str(file()), *arguments)


def _run(*arguments: str, variables: Mapping[str, str] = MappingProxyType({})) -> None:
    command = ("docker", *_compose(*arguments))
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, env={**os.environ, **variables}, check=False).returncode
    except OSError as error:
        raise EngineError(
            f"docker cannot be started: {error.strerror}; install Docker, or build the engines: otel-dflash stack build"
        ) from None
    if code:
        raise EngineError(f"`{' '.join(command)}` failed with exit code {code}; what it said is above")


def _ask(*arguments: str) -> tuple[int, str]:
    """Return the exit code of a docker command, and what it printed: of a failure the last line."""
    try:
        result = subprocess.run(
            ("docker", *arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {ANSWER_S:g} s"
    except OSError as error:
        return 1, error.strerror or str(error)
    if result.returncode == 0:
        return 0, result.stdout.strip()
    return result.returncode, (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
