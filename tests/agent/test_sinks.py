"""Sinks over real recordings, with exporters written as a user writes one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    MetricExporter,
    MetricExportResult,
    MetricsData,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_dflash.agent.sinks import SINKS, make_sinks
from otel_dflash.agent.sinks import sink as sinks
from otel_dflash.agent.sinks.metrics import MetricSink
from otel_dflash.agent.sinks.sink import Sink, SinkSetup
from otel_dflash.agent.sinks.spans import SpanSink
from otel_dflash.config import AgentConfig
from otel_dflash.recording.frames import Frame
from otel_dflash.recording.run_info import RunInfo, create_recording
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.spans.sampling import Sampling
from tests.metrics.planted import PlantedRing, agent_frames, open_frame
from tests.running import poll

MS = 1_000_000
S = 1_000_000_000
WALL = 1_700_000_000 * S
CONFIG = AgentConfig(0.1, 1 << 30, metric_interval_ns=10 * S, metric_age_ns_max=3600 * S, exit_timeout_s=1)


class Spans(SpanExporter):
    """Keeps what it gets. Each of `answers` is used once, then all is taken: a result, or what to raise."""

    def __init__(self, *answers: SpanExportResult | Exception) -> None:
        self.answers = list(answers)
        self.calls = 0
        self.batches: list[list[tuple[int, str]]] = []
        self.hold: threading.Event | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.calls += 1
        if self.hold:
            self.hold.wait(30)
        answer = self.answers.pop(0) if self.answers else SpanExportResult.SUCCESS
        if isinstance(answer, Exception):
            raise answer
        if answer is SpanExportResult.SUCCESS:
            self.batches.append([(span.context.span_id, span.name) for span in spans])
        return answer

    @property
    def spans(self) -> list[tuple[int, str]]:
        return [span for batch in self.batches for span in batch]

    def shutdown(self) -> None:
        pass


class Metrics(MetricExporter):
    """Keeps (time, start, count) of each point of dflash.phase.duration."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__({}, {})
        self.failures = failures
        self.points: list[tuple[int, int, int]] = []

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        if self.failures:
            self.failures -= 1
            return MetricExportResult.FAILURE
        for resource in metrics_data.resource_metrics:
            for metric in resource.scope_metrics[0].metrics:
                if metric.name == "dflash.phase.duration":
                    assert metric.data.aggregation_temporality is AggregationTemporality.CUMULATIVE  # type: ignore[union-attr]
                    self.points += [
                        (point.time_unix_nano - WALL, point.start_time_unix_nano - WALL, point.count)  # type: ignore[union-attr]
                        for point in metric.data.data_points
                    ]
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        pass


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    create_recording(tmp_path / "run-1", RunInfo("run-1", "node-1", WALL, 0, WALL, "0.1.0"))
    return tmp_path / "run-1"


@pytest.fixture
def writer(directory: Path) -> Iterator[RecordingWriter]:
    writer = RecordingWriter(directory, 1 << 30)
    yield writer
    writer.close()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Sink], Sink]]:
    """Start sinks that are finished and waited for at the end, with short pauses between tries."""
    monkeypatch.setattr(sinks, "BACKOFF_S", (0.001, 0.01))
    started: list[Sink] = []

    def run(sink: Sink) -> Sink:
        sink.start()
        started.append(sink)
        return sink

    yield run
    for sink in started:
        sink.finish()
        sink.join(30)
        sink.reader.close()
        assert not sink.is_alive()


def append(writer: RecordingWriter, frame: Frame, time_ns: int | None = None) -> None:
    time_ns = frame.time_ns if time_ns is None else time_ns
    writer.append(frame.kind, frame.ring, frame.first, frame.count, frame.payload, time_ns)


def steps(writer: RecordingWriter, ring: PlantedRing, count: int, at: int = 0) -> None:
    """Append a frame of steps with one phase each."""
    for number in range(count):
        ring.phase("forward", at + number * MS, at + number * MS + 1000)
        ring.step(at + number * MS, at + number * MS + 2000)
    if not writer.names(ring.ring):
        append(writer, ring.names_frame())
    append(writer, ring.flush(), at)


def finished(sink: Sink) -> None:
    sink.finish()
    assert sink.done.wait(30), sink.reason


# --- spans


def test_all_spans_are_delivered_once(
    directory: Path, writer: RecordingWriter, start: Callable[[Sink], Sink]
) -> None:
    exporter = Spans()
    sink = start(SpanSink("test", exporter, directory, writer))
    ring = PlantedRing(1, "target", 0)
    for turn in range(5):
        steps(writer, ring, 300, turn * S)
    finished(sink)
    assert len(exporter.spans) == len(set(exporter.spans)) == sink.delivered == 3000
    assert max(len(batch) for batch in exporter.batches) <= 512
    assert (sink.failures, sink.reason) == (0, None)


