"""What a run left in a real Jaeger, searched and read back through its APIs, by way of the real collector."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.otlp_receiver import Link, Span, tree
from tests.running import poll
from tests.stack.conftest import Stack
from tests.stack.jaeger_api import Jaeger
from tests.stack.sending import recorded_spans, send_run

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
EXAMPLE = PROJECT / "examples" / "dflash" / "train.py"
FLAGS = ("--simulate", "--targets", "2", "--drafters", "2", "--steps", "40", "--accumulate", "3")
ROLES = ("drafter", "postprocess", "target")
SPANS_PER_TRACE_MAX = 200
REFERENCE = {"opentracing.ref_type": "follows_from"}  # all that a link keeps


@dataclass(frozen=True)
class Searched:
    """A Jaeger behind a collector, with two runs in it: searched_trainer.py's as `dflash`, and one of the
    example as `example`."""

    jaeger: Jaeger
    collector: str
    recordings: dict[str, Path]
    counts: Any
    """What the example says that it did."""

    def spans(self, run: str) -> dict[str, Span]:
        """Return all spans of a run by id."""
        return {span.span_id: span for role in ROLES for span in self.jaeger.spans(f"{run}-{role}")}

    def wait_for(self, run: str) -> dict[str, Span]:
        """Return all spans of a run by id, once all of its recording have come."""
        expected = recorded_spans(self.recordings[run]).keys()
        poll(lambda: self.spans(run).keys() >= expected)
        return self.spans(run)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Searched]:
    directory = tmp_path_factory.mktemp("searched")
    stack = Stack(directory)
    try:
        jaeger = stack.start("jaeger")
        traces = jaeger.url("JAEGER_HTTP_PORT")
        collector = stack.start("otelcol", OTELCOL_TRACES_ENDPOINT=traces)
        endpoint, counts = collector.url("OTELCOL_GRPC_PORT"), directory / "counts.json"
        recordings = {
            "dflash": send_run(directory, endpoint, str(HERE / "searched_trainer.py")),
            "example": send_run(
                directory,
                endpoint,
                str(EXAMPLE),
                *FLAGS,
                "--counts",
                str(counts),
                run_id="run-2",
                OTEL_SERVICE_NAME="example",
            ),
        }
        found = Searched(
            Jaeger(jaeger.url("JAEGER_QUERY_HTTP_PORT")), endpoint, recordings, json.loads(counts.read_text())
        )
        for run in recordings:
            found.wait_for(run)
        yield found
    finally:
        stack.end()


@pytest.mark.parametrize("run", ["dflash", "example"])
def test_every_span_of_the_recording_is_read_back_as_it_was(searched: Searched, run: str) -> None:
    expected = recorded_spans(searched.recordings[run], OTEL_SERVICE_NAME=run)
    found = searched.spans(run)
    assert found.keys() == expected.keys()
    for span_id, span in expected.items():
        assert replace(found[span_id], encoded=b"") == as_jaeger_keeps(span)


def as_jaeger_keeps(span: Span) -> Span:
    """Return a span without what Badger drops, and with what otelcol.yaml adds.

    It drops the attributes of links and whether the parent is remote, and keeps one link to the parent of
    those that there are.
    """
    links = [link for link in span.links if link.span_id != span.parent_id]
    return replace(
        span,
        parent_is_remote=False,
        links=[
            Link(link.trace_id, link.span_id, REFERENCE)
            for link in [*span.links[: len(span.links) > len(links)], *links]
        ],
        resource={**span.resource, "ip": span.resource["host.name"]},
        encoded=b"",
    )


def test_services_are_the_roles_and_operations_their_phases(searched: Searched) -> None:
    jaeger = searched.jaeger
    assert jaeger.services() == [f"{run}-{role}" for run in ("dflash", "example") for role in ROLES]
    assert {role: jaeger.operations(f"example-{role}") for role in ROLES} == {
        "drafter": [
            "drafter.backward",
            "drafter.forward",
            "drafter.optimizer",
            "drafter.queue_get",
            "drafter.step",
        ],
        "postprocess": ["postprocess.d2h", "postprocess.queue_get", "postprocess.queue_put"],
        "target": [
            "target.model_forward",
            "target.pack_hidden",
            "target.queue_get",
            "target.queue_put",
            "target.step",
        ],
    }


def test_resources_tell_role_run_and_process(searched: Searched) -> None:
    resources = {
        json.dumps(span.resource, sort_keys=True): span.resource
        for span in searched.spans("example").values()
    }.values()
    (host,) = {resource["host.name"] for resource in resources}
    (pid,) = {resource["process.pid"] for resource in resources}
    common = {
        "service.namespace": "example",
        "service.instance.id": f"run-2-{host}-{pid}",
        "dflash.run.id": "run-2",
        "host.name": host,
        "ip": host,
        "process.pid": pid,
    }
    kept = [
        {name: value for name, value in resource.items() if not name.startswith("telemetry.sdk.")}
        for resource in resources
    ]
    assert sorted(kept, key=lambda resource: str(resource["service.name"])) == [
        {"service.name": f"example-{role}", **common} for role in ROLES
    ]


def worker(role: str, index: str, gpu: int | None = None, **more: Any) -> dict[str, Any]:
    own = {"dflash.worker.role": role, "dflash.worker.id": index, "dflash.clock.domain": "host"}
    return {
        **own,
        **({"dflash.gpu.index": gpu} if gpu is not None else {}),
        **{name.replace("_", "."): said for name, said in more.items()},
    }


def phase(name: str, attributes: dict[str, Any], state: str, kind: str = "", **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        **({"kind": kind} if kind else {}),
        "attributes": {**attributes, "dflash.worker.state": state},
        **more,
    }


def item(bucket: str) -> list[tuple[str, dict[str, str]]]:
    return [("dflash.queue.item", {"dflash.queue.name": "hidden_states", "dflash.bucket.id": bucket})]


TARGET, POSTPROCESS, DRAFTER = worker("target", "0", 0), worker("postprocess", "0"), worker("drafter", "0", 2)
STEP_0 = {
    "name": "target.step",
    "service": "dflash-target",
    "attributes": TARGET
    | {
        "dflash.batch.id": 0,
        "dflash.batch.tokens": 100,
        "dflash.batch.loss_tokens": 80,
        "dflash.bucket.id": "128",
    },
    "children": [
        phase("target.queue_get", TARGET, "starved", "CONSUMER"),
        phase("target.model_forward", TARGET, "busy"),
        phase("target.pack_hidden", TARGET, "busy"),
        phase("postprocess.d2h", POSTPROCESS, "busy"),
        phase("postprocess.queue_put", POSTPROCESS, "backpressured", "PRODUCER"),
        {
            "name": "drafter.step",
            "attributes": DRAFTER
            | {"dflash.step": 0, "dflash.batch.tokens": 200, "dflash.batch.item.count": 2},
            "links": [("target.step#0", REFERENCE), ("target.step#1", REFERENCE)],
            "children": [
                phase("drafter.queue_get", DRAFTER, "starved", "CONSUMER", events=item("128")),
                phase("drafter.queue_get", DRAFTER, "starved", "CONSUMER", events=item("256")),
                phase("drafter.forward", DRAFTER, "busy"),
                phase("drafter.backward", DRAFTER, "busy"),
                phase("drafter.optimizer", DRAFTER, "busy"),
            ],
        },
    ],
}
FAILED = {
    "name": "drafter.step",
    "service": "dflash-drafter",
    "status": "ERROR",
    "attributes": DRAFTER | {"dflash.step": 4, "error.type": "ZeroDivisionError"},
    "children": [
        phase("drafter.optimizer", DRAFTER | {"error.type": "ZeroDivisionError"}, "busy", status="ERROR")
    ],
}


def test_the_trace_of_a_drafters_step_and_a_failed_one(searched: Searched) -> None:
    found = tree(
        list(searched.spans("dflash").values()), ("thread.id", "thread.name", "dflash.queue.residence")
    )
    assert found[0] == STEP_0
    assert found[-1] == FAILED
    assert len(found) == 9, "a trace for each batch, and one for the step that consumed none"


def test_links_name_every_consumed_item_and_events_say_how_long_it_lay(searched: Searched) -> None:
    spans = searched.spans("example")
    steps = {
        span.attributes["dflash.step"]: span for span in spans.values() if "dflash.step" in span.attributes
    }
    consumed = {number: [link.span_id for link in step.links] for number, step in steps.items()}
    assert {
        number: [spans[made_by].attributes["dflash.batch.id"] for made_by in items]
        for number, items in consumed.items()
    } == {one["step"]: one["consumed"] for one in searched.counts["drafter_steps"]}
    assert {number: (step.trace_id, step.parent_id) for number, step in steps.items()} == {
        number: (spans[items[0]].trace_id, items[0]) for number, items in consumed.items()
    }
    for step in steps.values():
        gets = [
            span
            for span in spans.values()
            if span.parent_id == step.span_id and span.name == "drafter.queue_get"
        ]
        events = [event for span in sorted(gets, key=lambda span: span.start_ns) for event in span.events]
        assert len(events) == len(step.links) == 3
        for event, link in zip(events, step.links, strict=True):
            assert event.attributes["dflash.queue.name"] == "hidden_states"
            assert event.attributes["dflash.bucket.id"] == spans[link.span_id].attributes["dflash.bucket.id"]
            assert (
                0
                <= event.attributes["dflash.queue.residence"]
                <= (event.time_ns - spans[link.span_id].start_ns) / 1e9
            )


def test_no_trace_is_too_large_to_show(searched: Searched) -> None:
    for run in searched.recordings:
        assert max(sizes(searched.spans(run)).values()) <= SPANS_PER_TRACE_MAX


def sizes(spans: dict[str, Span]) -> Counter[str]:
    """Return how many spans each trace has."""
    return Counter(span.trace_id for span in spans.values())


MANY_ITEMS = """
import queue
import otel_dflash

