"""Sending a whole recording, again or for the first time: the agent's sinks, without a cursor on disk."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from otel_dflash.agent.sinks import SINKS, make_sinks
from otel_dflash.agent.sinks.sink import SinkSetup
from otel_dflash.config import AgentConfig, ConfigError
from otel_dflash.otlp.exporters import prepare_environment
from otel_dflash.otlp.sdk_log import SdkLog
from otel_dflash.spans.sampling import Sampling


@dataclass(frozen=True)
class ReplayResult:
    """What a replay sent."""

    spans: int
    points: int  # how often all series were sent
    delivered: bool
    reason: str  # why not all was delivered
    losses: list[str]  # data left out although all else was delivered, one line each


def replay(directory: Path, *, timeout_s: float) -> ReplayResult:
    """Send all spans and metrics of a recording to the exporters that the environment names.

    Raises:
        ConfigError: No exporter is named, or one cannot be created.
        RecordingError: The directory is not a recording.
    """
    prepare_environment()
    config = AgentConfig.from_environment()
    sampling = Sampling.from_environment()
    with SdkLog(sys.stderr) as log:
        setup = SinkSetup(directory, config, log.reasons, sampling, keep_cursor=False)
        by_signal = {signal: make_sinks(signal, setup) for signal in SINKS}
        sinks = [sink for group in by_signal.values() for sink in group]
        if not sinks:
            raise ConfigError(
                "no exporter is configured; give --endpoint URL, or set OTEL_EXPORTER_OTLP_ENDPOINT"
            )
        deadline = time.monotonic() + timeout_s
        for sink in sinks:
            sink.start()
        for sink in sinks:
            while sink.is_alive() and time.monotonic() < deadline:
                sink.join(max(0.0, deadline - time.monotonic()))
        delivered = all(sink.done.is_set() for sink in sinks)
        reasons = [
            *(sink.reason for sink in sinks if not sink.done.is_set()),
            f"not done within {timeout_s:g} s",
        ]
        return ReplayResult(
            spans=max((sink.delivered for sink in by_signal["spans"]), default=0),
            points=max((sink.delivered for sink in by_signal["metrics"]), default=0),
            delivered=delivered,
            reason="" if delivered else next(reason for reason in reasons if reason),
            losses=[line for sink in sinks for line in sink.losses],
        )
