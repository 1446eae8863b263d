"""Sessions whose agent and supervisor were both killed: the next command starts an agent for them, because
their rings hold the newest part, and their workers may still be running."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

from otel_dflash.config import ConfigError
from otel_dflash.launch import start_recording_agent
from otel_dflash.session import LOCK_FILE, Session, is_held, living_processes
from otel_dflash.session_list import abandoned_sessions

WAIT_S: Final = 5.0
POLL_S: Final = 0.02


def finish(wait: bool) -> None:
    """Start an agent for each; with `wait`, wait at most WAIT_S until they have taken what there is.

    Best effort: it never fails the user's command.
    """
    started = []
    for session in abandoned_sessions():
        # its recording can no longer be written, or no agent can be started here
        with suppress(OSError, ConfigError):
            session.recording.mkdir(parents=True, exist_ok=True)
            start_recording_agent(session, os.environ)
            started.append(session)
    deadline = time.monotonic() + WAIT_S
    while wait and time.monotonic() < deadline and any(map(_is_starting, started)):
        time.sleep(POLL_S)


def _is_starting(session: Session) -> bool:
    """Return whether an agent has still to end the session, or to begin if its workers are running."""
    is_served = bool(living_processes(session)) and is_held(session.path / LOCK_FILE)
    return session.path.exists() and not is_served
