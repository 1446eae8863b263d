"""Exemplars: a histogram's point leads to the longest span of the interval, by the ids that the replay gives
it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

from otel_dflash.metrics.families import families
from otel_dflash.metrics.fold import Fold
from otel_dflash.otlp.metric_data import MetricWriter
from otel_dflash.spans import identity
from tests.spans.recorder import INFO, Log, Recorder, mono, wall

AT_MS = 10_000


def fold_of(log: Log, kept: int = 1) -> Fold:
    fold = Fold(log.catalog, families(kept))
    for frame in log.frames:
        fold.add(frame)
    return fold


def shown(
    fold: Fold, sends: Callable[[int], bool] = lambda trace_id: True
) -> dict[str, list[tuple[int, int, float, int]]]:
    """Return the exemplars of each series as they are on the wire: trace id, span id, seconds, time."""
    request = encode_metrics(MetricWriter(INFO).data(fold.points(INFO, mono(AT_MS), sends)))
    found = {}
    for metric in (m for r in request.resource_metrics for s in r.scope_metrics for m in s.metrics):
        for point in metric.exponential_histogram.data_points:
            attributes = {pair.key: pair.value.string_value for pair in point.attributes}
            name = f"{attributes['dflash.worker.role']}.{attributes.get('dflash.phase', 'step')}{attributes.get('error.type', '')}"
            found[name] = [
                (
                    int.from_bytes(e.trace_id, "big"),
                    int.from_bytes(e.span_id, "big"),
                    e.as_double,
                    e.time_unix_nano,
                )
                for e in point.exemplars
            ]
    return found


def spans(log: Log) -> dict[tuple[int, int], Any]:
    return {(span.context.trace_id, span.context.span_id): span for span in log.replay()}


def a_pipeline() -> Log:
    """Two target steps; a drafter step goes on with an item of the second, a postprocess step resumes the
    first."""
    log = Log()
    target, drafter, postprocess = (
        Recorder(log, 1, "target"),
        Recorder(log, 2, "drafter"),
        Recorder(log, 3, "postprocess"),
    )
    first, second = target.ring + 1, target.ring + 2
    target.phase("model_forward", 0, 50, step=1)
    target.step(1, 0, 60)
    target.phase("model_forward", 60, 140, step=2)
    target.phase("model_forward", 140, 150, step=2, error="ValueError")
    target.drain()
    target.step(2, 60, 155)
    target.phase("idle", 160, 165)
    target.drain()
    drafter.consumed(1, 70, (second, second, 65), fixed_root=True)
    drafter.phase("forward", 70, 90, step=1)
    drafter.drain()
    drafter.phase("forward", 90, 130, step=1)
    drafter.step(1, 70, 140, root=second)
    drafter.phase("forward", 140, 145, step=2)
    drafter.step(2, 140, 150)
    drafter.drain()
    postprocess.resumed(1, 55, (first, first, 54))
    postprocess.drain()
    postprocess.phase("d2h", 55, 59, step=1)
    postprocess.step(1, 55, 60)
    postprocess.drain()
    return log


def test_each_series_leads_to_its_longest_span() -> None:
    log = a_pipeline()
    found = shown(fold_of(log))
    by_id = spans(log)
    names = {
        name: [
            (by_id[trace_id, span_id].name, seconds, time_ns)
            for trace_id, span_id, seconds, time_ns in exemplars
        ]
        for name, exemplars in found.items()
    }
    assert names == {
        "target.model_forward": [("target.model_forward", 0.08, wall(140))],
        "target.model_forwardValueError": [("target.model_forward", 0.01, wall(150))],
        "target.idle": [("target.idle", 0.005, wall(165))],
        "target.step": [("target.step", 0.095, wall(155))],
        "drafter.forward": [("drafter.forward", 0.04, wall(130))],
        "drafter.step": [("drafter.step", 0.07, wall(140))],
        "postprocess.d2h": [("postprocess.d2h", 0.004, wall(59))],
        # it has no span of its own: that of the step it works on
        "postprocess.step": [("target.step", 0.005, wall(60))],
    }
    (forward,), (step,) = found["drafter.forward"], found["target.step"]
    assert forward[0] == step[0], "the drafter step goes on in the trace of the second target step"


def test_an_interval_begins_anew_and_what_waits_for_its_step_comes_when_that_ends() -> None:
    log = Log()
    target = Recorder(log, 1, "target")
    fold = Fold(log.catalog, families(1))

    def drained() -> list[str]:
        done = len(log.frames)
        target.drain()
        for frame in log.frames[done:]:
            fold.add(frame)
        restored = Fold(log.catalog, families(1))
        assert restored.restore(json.loads(json.dumps(fold.to_dict()))) == {}
        found = shown(fold)
        assert shown(restored) == found
        fold.begin_interval()
        return [f"{name} {seconds}" for name, exemplars in found.items() for _, _, seconds, _ in exemplars]

    for frame in log.frames:
        fold.add(frame)
    target.phase("model_forward", 0, 30, step=1)
    target.step(1, 0, 35)
    target.phase("model_forward", 40, 50, step=2)
    assert drained() == ["target.model_forward 0.03", "target.step 0.035"]
    target.phase("model_forward", 50, 90, step=2)
    assert drained() == []
    target.phase("model_forward", 90, 95, step=2)
    assert drained() == []
    target.step(2, 40, 100)
    target.phase("model_forward", 100, 101, step=3)
    assert drained() == ["target.model_forward 0.04", "target.step 0.06"]
    target.step(3, 100, 102)
    assert drained() == ["target.step 0.002"]  # its phase was the shorter one when the interval ended


def test_a_step_whose_end_was_lost_leads_nowhere_and_holds_up_nothing() -> None:
    log = Log()
    target = Recorder(log, 1, "target")
    target.phase("model_forward", 0, 30, step=1)
    target.drain()
    target.phase("model_forward", 40, 45, step=2)
    target.step(2, 40, 50)
    target.drain()
    target.phase("model_forward", 50, 54, step=3)
    target.step(3, 50, 60)
    target.drain()
    assert {name: [seconds for *_, seconds, _ in found] for name, found in shown(fold_of(log)).items()} == {
        "target.model_forward": [0.004],
        "target.step": [0.01],
    }


@pytest.mark.parametrize("ratio", [0.3, 0.05])
def test_an_exemplar_leads_to_a_trace_that_is_sent(ratio: float) -> None:
    log = Log()
    target = Recorder(log, 1, "target")
    for step in range(1, 200):
        start = step * 10
        target.phase("model_forward", start, start + step % 9, step=step)
        target.step(step, start, start + 9)
    target.drain()
    sent = {
        step
        for step in range(1, 200)
        if identity.trace_id(target.ring + step) & (1 << 64) - 1 < ratio * (1 << 64)
    }
    ids = {identity.trace_id(target.ring + step): step for step in sent}
    longest = [step for step in range(1, 200) if step % 9 == 8][:8]
    expected = [step for step in longest if step in sent][:1]
    found = shown(fold_of(log, 8), lambda trace_id: trace_id in ids)
    assert [ids[trace_id] for trace_id, *_ in found["target.model_forward"]] == expected
    assert shown(fold_of(log, 0))["target.model_forward"] == []


def test_of_equal_durations_the_first_is_shown_wherever_a_frame_begins() -> None:
    found = []
    for each in (1, 2, 50):
        log = Log()
        target = Recorder(log, 1, "target")
        for step in range(1, 50):
            target.phase("model_forward", step * 10, step * 10 + 5, step=step)
            target.step(step, step * 10, step * 10 + 9)
            if step % each == 0:
                target.drain()
        target.drain()
        found.append(shown(fold_of(log, 3)))
    assert found[0] == found[1] == found[2]
    assert found[0]["target.step"][0][3] == wall(19)
