"""What `otel-dflash stack` started, remembered from one command to the next.

::

    ~/.local/state/otel-dflash/stack/   0700; $XDG_STATE_HOME when set
        stack.json                      what runs: see Stack
        lock                            held by the command that changes it
        jaeger/, jaeger.log, ...        each service's storage and log
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from otel_dflash.session import process_start
from otel_dflash.stack.engines import EngineError

DIRECTORY_MODE: Final = 0o700
STACK_FILE: Final = "stack.json"


@dataclass(frozen=True)
class Started:
    """A process that an `up` started. Pid and start time name it for good: a pid alone may be somebody else's by now."""

    pid: int
    start: int
    """In clock ticks since boot."""
    version: str
    variables: Mapping[str, str]
    """All that its configuration reads."""

    def is_alive(self) -> bool:
        """Return whether it runs."""
        return process_start(self.pid) == self.start

    def poll(self) -> int | None:
        """Return None while it runs; how it ended is only known to its parent."""
        return None if self.is_alive() else -1


@dataclass(frozen=True)
class Stack:
    """What was started and not stopped: processes by service, or containers."""

    services: dict[str, Started] = field(default_factory=dict)
    compose: dict[str, str] | None = None
    """The variables that Docker Compose got; None when it was not used."""

    def alive(self) -> dict[str, Started]:
        """Return the services that run as processes."""
        return {name: started for name, started in self.services.items() if started.is_alive()}


def directory() -> Path:
    """Return where storage, logs and stack.json lie."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base.absolute() / "otel-dflash" / "stack"


def read() -> Stack:
    """Return what was started and not stopped.

    Raises:
        EngineError: stack.json cannot be read.
    """
    path = directory() / STACK_FILE
    try:
        content = json.loads(path.read_bytes())
        return Stack({name: Started(**fields) for name, fields in content["services"].items()}, content["compose"])
    except FileNotFoundError:
        return Stack()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(f"{path} cannot be read ({error}); stop the services by hand (ss -ltnp) and remove it") from None


def write(stack: Stack) -> None:
    """Remember it. Whole or not at all: a command may be killed here.

    Raises:
        EngineError: The disk is full or the directory not writable.
    """
    path = directory() / STACK_FILE
    new = path.with_suffix(".new")
    try:
        new.write_text(json.dumps(asdict(stack), indent=1))
        new.replace(path)
    except OSError as error:
        raise unusable(error) from None


@contextmanager
def locked(say: Callable[[str], object]) -> Iterator[None]:
    """Keep other `up` and `down` commands out.

    Raises:
        EngineError: The directory cannot be made or belongs to somebody else.
    """
    base = directory()
    try:
        base.mkdir(parents=True, exist_ok=True)
        base.chmod(DIRECTORY_MODE)
        file = (base / "lock").open("w")
    except OSError as error:
        raise unusable(error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another command starts or stops the stack; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def unusable(error: OSError) -> EngineError:
    """Return what is wrong with the directory, and the remedy."""
    remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "point XDG_STATE_HOME at a directory of yours"
    return EngineError(f"{directory()} cannot hold the stack's data: {(error.strerror or str(error)).lower()}; {remedy}")
