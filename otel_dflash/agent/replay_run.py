"""Sending a recording once more, or for the first time: the same sinks, from its start, without a cursor on disk."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from otel_dflash.agent.exporters import metric_exporters, prepare_environment, span_exporters
from otel_dflash.agent.noise import NoiseFilter
from otel_dflash.agent.sampling import Sampling
from otel_dflash.agent.sinks import MetricSink
from otel_dflash.agent.span_sink import SpanSink
from otel_dflash.config import AgentConfig, ConfigError


@dataclass(frozen=True)
class ReplayResult:
    """What a replay sent."""

    spans: int
    points: int  # times all series were sent
    delivered: bool
    reason: str  # why not all was delivered
    losses: list[str]  # what was left out although all else was delivered, one line each


def replay(directory: Path, *, timeout_s: float) -> ReplayResult:
    """Send all spans and metrics of a recording to the exporters that the environment names.

    Raises:
        ConfigError: None is named, or one cannot be made.
        RecordingError: Not a recording.
    """
    prepare_environment()
    config = AgentConfig.from_environment()
    sampling = Sampling.from_environment()
    with NoiseFilter(sys.stderr) as noise:
        span_sinks = [
            SpanSink(name, exporter, directory, keep_cursor=False, reasons=noise.reasons, sampling=sampling)
            for name, exporter in span_exporters().items()
        ]
        metric_sinks = [
            MetricSink(name, exporter, directory, config, keep_cursor=False, reasons=noise.reasons, sampling=sampling)
            for name, exporter in metric_exporters().items()
        ]
        if not span_sinks and not metric_sinks:
            raise ConfigError("no exporter is configured; say --endpoint URL, or set OTEL_EXPORTER_OTLP_ENDPOINT")
        sinks = [*span_sinks, *metric_sinks]
        deadline = time.monotonic() + timeout_s
        for sink in sinks:
            sink.start()
        for sink in sinks:
            while sink.is_alive() and time.monotonic() < deadline:
                sink.join(max(0.0, deadline - time.monotonic()))
        delivered = all(sink.done.is_set() for sink in sinks)
        reasons = [*(sink.reason for sink in sinks if not sink.done.is_set()), f"not done within {timeout_s:g} s"]
        return ReplayResult(
            spans=max((sink.delivered for sink in span_sinks), default=0),
            points=max((sink.delivered for sink in metric_sinks), default=0),
            delivered=delivered,
            reason="" if delivered else next(reason for reason in reasons if reason),
            losses=[line for sink in sinks for line in sink.losses],
        )
