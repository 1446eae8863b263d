"""step.cancel(): a turn that was none leaves no step and no batch, and its time stays in the worker's states."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from otel_dflash.recording.frames import FrameKind
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.records import State
from otel_dflash.spans.replay import SpanReplay
from otel_dflash.views.summary import summarise
from tests.agent.draining import Draining
from tests.trainer.ring_reader import MemoryWorker


@pytest.fixture
def memory() -> MemoryWorker:
    return MemoryWorker(slots=1024)


def test_a_cancelled_step_is_no_step_and_its_phases_are_recorded(memory: MemoryWorker) -> None:
    worker = memory.worker
    for n in range(3):
        with worker.step() as step:
            with worker.queue_get:
                pass
            step.set(tokens=5, n=n)
            if n == 2:
                step.cancel()
                step.set(tokens=7, late=1)
                with worker.forward:
                    pass
    assert [shape for shape in memory.shapes() if shape[3] in (0, 3)] == [
        ("PHASE", "starved queue_get", "", 3),
        ("ATTRIBUTE", "n", "", 3),
        ("CANCELLED", "", "", 3),
        ("PHASE", "busy forward", "", 0),
    ]
    assert memory.counters() == {"steps": 2, "tokens": 10}
    assert memory.current == {threading.get_ident(): None}


def test_a_phase_around_the_cancel_is_recorded_when_it_ends(memory: MemoryWorker) -> None:
    worker = memory.worker
    with worker.step() as step, worker.queue_get, worker.backward, worker.backward:
        step.cancel()
        with worker.forward:
            pass
    with worker.step(), worker.queue_get:
        pass
    assert memory.shapes() == [
        ("CANCELLED", "", "", 1),
        ("PHASE", "busy forward", "", 0),
        ("PHASE", "busy backward", "", 0),
        ("PHASE", "busy backward", "", 0),
        ("PHASE", "starved queue_get", "", 0),
        ("PHASE", "starved queue_get", "", 2),
        ("STEP", "", "", 2),
    ]
    assert memory.counters() == {"steps": 1}


def test_a_phase_around_a_step_does_not_lie_in_the_one_that_was_cancelled_before(
    memory: MemoryWorker,
) -> None:
    worker = memory.worker
    worker.step.begin().cancel()
    with worker.forward:
        worker.step.begin().cancel()
        with worker.step():
            pass
    assert memory.shapes() == [
        ("CANCELLED", "", "", 1),
        ("CANCELLED", "", "", 2),
        ("STEP", "", "", 3),
        ("PHASE", "busy forward", "", 0),
    ]
    assert memory.counters() == {"steps": 1}


def test_a_step_that_has_handed_on_an_item_ends_instead(memory: MemoryWorker) -> None:
    with memory.worker.step() as step:
        step.produced()
        step.cancel()
    with memory.worker.step() as step:
        step.cancel()
        step.cancel()
    assert memory.shapes() == [("STEP", "", "", 1), ("CANCELLED", "", "", 2)]
    assert memory.counters() == {"steps": 1, "puts": 1}


def test_another_thread_cannot_cancel(memory: MemoryWorker) -> None:
    with memory.worker.step() as step:
        thread = threading.Thread(target=step.cancel)
        thread.start()
        thread.join()
    step.cancel()
    assert memory.shapes() == [("STEP", "", "", 1)]


def test_a_cancel_while_nothing_is_captured_is_the_end_of_that(memory: MemoryWorker) -> None:
    memory.control[0] = 2
    with memory.worker.step() as step:
        memory.control[0] = 0
        step.cancel()
        with memory.worker.forward:
            pass
    assert memory.shapes() == [("PHASE", "busy forward", "", 0)]


def test_states_batches_and_spans_of_a_run_with_cancelled_steps(tmp_path: Path) -> None:
    """Through the shipped drain, summary and replay: 200 turns of 202 are steps, and nothing reads as cut off."""
    with Draining(tmp_path) as draining:
        worker = draining.worker()
        other = draining.telemetry.worker("drafter", 0)
        with other.step() as step:
            context = step.produced()
        for n in range(202):
            with worker.step() as step, worker.queue_get:
                step.set(tokens=1)
                if n in (100, 201):
                    step.consumed(context)
                    step.cancel()
            draining.agent.drain.poll()
        draining.telemetry.close()
        draining.agent.drain.poll()
        reader = RecordingReader(draining.session.recording)
        replay = SpanReplay(reader.info, reader.catalog)
        spans: list[Any] = []
        while frames := reader.read():
            spans += [span for frame in frames for span in replay.add(frame)]
        reader.close()
        row = next(row for row in summarise(draining.session.recording).workers if row.role == "target")
    assert (row.batches, row.tokens, row.dropped) == (200, 200, {})
    assert (row.finished, row.place) == (True, None)
    gets = [span for span in spans if span.name == "target.queue_get"]
    assert row.states[State.STARVED] == sum(span.end_ns - span.start_ns for span in gets)
    steps = [span for span in spans if span.name == "target.step"]
    assert (len(gets), len(steps)) == (202, 200)
    assert [span.attributes.get("dflash.span.truncated") for span in spans] == [None] * len(spans)
    roots = [span.name for span in spans if span.parent is None and span.name != "target.step"]
    assert roots == ["drafter.step", "target.queue_get", "target.queue_get"]
    assert replay.unusable_records == 0
    closed = [json.loads(frame.payload) for frame in draining.frames(FrameKind.CLOSED)]
    assert [(end["open"], end["step"]) for end in closed] == [([], None)] * 2, "no step was open"
