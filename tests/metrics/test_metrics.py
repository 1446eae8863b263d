from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricsData

from otel_dflash import semconv
from otel_dflash.metrics.families import families
from otel_dflash.metrics.fold import Fold
from otel_dflash.otlp.metric_data import MetricWriter
from otel_dflash.recording.frames import Frame
from otel_dflash.recording.payloads import Open, OpenWork
from otel_dflash.recording.run_info import RunInfo
from tests.metrics.planted import PlantedRing, agent_frames, catalog_of, open_frame

WALL = 1_700_000_000_000_000_000
MS = 1_000_000
INFO = RunInfo("run-1", "node-a", anchor_wall_ns=WALL, anchor_mono_ns=0, created_ns=WALL - 5, version="1.2.3")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


def data_of(frames: list[Frame], *rings: PlantedRing, time_ns: int = 1_000 * MS) -> MetricsData:
    catalog = catalog_of(*rings)
    fold = Fold(catalog, families(1))
    fold.add_all([*(ring.names_frame() for ring in rings), *frames])
    return MetricWriter(INFO).data(fold.points(INFO, time_ns))


def short(attributes: dict[str, Any]) -> str:
    return " ".join(
        f"{key.removeprefix('dflash.').removeprefix('worker.')}={value}" for key, value in attributes.items()
    )


def flat(data: MetricsData) -> dict[str, Any]:
    """Return {instance: {metric: {attributes: value}}}; a histogram's value is a dict."""
    tree: dict[str, Any] = {}
    for resource in json.loads(data.to_json())["resource_metrics"]:
        (scope,) = resource["scope_metrics"]
        assert scope["scope"]["name"] == "otel_dflash"
        assert scope["scope"]["version"] == "1.2.3"
        metrics = tree[resource["resource"]["attributes"][semconv.SERVICE_INSTANCE_ID]] = {}
        for metric in scope["metrics"]:
            values = metrics[metric["name"].removeprefix("dflash.")] = {}
            for point in metric["data"]["data_points"]:
                assert short(point["attributes"]) not in values, "two points of one series"
                value = point.get("value")
                if value is None:
                    value = {
                        key: point[key]
                        for key in ("count", "sum", "min", "max", "scale", "zero_count", "positive")
                    }
                values[short(point["attributes"])] = value
    return tree


