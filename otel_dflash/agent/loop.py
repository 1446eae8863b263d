"""The agent's main loop: drain, append, serve the sinks.

It ends when the last trainer process is gone and everything is flushed.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Final

from otel_dflash.agent.delivery import Delivery
from otel_dflash.agent.drain import Drain
from otel_dflash.config import AgentConfig
from otel_dflash.console import log
from otel_dflash.recording.cursor import read_cursor
from otel_dflash.recording.payloads import (
    AGENT_CPU,
    RECORD_COST,
    RING_FILL,
    UNRECORDED_STEPS,
    WALL_OFFSET,
    Sample,
    lag_series,
)
from otel_dflash.recording.run_info import RunInfo, create_recording
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.session import (
    AGENT_EXIT_INCOMPLETE,
    LOCK_FILE,
    SESSION_FILE,
    Session,
    end_session,
    living_processes,
    map_control,
    open_lock,
    open_session,
    remove_session,
    unrecorded_steps,
)
from otel_dflash.version import __version__

AGENT_INTERVAL_S: Final = 1.0
LOCK_TRIES: Final = 10
LOCK_TRY_S: Final = 0.01


def main(session_directory: Path, *, record_only: bool = False) -> int:
    """Serve a session to its end, then exit.

    The exit code is 0, or AGENT_EXIT_INCOMPLETE if frames were lost. Returns 0 if the session has an agent
    already.

    Args:
        session_directory: The session.
        record_only: Send nothing: this process has not the environment of the run.

    Raises:
        ConfigError: There is no such session, or a setting cannot work.
        OSError: The recording cannot be opened.
    """
    session = open_session(session_directory)
    config = AgentConfig.from_environment()._replace(record_only=record_only)
    if not _take_lock(open_lock(session.path / LOCK_FILE)):
        return 0
    # A signal that ends every process of a job must not end the agent first. SIGKILL may: a kill at any
    # moment loses nothing.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    is_whole = Agent(session, config).run()
    os._exit(
        0 if is_whole else AGENT_EXIT_INCOMPLETE
    )  # an exporter may hang in a call that cannot be interrupted


class Agent:
    """One agent of one session."""

    def __init__(self, session: Session, config: AgentConfig) -> None:
        """Open the recording and prepare the drain and the sinks."""
        self._session = session
        self._config = config
        self._is_orphaned = False
        self._control = map_control(session)
        self._fill: dict[int, float] = {}  # as last recorded
        info = RunInfo(
            run=session.run_id,
            host=session.node,
            anchor_wall_ns=session.anchor_wall_ns,
            anchor_mono_ns=session.anchor_mono_ns,
            created_ns=session.anchor_wall_ns,
            version=__version__,
        )
        create_recording(session.recording, info)
        self._info = info
        self._recording = RecordingWriter(
            session.recording, config.recording_bytes, _first_unread(session.recording)
        )
        self._drain = Drain(session, self._recording, log, config.metric_interval_ns)
        self._delivery = Delivery(session.recording, config, self._recording)

    def run(self) -> bool:
        """Serve until nobody writes, then flush within the exit timeout; return whether no frame was lost."""
        self._delivery.start()
        next_figures = 0.0
        over = False
        while not over:
            over = not self._is_needed() and end_session(self._session)  # before the last drain
            self._drain.poll()
            if over or time.monotonic() >= next_figures:
                next_figures = time.monotonic() + AGENT_INTERVAL_S
                self._append_figures()
            if not over:
                time.sleep(self._config.drain_interval_s)
        self._delivery.finish(self._config.exit_timeout_s)
        self._recording.close()
        remove_session(self._session)
        return not self._recording.lost_frames

    def _is_needed(self) -> bool:
        """Return whether anybody may still write.

        Without the session's directory nobody can join, but the rings held here stay in memory.
        """
        if living_processes(self._session):
            return True
        if (self._session.path / SESSION_FILE).exists():
            return False
        if not self._is_orphaned:
            self._is_orphaned = True
            log(
                f"{self._session.path} was removed: workers created from now on record nothing, earlier "
                "ones are served to their end"
            )
        return self._drain.holds_living()

    def _append_figures(self) -> None:
        """Record what the telemetry costs, and how far the wall clock has moved from the anchor."""
        now = time.monotonic_ns()
        fill, cost_ns = self._drain.figures()
        unrecorded = unrecorded_steps(self._control)
        figures = {
            AGENT_CPU: time.process_time_ns(),
            WALL_OFFSET: time.time_ns() - self._info.wall_ns(now),
            **({RECORD_COST: cost_ns} if cost_ns else {}),  # no ring has reported it yet
            **({UNRECORDED_STEPS: unrecorded} if unrecorded else {}),
            **{lag_series(sink): lag_s for sink, lag_s in self._delivery.lags_s().items()},
        }
        self._recording.append_samples([Sample(series, now, value) for series, value in figures.items()], now)
        for ring, ratio in fill.items():
            if ratio != self._fill.get(ring):
                self._recording.append_samples([Sample(RING_FILL, now, ratio)], now, ring)
        self._fill = fill


def _take_lock(lock: int) -> bool:
    """Take the lock of a session; return False if an agent holds it, and not just a command for a moment."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_TRY_S)
        else:
            return True
    return False


def _first_unread(directory: Path) -> int:
    """Return the number after the newest frame that a sink has read, on disk or not."""
    positions = [read_cursor(path).get("position", 0) for path in directory.glob("cursor-*.json")]
    return max(positions, default=0)
