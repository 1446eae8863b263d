"""The record of what `otel-dflash stack` started, kept from one command to the next.

::

    ~/.local/state/otel-dflash/stack/   0700; $XDG_STATE_HOME when set; locked while it changes
        stack.json                      what is running: see Stack; absent when nothing is
        jaeger/, jaeger.log, ...        each service's storage and log
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from otel_dflash.session import process_start
from otel_dflash.stack.engines import EngineError, own_directory
from otel_dflash.stack.services import SERVICES

DIRECTORY_MODE: Final = 0o700
STACK_FILE: Final = "stack.json"


@dataclass(frozen=True)
class Started:
    """A process that `up` started. Pid and start time identify it for good: a pid alone may have been
    reused."""

    pid: int
    start: int
    """In clock ticks since boot."""
    version: str
    variables: Mapping[str, str]
    """All variables that its configuration reads."""

    def is_alive(self) -> bool:
        """Return whether it is running."""
        return process_start(self.pid) == self.start

    def poll(self) -> int | None:
        """Return None while it is running, else -1: only its parent knows how it ended."""
        return None if self.is_alive() else -1


@dataclass(frozen=True)
class Stack:
    """What has been started and not stopped: processes by service, or containers."""

    services: dict[str, Started] = field(default_factory=dict)
    compose: dict[str, str] | None = None
    """The variables of compose.yaml that were set; None when Docker Compose was not used."""

    def variables(self) -> dict[str, str]:
        """Return the variables that the processes were started with."""
        return {
            name: value for started in self.services.values() for name, value in started.variables.items()
        }

    def alive(self) -> dict[str, Started]:
        """Return the services whose processes are running."""
        return {name: started for name, started in self.services.items() if started.is_alive()}


def directory() -> Path:
    """Return the directory of storage, logs and stack.json.

    Raises:
        EngineError: The user has no home directory.
    """
    return own_directory("XDG_STATE_HOME", ".local/state") / "stack"


def read() -> Stack:
    """Return what has been started and not stopped.

    Raises:
        EngineError: stack.json cannot be read.
    """
    path = directory() / STACK_FILE
    try:
        content = json.loads(path.read_bytes())
        compose = content["compose"]
        return Stack(
            {name: _started(name, **fields) for name, fields in content["services"].items()},
            None if compose is None else {name: str(value) for name, value in compose.items()},
        )
    except FileNotFoundError:
        return Stack()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(
            f"{path} cannot be read ({error}); stop the services by hand (ss -ltnp) and remove it"
        ) from None


def write(stack: Stack) -> None:
    """Record `stack`; when it is empty, remove the file instead, which works on a full disk too. Written
    whole or not at all, because a command may be killed here.

    Raises:
        EngineError: The disk is full or the directory not writable.
    """
    path = directory() / STACK_FILE
    new = path.with_suffix(".new")
    try:
        if stack == Stack():
            path.unlink(missing_ok=True)
            return
        new.write_text(json.dumps(asdict(stack), indent=1))
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise unusable(error) from None


def _started(name: str, pid: int, start: int, version: str, variables: Mapping[str, str]) -> Started:
    """Return what stack.json holds about a service. Another version may have written it: variables that no
    longer exist are ignored, new ones get their defaults.

    Raises:
        KeyError: There is no such service.
        ValueError: `write` did not write this.
    """
    if int(pid) <= 0:
        raise ValueError(f"{pid} is not a pid")
    known = SERVICES[name].variables
    return Started(
        int(pid),
        int(start),
        str(version),
        {**known, **{key: str(variables[key]) for key in known if key in variables}},
    )


@contextmanager
def locked(report: Callable[[str], object]) -> Iterator[None]:
    """Keep other `up` and `down` commands out.

    Raises:
        EngineError: The directory cannot be created, or belongs to another user.
    """
    base = directory()
    try:
        base.mkdir(parents=True, exist_ok=True)
        if stat.S_IMODE(base.stat().st_mode) != DIRECTORY_MODE:
            base.chmod(DIRECTORY_MODE)
        # the directory itself is the lock, which works on a read-only disk too
        descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise unusable(error) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another command is starting or stopping the stack; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def unusable(error: OSError) -> EngineError:
    """Return the error for a directory that cannot be used, with the remedy."""
    remedy = (
        "free some space"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "set XDG_STATE_HOME to a directory that you can write"
    )
    return EngineError(
        f"{directory()} cannot hold the stack's data: {(error.strerror or str(error)).lower()}; {remedy}"
    )