def test_every_metric_of_a_small_run() -> None:
    target = PlantedRing(1, "target", 0, pid=100, created_ns=10 * MS, gpu=3)
    target.phase("queue_get", 10 * MS, 30 * MS, "starved")
    target.phase("model_forward", 40 * MS, 60 * MS)
    target.phase("model_forward", 60 * MS, 80 * MS, error="ValueError")
    target.step(10 * MS, 90 * MS, tokens=512, loss_tokens=200)
    # in a step that has not ended: 30 ms before it are not settled
    target.phase("model_forward", 120 * MS, 140 * MS)
    drafter = PlantedRing(2, "drafter", 7, pid=200, created_ns=20 * MS)
    figures = agent_frames(
        7 * MS, -2_000, {1: 0.25}, cost=1300.0, lags={"spans": 1.5, "metrics": 0}, unrecorded=7
    )
    frames = [target.flush(), target.counters(1, 512, 0, 0, 3), *figures, drafter.closed(20 * MS)]
    idle = {
        "ring_full": 0,
        "wrong_thread": 0,
        "stale": 0,
        "unsupported_value": 0,
        "name_limit": 0,
        "unmatched_item": 0,
    }
    idle |= {"malformed": 0, "not_recorded": 0}
    assert flat(data_of(frames, target, drafter)) == {
        "run-1-node-a-100": {
            "worker.count": {"role=target state=running": 1, "role=target state=ended": 0},
            "phase.duration": {
                "role=target id=0 gpu.index=3 phase=model_forward": {
                    "count": 2,
                    "sum": 0.04,
                    "min": 0.02,
                    "max": 0.02,
                    "scale": 6,
                    "zero_count": 0,
                    "positive": {"offset": -362, "bucket_counts": [2]},
                },
                "role=target id=0 gpu.index=3 phase=model_forward error.type=ValueError": {
                    "count": 1,
                    "sum": 0.02,
                    "min": 0.02,
                    "max": 0.02,
                    "scale": 6,
                    "zero_count": 0,
                    "positive": {"offset": -362, "bucket_counts": [1]},
                },
                "role=target id=0 gpu.index=3 phase=queue_get": {
                    "count": 1,
                    "sum": 0.02,
                    "min": 0.02,
                    "max": 0.02,
                    "scale": 6,
                    "zero_count": 0,
                    "positive": {"offset": -362, "bucket_counts": [1]},
                },
            },
            "step.duration": {
                "role=target id=0 gpu.index=3": {
                    "count": 1,
                    "sum": 0.08,
                    "min": 0.08,
                    "max": 0.08,
                    "scale": 6,
                    "zero_count": 0,
                    "positive": {"offset": -234, "bucket_counts": [1]},
                },
            },
            "worker.time": {
                "role=target id=0 gpu.index=3 state=busy": 0.06,
                "role=target id=0 gpu.index=3 state=starved": 0.02,
                "role=target id=0 gpu.index=3 state=backpressured": 0.0,
                "role=target id=0 gpu.index=3 state=lock_wait": 0.0,
                "role=target id=0 gpu.index=3 state=other": 0.02,
                "role=target id=0 gpu.index=3 state=uncaptured": 0.0,
            },
            "worker.batches": {"role=target id=0 gpu.index=3": 1},
            "worker.tokens": {"role=target id=0 gpu.index=3": 512},
            "training.tokens": {"role=target token.type=input": 512, "role=target token.type=loss": 200},
            "telemetry.events": {"role=target id=0 gpu.index=3": 5},
            "telemetry.events.dropped": {
                f"role=target id=0 gpu.index=3 telemetry.drop.reason={reason}": count
                for reason, count in {**idle, "ring_full": 3}.items()
            },
            "telemetry.ring.utilization": {"role=target id=0 gpu.index=3": 0.25},
            "telemetry.overhead": {"role=target id=0 gpu.index=3": 5 * 1300 / (130 * MS)},
        },
        "run-1-node-a-200": {
            "worker.count": {"role=drafter state=running": 0, "role=drafter state=ended": 1},
            "worker.time": {
                f"role=drafter id=7 state={state}": 0.0
                for state in ("busy", "starved", "backpressured", "lock_wait", "other", "uncaptured")
            },
            "worker.batches": {"role=drafter id=7": 0},
            "worker.tokens": {"role=drafter id=7": 0},
            "telemetry.events": {"role=drafter id=7": 0},
            "telemetry.events.dropped": {
                f"role=drafter id=7 telemetry.drop.reason={reason}": 0 for reason in idle
            },
            "telemetry.ring.utilization": {"role=drafter id=7": 0.0},
            "telemetry.overhead": {"role=drafter id=7": 0.0},
        },
        "run-1-node-a-agent": {
            "telemetry.cpu.time": {"telemetry.component=agent": 0.007},
            "telemetry.clock.offset": {"": -2e-06},
            "telemetry.events.dropped": {"telemetry.drop.reason=no_ring": 7},
            "telemetry.lag": {"telemetry.sink=metrics": 0.0, "telemetry.sink=spans": 1.5},
        },
    }


def test_the_age_of_what_is_open_is_a_gauge_and_absent_where_it_is_not_known() -> None:
    waiting, between, unknown, ended = (
        PlantedRing(number, role, number)
        for number, role in enumerate(("drafter", "target", "copier", "evaluator"), 1)
    )
    step = Open(waiting.ring + 1, 100 * MS)
    phases = (
        Open(waiting.name(3, "busy transfer"), 200 * MS),
        Open(waiting.name(3, "starved queue_get"), 300 * MS),
    )
    rings = {waiting.ring: OpenWork(step, phases)} | {
        ring.ring: OpenWork(None, ()) for ring in (between, unknown, ended)
    }
    unknown.phase("forward", 990 * MS, 1_000 * MS)
    frames = [open_frame(1_000 * MS, rings), unknown.flush(), ended.closed(1_000 * MS)]
    (metrics,) = flat(data_of(frames, waiting, between, unknown, ended, time_ns=1_000 * MS)).values()
    assert metrics["worker.open_span.age"] == {"role=drafter id=1": 0.8, "role=target id=2": 0.0}


def test_the_share_of_loss_tokens_is_of_steps_that_say_both() -> None:
    target = PlantedRing(1, "target", 0)
    target.step(0, 1, tokens=100, loss_tokens=0)
    target.step(1, 2, tokens=300, loss_tokens=60)
    target.step(2, 3, tokens=1000)
    target.step(3, 4, loss_tokens=5)
    (resource,) = flat(data_of([target.flush()], target)).values()
    assert resource["worker.tokens"] == {"role=target id=0": 1400}
    assert resource["training.tokens"] == {
        "role=target token.type=input": 400,
        "role=target token.type=loss": 60,
    }


