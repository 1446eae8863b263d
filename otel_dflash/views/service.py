"""What to say of a run that has not ended and that no agent serves."""

from __future__ import annotations

from otel_dflash.launch import AGENT_LOG
from otel_dflash.session import Session
from otel_dflash.session_list import is_supervised, is_unserved


def unserved(session: Session) -> str | None:
    """Return one line with the remedy if no agent serves a session, else None."""
    if not is_unserved(session):
        return None
    if is_supervised(session):
        remedy = "its supervisor starts one again within a minute"
    else:
        remedy = f"start one where the run was started: otel-dflash agent {session.path}"
    return f"no agent is serving this run; {remedy}; see {session.recording / AGENT_LOG}"
