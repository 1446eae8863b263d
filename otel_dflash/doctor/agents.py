"""The agents on this machine: alive, stuck or dead, and how far behind each of their sinks is.

A fault of a session is wrong where it is the one that this environment belongs to or records beside; of any
other it is a warning.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from otel_dflash import config
from otel_dflash.config import AgentConfig
from otel_dflash.doctor.finding import Finding, ok, warning, wrong
from otel_dflash.launch import AGENT_LOG
from otel_dflash.recording.cursor import read_cursor
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import RecordingError
from otel_dflash.recording.segments import segments
from otel_dflash.session import LOCK_FILE, Session
from otel_dflash.session_list import abandoned_sessions, is_supervised, running_sessions

SILENT_S_MAX: Final = 5.0  # an agent appends its own figures every second
SPAN_LAG_S_MAX: Final = 10.0
_UNKNOWN_PID: Final = -1


def check() -> Iterator[Finding]:
    """Yield a finding for each running session."""
    running = running_sessions()
    for session in running:
        yield _agent(session)
    abandoned = [session for session in abandoned_sessions() if session not in running]
    if abandoned:
        names = ", ".join(session.run_id for session in abandoned)
        yield warning(
            "agents",
            f"trainer and agent were both killed: {names}; `otel-dflash runs` saves what their rings hold",
        )
    if not running:
        yield ok("agents", "no run is active")


def _agent(session: Session) -> Finding:
    pid = _owner_of_lock(session.path / LOCK_FILE)
    log = session.recording / AGENT_LOG
    if pid is None:
        remedy = (
            "its supervisor starts one within a minute"
            if is_supervised(session)
            else "`otel-dflash runs` starts one that only records"
        )
        return _fault(session, f"run {session.run_id} has no agent: its rings fill up; {remedy}; see {log}")
    who = f"run {session.run_id}: agent{f' {pid}' if pid > 0 else ''}"
    silent_s = _silence_s(session.recording)
    if silent_s is None or silent_s > SILENT_S_MAX:
        since = "" if silent_s is None else f" for {silent_s:.0f} s"
        return _fault(
            session,
            f"{who} is stuck: it records nothing{since}; kill -9 it (its supervisor starts another), see "
            f"{log}",
        )
    lags_s = _lags_s(session.recording)
    shown = ", ".join(f"{name} {lag_s:.1f} s" for name, lag_s in sorted(lags_s.items()))
    metric_lag_s_max = SPAN_LAG_S_MAX + 2 * AgentConfig.from_environment().metric_interval_ns / 1e9
    late = [
        name
        for name, lag_s in lags_s.items()
        if lag_s > (SPAN_LAG_S_MAX if name.startswith("spans") else metric_lag_s_max)
    ]
    if late:
        return warning(
            "agents",
            (
                f"{who} records, but {', '.join(late)} is late ({shown}): nothing is lost; why it waits "
                f"is in {log}"
            ),
        )
    return ok("agents", f"{who} records" + (f", not yet sent: {shown}" if shown else ", sends nothing"))


def _fault(session: Session, text: str) -> Finding:
    if chosen := os.environ.get(config.SESSION_VARIABLE):
        is_ours = session.path == Path(chosen)
    else:
        is_ours = session.recording.parent == config.recordings_directory()
    return wrong("agents", text) if is_ours else warning("agents", f"another session's {text}")


def _owner_of_lock(path: Path) -> int | None:
    """Return the pid that holds the lock of a file, None when no process does.

    /proc tells it: taking the lock to find out could keep an agent from starting.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return _UNKNOWN_PID
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in lines:
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == wanted:
            return int(fields[4])
    return None


def _silence_s(recording: Path) -> float | None:
    """Return how long ago the recording last grew, in seconds; None when it has no segment."""
    try:
        newest = max((path.stat().st_mtime for _, path in segments(recording)), default=None)
    except OSError:
        return None
    return None if newest is None else max(0.0, time.time() - newest)


def _lags_s(recording: Path) -> dict[str, float]:
    """Return for each sink the age in seconds of the oldest frame it has not delivered, 0 when it has
    delivered all."""
    lags_s = {}
    for path in recording.glob("cursor-*.json"):
        position = read_cursor(path).get("position")
        if not isinstance(position, int):
            continue
        try:
            reader = RecordingReader(recording, position)
        except RecordingError:
            continue
        try:
            frames = reader.read(1)
        except RecordingError:
            continue
        finally:
            reader.close()
        lags_s[path.stem.removeprefix("cursor-")] = (
            max(0.0, (time.monotonic_ns() - frames[0].time_ns) / 1e9) if frames else 0.0
        )
    return lags_s
