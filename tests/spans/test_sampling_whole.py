"""A kept trace is sent once and whole, or counted: long steps, crowds of consumers, and whatever comes first
in the recording."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from otel_dflash.recording.delivery import SampledSpans
from otel_dflash.spans import steps
from tests.otlp_receiver import Span
from tests.spans.recorder import Item, Log, Recorder
from tests.spans.test_sampling import OFF, keep, recorded, sent
from tests.spans.test_trace_size import sizes


def names(spans: list[Span]) -> Counter[str]:
    return Counter(span.name for span in spans)


def test_the_parts_of_a_long_step_that_fails_are_sent_once_though_one_frame_holds_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "HELD_MAX", 100)
    log = Log()
    worker = Recorder(log, 1, "target")
    for number in range(250):  # an agent that was down finds it all in the ring
        worker.phase("forward", 1 + number / 100, 1.005 + number / 100, step=1)
    worker.step(1, 0, 500, error="OSError")
    worker.drain()
    spans, said = sent(recorded(log, tmp_path), keep("error", OFF))
    assert names(spans) == {"target.forward": 250, "target.step": 1}
    assert said == SampledSpans(
        sampler="always_off",
        keep=["error"],
        left_out_spans=0,
        kept_steps={"slow": 0, "error": 1, "truncated": 0},
        lost_traces=0,
    )


def test_consumers_that_are_recorded_before_their_producer_go_with_it(tmp_path: Path) -> None:
    log = Log()
    target, drafter = Recorder(log, 1, "target"), Recorder(log, 2, "drafter")
    item: Item = (target.ring + 1, target.ring + 1, 1.2)
    for step in (1, 2):
        drafter.consumed(step, 2 * step, item, fixed_root=True)
        drafter.step(step, 2 * step, 2 * step + 1, root=item[0], error="OSError" if step == 2 else "")
        drafter.drain()
    target.phase("forward", 1, 6, step=1)  # nothing of the target was recorded before
    target.step(1, 1, 7)
    target.drain()
    spans, said = sent(recorded(log, tmp_path), keep("error", OFF))
    assert names(spans) == {"drafter.step": 2, "target.step": 1, "target.forward": 1}
    assert said is not None
    assert (said.lost_traces, said.left_out_spans) == (0, 0)
    assert [link.attributes.get("dflash.trace.sampled") for span in spans for link in span.links] == [
        None,
        None,
    ]


def test_a_trace_of_more_consumers_than_are_remembered_is_counted_as_not_whole(tmp_path: Path) -> None:
    def kept_after(consumers: int) -> tuple[Counter[str], int]:
        log = Log()
        target, drafter = Recorder(log, 1, "target"), Recorder(log, 2, "drafter")
        target.step(1, 1, 2)
        target.drain()
        for step in range(1, consumers + 2):
            drafter.consumed(step, 10 + step, (target.ring + 1, target.ring + 1, 1.2), fixed_root=True)
            drafter.step(
                step,
                10 + step,
                10.5 + step,
                root=target.ring + 1,
                error="OSError" if step > consumers else "",
            )
        drafter.drain()
        spans, said = sent(recorded(log, tmp_path / str(consumers)), keep("error", OFF))
        assert said is not None
        return names(spans), said.lost_traces

    assert kept_after(200) == ({"target.step": 1, "drafter.step": 201}, 0)
    assert kept_after(300) == ({"target.step": 1, "drafter.step": 256}, 1)


@pytest.mark.parametrize("is_one_frame", [True, False])
def test_what_is_brought_back_is_linked_to_a_producer_that_was_recorded_after_it(
    tmp_path: Path, is_one_frame: bool
) -> None:
    log = Log()
    target, middle, drafter = (
        Recorder(log, 1, "target"),
        Recorder(log, 2, "postprocess"),
        Recorder(log, 3, "drafter"),
    )
    root = target.ring + 1
    for number in range(199):  # no room in its trace
        target.phase("forward", 1 + number, 1.5 + number, step=1)
    target.step(1, 0, 300)
    target.drain()
    drafter.consumed(1, 330, (root, middle.ring + 2, 325.0), fixed_root=True)
    drafter.step(1, 329, 331, root=root)
    drafter.drain()
    fails = 1 if is_one_frame else 3
    for step, at in ((1, 310), (2, 320), (3, 330)):
        middle.consumed(step, at, (root, root, 250.0), fixed_root=True)
        middle.step(step, at, at + 9, root=root, error="OSError" if step == fails else "")
        if step == 2 and not is_one_frame:
            middle.drain()
    middle.drain()
    spans, said = sent(recorded(log, tmp_path), keep("error", OFF))
    assert said is not None
    assert said.lost_traces == 0
    assert sizes(spans) == [200, 1, 1, 1, 1]


def test_items_of_thousands_of_steps_in_one_frame_are_brought_back_in_time(tmp_path: Path) -> None:
    """As after an agent was down: reading all of the frame again for each of them takes 30 s."""
    log = Log()
    target, drafter = Recorder(log, 1, "target"), Recorder(log, 2, "drafter")
    for step in range(1, 4001):
        target.phase("forward", step, step + 0.5, step=step)
        target.step(step, step, step + 0.9)
        drafter.consumed(1, 5000, (target.ring + step, target.ring + step, step + 0.6), fixed_root=step == 1)
    drafter.step(1, 4999, 5001, root=target.ring + 1, error="OSError")
    target.drain()
    drafter.drain()
    began_s = time.process_time()
    spans, _ = sent(recorded(log, tmp_path), keep("error", OFF))
    assert time.process_time() - began_s < 10
    assert names(spans) == {"target.step": 4000, "target.forward": 4000, "drafter.step": 1}