telemetry = otel_dflash.start()
target, drafter = telemetry.worker("target", 0), telemetry.worker("drafter", 0)
items = telemetry.wrap_queue(queue.Queue(), "hidden_states")
for number in range(500):
    with target.step():
        items.put(number)
with drafter.step() as step:
    for _ in range(500):
        with drafter.queue_get:
            items.get()
    step.set(step=0)
"""


def test_a_step_that_consumed_500_items_goes_on_in_linked_traces(searched: Searched, tmp_path: Path) -> None:
    script = tmp_path / "many_items.py"
    script.write_text(MANY_ITEMS)
    searched.recordings["many"] = send_run(
        tmp_path, searched.collector, str(script), OTEL_SERVICE_NAME="many"
    )
    spans = searched.wait_for("many")
    (step,) = (span for span in spans.values() if span.name == "drafter.step")
    made_by = sorted(
        (span for span in spans.values() if span.name == "target.step"), key=lambda span: span.start_ns
    )
    assert [link.span_id for link in step.links[:500]] == [maker.span_id for maker in made_by]
    assert (step.trace_id, step.parent_id) == (made_by[0].trace_id, made_by[0].span_id)
    assert step.attributes["dflash.batch.item.count"] == 500
    first, second = step.links[500:]
    assert step.attributes["dflash.trace.continued"] == 2
    assert {trace: size for trace, size in sizes(spans).items() if size > 1} == {
        step.trace_id: 200,
        first.trace_id: 200,
        second.trace_id: 102,
    }
    for link in (first, second):
        assert spans[link.span_id].trace_id == link.trace_id
        assert step.span_id in {back.span_id for back in spans[link.span_id].links}, "and back"
    assert sum(len(span.events) for span in spans.values() if span.name == "drafter.queue_get") == 500


def test_no_span_on_one_host_is_said_to_have_a_skewed_clock(searched: Searched, stack: Stack) -> None:
    """Without the collector's "ip" the UI would say it of each copy that ends after its step; so the check
    can fail."""
    for run in searched.recordings:
        assert {role: searched.jaeger.warnings(f"{run}-{role}") for role in ROLES} == {
            role: {} for role in ROLES
        }
    direct = stack.start("jaeger")
    send_run(
        direct.directory,
        direct.url("JAEGER_GRPC_PORT"),
        str(HERE / "searched_trainer.py"),
        OTEL_METRICS_EXPORTER="none",
    )
    jaeger = Jaeger(direct.url("JAEGER_QUERY_HTTP_PORT"))
    poll(lambda: "dflash-postprocess" in jaeger.services())
    assert "postprocess.d2h" in jaeger.warnings("dflash-postprocess")


@pytest.mark.parametrize(
    ("query", "steps"),
    [
        ({"tags": {"dflash.worker.id": "1"}, "operation": "drafter.step"}, [3, 1]),
        ({"tags": {"error": "true"}}, [4]),
        ({"tags": {"error.type": "ZeroDivisionError"}}, [4]),
        ({"tags": {"dflash.batch.id": "2"}}, []),  # on the target's step: see the next
        ({"service": "dflash-target", "tags": {"dflash.batch.id": "2"}}, [1]),
        ({"tags": {"dflash.span.truncated": "true"}}, []),
        ({"minDuration": "250ms", "operation": "drafter.step"}, [3, 2]),
        # some span was so long, and the operation is there
        (
            {"minDuration": "250ms", "operation": "drafter.forward"},
            [3, 2],
        ),
        ({"operation": "drafter.step", "limit": 2}, [4, 3]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_search_finds_steps_by_worker_error_and_duration(
    searched: Searched, query: dict[str, Any], steps: list[int]
) -> None:
    found = searched.jaeger.search(**{"service": "dflash-drafter", **query})
    assert [number for trace in found for number in drafter_steps(trace)] == steps


def drafter_steps(trace: dict[str, Any]) -> list[int]:
    return [tag["value"] for span in trace["spans"] for tag in span["tags"] if tag["key"] == "dflash.step"]


def test_api_v3_searches_by_duration_and_answers_404_for_none(searched: Searched) -> None:
    slow = searched.jaeger.spans("dflash-drafter", operation_name="drafter.step", duration_min="250ms")
    assert sorted(span.attributes["dflash.step"] for span in slow if "dflash.step" in span.attributes) == [
        2,
        3,
    ]
    assert searched.jaeger.spans("dflash-drafter", operation_name="drafter.step", duration_min="60s") == []


# --- docs/jaeger.md

COMMANDS = re.findall(r"```sh\n(.*?)```", (PROJECT / "docs" / "jaeger.md").read_text(), re.DOTALL)
OF_THE_EXAMPLE = ("dflash-", "example-")


def ask(searched: Searched, command: str, directory: Path, *changes: tuple[str, str]) -> str:
    """Run a command of the page, with the file that the longer ones need beside it, as they stand but for
    some changes."""
    text = f"{COMMANDS[1]}\n{command}"
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    environment = {**os.environ, "JAEGER": searched.jaeger.url, "NO_PROXY": "*"}
    ran = subprocess.run(
        ["bash", "-ec", text],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def without_numbers(answer: str) -> list[str]:
    return re.sub(r"\d+\.\d+ m?s", "TIME", re.sub(r"trace [0-9a-f]{32}", "trace ID", answer)).splitlines()


def test_the_documented_searches_answer(searched: Searched, tmp_path: Path) -> None:
    address, _, searches, slowest, waits, batch, _ = COMMANDS
    assert address.startswith("export JAEGER=http://localhost:16686 ")
    answers = [
        json.loads(ask(searched, line, tmp_path))
        for line in searches.splitlines()
        if not line.startswith("#")
    ]
    assert [
        [number for trace in answer["data"] for number in drafter_steps(trace)] for answer in answers
    ] == [[3, 1], [4], [3, 2]]
    assert sorted(without_numbers(ask(searched, slowest, tmp_path))[:2]) == [
        "drafter 0, step 2: TIME, of which TIME in drafter.forward (trace ID)",
        "drafter 1, step 3: TIME, of which TIME in drafter.queue_get (trace ID)",
    ], "each was made 300 ms long"
    of_targets = [
        ("drafter.step", "target.step"),
        ('f"drafter ', 'f"target '),
        ("'dflash.step'", "'dflash.batch.id'"),
    ]
    assert re.match(
        "target 0, step 6: .* in target.model_forward ", ask(searched, slowest, tmp_path, *of_targets)
    )
    assert without_numbers(ask(searched, waits, tmp_path))[0] == (
        "TIME, until batch 6 of target 0 was put, which had spent TIME in target.model_forward; "
        "took an item of hidden_states, bucket 128, TIME old (trace ID)"
    )
    assert without_numbers(ask(searched, batch, tmp_path)) == [
        "batch 4: target 0, TIME (trace ID)",
        "batch 5: target 1, TIME (trace ID)",
    ]


@pytest.mark.parametrize("limit", [1000, 7])
@pytest.mark.parametrize("tags", ["", ', **{"dflash.run.id": "run-2"}'], ids=["every-run", "one-run"])
def test_the_slowest_steps_are_found_among_more_than_an_answer_holds(
    searched: Searched, tmp_path: Path, limit: int, tags: str
) -> None:
    """Of 40 steps; the first ones are the slowest, and Jaeger answers with the newest ones."""
    steps = [span for span in searched.spans("example").values() if span.name == "drafter.step"]
    changes = [
        (", 1000, operation", f", {limit}, operation"),
        ('"drafter.step", 3)', f'"drafter.step", 3{tags})'),
    ]
    said = ask(searched, COMMANDS[3], tmp_path, OF_THE_EXAMPLE, *changes)
    assert [line.partition(" ms,")[0] for line in said.splitlines()] == [
        (
            f"drafter {span.attributes['dflash.worker.id']}, step {span.attributes['dflash.step']}: "
            f"{duration_us(span) / 1e3:.1f}"
        )
        for span in sorted(steps, key=duration_us, reverse=True)[:3]
    ]


def duration_us(span: Span) -> int:
    return (span.end_ns - span.start_ns) // 1000


def test_a_wait_at_a_queue_with_min_ready_is_laid_to_the_put_that_ended_it(
    searched: Searched, tmp_path: Path
) -> None:
    """The example's queue gives nothing before four items are there."""
    spans = searched.spans("example")
    puts = sorted(
        (span for span in spans.values() if span.name == "postprocess.queue_put"),
        key=lambda span: span.start_ns,
    )
    gets = [span for span in spans.values() if span.name == "drafter.queue_get"]
    waits = sorted(
        (get for get in gets if get.attributes["dflash.worker.id"] == "1"), key=duration_us, reverse=True
    )[:3]
    said = ask(searched, COMMANDS[4], tmp_path, OF_THE_EXAMPLE).splitlines()
    for line, wait in zip(said, waits, strict=True):
        taken = sum(get.end_ns < wait.end_ns for get in gets)
        # one, unless threads lag
        makers = [spans[put.parent_id].attributes for put in puts[taken + 3 :] if put.start_ns < wait.end_ns]
        (item,) = (event.attributes for event in wait.events)
        assert re.sub(r"(which had spent) \d+\.\d ms", r"\1 TIME", line) in [
            f"{duration_us(wait) / 1e3:.1f} ms, until batch {made['dflash.batch.id']} of target "
            f"{made['dflash.worker.id']} was put, "
            "which had spent TIME in target.model_forward; took an item of hidden_states, "
            f"bucket {item['dflash.bucket.id']}, {1e3 * item['dflash.queue.residence']:.1f} ms old "
            f"(trace {wait.trace_id})"
            for made in makers
        ]


