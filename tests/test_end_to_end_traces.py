"""A small deterministic run as it arrives: parents, links, kinds, attributes and resources; and a wall clock
that jumps meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.otlp_receiver import OtlpReceiver
from tests.whole_run import run

SCRIPT = """
import json, os, queue, sys
import otel_dflash

telemetry = otel_dflash.start()
target, postprocess = telemetry.worker("target", 1, gpu=1), telemetry.worker("postprocess", 0)
drafter = telemetry.worker("drafter", 0, gpu=5)
hidden_states = telemetry.wrap_queue(queue.LifoQueue(), "hidden_states", capacity=64)

with target.step() as step:
    step.set(tokens=100, loss_tokens=80, bucket=512, step=0, batch_id="first", ratio=0.5)
    with target.queue_get: pass
    with target.model_forward, target.phase("attention", "lock_wait"): pass
    with target.queue_put:
        hidden_states.put("a")
        hidden_states.put("b")
with target.step() as step:
    with target.pack_hidden: pass
    context = step.produced()
with postprocess.resume(context):
    with postprocess.d2h: pass
    with postprocess.queue_put: hidden_states.put("c")
with drafter.step() as step:
    with drafter.queue_get: got = [hidden_states.get(), hidden_states.get()]
    with drafter.forward: pass
    with drafter.queue_get: got.append(hidden_states.get())
    with drafter.backward: pass
    step.set(step=7)
try:
    with drafter.step(), drafter.queue_get: hidden_states.get_nowait()
except queue.Empty:
    pass
try:
    with drafter.step(), drafter.optimizer: 1 / 0
except ZeroDivisionError:
    pass
with open(sys.argv[1], "w") as file:
    json.dump([got, os.getpid(), os.uname().nodename], file)
"""

ANYWHERE = ("thread.id", "thread.name", "dflash.clock.domain", "dflash.queue.residence")


def worker(role: str, index: str, gpu: int | None = None, **more: Any) -> dict[str, Any]:
    """Return the attributes of every span of a worker, and some of one span."""
    own: dict[str, Any] = {"dflash.worker.role": role, "dflash.worker.id": index}
    if gpu is not None:
        own["dflash.gpu.index"] = gpu
    return {**own, **{name.replace("_", "."): value for name, value in more.items()}}


def target(state: str = "", **more: Any) -> dict[str, Any]:
    return worker("target", "1", 1, **({"dflash_worker_state": state} if state else {}), **more)


def drafter(state: str = "", **more: Any) -> dict[str, Any]:
    return worker("drafter", "0", 5, **({"dflash_worker_state": state} if state else {}), **more)


QUEUE = {"dflash.queue.name": "hidden_states"}
BUCKET = {**QUEUE, "dflash.bucket.id": "512"}
ITEM = "dflash.queue.item"

TREE = [
    {
        "name": "target.step",
        "service": "dflash-target",
        "attributes": target(
            dflash_step=0,
            dflash_batch_tokens=100,
            dflash_bucket_id="512",
            dflash_batch_id="first",
            dflash_ratio=0.5,
        )
        | {"dflash.batch.loss_tokens": 80},
        "children": [
            {"name": "target.queue_get", "kind": "CONSUMER", "attributes": target("starved")},
            {
                "name": "target.model_forward",
                "attributes": target("busy"),
                "children": [{"name": "target.attention", "attributes": target("lock_wait")}],
            },
            {"name": "target.queue_put", "kind": "PRODUCER", "attributes": target("backpressured")},
        ],
    },
    {
        "name": "target.step",
        "service": "dflash-target",
        "attributes": target(),
        "children": [
            {"name": "target.pack_hidden", "attributes": target("busy")},
            {
                "name": "postprocess.d2h",
                "service": "dflash-postprocess",
                "remote_parent": "target.step#1",
                "attributes": worker("postprocess", "0", dflash_worker_state="busy"),
            },
            {
                "name": "postprocess.queue_put",
                "service": "dflash-postprocess",
                "kind": "PRODUCER",
                "remote_parent": "target.step#1",
                "attributes": worker("postprocess", "0", dflash_worker_state="backpressured"),
            },
            {
                "name": "drafter.step",
                "service": "dflash-drafter",
                "remote_parent": "target.step#1",
                "attributes": drafter(dflash_step=7) | {"dflash.batch.item.count": 3},
                "links": [("target.step#1", QUEUE), ("target.step#0", BUCKET), ("target.step#0", BUCKET)],
                "children": [
                    {
                        "name": "drafter.queue_get",
                        "kind": "CONSUMER",
                        "attributes": drafter("starved"),
                        "events": [(ITEM, QUEUE), (ITEM, BUCKET)],
                    },
                    {"name": "drafter.forward", "attributes": drafter("busy")},
                    {
                        "name": "drafter.queue_get",
                        "kind": "CONSUMER",
                        "attributes": drafter("starved"),
                        "events": [(ITEM, BUCKET)],
                    },
                    {"name": "drafter.backward", "attributes": drafter("busy")},
                ],
            },
        ],
    },
    {
        "name": "drafter.step",
        "service": "dflash-drafter",
        "attributes": drafter(),
        "children": [{"name": "drafter.queue_get", "kind": "CONSUMER", "attributes": drafter("starved")}],
    },
    {
        "name": "drafter.step",
        "service": "dflash-drafter",
        "status": "ERROR",
        "attributes": drafter(error_type="ZeroDivisionError"),
        "children": [
            {
                "name": "drafter.optimizer",
                "status": "ERROR",
                "attributes": drafter("busy", error_type="ZeroDivisionError"),
            },
        ],
    },
]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_small_run_arrives_as_one_tree(protocol: str, receiver: OtlpReceiver, tmp_path: Path) -> None:
    ran = run(tmp_path, receiver, ["-c", SCRIPT, "FILE"], protocol)
    got, pid, host = ran.said
    assert got == ["c", "b", "a"]
    assert receiver.tree(ANYWHERE) == TREE
    common = {
        "service.namespace": "dflash",
        "service.instance.id": f"run-1-{host}-{pid}",
        "host.name": host,
        "process.pid": pid,
    }
    resources = {
        span.name.partition(".")[0]: {
            name: value for name, value in span.resource.items() if not name.startswith("telemetry.sdk.")
        }
        for span in ran.spans()
    }
    assert resources == {
        role: {"service.name": f"dflash-{role}", "dflash.run.id": "run-1", **common}
        for role in ("target", "postprocess", "drafter")
    }


def test_names_of_the_users_environment_reach_the_resource(receiver: OtlpReceiver, tmp_path: Path) -> None:
    said = {"OTEL_SERVICE_NAME": "night", "OTEL_RESOURCE_ATTRIBUTES": "team=speculation,host.name=elsewhere"}
    ran = run(tmp_path, receiver, ["-c", SCRIPT, "FILE"], **said)
    host = ran.said[2]
    assert {
        (
            s.resource["service.name"],
            s.resource["service.namespace"],
            s.resource["team"],
            s.resource["host.name"],
        )
        for s in ran.spans()
    } == {(f"night-{role}", "night", "speculation", host) for role in ("target", "postprocess", "drafter")}


# --- the wall clock

JUMP_NS = 3_600_000_000_000
SITECUSTOMIZE = """
import os, time
_time_ns = time.time_ns
def time_ns():
    return _time_ns() + (3_600_000_000_000 if os.path.exists(os.environ["CLOCK_JUMPED"]) else 0)
