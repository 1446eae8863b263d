"""Trainer, agent and receiver together: what was executed, recorded, received as spans and counted by metrics
is equal, exactly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from otel_dflash.recording.frames import FrameKind
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.records import DROP_REASONS
from tests.otlp_receiver import OtlpReceiver, Span
from tests.whole_run import DEADLINE_S, TESTS, Ran, run

EXAMPLE = TESTS.parent / "examples" / "dflash" / "train.py"
Counts = dict[tuple[str, str, str], int]
"""(role, index, phase or "step") -> how often."""


def recorded(recording: Path) -> tuple[Counts, dict[str, int]]:
    """Return the PHASE records in a recording, and what was dropped."""
    reader = RecordingReader(recording)
    counts: Counter[tuple[str, str, str]] = Counter()
    dropped: dict[tuple[int, str], int] = {}
    while frames := reader.read():
        for frame in frames:
            names = reader.catalog.get(frame.ring)
            if frame.kind == FrameKind.COUNTERS:
                for counter, reason in DROP_REASONS.items():
                    dropped[frame.ring, reason] = int.from_bytes(
                        frame.payload[8 * counter : 8 * counter + 8], "little"
                    )
            elif frame.kind == FrameKind.RECORDS and names:
                for offset in range(0, len(frame.payload), 64):
                    word = int.from_bytes(frame.payload[offset : offset + 8], "little")
                    if word >> 32 & 0xFF == 1:  # PHASE
                        counts[
                            names.worker.role, str(names.worker.index), names.phase(word >> 16 & 0xFFFF)[1]
                        ] += 1
    assert reader.missing_frames == 0
    reader.close()
    lost: Counter[str] = Counter()
    for (_, reason), count in dropped.items():
        lost[reason] += count
    return dict(counts), {reason: count for reason, count in lost.items() if count}


def received(spans: list[Span]) -> Counts:
    found: Counter[tuple[str, str, str]] = Counter()
    for span in spans:
        role, _, name = span.name.partition(".")
        assert span.attributes["dflash.worker.role"] == role
        found[role, str(span.attributes["dflash.worker.id"]), name] += 1
    return dict(found)


def measured(receiver: OtlpReceiver) -> Counts:
    """Return the counts of the histograms of phases."""
    found: Counter[tuple[str, str, str]] = Counter()
    for point in receiver.latest("dflash.phase.duration"):
        attributes = point.attributes
        found[
            attributes["dflash.worker.role"], attributes["dflash.worker.id"], attributes["dflash.phase"]
        ] += point.count
    return dict(found)


def without_steps(counts: Counts) -> Counts:
    return {key: count for key, count in counts.items() if key[2] != "step" and count}


def executed(said: Any) -> Counts:
    """Return what pipeline_trainer.py counted."""
    return {
        (*worker.split(), name): count
        for worker, counts in said["counts"].items()
        for name, count in counts.items()
    }


def assert_all_four_equal(ran: Ran, phases: Counts, lost: dict[str, int] | None = None) -> None:
    in_recording, dropped = recorded(ran.recording)
    assert in_recording == phases
    assert without_steps(received(ran.spans())) == phases
    assert measured(ran.receiver) == phases
    assert dropped == (lost or {})
    reasons = {
        str(point.attributes["dflash.telemetry.drop.reason"]): 0
        for point in ran.receiver.points("dflash.telemetry.events.dropped")
    }
    for point in ran.receiver.latest("dflash.telemetry.events.dropped"):
        reasons[str(point.attributes["dflash.telemetry.drop.reason"])] += int(point.value)
    assert {reason: count for reason, count in reasons.items() if count} == (lost or {})


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize(("targets", "drafters"), [(1, 0), (5, 3)])
def test_executed_recorded_received_and_measured_are_equal(
    targets: int, drafters: int, protocol: str, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    steps = 150
    script = [str(TESTS / "pipeline_trainer.py"), str(targets), str(drafters), str(steps), "FILE"]
    ran = run(tmp_path, receiver, script, protocol)
    assert {request["protocol"] for request in receiver.requests} == {protocol}
    counted = executed(ran.said)
    assert_all_four_equal(ran, without_steps(counted))
    assert received(ran.spans()) == counted
    batches = {
        (point.attributes["dflash.worker.role"], point.attributes["dflash.worker.id"], "step"): int(
            point.value
        )
        for point in receiver.latest("dflash.worker.batches")
        if point.attributes["dflash.worker.role"] != "postprocess"  # its steps go on with others' steps
    }
    assert batches == {key: count for key, count in counted.items() if key[2] == "step"}
    tokens = {
        point.attributes["dflash.worker.id"]: int(point.value)
        for point in receiver.latest("dflash.worker.tokens", {"dflash.worker.role": "target"})
    }
    assert tokens == {str(index): steps * (steps + 1) // 2 for index in range(targets)}


def test_links_name_exactly_the_consumed_items(receiver: OtlpReceiver, tmp_path: Path) -> None:
    """Each drafter step took two items, some target steps made two, and a third worker handed them on."""
    ran = run(tmp_path, receiver, [str(TESTS / "pipeline_trainer.py"), "3", "2", "60", "FILE"])
    steps = ran.step_spans()
    by_span = {(span.trace_id, span.span_id): step for step, span in steps.items()}
    consumed = {step: list(map(str, items)) for step, items in ran.said["consumed"].items()}
    assert sorted(item for items in consumed.values() for item in items) == sorted(
        map(str, ran.said["resumed"])
    )
    assert len(ran.said["resumed"]) == 3 * 80

    links = {
        step: [by_span[link.trace_id, link.span_id] for link in span.links]
        for step, span in steps.items()
        if span.links
    }
    assert links == {step: items for step, items in consumed.items() if items}
    parents = {step: by_span[span.trace_id, span.parent_id] for step, span in steps.items() if span.parent_id}
    assert parents == {step: items[0] for step, items in consumed.items() if items}
    residences = [link.attributes["dflash.queue.residence"] for span in steps.values() for link in span.links]
    assert all(0 <= residence < DEADLINE_S for residence in residences)
    assert len(set(residences)) > len(residences) // 2, "each put has a time of its own"


def test_a_copy_that_another_thread_completes_belongs_to_the_step_that_began_it(
    receiver: OtlpReceiver, tmp_path: Path
) -> None:
    ran = run(tmp_path, receiver, [str(TESTS / "pipeline_trainer.py"), "2", "1", "12", "FILE"])
    by_span = {(span.trace_id, span.span_id): step for step, span in ran.step_spans().items()}
    copies = sorted(
        (span for span in ran.spans() if span.name == "postprocess.d2h"), key=lambda span: span.start_ns
    )
    assert [by_span[span.trace_id, span.parent_id] for span in copies] == list(map(str, ran.said["resumed"]))
    assert {(span.resource["service.name"], span.attributes["dflash.worker.role"]) for span in copies} == {
        ("dflash-postprocess", "postprocess")
    }


@pytest.mark.parametrize(
    "flags",
    [
        ["--simulate", "--targets", "5", "--drafters", "3", "--steps", "40"],
        pytest.param(["--targets", "2", "--steps", "4", "--teach-steps", "2"], marks=pytest.mark.slow),
    ],
    ids=["simulated", "real"],
)
def test_a_run_of_the_example_is_exact(flags: list[str], receiver: OtlpReceiver, tmp_path: Path) -> None:
    ran = run(tmp_path, receiver, [str(EXAMPLE), *flags, "--counts", "FILE"])
    phases = {
        (role, index, name): count
        for role, workers in ran.said["phases"].items()
        for index, counts in workers.items()
        for name, count in counts.items()
        if count
    }
    assert_all_four_equal(ran, phases)
    drafter_steps = [
        span for span in ran.spans() if span.name == "drafter.step" and "dflash.step" in span.attributes
    ]
    batches = {span.span_id: span.attributes.get("dflash.batch.id") for span in ran.spans()}
    links = {
        span.attributes["dflash.step"]: [batches[link.span_id] for link in span.links]
        for span in drafter_steps
    }
    assert links == {step["step"]: step["consumed"] for step in ran.said["drafter_steps"]}