@pytest.mark.parametrize("failure", [SpanExportResult.FAILURE, RuntimeError("plugin bug"), KeyError("x")])
def test_a_failed_export_is_repeated_until_it_succeeds(
    failure: SpanExportResult | Exception,
    directory: Path,
    writer: RecordingWriter,
    start: Callable[[Sink], Sink],
    capfd: pytest.CaptureFixture[str],
) -> None:
    exporter = Spans(*[failure] * 5)
    ring = PlantedRing(1, "target", 0)
    steps(writer, ring, 10)
    sink = start(SpanSink("test", exporter, directory, writer))
    finished(sink)
    assert len(exporter.spans) == len(set(exporter.spans)) == 20
    assert (sink.failures, sink.reason, exporter.calls) == (5, None, 6)
    said = capfd.readouterr().err
    assert said.count("\n") == (1 if isinstance(failure, Exception) else 0)
    assert "Traceback" not in said


def test_why_an_exporter_raises_is_kept_while_it_does(
    directory: Path, writer: RecordingWriter, start: Callable[[Sink], Sink]
) -> None:
    exporter = Spans(*[RuntimeError("no route to https://user:secret@host")] * 1_000_000)
    steps(writer, PlantedRing(1, "target", 0), 1)
    sink = start(SpanSink("test", exporter, directory, writer))
    poll(lambda: sink.failures > 3)
    assert sink.reason == "RuntimeError: no route to https://***@host"
    exporter.answers.clear()
    poll(lambda: sink.reason is None)


def test_an_exporter_that_hangs_delays_itself_alone(
    directory: Path, writer: RecordingWriter, start: Callable[[Sink], Sink]
) -> None:
    stuck, well = Spans(), Spans()
    stuck.hold = threading.Event()
    first = start(SpanSink("stuck", stuck, directory, writer))
    second = start(SpanSink("well", well, directory, writer))
    ring = PlantedRing(1, "target", 0)
    steps(writer, ring, 10)
    poll(lambda: stuck.calls == 1 and len(well.spans) == 20)
    steps(writer, ring, 10, S)
    poll(lambda: len(well.spans) == 40)
    assert (first.delivered, stuck.calls) == (0, 1)
    stuck.hold.set()
    finished(first)
    finished(second)
    assert stuck.spans == well.spans


def test_a_sink_started_again_goes_on_behind_what_was_delivered(
    directory: Path, writer: RecordingWriter, start: Callable[[Sink], Sink]
) -> None:
    ring = PlantedRing(1, "target", 0)
    ring.phase("forward", 0, 10)  # of a step that ends in the second sink's time
    append(writer, ring.names_frame())
    append(writer, ring.flush(), 0)
    first, second = Spans(), Spans()
    sink = start(SpanSink("test", first, directory, writer))
    finished(sink)
    assert first.spans == []
    ring.step(0, 20)
    append(writer, ring.flush(), 0)
    finished(start(SpanSink("test", second, directory, writer)))
    assert [name for _, name in second.spans] == ["target.step", "target.forward"]
    third = Spans()
    finished(start(SpanSink("test", third, directory, writer)))
    assert third.spans == []


def test_a_cursor_inside_a_large_frame_skips_what_was_sent(
    directory: Path, writer: RecordingWriter, start: Callable[[Sink], Sink]
) -> None:
    ring = PlantedRing(1, "target", 0)
    for turn in range(4):
        steps(writer, ring, 400, turn * S)
    whole = Spans()
    sink = start(SpanSink("whole", whole, directory, writer))
    finished(sink)
    cursor = {"position": 0, "delivered": 2500}  # more than one gathering gives
    (directory / "cursor-spans-part.json").write_text(json.dumps(cursor))
    rest = Spans()
    sink = start(SpanSink("part", rest, directory, writer))
    finished(sink)
    assert rest.spans == whole.spans[2500:]


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"position": "7"}',
        '{"position": -1}',
        '{"position": 0, "delivered": "3"}',
        '{"position": 3, "held": "AAAA"}',
        '{"position": 3, "held": 5}',
        '{"position": 3, "held": "é"}',
    ],
)
def test_a_cursor_that_cannot_be_used_starts_over_with_the_same_ids(
    cursor: str, directory: Path, writer: RecordingWriter, start: Callable[[Sink], Sink]
) -> None:
    steps(writer, PlantedRing(1, "target", 0), 10)
    first, second = Spans(), Spans()
    finished(start(SpanSink("first", first, directory, writer)))
    (directory / "cursor-spans-second.json").write_text(cursor)
    finished(start(SpanSink("second", second, directory, writer)))
    assert second.spans == first.spans
    assert len(first.spans) == 20


