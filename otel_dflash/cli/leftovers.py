"""Sessions whose trainer and agent were both killed: the next command has an agent finish them. Their rings still hold the newest part."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

from otel_dflash.config import ConfigError
from otel_dflash.session import abandoned_sessions
from otel_dflash.trainer.launch import start_agent

WAIT_S: Final = 5.0
POLL_S: Final = 0.02


def finish(wait: bool) -> None:
    """Start an agent for each; with `wait` until they have ended, a few seconds at most. Best effort: never raises for a user's command."""
    started = []
    for session in abandoned_sessions():
        with suppress(OSError, ConfigError):  # its recording cannot be written any more, or there is no agent here
            session.recording.mkdir(parents=True, exist_ok=True)
            start_agent(session, dict(os.environ))
            started.append(session)
    deadline = time.monotonic() + WAIT_S
    while wait and time.monotonic() < deadline and any(session.path.exists() for session in started):
        time.sleep(POLL_S)
