"""Frames in, spans out: whole trees as they look on the wire, by the SDK's own encoder."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from otel_dflash.otlp.batches import batches
from otel_dflash.otlp.span_data import SpanData
from otel_dflash.records import ValueType
from otel_dflash.spans import identity
from tests.otlp_receiver import tree
from tests.spans.recorder import COMMON, INFO, MS, WALL_NS, Log, Recorder, on_the_wire, shape, wall


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


RESOURCE = {
    "telemetry.sdk.language": "python",
    "telemetry.sdk.name": "opentelemetry",
    "service.name": "dflash-target",
    "service.namespace": "dflash",
    "service.instance.id": "run-1-node-1-4242",
    "host.name": "node-1",
    "process.pid": 4242,
    "dflash.run.id": "run-1",
}


def a_pipeline() -> Log:
    """Two target steps, the second with two puts; one drafter step consumes all three items, one of them in a
    get of its own."""
    log = Log()
    target = Recorder(log, 1, "target", 2, gpu=2)
    drafter = Recorder(log, 2, "drafter", 0, gpu=5)
    first, second = target.ring + 1, target.ring + 2
    target.attribute(1, 1, "batch_id", ValueType.INT, 9)
    target.phase("model_forward", 1, 5, step=1)
    target.phase("queue_put", 5, 6, step=1, state="backpressured")
    target.step(1, 0, 7, tokens=512, loss_tokens=400, bucket="b128", number=0)
    target.drain()
    target.phase("queue_put", 8, 9, step=2, state="backpressured")
    target.phase("queue_put", 9, 10, step=2, state="backpressured")
    drafter.consumed(1, 7, (first, first, 5.5), fixed_root=True, bucket="b128")
    drafter.drain()
    target.step(2, 7, 11)
    target.drain()
    drafter.consumed(1, 12, (second, second, 8.5), bucket="b128")
    drafter.consumed(1, 30, (second, second, 9.5))
    drafter.phase("queue_get", 6, 13, step=1, state="starved")
    drafter.phase("forward", 13, 20, step=1)
    drafter.phase("backward", 20, 29, step=1)
    drafter.step(1, 6, 31, tokens=900, number=41, root=first)
    drafter.drain()
    return log


def test_a_pipeline_is_one_tree_with_links_and_residence() -> None:
    state = {name: {"dflash.worker.state": name} for name in ("busy", "starved", "backpressured")}
    target = {
        "dflash.worker.role": "target",
        "dflash.worker.id": "2",
        "dflash.gpu.index": 2,
        "dflash.clock.domain": "host",
    }
    drafter = {
        "dflash.worker.role": "drafter",
        "dflash.worker.id": "0",
        "dflash.gpu.index": 5,
        "dflash.clock.domain": "host",
    }
    thread = {"thread.id": 77, "thread.name": "target-0"}
    items = [
        {"dflash.queue.name": "hidden_states", "dflash.queue.residence": 0.0015, "dflash.bucket.id": "b128"},
        {"dflash.queue.name": "hidden_states", "dflash.queue.residence": 0.0035, "dflash.bucket.id": "b128"},
        {"dflash.queue.name": "hidden_states", "dflash.queue.residence": 0.0205},
    ]
    assert tree(on_the_wire(a_pipeline().replay())) == [
        {
            "name": "target.step",
            "service": "dflash-target",
            "attributes": {
                **target,
                **thread,
                "dflash.step": 0,
                "dflash.batch.tokens": 512,
                "dflash.batch.loss_tokens": 400,
                "dflash.bucket.id": "b128",
                "dflash.batch.id": 9,
            },
            "children": [
                {"name": "target.model_forward", "attributes": {**target, **state["busy"]}},
                {
                    "name": "target.queue_put",
                    "kind": "PRODUCER",
                    "attributes": {**target, **state["backpressured"]},
                },
                {
                    "name": "drafter.step",
                    "service": "dflash-drafter",
                    "remote_parent": "target.step#0",
                    "attributes": {
                        **drafter,
                        **thread,
                        "dflash.step": 41,
                        "dflash.batch.tokens": 900,
                        "dflash.batch.item.count": 3,
                    },
                    "links": [
                        ("target.step#0", items[0]),
                        ("target.step#1", items[1]),
                        ("target.step#1", items[2]),
                    ],
                    "events": [("dflash.queue.item", items[2])],  # its get is in no queue_get phase
                    "children": [
                        {
                            "name": "drafter.queue_get",
                            "kind": "CONSUMER",
                            "attributes": {**drafter, **state["starved"]},
                            "events": [("dflash.queue.item", items[0]), ("dflash.queue.item", items[1])],
                        },
                        {"name": "drafter.forward", "attributes": {**drafter, **state["busy"]}},
                        {"name": "drafter.backward", "attributes": {**drafter, **state["busy"]}},
                    ],
                },
            ],
        },
        {
            "name": "target.step",
            "service": "dflash-target",
            "attributes": {**target, **thread},
            "children": [
                {
                    "name": "target.queue_put",
                    "kind": "PRODUCER",
                    "attributes": {**target, **state["backpressured"]},
                },
                {
                    "name": "target.queue_put",
                    "kind": "PRODUCER",
                    "attributes": {**target, **state["backpressured"]},
                },
            ],
        },
    ]


def test_times_are_anchored_wall_time_and_ids_follow_from_the_context() -> None:
    spans = {span.name: span for span in on_the_wire(a_pipeline().replay())}
    drafter, get = spans["drafter.step"], spans["drafter.queue_get"]
    context = ((1 << 28) + 1) << 128 | ((1 << 28) + 1) << 64 | wall(5.5)
    assert (drafter.start_ns, drafter.end_ns) == (wall(6), wall(31))
    assert [event.time_ns for event in get.events] == [wall(7), wall(12)]
    root, producer = context >> 128, context >> 64 & (1 << 64) - 1
    assert (identity.trace_id(root), identity.step_span_id(producer)) == (
        int(drafter.trace_id, 16),
        int(drafter.parent_id, 16),
    )


def test_resource_is_ours_for_our_names_and_the_users_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def resources() -> list[dict[str, Any]]:
        found = {
            span.resource["service.name"]: dict(span.resource) for span in on_the_wire(a_pipeline().replay())
        }
        assert all(resource.pop("telemetry.sdk.version") for resource in found.values())
        return [found[name] for name in sorted(found, reverse=True)]

    drafter = {**RESOURCE, "service.name": "dflash-drafter"}
    assert resources() == [RESOURCE, drafter]
    monkeypatch.setenv("OTEL_SERVICE_NAME", "lab")
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES", "team=llm,host.name=elsewhere,service.version=7,dflash.run.id=x"
    )
    extra = {"service.namespace": "lab", "team": "llm", "service.version": "7"}
    assert resources() == [
        {**RESOURCE, **extra, "service.name": "lab-target"},
        {**drafter, **extra, "service.name": "lab-drafter"},
    ]


def test_a_phase_is_a_child_of_the_smallest_phase_around_it() -> None:
    log = Log()
    worker = Recorder(log, 1, "target")
    worker.phase("a1", 2, 3, step=1)
    worker.phase("a1x", 4, 4.5, step=1)
    worker.phase("a2", 3.5, 5, step=1)
    worker.phase("a", 1, 6, step=1)
    worker.phase("b", 6, 7, step=1)
    worker.step(1, 0, 8)
    worker.drain()
    assert shape(log.replay()) == [
        {
            "name": "target.step",
            "service": "dflash-target",
            "children": [
                {
                    "name": "target.a",
                    "children": [
                        {"name": "target.a1"},
                        {"name": "target.a2", "children": [{"name": "target.a1x"}]},
                    ],
                },
                {"name": "target.b"},
            ],
        }
    ]


def test_a_resumed_step_has_no_span_and_its_phases_are_the_other_steps() -> None:
    log = Log()
    target, post = Recorder(log, 1, "target"), Recorder(log, 2, "postprocess", 3)
    origin = target.ring + 1
    target.step(1, 0, 5)
    target.drain()
    post.consumed(1, 6, (origin, origin, 4), fixed_root=True)
    post.resumed(1, 6, (origin, origin, 4))
    post.attribute(1, 7, "bytes", ValueType.INT, 12)
    post.phase("d2h", 7, 9, step=1)
    post.phase("queue_put", 9, 10, step=1)
    post.step(1, 6.5, 10, root=origin)
    post.drain()
    item = {"dflash.queue.name": "hidden_states", "dflash.queue.residence": 0.002}
    assert shape(log.replay()) == [
        {
            "name": "target.step",
            "service": "dflash-target",
            "children": [
                {
                    "name": "postprocess.d2h",
                    "service": "dflash-postprocess",
                    "remote_parent": "target.step#0",
                    "attributes": {"dflash.bytes": 12},
                    "events": [("dflash.queue.item", item)],
                },
                {
                    "name": "postprocess.queue_put",
                    "service": "dflash-postprocess",
                    "remote_parent": "target.step#0",
                    "kind": "PRODUCER",
                },
            ],
        }
    ]


def test_a_later_consume_only_links_and_the_root_survives_a_lost_consume() -> None:
    log = Log()
    origin = (9 << 28) + 4
    drafter = Recorder(log, 2, "drafter")
    drafter.consumed(1, 3, (origin, origin, 1))  # the step put something before: it is its own root
    drafter.step(1, 0, 5)
    drafter.step(2, 5, 6, root=origin)  # what fixed the root was dropped: the ring was full
    drafter.drain()
    own, lost = on_the_wire(log.replay())
    assert own.trace_id == f"{identity.trace_id(drafter.ring + 1):032x}"
    assert [(link.trace_id, link.span_id) for link in own.links] == [
        (f"{identity.trace_id(origin):032x}", f"{identity.step_span_id(origin):016x}")
    ]
    assert (own.parent_id, lost.parent_id) == ("", "")
    assert lost.trace_id == f"{identity.trace_id(origin):032x}"


def test_an_item_put_outside_a_step_has_residence_but_no_link_and_a_clock_behind_gives_zero() -> None:
    log = Log()
    drafter = Recorder(log, 2, "drafter")
    drafter.consumed(1, 3, (0, 0, 1))
    drafter.consumed(1, 3, (0, 0, 4))
    drafter.step(1, 0, 5)
    drafter.drain()
    (span,) = on_the_wire(log.replay())
    assert span.links == []
    assert [event.attributes["dflash.queue.residence"] for event in span.events] == [0.002, 0.0]
    assert span.attributes["dflash.batch.item.count"] == 2


def test_an_item_without_a_put_time_has_no_residence() -> None:
    log = Log()
    drafter = Recorder(log, 2, "drafter")
    before_1971 = -WALL_NS / MS
    misplaced = ((9 << 60) - WALL_NS) / MS  # an id in its place
    for put_ms in (before_1971, misplaced):
        drafter.consumed(1, 3, (5, 5, put_ms))
    drafter.step(1, 0, 5)
    drafter.drain()
    (span,) = on_the_wire(log.replay())
    assert [link.attributes for link in span.links] == [{"dflash.queue.name": "hidden_states"}] * 2
    assert [event.attributes for event in span.events] == [{"dflash.queue.name": "hidden_states"}] * 2


def test_errors_mark_the_phase_and_the_step() -> None:
    log = Log()
    worker = Recorder(log, 1, "target")
    worker.phase("forward", 1, 2, step=1, error="ValueError")
    worker.phase("queue_get", 2, 3, step=1)
    worker.step(1, 0, 4, error="torch.OutOfMemoryError")
    worker.drain()
    assert shape(log.replay()) == [
        {
            "name": "target.step",
            "service": "dflash-target",
            "status": "ERROR",
            "attributes": {"error.type": "torch.OutOfMemoryError"},
            "children": [
                {"name": "target.forward", "status": "ERROR", "attributes": {"error.type": "ValueError"}},
                {"name": "target.queue_get", "kind": "CONSUMER"},
            ],
        }
    ]


def test_attributes_keep_type_sign_and_name() -> None:
    log = Log()
    worker = Recorder(log, 1, "target")
    worker.attribute(1, 1, "delta", ValueType.INT, -3)
    worker.attribute(1, 1, "acme.loss", ValueType.FLOAT, struct.unpack("<Q", struct.pack("<d", 0.25))[0])
    worker.attribute(1, 1, "phase_of_moon", ValueType.TEXT, worker.text("füll"))
    worker.attribute(1, 1, "warm", ValueType.BOOL, 1)
    worker.attribute(1, 1, "delta", ValueType.INT, -4)
    worker.step(1, 0, 2)
    worker.drain()
    (span,) = on_the_wire(log.replay())
    said = {key: value for key, value in span.attributes.items() if key not in COMMON}
    assert said == {
        "dflash.delta": -4,
        "acme.loss": 0.25,
        "dflash.phase_of_moon": "füll",
        "dflash.warm": True,
    }


def test_a_killed_worker_ends_what_was_open_and_marks_it() -> None:
    log = Log()
    worker = Recorder(log, 1, "target")
    worker.consumed(1, 1, ((9 << 28) + 4, (9 << 28) + 4, 0), fixed_root=True)
    worker.phase("queue_get", 0, 2, step=1, state="starved")
    worker.close(9, {"kernel": 5, "model_forward": 3, "outside": -1}, step=(1, 0))
    cut = {"dflash.span.truncated": True}
    item = {"dflash.queue.name": "hidden_states", "dflash.queue.residence": 0.001}
    spans = log.replay()
    assert shape(spans) == [
        {"name": "target.outside", "service": "dflash-target", "attributes": cut},
        {
            "name": "target.step",
            "service": "dflash-target",
            "remote_parent": "?",
            "lost_parent": True,
            "attributes": {"dflash.batch.item.count": 1, **cut},
            "links": [("?", item)],
            "children": [
                {"name": "target.queue_get", "kind": "CONSUMER", "events": [("dflash.queue.item", item)]},
                {
                    "name": "target.model_forward",
                    "attributes": cut,
                    "children": [{"name": "target.kernel", "attributes": cut}],
                },
            ],
        },
    ]
    assert {span.name: span.end_ns for span in spans}["target.kernel"] == wall(9)


def test_a_phase_outside_any_step_goes_out_at_once_in_a_trace_of_its_own() -> None:
    log = Log()
    worker = Recorder(log, 1, "prefetch")
    worker.phase("read", 0, 1)
    worker.phase("read", 1, 2)
    worker.drain()
    spans = log.replay()
    assert shape(spans) == [{"name": "prefetch.read", "service": "dflash-prefetch"}] * 2
    assert len({span.trace_id for span in on_the_wire(spans)}) == 2


def test_a_ring_without_names_still_gives_spans() -> None:
    log = Log()
    worker = Recorder(log, 1, "target")
    worker.phase("forward", 1, 2, step=1, error="ValueError")
    worker.step(1, 0, 3, bucket="b")
    worker.drain()
    log.catalog.clear()
    assert [span.name for span in on_the_wire(log.replay())] == ["_OTHER.step", "_OTHER._OTHER"]


def test_size_estimates_bound_the_encoded_size_and_batches_keep_to_it() -> None:
    log = a_pipeline()
    drafter = Recorder(log, 4, "drafter")
    for number in range(3000):
        drafter.consumed(1, 1, (5, number + 1, 0), bucket="ä" * 30)
    drafter.step(1, 0, 2)
    for number in range(2000):
        drafter.phase("forward", 1, 2, step=number + 2)
        drafter.step(number + 2, 1, 2, tokens=1 << 60, number=1 << 40)
    drafter.drain()
    spans = log.replay()
    for span in spans:
        encoded = (
            encode_spans(SpanData(INFO).readable_spans([span]))
            .resource_spans[0]
            .scope_spans[0]
            .spans[0]
            .ByteSize()
            + 4
        )
        assert encoded <= span.otlp_bytes <= 2 * encoded + 64, span.name
    cut = list(batches(spans, lambda span: span.otlp_bytes))
    assert [span for batch in cut for span in batch] == spans
    assert max(len(batch) for batch in cut) == 512
    assert all(sum(span.otlp_bytes for span in batch) <= 1 << 20 or len(batch) == 1 for batch in cut)
    assert list(batches([], len)) == []