def test_a_cursor_that_cannot_be_saved_is_said_once_and_delivery_goes_on(
    directory: Path, writer: RecordingWriter, start: Callable[[Sink], Sink], capfd: pytest.CaptureFixture[str]
) -> None:
    (directory / "cursor-spans-test.tmp").mkdir()
    exporter = Spans()
    sink = start(SpanSink("test", exporter, directory, writer))
    ring = PlantedRing(1, "target", 0)
    for turn in range(3):
        steps(writer, ring, 1000, turn * S)
    finished(sink)
    assert len(exporter.spans) == 6000
    assert capfd.readouterr().err.count("cannot be saved") == 1


def test_a_replay_ends_at_the_end_of_the_recording_and_leaves_no_cursor(
    directory: Path, writer: RecordingWriter, start: Callable[[Sink], Sink]
) -> None:
    steps(writer, PlantedRing(1, "target", 0), 10)
    exporter = Spans()
    sink = start(SpanSink("test", exporter, directory, keep_cursor=False))
    assert sink.done.wait(30)
    assert len(exporter.spans) == 20
    assert list(directory.glob("cursor-*")) == []


# --- metrics


def test_after_an_outage_there_is_one_point_for_each_recorded_interval(
    directory: Path, writer: RecordingWriter, start: Callable[[Sink], Sink]
) -> None:
    exporter = Metrics(failures=7)
    ring = PlantedRing(1, "target", 0, created_ns=2 * S)
    for second in range(3, 60, 2):
        steps(writer, ring, 1, second * S)
        for frame in [*agent_frames(second), open_frame(second * S, {})]:
            append(writer, frame, second * S)
    sink = start(MetricSink("test", exporter, directory, CONFIG, writer, clock=lambda: WALL + 60 * S))
    finished(sink)
    assert exporter.points == [
        (11 * S, 2 * S, 5),
        (21 * S, 2 * S, 10),
        (31 * S, 2 * S, 15),
        (41 * S, 2 * S, 20),
        (51 * S, 2 * S, 25),
        (59 * S, 2 * S, 29),
    ]
    assert sink.failures == 7


def test_a_metric_sink_started_again_at_any_frame_sends_the_same_totals(
    directory: Path, writer: RecordingWriter, start: Callable[[Sink], Sink]
) -> None:
    ring = PlantedRing(1, "target", 0)
    points: list[tuple[int, int, int]] = []
    for second in range(0, 60, 3):
        steps(writer, ring, 2, second * S)
        exporter = Metrics()
        finished(start(MetricSink("test", exporter, directory, CONFIG, writer, clock=lambda: WALL + 60 * S)))
        points += exporter.points
    assert points[-1] == (57 * S, 0, 40)
    assert [count for _, _, count in points] == sorted(count for _, _, count in points)
    assert {start_ns for _, start_ns, _ in points} == {0}
    assert all(
        count == 2 * (time_ns // (3 * S) + 1)
        for time_ns, _, count in points
        if time_ns % CONFIG.metric_interval_ns
    )


def test_totals_of_a_later_version_are_folded_again_from_the_start(
    directory: Path, writer: RecordingWriter, start: Callable[[Sink], Sink], capfd: pytest.CaptureFixture[str]
) -> None:
    steps(writer, PlantedRing(1, "target", 0), 5)
    (directory / "cursor-metrics-test.json").write_text('{"position": 2, "totals": {"version": 99}}')
    exporter = Metrics()
    finished(start(MetricSink("test", exporter, directory, CONFIG, writer, clock=lambda: WALL + 60 * S)))
    assert [count for _, _, count in exporter.points] == [5]
    assert capfd.readouterr().err.count("its cursor cannot be used") == 1


# --- the registry


def test_each_entry_makes_a_sink_for_each_exporter_of_its_signal(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for signal in ("TRACES", "METRICS"):
        monkeypatch.setenv(f"OTEL_{signal}_EXPORTER", "console")
    setup = SinkSetup(directory, CONFIG, {}, Sampling.from_environment(), keep_cursor=False)
    made = {signal: make_sinks(signal, setup) for signal in SINKS}
    assert {signal: [(type(sink), sink.name) for sink in group] for signal, group in made.items()} == {
        "spans": [(SpanSink, "sink spans-console")],
        "metrics": [(MetricSink, "sink metrics-console")],
    }


def test_an_agent_loads_no_sdk_before_it_drains() -> None:
    program = "import sys, otel_dflash.agent.loop; print([name for name in sys.modules if 'opentelemetry.sdk' in name])"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, timeout=60, check=True).stdout == b"[]\n"
