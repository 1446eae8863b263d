"""Agents at work on this machine: alive, stuck or dead, and how far behind each of their sinks is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from otel_dflash.agent.recording import RecordingError, RecordingReader
from otel_dflash.agent.segments import segments
from otel_dflash.agent.sinks import read_cursor
from otel_dflash.config import AgentConfig
from otel_dflash.doctor.lines import Line, ok, warning, wrong
from otel_dflash.session import LOCK_FILE, Session, abandoned_sessions, running_sessions
from otel_dflash.trainer.launch import AGENT_LOG

SILENT_S_MAX: Final = 5.0  # an agent appends its own figures every second
SPAN_LAG_S_MAX: Final = 10.0
_UNKNOWN_PID: Final = -1


def check() -> Iterator[Line]:
    """Yield a line per session that goes on here."""
    running = running_sessions()
    for session in running:
        yield _agent(session)
    left = [session for session in abandoned_sessions() if session not in running]
    if left:
        names = ", ".join(session.run_id for session in left)
        yield warning("agents", f"trainer and agent were both killed: {names}; `otel-dflash runs` saves what their rings hold")
    if not running:
        yield ok("agents", "no run goes on here")


def _agent(session: Session) -> Line:
    pid = _owner_of_lock(session.path / LOCK_FILE)
    log = session.recording / AGENT_LOG
    if pid is None:
        return wrong("agents", f"run {session.run_id} has no agent: its rings fill up; see {log}, and start the run again")
    who = f"run {session.run_id}: agent{f' {pid}' if pid > 0 else ''}"
    silent_s = _silence_s(session.recording)
    if silent_s is None or silent_s > SILENT_S_MAX:
        since = "" if silent_s is None else f" for {silent_s:.0f} s"
        return wrong("agents", f"{who} is stuck: it records nothing{since}; kill -9 it (`otel-dflash run` starts another), see {log}")
    lags_s = _lags_s(session.recording)
    shown = ", ".join(f"{name} {lag_s:.1f} s" for name, lag_s in sorted(lags_s.items()))
    metric_lag_s_max = SPAN_LAG_S_MAX + 2 * AgentConfig.from_environment().metric_interval_ns / 1e9
    late = [name for name, lag_s in lags_s.items() if lag_s > (SPAN_LAG_S_MAX if name.startswith("spans") else metric_lag_s_max)]
    if late:
        return warning("agents", f"{who} records, but {', '.join(late)} is late ({shown}): nothing is lost; why it waits is in {log}")
    return ok("agents", f"{who} records" + (f", not yet sent: {shown}" if shown else ", sends nothing"))


def _owner_of_lock(path: Path) -> int | None:
    """Return the pid that holds the file's lock, None when nobody does. Looked up, not tried: that could keep an agent from starting."""
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
    """Return seconds since the recording grew, None when it has no segment."""
    try:
        newest = max((path.stat().st_mtime for _, path in segments(recording)), default=None)
    except OSError:
        return None
    return None if newest is None else max(0.0, time.time() - newest)


def _lags_s(recording: Path) -> dict[str, float]:
    """Return by sink the age of the oldest frame that it has not delivered, in seconds, 0 when it has delivered all."""
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
        lags_s[path.stem.removeprefix("cursor-")] = max(0.0, (time.monotonic_ns() - frames[0].time_ns) / 1e9) if frames else 0.0
    return lags_s
