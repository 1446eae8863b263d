"""Metrics in a real Prometheus: exact totals at their own times, quantiles, exemplars, what it refuses, and
how many series there are."""

from __future__ import annotations

import json
import math
import random
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import RunInfo, create_recording
from otel_dflash.recording.writer import RecordingWriter
from tests.metrics.planted import PlantedRing, agent_frames, open_frame
from tests.otlp_receiver import OtlpReceiver, Span
from tests.processes import clean_environment
from tests.running import Running, poll
from tests.stack.conftest import Stack
from tests.stack.jaeger_api import Jaeger
from tests.stack.prometheus_api import Prometheus
from tests.whole_run import TESTS

MS = 1_000_000
S = 1_000_000_000
DAY = 86_400
BUCKET = 2 ** (1 / 64)  # a bucket's upper bound over its lower one
SHOWN_S = 20.0


@pytest.fixture
def prometheus(stack: Stack) -> Prometheus:
    return Prometheus(stack.start("prometheus").url("PROMETHEUS_PORT"))


def planted(directory: Path, run: str, started_s: float, frames: list[tuple[float, Frame]]) -> Path:
    """Write a recording that began at `started_s`, Unix time; each frame with its time in it, s. Each interval of
    10 s with a frame ends with an OPEN frame."""
    started_ns = int(started_s * S)
    recording = directory / run
    create_recording(recording, RunInfo(run, "node-1", started_ns, 0, started_ns, "0.1.0"))
    writer = RecordingWriter(recording, 1 << 30)
    end_s = 10
    for at_s, frame in frames:
        if at_s >= end_s:
            ends = open_frame(end_s * S, {})
            writer.append(ends.kind, 0, 0, 0, ends.payload, ends.time_ns)
        end_s = (int(at_s) // 10 + 1) * 10
        writer.append(frame.kind, frame.ring, frame.first, frame.count, frame.payload, int(at_s * S))
    writer.close()
    return recording


def steps(ring: PlantedRing, count: int, at_s: float) -> Frame:
    """Return a frame of `count` steps, each with a phase of 1 ms, from that time on."""
    for number in range(count):
        start = int(at_s * S) + number * 10 * MS
        ring.phase("forward", start, start + MS)
        ring.step(start, start + 2 * MS, tokens=10)
    return ring.flush(int(at_s * S) + count * 10 * MS)


def replay(recording: Path, prometheus: Prometheus, **variables: str) -> subprocess.CompletedProcess[str]:
    """Send a recording's metrics by the command that a user has."""
    command = [
        sys.executable,
        "-m",
        "otel_dflash",
        "replay",
        recording.name,
        "--dir",
        str(recording.parent),
        "--timeout",
        "60",
    ]
    return subprocess.run(
        command,
        env=clean_environment(**prometheus.environment(), **variables),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def fill(prometheus: Prometheus, directory: Path) -> None:
    """Send something of now: an empty Prometheus takes points of any age."""
    ring = PlantedRing(9, "target", 9, created_ns=0)
    recording = planted(
        directory, "now", time.time() - 5, [(0.0, ring.names_frame()), (1.0, steps(ring, 1, 0.5))]
    )
    assert replay(recording, prometheus).returncode == 0


# --- quantiles


def durations_of(recording: Path, phase: str) -> dict[str, list[int]]:
    """Return the durations of a phase in the records of a recording, sorted, by worker id."""
    reader = RecordingReader(recording)
    found: dict[str, list[int]] = {}
    while frames := reader.read():
        for frame in frames:
            if frame.kind == FrameKind.RECORDS:
                names = reader.catalog[frame.ring]
                for head, start, end, *_ in struct.iter_unpack("<8Q", frame.payload):
                    if head >> 32 & 0xFF == 1 and names.phase(head >> 16 & 0xFFFF)[1] == phase:
                        found.setdefault(str(names.worker.index), []).append(end - start)
    reader.close()
    return {worker: sorted(durations) for worker, durations in found.items()}


def nearest_rank(durations: list[int], q: float) -> float:
    return durations[math.ceil(q * len(durations)) - 1] / S


def lognormal(dice: random.Random, scale: int) -> int:
    return round(20 * MS * scale * math.exp(dice.gauss(0, 0.25)))


def bimodal(dice: random.Random, scale: int) -> int:
    """Return a wait that found an item (85 of 100, some us) or did not (some ms)."""
    return round((20_000 if dice.random() < 0.85 else 40 * MS) * scale * math.exp(dice.gauss(0, 0.25)))


@pytest.mark.parametrize(
    ("phase", "shape", "outlier_ns", "quantiles"),
    [
        ("forward", lognormal, 12 * S, (0.5, 0.9, 0.99, 0.99999)),
        ("queue_get", bimodal, None, (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)),
    ],
    ids=["one-hump-and-an-outlier-of-12-s", "two-humps"],
)
def test_quantiles_are_within_a_bucket_of_the_exact_ones(
    phase: str,
    shape: Callable[[random.Random, int], int],
    outlier_ns: int | None,
    quantiles: tuple[float, ...],
    prometheus: Prometheus,
    tmp_path: Path,
) -> None:
    """Of each worker and of both together; of two humps on both, and not in the gap, where any value is as
    right."""
    dice = random.Random(4)
    rings = [PlantedRing(number, "drafter", number, created_ns=0) for number in (1, 2)]
    frames: list[tuple[float, Frame]] = []
    for number, ring in enumerate(rings, 1):
        now = 0
        for count in range(3000):
            took = outlier_ns if outlier_ns and count == 5 and number == 1 else shape(dice, number)
            ring.phase(phase, now, now + took)
            now += took
            if count % 100 == 99:
                frames.append((now / S, ring.flush(now)))
        frames.append((now / S, ring.closed(now)))
    frames.sort(key=lambda item: item[0])
    length_s = frames[-1][0]
    started_s = time.time() - length_s - 60
    recording = planted(
        tmp_path, "run-1", started_s, [*((0.0, ring.names_frame()) for ring in rings), *frames]
    )
    sent = replay(recording, prometheus)
    assert (sent.returncode, sent.stderr) == (0, "")
    exact = durations_of(recording, phase)
    exact["both"] = sorted(exact["1"] + exact["2"])
    assert len(exact["both"]) == 6000
    ranks = {q: nearest_rank(exact["both"], q) for q in quantiles}
    assert not outlier_ns or ranks[quantiles[-1]] == 12
    assert outlier_ns or (
        max(ranks[q] for q in quantiles if q <= 0.75) < 0.0002
        and min(ranks[q] for q in quantiles if q >= 0.9) > 0.01
    )
    end_s = started_s + length_s + 1
    metric = f'dflash_phase_duration_seconds{{dflash_phase="{phase}"}}'
    for q in quantiles:
        totals = prometheus.query(f"histogram_quantile({q}, {metric})", end_s)
        rates = prometheus.query(
            f"histogram_quantile({q}, sum by (dflash_worker_role) (rate({metric}[{int(length_s) + 3}s])))",
            end_s,
        )
        ((_, of_both),) = rates
        found = {labels["dflash_worker_id"]: value for labels, value in totals} | {"both": of_both}
        wanted = {worker: nearest_rank(durations, q) for worker, durations in exact.items()}
        assert found.keys() == wanted.keys()
        assert {
            worker: value
            for worker, value in found.items()
            if not 1 / BUCKET <= value / wanted[worker] <= BUCKET
        } == {}, (q, wanted)


# --- own times


@pytest.mark.parametrize("age_s", [300, 5 * 3600, 20 * DAY])
def test_a_late_recording_lies_at_its_own_times_with_exact_totals(
    age_s: int, prometheus: Prometheus, tmp_path: Path
) -> None:
    started_s = round(time.time()) - age_s
    ring = PlantedRing(1, "target", 0, created_ns=2 * S)
    late = [(at, steps(ring, 5, at)) for at in (3.0, 7.0, 12.0, 35.0)]
    recording = planted(
        tmp_path, "late", started_s, [(2.0, ring.names_frame()), *late, (36.0, ring.closed(36 * S))]
    )
    fill(prometheus, tmp_path)
    assert (
        replay(recording, prometheus).stdout
        == "sent all of late: 0 spans and 3 points of each metric series\n"
    )
    times = [started_s + at for at in (10, 20, 36)]
    counts = dict(zip(times, (10, 15, 20), strict=True))
    selector = '{dflash_run_id="late"}'
    found = {
        name: [
            series for _, series in prometheus.samples(f"{name}{selector}", started_s - 10, started_s + 100)
        ]
        for name in (
            "dflash_worker_batches_total",
            "dflash_worker_tokens_total",
            "dflash_phase_duration_seconds",
        )
    }
    # what comes out of order begins with its first value: Prometheus adds the zero at a series' start to new
    # data only
    if age_s < 3600:
        counts = {started_s + 2: 0, **counts}
    assert found["dflash_worker_batches_total"] == [list(counts.items())]
    assert found["dflash_worker_tokens_total"] == [[(at, 10 * count) for at, count in counts.items()]]
    (points,) = found["dflash_phase_duration_seconds"]
    assert [(at, int(value["count"]), round(float(value["sum"]), 9)) for at, value in points] == [
        (at, count, count / 1000) for at, count in counts.items()
    ]
    ((_, exemplars),) = prometheus.exemplars(
        f"dflash_phase_duration_seconds{selector}", started_s, started_s + 100
    )
    assert [(one["timestamp"], one["value"]) for one in exemplars] == [
        (started_s + at, "0.001") for at in (3.001, 12.001, 35.001)
    ]


def test_after_an_outage_every_interval_is_there_and_the_totals_are_exact(
    stack: Stack, tmp_path: Path
) -> None:
    server = stack.prepare("prometheus")
    prometheus = Prometheus(server.url("PROMETHEUS_PORT"))
    with Running(tmp_path, **prometheus.environment()) as running:
        running.start_agent()
        running.start_trainer()
        before_s = time.time()
        failed = running.recording / "agent.log"
        for _ in range(4):
            running.ask("steps 20")
            seen = time.time()
            poll(lambda seen=seen: time.time() > seen + 0.4)  # type: ignore[misc]  # another interval begins
        poll(lambda: "Failed to export" in failed.read_text() or "Export is retried" in failed.read_text())
        server.start()
        started_s = time.time()
        running.ask("steps 20")
        counts = running.end_trainer()
        assert running.agents[0].wait(60) == 0
        state = running.delivery()["metrics"]
    assert (state["delivered"], state["losses"]) == (True, [])
    ((_, batches),) = prometheus.samples(
        'dflash_worker_batches_total{dflash_worker_role="target"}', before_s - 5, time.time() + 1
    )
    values = [int(value) for _, value in batches]
    assert (values[0], values[-1], counts["target.step"]) == (0, 100, 100)
    assert values == sorted(values)
    assert len({at for at, _ in batches if at < started_s}) >= 4
    totals = prometheus.query("histogram_count(dflash_phase_duration_seconds)", time.time())
    assert {
        f"{labels['dflash_worker_role']}.{labels['dflash_phase']}": value for labels, value in totals
    } == {name: count for name, count in counts.items() if name.partition(".")[2] not in ("", "step")}


# --- what Prometheus refuses


def test_points_too_old_are_left_out_and_cost_the_others_nothing(
    prometheus: Prometheus, tmp_path: Path
) -> None:
    """The recording goes on for 40 days: its first points are older than Prometheus takes."""
    started_s = round(time.time()) - 40 * DAY
    ring = PlantedRing(1, "target", 0, created_ns=0)
    at_s = [1.0, DAY, 20 * DAY, 40 * DAY - 60]
    recording = planted(
        tmp_path, "old", started_s, [(0.0, ring.names_frame()), *((at, steps(ring, 3, at)) for at in at_s)]
    )
    fill(prometheus, tmp_path)
    sent = replay(recording, prometheus)
    assert (sent.returncode, sent.stdout) == (
        0,
        "sent all of old: 0 spans and 2 points of each metric series\n",
    )
    assert sent.stderr == (
        "otel-dflash: points of each metric that are over 29 days old and were not sent: 2; a newer "
        "one holds their totals. To send them "
        "too, widen the receiver's out-of-order window and OTEL_DFLASH_METRIC_AGE_S, and replay\n"
    )
    ((_, batches),) = prometheus.samples(
        'dflash_worker_batches_total{dflash_run_id="old"}', started_s - DAY, time.time()
    )
    assert batches == [(started_s + 20 * DAY + 10, 9.0), (started_s + 40 * DAY - 60, 12.0)]


def test_what_is_refused_although_the_agent_sends_it_costs_itself_alone(
    prometheus: Prometheus, tmp_path: Path
) -> None:
    """Somebody allows points of 60 days here, and Prometheus takes 30."""
    started_s = round(time.time()) - 40 * DAY
    ring = PlantedRing(1, "target", 0, created_ns=0)
    at_s = [1.0, 40 * DAY - 60]
    recording = planted(
        tmp_path, "old", started_s, [(0.0, ring.names_frame()), *((at, steps(ring, 3, at)) for at in at_s)]
    )
    fill(prometheus, tmp_path)
    sent = replay(recording, prometheus, OTEL_DFLASH_METRIC_AGE_S=str(60 * DAY))
    assert (sent.returncode, sent.stdout) == (
        0,
        "sent all of old: 0 spans and 1 points of each metric series\n",
    )
    assert sent.stderr.splitlines()[-1].startswith(
        "otel-dflash: metric points that the receiver refused for good: 22 (400: Bad Request"
    )
    ((_, batches),) = prometheus.samples(
        'dflash_worker_batches_total{dflash_run_id="old"}', started_s - DAY, time.time()
    )
    assert batches == [(started_s + 40 * DAY - 60, 6.0)]


def test_one_refused_metric_costs_the_others_nothing(prometheus: Prometheus, tmp_path: Path) -> None:
    """Two recordings claim one series at one time with two values: the second value is refused, all else of
    that request is taken."""
    started_s = round(time.time()) - 60
    for tokens in (10, 11):
        ring = PlantedRing(1, "target", 0, created_ns=0)
        ring.step(0, MS, tokens=tokens)
        frames = [(0.0, ring.names_frame()), (1.0, ring.flush(S))]
        if tokens == 11:
            frames += [(1.0, frame) for frame in agent_frames(5 * S)]
        recording = planted(tmp_path / str(tokens), "same", started_s, frames)
        sent = replay(recording, prometheus)
        assert sent.returncode == 0
    assert sent.stderr.splitlines()[-1].startswith(
        "otel-dflash: metric points that the receiver refused for good: 1 (400: Bad Request"
    )
    now_s = time.time()
    assert [value for _, value in prometheus.query("dflash_worker_tokens_total", now_s)] == [10.0]
    assert [value for _, value in prometheus.query("dflash_telemetry_cpu_time_seconds_total", now_s)] == [5.0]


# --- a whole run: exemplars, labels, series


def test_a_run_of_five_targets_and_three_drafters(stack: Stack, tmp_path: Path) -> None:
    """By the whole stack: exact totals, below 900 series, no label but the chosen ones, exemplars that lead
    to spans in Jaeger."""
    prometheus = Prometheus(stack.start("prometheus").url("PROMETHEUS_PORT"))
    started = stack.start("jaeger", JAEGER_PROMETHEUS_URL=prometheus.url)
    jaeger = Jaeger(started.url("JAEGER_QUERY_HTTP_PORT"))
    collector = stack.start(
        "otelcol",
        OTELCOL_TRACES_ENDPOINT=started.url("JAEGER_HTTP_PORT"),
        OTELCOL_METRICS_ENDPOINT=f"{prometheus.url}/api/v1/otlp",
    )
    started_s = time.time()
    counts = trained(tmp_path, collector.url("OTELCOL_GRPC_PORT"))
    phases = {
        (role, index, name): count
        for role, workers in counts["phases"].items()
        for index, of_worker in workers.items()
        for name, count in of_worker.items()
        if count
    }
    assert Counter(role for role, index in {(role, index) for role, index, _ in phases}) >= Counter(
        target=5, drafter=3
    )

    def totals() -> dict[tuple[str, ...], float]:
        found = prometheus.query("histogram_count(dflash_phase_duration_seconds)", time.time())
        return {
            tuple(labels[f"dflash_{key}"] for key in ("worker_role", "worker_id", "phase")): value
            for labels, value in found
        }

    poll(lambda: totals() == phases, SHOWN_S)
    operations = {(f"dflash-{role}", f"{role}.{name}") for role, _, name in phases}

    def of_the_run() -> list[dict[str, str]]:
        """Return the labels of all its series, also those that Jaeger made of its spans, and the rules of its
        metrics."""
        return prometheus.series(
            '{dflash_run_id="five-and-three"}', "target_info", from_s=started_s - 60, to_s=time.time() + 60
        )

    poll(
        lambda: (
            operations <= {(labels.get("service_name"), labels.get("span_name")) for labels in of_the_run()}
        ),
        3 * SHOWN_S,
    )
    series = of_the_run()
    span_metrics = [labels for labels in series if labels["__name__"].startswith("traces_span_metrics_")]
    assert len(series) - len(span_metrics) < 900 / 2, "GPU, queue and host families are still to come"
    assert len(series) < 900, (
        "462 when this was written, half of them Jaeger's, which end 5 minutes after the run"
    )
    names = {name for labels in series if labels["__name__"].startswith("dflash_") for name in labels}
    # on a busy machine a run this short ends before the agent has recorded how far its sinks are
    assert names | {"dflash_telemetry_sink"} == {
        "__name__",
        "job",
        "instance",
        "host_name",
        "dflash_run_id",
        "dflash_gpu_index",
        "dflash_phase",
        "dflash_token_type",
        "dflash_worker_role",
        "dflash_worker_id",
        "dflash_worker_state",
        "dflash_telemetry_component",
        "dflash_telemetry_drop_reason",
        "dflash_telemetry_sink",
    }
    shown = prometheus.exemplars(
        '{__name__=~"dflash_(phase|step)_duration_seconds"}', started_s, time.time() + 60
    )
    ids = {
        (one["labels"]["trace_id"], one["labels"]["span_id"]) for _, exemplars in shown for one in exemplars
    }

    def spans_in_jaeger() -> dict[tuple[str, str], Span]:
        return {
            (span.trace_id, span.span_id): span
            for role in ("target", "postprocess", "drafter")
            for span in jaeger.spans(f"dflash-{role}")
        }

    poll(lambda: ids <= spans_in_jaeger().keys(), SHOWN_S)
    spans = spans_in_jaeger()
    steps = {(role, index, "step") for role, index, _ in phases}
    assert {
        (labels["dflash_worker_role"], labels["dflash_worker_id"], labels.get("dflash_phase", "step"))
        for labels, _ in shown
    } == {
        *phases,
        *steps,
    }
    for labels, exemplars in shown:
        name = f"{labels['dflash_worker_role']}.{labels.get('dflash_phase', 'step')}"
        for exemplar in exemplars:
            span = spans[exemplar["labels"]["trace_id"], exemplar["labels"]["span_id"]]
            if name == "postprocess.step":  # works on a target's step and has no span of its own
                assert span.name == "target.step"
                continue
            assert (span.name, span.attributes["dflash.worker.id"]) == (name, labels["dflash_worker_id"])
            assert float(exemplar["value"]) == (span.end_ns - span.start_ns) / S
            assert exemplar["timestamp"] == pytest.approx(span.end_ns / S, abs=0.001)


def test_exemplars_of_a_sampled_run_lead_to_traces_that_were_sent(
    stack: Stack, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    prometheus = Prometheus(stack.start("prometheus").url("PROMETHEUS_PORT"))
    collector = stack.start(
        "otelcol",
        OTELCOL_TRACES_ENDPOINT=receiver.http_endpoint,
        OTELCOL_METRICS_ENDPOINT=f"{prometheus.url}/api/v1/otlp",
    )
    started_s = time.time()
    counts = trained(
        tmp_path,
        collector.url("OTELCOL_GRPC_PORT"),
        OTEL_TRACES_SAMPLER="traceidratio",
        OTEL_TRACES_SAMPLER_ARG="0.3",
    )
    steps = counts["phases"]["drafter"]["0"]["optimizer"]
    ended = 'dflash_step_duration_seconds{dflash_worker_role="drafter",dflash_worker_id="0"}'
    poll(
        lambda: [value for _, value in prometheus.query(f"histogram_count({ended})", time.time())] == [steps],
        SHOWN_S,
    )
    shown = prometheus.exemplars(
        '{__name__=~"dflash_(phase|step)_duration_seconds"}', started_s, time.time() + 60
    )
    ids = {
        (one["labels"]["trace_id"], one["labels"]["span_id"]) for _, exemplars in shown for one in exemplars
    }
    poll(lambda: ids <= {(span.trace_id, span.span_id) for span in receiver.spans()}, SHOWN_S)
    assert len(ids) > 10
    assert (
        len(receiver.span_ids())
        < sum(sum(phases.values()) for workers in counts["phases"].values() for phases in workers.values())
        / 2
    )


def trained(
    directory: Path, endpoint: str, **variables: str
) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """Run the example to the end of the delivery; return what it counted."""
    settings = clean_environment(
        OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
        OTEL_DFLASH_METRIC_MS="500",
        OTEL_DFLASH_EXIT_MS="60000",
        **variables,
    )
    script = [
        str(TESTS.parent / "examples" / "dflash" / "train.py"),
        "--simulate",
        "--targets",
        "5",
        "--drafters",
        "3",
        "--steps",
        "60",
    ]
    counted = directory / "counts.json"
    command = [
        sys.executable,
        "-m",
        "otel_dflash",
        "run",
        "--run-id",
        "five-and-three",
        "--dir",
        str(directory),
        "--quiet",
    ]
    ran = subprocess.run(
        [*command, "--", sys.executable, *script, "--counts", str(counted)],
        env=settings,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, dict[str, dict[str, dict[str, int]]]] = json.loads(counted.read_text())
    return found
