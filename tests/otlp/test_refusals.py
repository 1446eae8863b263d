"""What a receiver refuses for good costs itself alone, and points of a wrong age are not sent: real
exporters, a real receiver."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_dflash.agent.sinks import sink as sinks
from otel_dflash.agent.sinks.metrics import MetricSink
from otel_dflash.agent.sinks.sink import Sink
from otel_dflash.agent.sinks.spans import SpanSink
from otel_dflash.config import AgentConfig
from otel_dflash.otlp.exporters import metric_exporters, span_exporters
from otel_dflash.otlp.sdk_log import SdkLog
from otel_dflash.recording.run_info import RunInfo, create_recording
from otel_dflash.recording.writer import RecordingWriter
from tests.metrics.planted import PlantedRing, open_frame
from tests.otlp_receiver import OtlpReceiver
from tests.processes import RUN, completed, user_environment
from tests.running import poll

MS = 1_000_000
S = 1_000_000_000
WALL = 1_700_000_000 * S
DAY = 86_400
CONFIG = AgentConfig(
    0.1, 1 << 30, metric_interval_ns=10 * S, metric_age_ns_max=29 * DAY * S, exit_timeout_s=1
)
TRAINER = """
import otel_dflash
telemetry = otel_dflash.start()
with telemetry.worker("target", 0).step():
    pass
