"""No trace holds more than 200 spans: the work goes on in linked ones, and every parent and every link is
found where it says."""

from __future__ import annotations

from collections import Counter

import pytest

from otel_dflash.spans import identity, steps, traces
from otel_dflash.spans.replay import SpanReplay
from tests.otlp_receiver import Span
from tests.spans.recorder import INFO, Item, Log, Recorder, on_the_wire

CONTINUES = {"dflash.link.kind": "continues"}
CONTINUED = {"dflash.link.kind": "continued"}


def sizes(spans: list[Span]) -> list[int]:
    """Return the sizes of all traces, largest first; check that what a span points at is there, and in its
    own trace if it is above."""
    places = {(span.trace_id, span.span_id) for span in spans}
    assert len({span.span_id for span in spans}) == len(spans)
    assert [
        span.name for span in spans if span.parent_id and (span.trace_id, span.parent_id) not in places
    ] == []
    assert [
        (span.name, link)
        for span in spans
        for link in span.links
        if (link.trace_id, link.span_id) not in places
    ] == []
    return sorted(Counter(span.trace_id for span in spans).values(), reverse=True)


def trace_of(step: int) -> str:
    return f"{identity.trace_id(step):032x}"


def items_of(target: Recorder, count: int) -> list[Item]:
    """Let a target make items, one a step."""
    for step in range(1, count + 1):
        target.phase("queue_put", step, step + 0.5, step=step, state="backpressured")
        target.step(step, step, step + 0.6)
    target.drain()
    return [(target.ring + step, target.ring + step, step + 0.2) for step in range(1, count + 1)]


def test_a_step_of_500_gets_goes_on_in_linked_traces() -> None:
    log = Log()
    target, drafter = Recorder(log, 1, "target"), Recorder(log, 2, "drafter")
    items = items_of(target, 500)
    for number, item in enumerate(items):
        drafter.phase("queue_get", 1000 + number, 1000.6 + number, step=1, state="starved")
        drafter.consumed(1, 1000.5 + number, item, fixed_root=number == 0)
    drafter.step(1, 1000, 2000, root=items[0][0])
    drafter.drain()
    spans = on_the_wire(log.replay())
    assert sizes(spans) == [200, 200, 103] + [2] * 499
    (step,) = [span for span in spans if span.name == "drafter.step"]
    gets = [span for span in spans if span.name == "drafter.queue_get"]
    assert (
        step.trace_id,
        step.attributes["dflash.trace.continued"],
        step.attributes["dflash.batch.item.count"],
    ) == (
        trace_of(target.ring + 1),
        2,
        500,
    )
    assert [(link.trace_id, link.span_id) for link in step.links[:500]] == [
        (trace_of(step_id), f"{identity.step_span_id(step_id):016x}") for step_id, _, _ in items
    ]
    further = [span for span in gets if span.trace_id != step.trace_id]
    assert [(link.trace_id, link.span_id, link.attributes) for link in step.links[500:]] == [
        (further[number].trace_id, further[number].span_id, CONTINUED) for number in (0, 200)
    ]
    assert [[(link.span_id, link.attributes) for link in span.links] for span in further] == [
        [(step.span_id, CONTINUES)]
    ] * 303
    assert {(span.parent_id, len(span.links)) for span in gets if span.trace_id == step.trace_id} == {
        (step.span_id, 0)
    }
    assert [len(span.events) for span in gets] == [1] * 500


def test_what_is_around_others_stays_with_the_step_and_nests_in_each_trace() -> None:
    log = Log()
    worker = Recorder(log, 1, "target")
    worker.phase("load", 1, 1.5, step=1)
    for number in range(300):
        worker.phase("forward", 2 + number, 2.4 + number, step=1)
        worker.phase("layer", 2 + number, 2.5 + number, step=1)
    worker.phase("epoch", 1, 400, step=1)
    worker.step(1, 0, 401)
    worker.drain()
    spans = on_the_wire(log.replay())
    assert sizes(spans) == [200, 200, 200, 3]
    (step,), (epoch,) = (
        [span for span in spans if span.name == name] for name in ("target.step", "target.epoch")
    )
    assert (epoch.trace_id, epoch.parent_id) == (step.trace_id, step.span_id)
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        above = by_id.get(span.parent_id)
        links = [(by_id[link.span_id].name, link.attributes) for link in span.links if span is not step]
        if span.name == "target.layer":
            assert (above, links) == (
                (epoch, []) if span.trace_id == step.trace_id else (None, [("target.epoch", CONTINUES)])
            )
        elif span.name == "target.forward" and above is None:  # its layer began in the trace before
            assert (links, span.trace_id != step.trace_id) == ([("target.layer", CONTINUES)], True)
        elif span.name == "target.forward":
            assert (above.name if above else "", links) == ("target.layer", [])


