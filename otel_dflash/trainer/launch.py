"""Starting the agent: an ordinary command in a process of its own, never a fork of the trainer."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from otel_dflash.config import AGENT_VARIABLE, ConfigError
from otel_dflash.session import Session

AGENT_LOG = "agent.log"
NEEDED_PACKAGES = ("numpy", "click")


def agent_command() -> list[str]:
    """Return the command that runs an agent: OTEL_DFLASH_AGENT, this interpreter if it can, or `otel-dflash` on the PATH.

    Raises:
        ConfigError: There is none of these.
    """
    chosen = os.environ.get(AGENT_VARIABLE)
    if not chosen and sys.executable and _has_agent_packages():
        return [*_interpreter(), "-m", "otel_dflash", "agent"]

    import shlex  # these here: a process that joins a session starts nothing, and they take 5 ms
    import shutil

    if chosen:
        try:
            command = shlex.split(chosen)
        except ValueError:  # a quotation without its end
            command = []
        if not command or shutil.which(command[0]) is None:
            raise ConfigError(f"{AGENT_VARIABLE} is no command that can be run: {chosen!r}; name a path such as /opt/venv/bin/otel-dflash")
        return [*command, "agent"]
    installed = shutil.which("otel-dflash")
    if installed:
        return [installed, "agent"]
    raise ConfigError(
        "no agent: this environment lacks its packages and there is no `otel-dflash` on the PATH; pip install otel-dflash into any "
        f"environment and set {AGENT_VARIABLE}=/path/to/its/bin/otel-dflash"
    )


def _interpreter() -> list[str]:
    """Return this interpreter, told (from 3.11 on) not to import from the working directory: a `logging.py` of the user's may lie there."""
    try:
        is_here = Path(__file__).parents[2].samefile(Path.cwd())  # a checkout that is not installed
    except OSError:
        is_here = False
    return [sys.executable] if is_here or sys.version_info < (3, 11) else [sys.executable, "-P"]


def start_agent(session: Session, environment: dict[str, str]) -> None:
    """Start the agent of a session, detached: no child of this process is left to be waited for, and no signal is shared.

    Raises:
        ConfigError: There is no agent to start.
        OSError: The command cannot be run.
    """
    import subprocess

    command = [*agent_command(), str(session.path)]
    log = session.recording / AGENT_LOG
    with open(log, "ab") as output:
        shell = subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
            check=False,
        )
    if shell.returncode:
        raise ConfigError(f"the agent could not be started: /bin/sh gave {shell.returncode}; see {log}")


def _has_agent_packages() -> bool:
    """Look without importing: the packages must not enter the trainer's sys.modules."""
    if any(PathFinder.find_spec(name) is None for name in NEEDED_PACKAGES):
        return False
    namespace = PathFinder.find_spec("opentelemetry")
    places = namespace.submodule_search_locations if namespace else None
    return any(Path(place, "sdk").is_dir() for place in places or ())