"""
INVALID = {
    "grpc": "INVALID_ARGUMENT: the receiver does not take that",
    "http/protobuf": (
        "400: Bad Request (the data was not accepted; if the collector speaks TLS, begin the URL "
        "with https://)"
    ),
}


@pytest.fixture(params=["grpc", "http/protobuf"])
def protocol(request: pytest.FixtureRequest, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one that exporters made in this test speak with the receiver."""
    for name, value in {**receiver.environment(request.param), "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}.items():
        monkeypatch.setenv(name, value)
    return str(request.param)


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Iterator[SdkLog]:
    monkeypatch.setattr(sinks, "BACKOFF_S", (0.001, 0.01))
    with SdkLog(io.StringIO()) as noise:
        yield noise


def span_sink(path: Path, noise: SdkLog) -> SpanSink:
    return SpanSink("test", span_exporters()["otlp"], path, keep_cursor=False, reasons=noise.reasons)


def metric_sink(
    path: Path, noise: SdkLog, clock_s: Callable[[], float], keep_cursor: bool = False
) -> MetricSink:
    exporter = metric_exporters()["otlp"]
    return MetricSink(
        "test",
        exporter,
        path,
        CONFIG,
        None,
        keep_cursor,
        noise.reasons,
        clock=lambda: WALL + int(clock_s() * S),
    )


def recording(directory: Path, at_s: list[float], bad: tuple[int, ...] = ()) -> Path:
    """Write a recording with 100 steps at each of those times, and an OPEN frame where the interval of each but
    the last ends; the phase of some, counted over all, is "bad" and not "forward"."""
    path = directory / "run-1"
    create_recording(path, RunInfo("run-1", "node-1", WALL, 0, WALL, "0.1.0"))
    writer = RecordingWriter(path, 1 << 30)
    ring = PlantedRing(1, "target", 0, created_ns=0)
    frames = []
    for turn, second in enumerate(at_s):
        for number in range(100):
            start = int(second * S) + number * MS
            ring.phase("bad" if turn * 100 + number in bad else "forward", start, start + 1000)
            ring.step(start, start + 2000)
        if frames:
            frames.append(open_frame((int(at_s[turn - 1]) // 10 + 1) * 10 * S, {}))
        frames.append(ring.flush(int(second * S)))
    names = ring.names_frame()
    for frame in (names, *frames):
        writer.append(frame.kind, frame.ring, frame.first, frame.count, frame.payload, frame.time_ns)
    writer.close()
    return path


def deliver(sink: Sink) -> None:
    sink.start()
    finish(sink)


def finish(sink: Sink) -> None:
    sink.finish()
    assert sink.done.wait(60), sink.reason
    sink.join()
    sink.reader.close()


def has_span(name: str) -> Callable[[Any], bool]:
    return lambda request: any(
        span.name == name
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    )


def has_metric(name: str) -> Callable[[Any], bool]:
    return lambda request: any(
        metric.name == name
        for resource in getattr(request, "resource_metrics", [])
        for scope in resource.scope_metrics
        for metric in scope.metrics
    )


def test_what_was_left_out_is_said_at_the_end_and_in_the_summary(
    receiver: OtlpReceiver, tmp_path: Path
) -> None:
    receiver.refuses = has_metric("dflash.worker.tokens")
    environment = {
        **user_environment(tmp_path),
        **receiver.environment("grpc"),
        "OTEL_DFLASH_EXIT_MS": "20000",
    }
    del environment["OTEL_DFLASH_AGENT"]
    code, _, said = completed((*RUN, sys.executable, "-c", TRAINER), environment, tmp_path)
    line = (
        f"metric points that the receiver refused for good: 1 ({INVALID['grpc']}); they are in the "
        "recording, the receiver's log says more"
    )
    assert (code, said.decode()) == (0, f"otel-dflash: lost: {line}\n")
    assert len(receiver.spans()) == 1
    _, summary, _ = completed(
        (sys.executable, "-m", "otel_dflash", "summary", "latest"),
        {**environment, "COLUMNS": "300"},
        tmp_path,
    )
    assert line in " ".join(summary.decode().split())


# --- spans


@pytest.mark.parametrize("bad", [(0,), (3, 4, 77), (99,)])
def test_refused_spans_cost_the_others_nothing(
    bad: tuple[int, ...],
    protocol: str,
    receiver: OtlpReceiver,
    noise: SdkLog,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    receiver.refuses = has_span("target.bad")
    sink = span_sink(recording(tmp_path, [0, 1], bad), noise)
    deliver(sink)
    spans = receiver.spans()
    assert (len(spans), len(receiver.span_ids()), sink.delivered, sink.refused) == (400 - len(bad),) * 3 + (
        len(bad),
    )
    assert sink.losses == [
        (
            f"spans that the receiver refused for good: {len(bad)} ({INVALID[protocol]}); they are in "
            "the recording, the receiver's log says more"
        )
    ]
    said = (
        f"sink spans-test: the receiver refuses some spans for good ({INVALID[protocol]}); they are left "
        "out and counted\n"
    )
    assert capfd.readouterr().err == f"otel-dflash: {said}"


def test_a_receiver_that_has_taken_nothing_yet_may_be_the_wrong_one_so_spans_wait(
    protocol: str, receiver: OtlpReceiver, noise: SdkLog, tmp_path: Path
) -> None:
    receiver.refuses = lambda request: True
    sink = span_sink(recording(tmp_path, [0]), noise)
    sink.start()
    poll(lambda: sink.failures > 20)
    assert (sink.delivered, sink.refused, sink.reason) == (0, 0, INVALID[protocol])
    receiver.refuses = lambda request: False
    finish(sink)
    assert (len(receiver.spans()), len(receiver.span_ids()), sink.losses) == (200, 200, [])


# --- metrics


@pytest.mark.usefixtures("protocol")
def test_a_refused_metric_costs_the_others_nothing(
    receiver: OtlpReceiver, noise: SdkLog, tmp_path: Path
) -> None:
    receiver.refuses = has_metric("dflash.worker.tokens")
    sink = metric_sink(recording(tmp_path, [1, 11, 21]), noise, lambda: 30)
    deliver(sink)
    assert [point.value for point in receiver.points("dflash.worker.batches")] == [100, 200, 300]
    assert receiver.points("dflash.worker.tokens") == []
    assert (sink.delivered, sink.refused) == (3, 3)
    assert [point.count for point in receiver.points("dflash.phase.duration")] == [100, 200, 300]


@pytest.mark.usefixtures("protocol")
def test_points_that_are_all_refused_do_not_hold_up_newer_ones(
    receiver: OtlpReceiver, noise: SdkLog, tmp_path: Path
) -> None:
    receiver.refuses = lambda request: time_of(request) < WALL + 15 * S
    sink = metric_sink(recording(tmp_path, [1, 11, 21]), noise, lambda: 30)
    deliver(sink)
    assert [(point.time_ns - WALL, point.value) for point in receiver.points("dflash.worker.batches")] == [
        (20 * S, 200),
        (21 * S, 300),
    ]
    assert (sink.delivered, sink.refused) == (2, 22)


@pytest.mark.usefixtures("protocol")
def test_the_cursor_waits_for_a_receiver_that_takes_no_points_at_all(
    receiver: OtlpReceiver, noise: SdkLog, tmp_path: Path
) -> None:
    path = recording(tmp_path, [1, 11, 21])
    receiver.refuses = lambda request: True
    sink = metric_sink(path, noise, lambda: 30, keep_cursor=True)
    sink.start()
    sink.finish()
    poll(lambda: sink.failures > 3)
    assert (sink.delivered, sink.losses, sink.position, list(path.glob("cursor-*"))) == (0, [], 0, [])
    receiver.refuses = lambda request: False
    finish(sink)
    assert [point.value for point in receiver.points("dflash.worker.batches")] == [300]


def time_of(request: Any) -> int:
    metric = request.resource_metrics[0].scope_metrics[0].metrics[0]
    return int(getattr(metric, metric.WhichOneof("data")).data_points[0].time_unix_nano)


@pytest.mark.usefixtures("protocol")
def test_points_of_a_wrong_age_are_left_out_and_said(
    receiver: OtlpReceiver, noise: SdkLog, tmp_path: Path
) -> None:
    at_s = [1.0, 11.0, DAY, 29 * DAY + 15, 29 * DAY + 615]
    sink = metric_sink(recording(tmp_path, at_s), noise, lambda: 29 * DAY + 15)
    deliver(sink)
    times = [point.time_ns - WALL for point in receiver.points("dflash.worker.batches")]
    assert times == [20 * S, (DAY + 10) * S, (29 * DAY + 20) * S]
    assert (sink.too_old, sink.ahead, sink.delivered, sink.refused) == (1, 1, 3, 0)
    assert sink.losses == [
        "points of each metric that are over 29 days old and were not sent: 1; a newer one holds their "
        "totals. To send them too, widen the "
        "receiver's out-of-order window and OTEL_DFLASH_METRIC_AGE_S, and replay",
        "points of each metric that are over 5 min ahead of this host's clock and were not sent: 1; it "
        "was set back after the session "
        "began, or is wrong here: set it, or wait, and replay",
    ]


@pytest.mark.usefixtures("protocol")
def test_of_a_recording_that_is_too_old_no_newer_point_is_promised(
    receiver: OtlpReceiver, noise: SdkLog, tmp_path: Path
) -> None:
    sink = metric_sink(recording(tmp_path, [1, 11]), noise, lambda: 40 * DAY)
    deliver(sink)
    assert receiver.points("dflash.worker.batches") == []
    assert sink.losses == [
        "points of each metric that are over 29 days old and were not sent: 2. To send them too, widen "
        "the receiver's out-of-order window "
        "and OTEL_DFLASH_METRIC_AGE_S, and replay"
    ]


@pytest.mark.usefixtures("protocol")
def test_points_that_grow_too_old_while_they_wait_are_left_out(
    receiver: OtlpReceiver, noise: SdkLog, tmp_path: Path
) -> None:
    now_s = [100.0]
    sink = metric_sink(recording(tmp_path, [1, 29 * DAY]), noise, lambda: now_s[0])
    receiver.down = True
    sink.start()
    poll(lambda: sink.failures > 2)
    now_s[0] = 29 * DAY + 100
    poll(lambda: sink.too_old == 1)
    receiver.down = False
    finish(sink)
    assert [point.value for point in receiver.points("dflash.worker.batches")] == [200]
    assert (sink.too_old, sink.delivered) == (1, 1)