time.time_ns = time_ns
time.time = lambda: time_ns() / 1e9
"""
JUMPING = """
import json, os, queue, sys, time
import otel_dflash

telemetry = otel_dflash.start()
target, drafter = telemetry.worker("target", 0), telemetry.worker("drafter", 0)
items = telemetry.wrap_queue(queue.Queue(), "hidden_states")
now = time.monotonic_ns
walls = [time.time_ns()]
stamps = []
for number in range(3):
    outer = now()
    with target.step(), target.queue_put:
        inner = now()
        items.put(number)
        if number == 1:
            open(os.environ["CLOCK_JUMPED"], "w").close()
        until = now() + 20_000_000
        while now() < until:
            pass
        inner = now() - inner
    put = now()
    with drafter.step(), drafter.queue_get:
        items.get()
    stamps.append((inner, put - outer, now() - outer))
walls.append(time.time_ns())
with open(sys.argv[1], "w") as file:
    json.dump([walls, stamps], file)
"""


def test_a_jump_of_the_wall_clock_changes_no_duration(receiver: OtlpReceiver, tmp_path: Path) -> None:
    """It jumps by an hour within the second put, for the trainer and for the agent."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    flag = tmp_path / "jumped"
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ran = run(tmp_path, receiver, ["-c", JUMPING, "FILE"], CLOCK_JUMPED=str(flag), PYTHONPATH=path)
    (start_ns, end_ns), stamps = ran.said
    assert end_ns - start_ns > JUMP_NS

    spans = sorted(ran.spans(), key=lambda span: span.start_ns)
    puts = [span for span in spans if span.name == "target.queue_put"]
    within = [
        inner <= span.end_ns - span.start_ns <= outer
        for span, (inner, outer, _) in zip(puts, stamps, strict=True)
    ]
    assert within == [True, True, True]
    assert [span.name for span in spans] == [
        "target.step",
        "target.queue_put",
        "drafter.step",
        "drafter.queue_get",
    ] * 3
    assert all(start_ns <= span.start_ns <= span.end_ns <= end_ns - JUMP_NS for span in spans), (
        "spans keep the clock of the start"
    )
    links = [link for span in spans for link in span.links]
    residences_ns = [link.attributes["dflash.queue.residence"] * 1e9 for link in links]
    assert [
        20e6 <= residence <= whole for residence, (_, _, whole) in zip(residences_ns, stamps, strict=True)
    ] == [True, True, True]
    for point in receiver.latest("dflash.phase.duration"):
        assert point.total < JUMP_NS / 1e9, point.attributes
    (offset,) = receiver.latest("dflash.telemetry.clock.offset")
    assert abs(offset.value - JUMP_NS / 1e9) < 1, "the jump is exported, not applied"
