"""What is held of open steps: lost ends, long steps, and a restart at any frame."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from otel_dflash.records import ValueType
from otel_dflash.spans import identity, steps
from otel_dflash.spans.replay import SpanReplay
from otel_dflash.spans.steps import StepAssembler
from tests.spans.recorder import INFO, Log, Recorder, mono, on_the_wire, shape, wall


def test_a_step_whose_record_was_lost_is_cut_off_by_the_next_one() -> None:
    log = Log()
    worker = Recorder(log, 1, "target")
    worker.phase("pack_hidden", 2, 3, step=1)
    worker.phase("model_forward", 1, 4, step=1)
    worker.step(1, 0, 5)
    worker.lose()
    worker.phase("model_forward", 6, 7, step=2)
    worker.step(2, 5, 8)
    worker.phase("model_forward", 9, 10, step=3)
    worker.step(3, 8, 11)
    worker.lose()
    worker.close(12)
    spans = log.replay()
    cut = {"dflash.span.truncated": True}
    forward = {"name": "target.model_forward"}
    assert shape(spans) == [
        {
            "name": "target.step",
            "service": "dflash-target",
            "attributes": cut,
            "children": [{**forward, "children": [{"name": "target.pack_hidden"}]}],
        },
        {"name": "target.step", "service": "dflash-target", "children": [forward]},
        {"name": "target.step", "service": "dflash-target", "attributes": cut, "children": [forward]},
    ]
    times = [(span.start_ns, span.end_ns) for span in spans if span.name == "target.step"]
    assert times == [(wall(1), wall(4)), (wall(5), wall(8)), (wall(9), wall(10))]


def test_a_record_that_ends_before_it_starts_is_no_span_and_counted() -> None:
    log = Log()
    worker = Recorder(log, 1, "target")
    worker.phase("model_forward", 4, 3, step=1)
    worker.phase("pack_hidden", 3, 4, step=1)
    worker.step(1, 2, 5)
    worker.drain()
    replay = SpanReplay(INFO, log.catalog)
    names = [span.name for frame in log.frames for span in replay.add(frame)]
    assert (names, replay.unusable_records) == (["target.step", "target.pack_hidden"], 1)


def test_a_record_after_its_step_never_repeats_the_step() -> None:
    log = Log()
    worker = Recorder(log, 1, "target")
    worker.step(1, 0, 2)
    worker.phase("late", 1, 3, step=1)
    worker.step(1, 0, 3)
    worker.drain()
    replay = SpanReplay(INFO, log.catalog)
    spans = [span for frame in log.frames for span in replay.add(frame)]
    assert shape(spans) == [
        {"name": "target.step", "service": "dflash-target", "children": [{"name": "target.late"}]}
    ]
    assert replay.unusable_records == 1


def test_a_step_too_long_to_hold_goes_out_in_parts_and_its_span_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "HELD_MAX", 4)
    log = Log()
    origin = (9 << 28) + 4
    worker = Recorder(log, 1, "target")
    worker.consumed(1, 0.5, (origin, origin, 0), fixed_root=True)
    for index in range(8):
        worker.phase("tick", index + 1, index + 2, step=1)
        worker.drain()
    worker.step(1, 0, 12, root=origin)
    worker.drain()
    (step,) = shape(log.replay())
    assert [child["name"] for child in step["children"]] == ["target.tick"] * 8
    assert len(step["events"]) == len(step["links"]) == 1
    spans = on_the_wire(log.replay())
    assert {span.trace_id for span in spans} == {f"{identity.trace_id(origin):032x}"}
    assert len({span.span_id for span in spans}) == len(spans) == 9

    parts = [[(part.whole, len(part.phases)) for part in got] for got in completed(log) if got]
    assert parts == [[(False, 3)], [(False, 3)], [(True, 2)]]


def test_a_long_step_that_is_cut_off_starts_with_its_first_part_also_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "HELD_MAX", 4)
    log = Log()
    worker = Recorder(log, 1, "target")
    for index in range(6):
        worker.phase("tick", index + 1, index + 2, step=1)
    worker.drain()
    held = StepAssembler()
    for frame in log.frames:
        held.add(frame)
    worker.close(20)
    restored = StepAssembler()
    restored.restore(held.held())
    for assembler in (held, restored):
        (step,) = assembler.add(log.frames[-1])
        assert (step.start_ns, step.end_ns, step.truncated, len(step.phases)) == (mono(1), mono(7), True, 2)


def test_links_of_one_step_are_capped_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "HELD_MAX", 4)
    log = Log()
    worker = Recorder(log, 1, "drafter")
    for _ in range(6):
        worker.consumed(1, 1, (5, 5, 0))
    worker.step(1, 0, 2)
    worker.drain()
    replay = SpanReplay(INFO, log.catalog)
    (span,) = [span for frame in log.frames for span in replay.add(frame)]
    assert len(span.links) == 4
    assert replay.unusable_records == 2


def completed(log: Log) -> Iterator[list[steps.CompletedStep]]:
    assembler = StepAssembler()
    for frame in log.frames:
        yield assembler.add(frame)


def a_long_log() -> Log:
    """Every kind of end, of several workers, in frames that cut steps everywhere."""
    log = Log()
    target, drafter, post = (
        Recorder(log, 1, "target"),
        Recorder(log, 2, "drafter"),
        Recorder(log, 3, "postprocess"),
    )
    for step in range(1, 5):
        base = step * 10
        origin = target.ring + step
        target.phase("model_forward", base, base + 2, step=step)
        target.drain()
        drafter.consumed(step, base + 3, (origin, origin, base + 2), fixed_root=step != 2)
        drafter.phase("queue_get", base + 1, base + 3, step=step)
        drafter.drain()
        post.phase("idle", base, base + 1)
        post.resumed(step, base + 3, (origin, origin, base + 2))
        post.drain()
        target.attribute(step, base, "lr", ValueType.FLOAT, 4607182418800017408)
        target.step(step, base, base + 5, tokens=step)
        if step == 3:
            target.lose()
        target.drain()
        post.phase("d2h", base + 3, base + 4, step=step)
        post.step(step, base + 3, base + 5)
        drafter.phase("forward", base + 4, base + 9, step=step, error="ValueError" if step == 1 else "")
        drafter.step(step, base + 1, base + 9, root=origin)
        post.drain()
        drafter.drain()
    target.phase("model_forward", 60, 61, step=5)
    target.close(70, {"pack_hidden": 61}, step=(5, 59))
    drafter.close(70)
    post.close(70, {"idle": 62})
    return log


def test_a_restart_at_any_frame_goes_on_with_identical_bytes() -> None:
    log = a_long_log()
    whole = [span.encoded for span in on_the_wire(log.replay())]
    assert len(whole) == len(set(whole)) > 25
    for cut in range(len(log.frames) + 1):
        before = SpanReplay(INFO, log.catalog)
        got = [span for frame in log.frames[:cut] for span in before.add(frame)]
        state = before.state()
        after = SpanReplay(INFO, log.catalog)
        after.restore(state)
        assert after.state() == state
        got += [span for frame in log.frames[cut:] for span in after.add(frame)]
        assert sorted(span.encoded for span in on_the_wire(got)) == sorted(whole)


@pytest.mark.parametrize("cut", [0, 3, 20, -1])
def test_damaged_held_records_are_refused(cut: int) -> None:
    log = Log()
    worker = Recorder(log, 1, "target")
    worker.phase("forward", 1, 2, step=1)
    worker.drain()
    replay = SpanReplay(INFO, log.catalog)
    for frame in log.frames:
        replay.add(frame)
    with pytest.raises(ValueError, match="state cannot be read"):
        SpanReplay(INFO, log.catalog).restore(replay.state()[:cut])
    with pytest.raises(ValueError, match="state cannot be read"):
        SpanReplay(INFO, log.catalog).restore(b"x" * 200)
    assembler = StepAssembler()
    for frame in log.frames:
        assembler.add(frame)
    with pytest.raises(ValueError, match="held records"):
        StepAssembler().restore(assembler.held()[:cut])
