"""This user's sessions on this machine: which are running, and which nobody serves."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from otel_dflash.config import ConfigError
from otel_dflash.records import HEADER_BYTES, MAGIC, Counter, Header
from otel_dflash.session import (
    AGENT_START_S,
    LOCK_FILE,
    SESSION_FILE,
    SUPERVISOR_LOCK_FILE,
    Session,
    base_directories,
    is_held,
    living_processes,
    open_session,
    pid_namespace,
)

ABANDONED_AGE_S: Final = 60.0  # a younger one may be about to get its first process
FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"  # of the machine: it sees the processes of all others
_HEADER: Final = struct.Struct(f"<{HEADER_BYTES // 8}Q")


def running_sessions() -> list[Session]:
    """Return the sessions with a living process."""
    return [session for session in _sessions() if living_processes(session)]


def unserved_sessions() -> list[Session]:
    """Return the sessions that no agent serves, although one has had the time to start."""
    return list(filter(is_unserved, _sessions()))


def is_unserved(session: Session) -> bool:
    """Return whether no agent serves a session, although one has had the time to start."""
    return not is_held(session.path / LOCK_FILE) and _age_s(session) > _start_s(session)


def abandoned_sessions() -> list[Session]:
    """Return the unserved sessions whose supervisor is gone too: nothing but a command starts an agent."""
    return [session for session in unserved_sessions() if not is_supervised(session) and _is_visible(session)]


def is_supervised(session: Session) -> bool:
    """Return whether a supervisor starts an agent where there is none."""
    return is_held(session.path / SUPERVISOR_LOCK_FILE)


def find_session(recording: Path) -> Session | None:
    """Return the session whose recording this is, None if it has ended."""
    for session in _sessions():
        with suppress(OSError):
            if session.recording.samefile(recording):
                return session
    return None


def dropped_records(session: Session) -> dict[int, int]:
    """Return by ring how many records it had no room for, read from its memory."""
    dropped = {}
    for path in session.path.glob("ring-*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:  # retired just now, or a memfd whose process has ended
            continue
        try:
            words = _HEADER.unpack(os.pread(fd, HEADER_BYTES, 0))
        except (OSError, struct.error):  # not a ring
            continue
        finally:
            os.close(fd)
        if words[Header.MAGIC] == MAGIC:
            dropped[words[Header.RING_ID]] = words[Header.COUNTERS + Counter.DROPPED_RING_FULL]
    return dropped


def _sessions() -> Iterator[Session]:
    for path in (path for base in base_directories() for path in sorted(base.glob("*/"))):
        try:
            yield open_session(path)
        except ConfigError:
            continue


def _age_s(session: Session) -> float:
    try:
        return time.time() - (session.path / SESSION_FILE).stat().st_mtime
    except OSError:  # it has just ended
        return 0.0


def _start_s(session: Session) -> float:
    """Return the age from which on a session without an agent gets none by itself."""
    had_process = any(session.path.glob("process-*"))
    return AGENT_START_S if had_process else ABANDONED_AGE_S


def _is_visible(session: Session) -> bool:
    """Return whether this process can tell which processes of a session are alive.

    Those of another PID namespace look dead from here, unless that namespace itself is gone.
    """
    own = pid_namespace()
    if session.pid_namespace == own:
        return True
    return own == FIRST_PID_NAMESPACE and session.pid_namespace not in _namespaces()


def _namespaces() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/pid"):
        try:
            found.add(str(path.readlink()))
        except OSError:  # it has ended, or belongs to another user: then it has no session of this one
            continue
    return found
