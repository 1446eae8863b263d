"""Sessions whose trainer and agent were both killed: the next command has an agent finish them. Their rings still hold the newest part."""

from __future__ import annotations

import subprocess
import time
from typing import Final

from otel_dflash.session import abandoned_sessions
from otel_dflash.trainer.launch import AGENT_LOG, agent_command

WAIT_S: Final = 5.0


def finish(wait: bool) -> None:
    """Start an agent for each; with `wait` until they have ended, a few seconds at most. Best effort: never raises for a user's command."""
    agents = []
    for session in abandoned_sessions():
        try:
            session.recording.mkdir(parents=True, exist_ok=True)
            with open(session.recording / AGENT_LOG, "ab") as log:
                command = [*agent_command(), str(session.path)]
                agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        except (OSError, ValueError):  # its recording cannot be written any more
            continue
        agents.append(agent)
    deadline = time.monotonic() + WAIT_S if wait else 0.0
    for agent in agents:
        try:
            agent.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.returncode = 0  # it ends by itself; nobody is to be warned about it