def fan_out() -> Log:
    """One target step makes 500 items, while it goes on; 500 drafter steps take one each, and every tenth
    makes another from it."""
    log = Log()
    target, drafter, late = Recorder(log, 1, "target"), Recorder(log, 2, "drafter"), Recorder(log, 3, "late")
    root = target.ring + 1
    for number in range(500):
        target.phase("queue_put", number, number + 0.5, step=1, state="backpressured")
    target.drain()
    for number in range(1, 501):
        at = 500 + 10 * number
        drafter.phase("queue_get", at, at + 1, step=number, state="starved")
        drafter.consumed(number, at + 1, (root, root, number - 0.8), fixed_root=True)
        for name in ("forward", "backward", "optimizer"):
            drafter.phase(name, at + 2, at + 3, step=number)
        if number % 10 == 0:  # taken while the drafter's step is open
            drafter.drain()
            late.consumed(number, at + 4, (root, drafter.ring + number, at + 3), fixed_root=True)
            late.step(number, at + 4, at + 5, root=root)
            late.drain()
        drafter.step(number, at, at + 9, root=root)
        if number % 50 == 0:
            drafter.drain()
    late.resumed(600, 9000, (root, root, 3))
    late.phase("d2h", 9000, 9001, step=600)
    late.step(600, 9000, 9002, root=root)
    late.drain()
    target.step(1, 0, 9500)
    target.drain()
    return log


def test_a_root_with_500_consumers_keeps_its_own_span_and_the_rest_begin_traces_of_their_own() -> None:
    log = fan_out()
    spans = on_the_wire(log.replay())
    found = sizes(spans)
    assert (sum(found), found[0]) == (501 + 5 * 500 + 50 + 1, 200)
    (root,) = [span for span in spans if span.name == "target.step"]
    drafters = [span for span in spans if span.name == "drafter.step"]
    assert {span.trace_id for span in [root, drafters[0]]} == {trace_of((1 << 28) + 1)}
    assert {(link.trace_id, link.span_id) for span in drafters for link in span.links} == {
        (root.trace_id, root.span_id)
    }
    moved = {
        (2 << 28) + number: span for number, span in enumerate(drafters, 1) if span.trace_id != root.trace_id
    }
    assert len(moved) > 400
    assert {step: (span.trace_id, span.parent_id) for step, span in moved.items()} == {
        step: (trace_of(step), "") for step in moved
    }


def test_a_restart_at_any_frame_gives_every_span_the_same_place() -> None:
    log = fan_out()
    whole = [span.encoded for span in on_the_wire(log.replay())]
    for cut in range(0, len(log.frames) + 1, 23):
        before = SpanReplay(INFO, log.catalog)
        got = [span for frame in log.frames[:cut] for span in before.add(frame)]
        after = SpanReplay(INFO, log.catalog)
        after.restore(before.state())
        got += [span for frame in log.frames[cut:] for span in after.add(frame)]
        assert [span.encoded for span in on_the_wire(got)] == whole


def test_what_is_remembered_is_bounded_and_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "TRACES_MAX", 10)
    full = traces.Traces()
    for root in range(1, 100):
        full.take(root, 500)
        assert full.join(root, root + 1000, 5) == root + 1000
    assert [full.locate(root, root + 1000) for root in (89, 90, 99)] == [89, 1090, 1099]
    assert [full.take(root, 500) for root in (99, 90, 89)] == [0, 0, 199]
    assert {len(traces.decode_words(full.state()[name])) for name in ("roots", "steps")} == {10}


def test_the_parts_of_a_long_step_go_where_its_own_span_goes_though_one_frame_holds_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "HELD_MAX", 50)
    log = Log()
    target, drafter = Recorder(log, 1, "target"), Recorder(log, 2, "drafter")
    for number in range(199):
        target.phase("forward", 1 + number, 1.5 + number, step=1)
    target.step(1, 0, 300)
    target.drain()
    drafter.consumed(1, 301, (target.ring + 1, target.ring + 1, 250.0), fixed_root=True)
    for number in range(130):
        drafter.phase("forward", 302 + number, 302.5 + number, step=1)
    drafter.step(1, 300, 500, root=target.ring + 1)
    drafter.drain()
    spans = on_the_wire(log.replay())
    assert sizes(spans) == [200, 131]
    assert {span.trace_id for span in spans if span.name.startswith("drafter")} == {
        trace_of(drafter.ring + 1)
    }


def test_a_full_trace_that_is_still_asked_for_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "TRACES_MAX", 10)
    kept = traces.Traces()
    kept.take(1 << 28, 199)
    for step in range(2 << 28, (2 << 28) + 30):
        assert kept.join(1 << 28, step, 2) == step, "there is no room"
        kept.take(step, 1)


@pytest.mark.parametrize(("spans", "is_joined"), [(194, True), (195, False), (200, False), (201, True)])
def test_a_step_joins_its_root_when_it_fits_or_when_it_fits_nowhere(spans: int, is_joined: bool) -> None:
    sizes = traces.Traces()
    sizes.take(1, 5)
    assert (sizes.join(1, 2, spans) == 1) is is_joined
    assert sizes.join(1, 2, 1) == sizes.locate(1, 2)  # once decided, it stays