# --- service performance monitoring


def test_latencies_calls_and_errors_come_from_prometheus(stack: Stack, tmp_path: Path) -> None:
    prometheus = stack.start("prometheus")
    jaeger = stack.start("jaeger", JAEGER_PROMETHEUS_URL=prometheus.url("PROMETHEUS_PORT"))
    send_run(
        jaeger.directory,
        jaeger.url("JAEGER_GRPC_PORT"),
        str(HERE / "searched_trainer.py"),
        OTEL_METRICS_EXPORTER="none",
    )
    searched = Searched(Jaeger(jaeger.url("JAEGER_QUERY_HTTP_PORT")), "", {}, None)
    latencies, calls, errors, minstep = COMMANDS[-1].splitlines()

    def newest(command: str) -> dict[str, float]:
        """Return each operation's newest value that is not zero."""
        found = {}
        for metric in json.loads(ask(searched, command, tmp_path))["metrics"]:
            label = {label["name"]: label["value"] for label in metric["labels"]}
            values = [point["gaugeValue"]["doubleValue"] for point in metric["metricPoints"]]
            if any(isinstance(value, float) and value > 0 for value in values):
                found[label.get("operation", label["service_name"])] = values[-1]
        return found

    # two flushes of the span metrics: a rate needs two points
    poll(lambda: len(newest(calls)) == 4 and newest(errors))
    rates = newest(calls)
    assert rates.keys() == {"drafter.step", "drafter.forward", "drafter.backward", "drafter.optimizer"}
    assert rates["drafter.step"] / rates["drafter.forward"] == pytest.approx(5 / 4)
    # a step and its optimizer, of 5 steps, 5 optimizers, 4 and 4
    assert newest(errors) == {"dflash-drafter": pytest.approx(2 / 18)}
    assert 200 <= newest(latencies)["drafter.step"] <= 500, "ms; the slow one took 300"
    assert json.loads(ask(searched, minstep, tmp_path))["data"] == 1
