"""The agent process: drain, append, serve the sinks; ends by itself when the last trainer process is gone and all is flushed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from otel_dflash.agent.drain import Drain
from otel_dflash.agent.frames import FrameKind
from otel_dflash.agent.recording import RecordingWriter, RunInfo, create_recording, write_atomically
from otel_dflash.config import AgentConfig, ConfigError
from otel_dflash.session import (
    AGENT_EXIT_INCOMPLETE,
    DELIVERY_FILE,
    LOCK_FILE,
    SESSION_FILE,
    Session,
    end_session,
    living_processes,
    open_session,
    remove_session,
)
from otel_dflash.version import __version__

AGENT_INTERVAL_S: Final = 1.0


def main(session_directory: Path) -> int:
    """Serve a session to its end, and exit; AGENT_EXIT_INCOMPLETE where frames were lost. At once 0 when the session has an agent.

    Raises:
        ConfigError: There is no such session, or a setting cannot work.
        OSError: The recording cannot be opened.
    """
    session = open_session(session_directory)
    config = AgentConfig.from_environment()
    lock = os.open(session.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    # What ends every process of a job must not end the agent before them; SIGKILL may: a kill at any moment loses nothing.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    is_whole = Agent(session, config).run()
    os._exit(0 if is_whole else AGENT_EXIT_INCOMPLETE)  # an exporter may hang in a call that nothing can end


class Agent:
    """One agent of one session."""

    def __init__(self, session: Session, config: AgentConfig) -> None:
        """Open the recording and take up the rings."""
        self._session = session
        self._config = config
        self._is_orphaned = False
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
        self._recording = RecordingWriter(session.recording, config.recording_bytes, _first_unread(session.recording))
        self._drain = Drain(session, self._recording, say)
        self._delivery = Delivery(session.recording, config, self._recording)

    def run(self) -> bool:
        """Serve until nobody writes; then flush what can be flushed in time. Return whether all is in the recording."""
        self._delivery.start()
        next_figures = 0.0
        over = False
        while not over:
            over = not self._is_needed() and end_session(self._session)  # before the last look at the rings
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
        """Return whether anybody may still write. Without its directory nobody can join, but the rings held here stay in memory."""
        if living_processes(self._session):
            return True
        if (self._session.path / SESSION_FILE).exists():
            return False
        if not self._is_orphaned:
            self._is_orphaned = True
            say(f"{self._session.path} was removed: workers made from now on record nothing, those before are served to their end")
        return self._drain.holds_living()

    def _append_figures(self) -> None:
        """Record what the telemetry itself costs, and how far the wall clock is from the anchor."""
        now = time.monotonic_ns()
        fill, cost_ns = self._drain.figures()
        figures = {
            "cpu_ns": time.process_time_ns(),
            "wall_offset_ns": time.time_ns() - self._info.wall_ns(now),
            "fill": fill,
            "cost_ns": cost_ns,
            "lags_s": self._delivery.lags_s(),
        }
        self._recording.append(FrameKind.AGENT, 0, 0, 0, json.dumps(figures).encode(), now)


class Delivery:
    """The sinks of an agent: made beside the drain, because loading the SDK takes longer than a ring may wait."""

    def __init__(self, directory: Path, config: AgentConfig, recording: RecordingWriter) -> None:
        """Prepare; nothing is loaded yet."""
        self._directory = directory
        self._config = config
        self._recording = recording
        self._sinks: dict[str, list[Any]] = {"spans": [], "metrics": []}
        self._failure: str | None = None
        self._starting = threading.Thread(target=self._start, daemon=True)
        self._noise: Any = None

    def start(self) -> None:
        """Load the SDK and start a sink for each exporter that the environment names."""
        self._starting.start()

    def finish(self, timeout_s: float) -> None:
        """Let the sinks reach the end of the recording, at most `timeout_s`; write down how far they came."""
        deadline = time.monotonic() + timeout_s
        self._starting.join(timeout_s)
        if self._starting.is_alive():
            self._failure = "the exporters were not loaded yet"
        sinks = [sink for group in self._sinks.values() for sink in group]
        for sink in sinks:
            sink.finish()
        for sink in sinks:
            if sink.is_alive():
                sink.join(max(0.0, deadline - time.monotonic()))
        states = {signal_name: self._state(group) for signal_name, group in self._sinks.items() if group or self._failure}
        lost, removed = self._recording.lost_frames, self._recording.removed_segments
        if lost or removed:
            states["recording"] = {"lost_frames": lost, "removed_segments": removed}
            say(f"the recording lacks {lost} frames that found no room on the disk, and {removed} oldest segments beyond its size cap")
        try:
            write_atomically(self._directory / DELIVERY_FILE, json.dumps(states, indent=1).encode())
        except OSError as error:
            say(f"{DELIVERY_FILE} cannot be written: {error.strerror}")

    def _start(self) -> None:
        from otel_dflash.agent.exporters import metric_exporters, prepare_environment, span_exporters
        from otel_dflash.agent.noise import NoiseFilter
        from otel_dflash.agent.sampling import Sampling
        from otel_dflash.agent.sinks import MetricSink
        from otel_dflash.agent.span_sink import SpanSink

        try:
            prepare_environment()
            self._noise = NoiseFilter(sys.stderr)
            self._noise.__enter__()
            sampling = Sampling.from_environment()
            told = {"reasons": self._noise.reasons, "sampling": sampling}
            for name, span_exporter in span_exporters().items():
                self._sinks["spans"].append(SpanSink(name, span_exporter, self._directory, self._recording, **told))
            for name, metric_exporter in metric_exporters().items():
                self._sinks["metrics"].append(MetricSink(name, metric_exporter, self._directory, self._config, self._recording, **told))
        except Exception as error:  # noqa: BLE001  the recording goes on; what cannot be sent now can be replayed
            self._failure = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            say(f"not everything is exported: {self._failure}")
        for group in self._sinks.values():
            for sink in group:
                sink.start()

    def lags_s(self) -> dict[str, float]:
        """Return by signal the age of the newest record that the slower sink has delivered."""
        now = time.monotonic_ns()
        ages = {name: [now - sink.newest_ns for sink in group if sink.newest_ns is not None] for name, group in self._sinks.items()}
        return {name: max(0, *ages_ns) / 1e9 for name, ages_ns in ages.items() if ages_ns}

    def _state(self, group: list[Any]) -> dict[str, Any]:
        delivered = bool(group) and all(sink.done.is_set() for sink in group) and not self._failure
        reasons = [self._failure, *(sink.reason for sink in group if not sink.done.is_set())]
        sampled = next(filter(None, (sink.sampled for sink in group)), None)
        return {
            **({"sampled": sampled} if sampled else {}),
            "delivered": delivered,
            "failures": sum(sink.failures for sink in group),
            "unusable_records": sum(sink.unusable_records for sink in group),
            "losses": [line for sink in group for line in sink.losses],
            "pending": sum(self._recording.next_number - sink.position for sink in group if not sink.done.is_set()),
            "reason": None if delivered else next(filter(None, reasons), "the time to flush was up"),
        }


def say(text: str) -> None:
    """Print one line to the agent's log, which may lie on a full disk."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} otel-dflash agent: {text}", file=sys.stderr, flush=True)


def _first_unread(directory: Path) -> int:
    positions = [0]
    for path in directory.glob("cursor-*.json"):
        try:
            positions.append(int(json.loads(path.read_bytes())["position"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return max(positions)
