"""Starting an agent and its supervisor: ordinary commands in their own processes, no forks of the trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from otel_dflash.config import AGENT_VARIABLE, DISABLED_VARIABLE, ConfigError
from otel_dflash.session import Session

AGENT_LOG = "agent.log"
NEEDED_PACKAGES = ("numpy", "click")
SUPERVISOR_PROGRAM = Path(__file__).with_name("supervisor") / "__main__.py"


def agent_command() -> list[str]:
    """Return the command that runs an agent.

    It is OTEL_DFLASH_AGENT, this interpreter if it has the agent's packages, or `otel-dflash` on the PATH.

    Raises:
        ConfigError: None of them can run an agent.
    """
    chosen = os.environ.get(AGENT_VARIABLE)
    if not chosen and _has_interpreter() and _has_agent_packages():
        return [*interpreter(), "-m", "otel_dflash", "agent"]

    import shlex  # imported here: they take 5 ms, and a process that joins a session starts nothing
    import shutil

    if chosen:
        try:
            command = shlex.split(chosen)
        except ValueError:  # an unclosed quotation
            command = []
        if not command or shutil.which(command[0]) is None:
            raise ConfigError(
                f"{AGENT_VARIABLE} is not a command that can be run: {chosen!r}; set it to a path such as "
                "/opt/venv/bin/otel-dflash"
            )
        return [*command, "agent"]
    installed = shutil.which("otel-dflash")
    if installed:
        return [installed, "agent"]
    raise ConfigError(
        "no agent can be started: this environment lacks its packages, and `otel-dflash` is not on the PATH; "
        f"install all of it into any environment (`pip install .` in a clone of the project) and set "
        f"{AGENT_VARIABLE}=/path/to/its/bin/otel-dflash"
    )


def interpreter() -> list[str]:
    """Return the command of this interpreter.

    From Python 3.11 on it does not import from the working directory, where a user may have a `logging.py`.
    """
    try:
        is_here = Path(__file__).parents[1].samefile(Path.cwd())  # a checkout that is not installed
    except OSError:
        is_here = False
    return [sys.executable] if is_here or sys.version_info < (3, 11) else [sys.executable, "-P"]


def supervisor_command(session: Session) -> list[str]:
    """Return the command that supervises an agent of a session for this process.

    Raises:
        ConfigError: No agent can be started.
    """
    agent = agent_command()
    # -S: it needs the standard library alone, and a user's sitecustomize may call start()
    command = (
        [sys.executable, "-S", str(SUPERVISOR_PROGRAM)] if _has_interpreter() else [*agent[:-1], "supervise"]
    )
    return [*command, str(session.path), str(os.getpid()), *agent]


def start_supervisor(session: Session, environment: Mapping[str, str]) -> None:
    """Start the supervisor of a session's agent, detached: it needs no wait, and gets none of this process's
    signals. It reports to this process's stderr.

    Raises:
        ConfigError: No agent can be started.
        OSError: The command cannot be run.
    """
    _detach(supervisor_command(session), environment)


def start_recording_agent(session: Session, environment: Mapping[str, str]) -> None:
    """Start an agent that only records, detached: this process has not the environment of the run, and must
    not deliver elsewhere.

    Raises:
        ConfigError: No agent can be started.
        OSError: The command cannot be run, or its log cannot be written.
    """
    with open(session.recording / AGENT_LOG, "ab") as log:
        _detach([*agent_command(), "--record-only", str(session.path)], environment, log.fileno())


def agent_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an agent and its supervisor: `start()` does nothing."""
    return {**environment, DISABLED_VARIABLE: "true"}


def _detach(command: list[str], environment: Mapping[str, str], output: int | None = None) -> None:
    import subprocess

    shell = subprocess.run(
        ["/bin/sh", "-c", '"$@" &', "sh", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if output is None else output,
        stderr=output,
        env=agent_environment(environment),
        start_new_session=True,
        check=False,
    )
    if shell.returncode:
        raise ConfigError(f"the agent could not be started: /bin/sh ended with exit code {shell.returncode}")


def _has_interpreter() -> bool:
    """Return whether `sys.executable` is Python: in a frozen application it is the application."""
    return bool(sys.executable) and not getattr(sys, "frozen", False) and SUPERVISOR_PROGRAM.is_file()


def _has_agent_packages() -> bool:
    """Return whether the agent's packages are installed, without importing them into the trainer."""
    if any(PathFinder.find_spec(name) is None for name in NEEDED_PACKAGES):
        return False
    namespace = PathFinder.find_spec("opentelemetry")
    places = namespace.submodule_search_locations if namespace else None
    return any(Path(place, "sdk").is_dir() for place in places or ())
