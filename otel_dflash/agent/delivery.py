"""The sinks of an agent: started beside the drain, flushed at the end."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from otel_dflash.agent.sinks import SINKS, make_sinks
from otel_dflash.config import AgentConfig, ConfigError
from otel_dflash.console import log
from otel_dflash.otlp.settings import exporter_names
from otel_dflash.recording.delivery import DeliveryReport, RecordingLosses, SignalDelivery
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.session import DELIVERY_FILE

if TYPE_CHECKING:
    from otel_dflash.agent.sinks.sink import Sink


RECORD_ONLY: Final = (
    "a later command started this agent, which only records: it has not the run's environment"
)


class Delivery:
    """The sinks of an agent; none if it only records.

    A thread of their own creates them: loading the SDK takes longer than a ring may wait.
    """

    def __init__(self, directory: Path, config: AgentConfig, recording: RecordingWriter) -> None:
        """Prepare; nothing is loaded yet."""
        self._directory = directory
        self._config = config
        self._recording = recording
        self._sinks: dict[str, list[Sink]] = {signal: [] for signal in SINKS}
        self._failure: str | None = None
        self._starting = threading.Thread(target=self._start, daemon=True)
        self._sdk_log: Any = None

    def start(self) -> None:
        """Load the SDK and start a sink for each exporter that the environment names."""
        self._starting.start()

    def finish(self, timeout_s: float) -> None:
        """Let the sinks reach the end of the recording within `timeout_s`, then write the delivery report."""
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
        lost, removed = self._recording.lost_frames, self._recording.removed_segments
        if lost or removed:
            log(
                f"the recording lacks {lost} frames for which the disk had no room, and {removed} "
                "oldest segments beyond its size cap"
            )
        self._write_report()

    def _write_report(self) -> None:
        signals = {
            name: self._signal(group)
            for name, group in self._sinks.items()
            if group or self._config.record_only or (self._failure and _is_configured(name))
        }
        lost, removed = self._recording.lost_frames, self._recording.removed_segments
        try:
            losses = RecordingLosses(lost, removed) if lost or removed else None
            DeliveryReport(signals, losses).write(self._directory)
        except OSError as error:
            log(f"{DELIVERY_FILE} cannot be written: {error.strerror}")

    def _start(self) -> None:
        if self._config.record_only:
            self._failure = RECORD_ONLY
            log(f"{RECORD_ONLY}; send the rest: otel-dflash replay {self._directory} --endpoint URL")
            self._write_report()  # now: `summary` shows it
            return
        try:
            from otel_dflash.agent.sinks.sink import SinkSetup
            from otel_dflash.otlp.exporters import prepare_environment
            from otel_dflash.otlp.sdk_log import SdkLog
            from otel_dflash.spans.sampling import Sampling

            prepare_environment()
            self._sdk_log = SdkLog(sys.stderr)
            self._sdk_log.__enter__()
            reasons = self._sdk_log.reasons
            sampling = Sampling.from_environment()
            setup = SinkSetup(self._directory, self._config, reasons, sampling, self._recording)
            for signal in SINKS:
                self._sinks[signal] = make_sinks(signal, setup)
        except Exception as error:  # noqa: BLE001  recording continues; what cannot be sent now can be replayed
            self._failure = (
                str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            )
            log(f"not everything is exported: {self._failure}")
        for group in self._sinks.values():
            for sink in group:
                sink.start()

    def lags_s(self) -> dict[str, float]:
        """Return by signal the age of the newest record that the slower sink has delivered."""
        now = time.monotonic_ns()
        ages = {
            name: [now - sink.newest_ns for sink in group if sink.newest_ns is not None]
            for name, group in self._sinks.items()
        }
        return {name: max(0, *ages_ns) / 1e9 for name, ages_ns in ages.items() if ages_ns}

    def _signal(self, group: list[Sink]) -> SignalDelivery:
        delivered = bool(group) and all(sink.done.is_set() for sink in group) and not self._failure
        reasons = [self._failure, *(sink.reason for sink in group if not sink.done.is_set())]
        return SignalDelivery(
            delivered=delivered,
            failures=sum(sink.failures for sink in group),
            unusable_records=sum(sink.unusable_records for sink in group),
            losses=[line for sink in group for line in sink.losses],
            pending=sum(
                self._recording.next_number - sink.position for sink in group if not sink.done.is_set()
            ),
            reason=None
            if delivered
            else next(filter(None, reasons), "not done when the time to flush was over"),
            sampled=next(filter(None, (sink.sampled for sink in group)), None),
        )


def _is_configured(signal: str) -> bool:
    """Return whether the environment asks for exporters of a signal, also if they cannot be created."""
    try:
        return bool(exporter_names("traces" if signal == "spans" else "metrics", os.environ))
    except ConfigError:
        return True