def test_a_metric_carries_its_definition_and_times_of_the_recording() -> None:
    target = PlantedRing(1, "target", 0, created_ns=10 * MS)
    target.step(10 * MS, 90 * MS)
    (resource,) = json.loads(data_of([target.flush()], target, time_ns=95 * MS).to_json())["resource_metrics"]
    metrics = {metric["name"]: metric for metric in resource["scope_metrics"][0]["metrics"]}
    times = {
        (point["start_time_unix_nano"], point["time_unix_nano"])
        for metric in metrics.values()
        for point in metric["data"]["data_points"]
    }
    assert times == {(WALL + 10 * MS, WALL + 95 * MS)}
    kinds = {
        name: (
            metric["unit"],
            metric["data"].get("aggregation_temporality"),
            metric["data"].get("is_monotonic"),
        )
        for name, metric in metrics.items()
    }
    assert kinds == {
        "dflash.worker.count": ("{worker}", 2, False),
        "dflash.step.duration": ("s", 2, None),
        "dflash.worker.time": ("s", 2, True),
        "dflash.worker.batches": ("{batch}", 2, True),
        "dflash.worker.tokens": ("{token}", 2, True),
        "dflash.telemetry.events": ("{event}", 2, True),
        "dflash.telemetry.events.dropped": ("{event}", 2, True),
        "dflash.telemetry.ring.utilization": ("1", None, None),
    }
    assert metrics["dflash.step.duration"]["description"] == "Host time of one step of a worker."


def test_a_worker_made_again_and_a_phase_of_two_states_are_one_series() -> None:
    first = PlantedRing(1, "target", 0, created_ns=10)
    first.phase("lock", 10, 1010)
    first.step(10, 1010, tokens=3)
    again = PlantedRing(2, "target", 0, created_ns=5_000)
    again.phase("lock", 5_000, 7_000, "lock_wait")
    again.phase("lock", 7_000, 7_500)
    again.step(5_000, 7_600, tokens=4)
    data = data_of([again.flush(), first.flush()], first, again)
    (metrics,) = flat(data).values()
    assert {state.rpartition("=")[2]: seconds for state, seconds in metrics["worker.time"].items()} == {
        "busy": 1.5e-06,
        "starved": 0.0,
        "backpressured": 0.0,
        "lock_wait": 2e-06,
        "other": 1e-07,
        "uncaptured": 0.0,
    }
    (phase,) = metrics["phase.duration"].values()
    assert (phase["count"], phase["sum"], phase["min"], phase["max"]) == (3, 3.5e-06, 5e-07, 2e-06)
    assert metrics["worker.tokens"] == {"role=target id=0": 7}
    starts = {
        point.start_time_unix_nano
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
    }
    assert starts == {WALL + 10}


def test_the_environment_names_the_service_and_the_recording_the_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = PlantedRing(1, "target", 0, pid=42)
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES",
        "team=research,service.name=ignored,host.name=elsewhere,service.instance.id=x",
    )
    monkeypatch.setenv("OTEL_SERVICE_NAME", "qwen-drafter")
    (named,) = data_of([], target).resource_metrics
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=by-attribute")
    monkeypatch.delenv("OTEL_SERVICE_NAME")
    (by_attribute,) = data_of([], target).resource_metrics
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES")
    (plain,) = data_of([], target).resource_metrics
    ours = {
        "service.instance.id": "run-1-node-a-42",
        "host.name": "node-a",
        "dflash.run.id": "run-1",
        "process.pid": 42,
    }
    found = [
        {
            key: value
            for key, value in item.resource.attributes.items()
            if not key.startswith("telemetry.sdk.")
        }
        for item in (named, by_attribute, plain)
    ]
    assert found == [
        {"team": "research", "service.name": "qwen-drafter", **ours},
        {"service.name": "by-attribute", **ours},
        {"service.name": "dflash", **ours},
    ]


def test_a_worker_newer_than_the_interval_waits_for_the_next() -> None:
    old, new = PlantedRing(1, "target", 0, created_ns=300), PlantedRing(2, "target", 1, created_ns=500)
    found = [data_of([], old, new, time_ns=time_ns) for time_ns in (400, 500)]
    assert [list(flat(data)["run-1-node-a-100"]["worker.batches"]) for data in found] == [
        ["role=target id=0"],
        ["role=target id=0", "role=target id=1"],
    ]


def test_nothing_recorded_is_no_data() -> None:
    assert data_of([]).resource_metrics == []


def test_the_stock_encoder_takes_it() -> None:
    target = PlantedRing(1, "target", 0)
    target.phase("model_forward", 0, 20 * MS)
    target.phase("model_forward", 20 * MS, 12_000 * MS)
    request = encode_metrics(data_of([target.flush(time=12_000 * MS), *agent_frames(1)], target))
    points = [
        point
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.exponential_histogram.data_points
    ]
    (point,) = points
    assert (point.count, point.scale, point.positive.offset, sum(point.positive.bucket_counts)) == (
        2,
        6,
        -362,
        2,
    )
    assert len(point.positive.bucket_counts) == 592
    assert len(request.resource_metrics) == 2
