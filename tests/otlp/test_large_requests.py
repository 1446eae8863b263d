"""Metric requests are of a size that receivers accept, however many workers there are: real exporters, a real
receiver."""

from __future__ import annotations

import io
import random
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from otel_dflash.agent.sinks import sink as sinks
from otel_dflash.agent.sinks.metrics import MetricSink
from otel_dflash.config import AgentConfig
from otel_dflash.otlp.batches import BYTES_PER_BATCH
from otel_dflash.otlp.exporters import metric_exporters
from otel_dflash.otlp.sdk_log import SdkLog
from otel_dflash.recording.frames import Frame
from otel_dflash.recording.run_info import RunInfo, create_recording
from otel_dflash.recording.writer import RecordingWriter
from tests.metrics.planted import PlantedRing, open_frame
from tests.otlp_receiver import OtlpReceiver, Point
from tests.processes import clean_environment, completed

S = 1_000_000_000
CONFIG = AgentConfig(0.1, 1 << 30, metric_interval_ns=10 * S, metric_age_ns_max=86_400 * S, exit_timeout_s=1)
PHASES = ("model_forward", "pack_hidden", "queue_put", "forward", "backward", "optimizer", "h2d", "d2h")


def sent_live(directory: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> MetricSink:
    """Record one step of each worker, whose phases take from 1 us to 100 ms, while a sink sends the points."""
    monkeypatch.setattr(sinks, "BACKOFF_S", (0.001, 0.01))
    started_ns = time.time_ns() - 60 * S
    create_recording(directory, RunInfo(directory.name, "node-1", started_ns, 0, started_ns, "0.1.0"))
    writer = RecordingWriter(directory, 1 << 30)

    def append(frame: Frame, at_s: int) -> None:
        writer.append(frame.kind, frame.ring, frame.first, frame.count, frame.payload, at_s * S)

    with SdkLog(io.StringIO()) as noise:
        exporter = metric_exporters()["otlp"]
        sink = MetricSink("test", exporter, directory, CONFIG, writer, reasons=noise.reasons)
        sink.start()
        chosen = random.Random(1)
        for index in range(workers):
            ring = PlantedRing(index + 1, "target", index)
            for start_ns in range(S, 5 * S, S):
                for phase in PHASES:
                    ring.phase(phase, start_ns, start_ns + int(10 ** chosen.uniform(3, 8)))
                ring.step(start_ns, start_ns + S // 2)
            append(ring.names_frame(), 0)
            append(ring.flush(), 6)
        append(open_frame(10 * S, {}), 10)
        sink.finish()
        assert sink.done.wait(120), sink.reason
        sink.join()
    sink.reader.close()
    writer.close()
    return sink


def series(points: list[Point]) -> Counter[str]:
    """Return how often each point came, with all that it says."""
    return Counter(
        f"{point.name} {sorted(point.resource.items())} {point.proto.SerializeToString(deterministic=True)!r}"
        for point in points
    )


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_all_points_of_1000_workers_arrive_once_in_requests_far_below_the_usual_limit(
    protocol: str, receiver: OtlpReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    receiver.refuses = lambda request: sizes.append(request.ByteSize())  # type: ignore[func-returns-value]
    environment = receiver.environment(protocol)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    sink = sent_live(tmp_path / "run-1", 1000, monkeypatch)
    assert (sink.delivered, sink.failures, sink.refused) == (1, 0, 0)
    live = series(receiver.points())
    assert set(live.values()) == {1}
    phases = Counter(
        point.attributes["dflash.worker.id"] for point in receiver.points("dflash.phase.duration")
    )
    assert phases == {str(index): len(PHASES) for index in range(1000)}
    assert sum(sizes) > receiver.bytes_max > 3 * BYTES_PER_BATCH
    assert max(sizes) <= BYTES_PER_BATCH

    receiver.clear()
    sizes.clear()
    command = (sys.executable, "-m", "otel_dflash", "replay", "run-1")
    variables = {**environment, "OTEL_DFLASH_DIR": str(tmp_path), "OTEL_TRACES_EXPORTER": "none"}
    code, _, said = completed(command, clean_environment(**variables), tmp_path)
    assert code == 0, said
    assert series(receiver.points()) == live
    assert max(sizes) <= BYTES_PER_BATCH


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_receiver_with_a_smaller_limit_gets_all_points_once_in_halves(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OtlpReceiver(bytes_max=200_000) as receiver:
        for name, value in {**receiver.environment(protocol), "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}.items():
            monkeypatch.setenv(name, value)
        sink = sent_live(tmp_path / "run-1", 100, monkeypatch)
        found = series(receiver.points())
    assert (sink.delivered, sink.refused, sink.losses) == (1, 0, [])
    assert set(found.values()) == {1}
    phases = Counter(
        point.attributes["dflash.worker.id"] for point in receiver.points("dflash.phase.duration")
    )
    assert phases == {str(index): len(PHASES) for index in range(100)}
