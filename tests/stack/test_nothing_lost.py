"""The way from the agent over the node collector to Jaeger, with each part of it stopped, killed or full:
every span arrives.

Doubles are counted in a receiver of the test in Jaeger's place: Jaeger hides them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from otel_dflash.otlp.batches import ITEMS_PER_BATCH
from tests.otlp_receiver import OtlpReceiver, Span
from tests.running import Running, death, poll
from tests.stack.conftest import Stack, Started
from tests.stack.jaeger_api import Jaeger
from tests.stack.sending import recorded_spans, send_run

OUTAGE_S: Final = 60.0
CATCH_UP_S: Final = 60.0
RECONNECTED_S: Final = 15.0
GRPC_BYTES_MAX: Final = 4 << 20
SERVICE: Final = ["dflash-target"]  # is in every trace of the trainer
MIB: Final = 1 << 20


class Sink(OtlpReceiver):
    """Takes the collector's traces. `gate` shut: what arrives is stored, but the answer waits, so nobody
    knows that it was."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.request_bytes: list[int] = []
        self.unanswered: Counter[str] = Counter()

    def store_spans(self, request: Any, headers: dict[str, str]) -> None:
        self.request_bytes.append(request.ByteSize())
        before = len(self.spans())
        super().store_spans(request, headers)
        if not self.gate.is_set():
            self.unanswered.update(span.span_id for span in self.spans()[before:])
            assert self.gate.wait(CATCH_UP_S)


@pytest.fixture
def sink() -> Iterator[Sink]:
    with Sink() as sink:
        yield sink
        sink.gate.set()


def collector_to(stack: Stack, sink: OtlpReceiver, **variables: str) -> Started:
    """Return a running node collector that sends to `sink`."""
    endpoint = sink.http_endpoint
    return stack.start(
        "otelcol", OTELCOL_TRACES_ENDPOINT=endpoint, OTELCOL_METRICS_ENDPOINT=endpoint, **variables
    )


def running_to(collector: Started, directory: Path, timeout_s: int = 2) -> Running:
    endpoint = collector.url("OTELCOL_GRPC_PORT")
    return Running(directory, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_EXPORTER_OTLP_TIMEOUT=f"{timeout_s}")


def train_for(running: Running, seconds: float) -> None:
    """Let the trainer work at a steady pace."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        running.ask("steps 5")
        threading.Event().wait(0.1)


def finish(running: Running) -> dict[str, Span]:
    """End the run; once the agent has sent all, return what its recording holds."""
    counts = running.end_trainer()
    assert death(running.agents[-1]) == 0
    assert running.delivery()["spans"]["delivered"]
    spans = recorded_spans(running.recording)
    assert Counter(span.name for span in spans.values()) == {
        name: count for name, count in counts.items() if "." in name
    }
    return spans


def assert_nothing_dropped(log: str) -> None:
    """The collector says when it gives up what it took. ("Rejecting data" is another thing: the agent was
    told, and keeps it.)"""
    assert [
        line for line in log.splitlines() if "Dropping data" in line or "Error deleting item" in line
    ] == []


@pytest.mark.timeout(300)
def test_jaeger_stopped_for_a_minute_and_the_collector_killed_twice_lose_no_span(
    stack: Stack, tmp_path: Path
) -> None:
    jaeger = stack.start("jaeger")
    collector = stack.start("otelcol", OTELCOL_TRACES_ENDPOINT=jaeger.url("JAEGER_HTTP_PORT"))
    api = Jaeger(jaeger.url("JAEGER_QUERY_HTTP_PORT"))
    with running_to(collector, tmp_path) as running:
        running.start_agent()
        running.start_trainer()
        poll(lambda: train_for(running, 0.1) or api.span_ids(SERVICE))  # type: ignore[func-returns-value]
        before = api.span_ids(SERVICE)
        jaeger.kill()
        train_for(running, OUTAGE_S / 2)
        collector.kill()
        running.ask("steps 50")
        collector.start()
        train_for(running, OUTAGE_S / 2)
        jaeger.start()
        poll(lambda: train_for(running, 0.1) or api.span_ids(SERVICE) > before, RECONNECTED_S)  # type: ignore[func-returns-value]
        collector.kill()  # while it sends what it kept
        running.ask("steps 50")
        collector.start()
        expected = finish(running)
    poll(lambda: api.span_ids(SERVICE) >= expected.keys(), CATCH_UP_S)
    assert api.span_ids(SERVICE) == expected.keys()
    assert_nothing_dropped(collector.log)


def test_a_killed_collector_sends_again_only_what_nobody_had_confirmed(
    stack: Stack, sink: Sink, tmp_path: Path
) -> None:
    collector = collector_to(stack, sink)
    with running_to(
        collector, tmp_path, timeout_s=30
    ) as running:  # an answer that is only late must not count as none
        running.start_agent()
        running.start_trainer()
        train_for(running, 2)
        poll(lambda: is_all_taken(running))
        confirmed = recorded_spans(running.recording).keys()
        poll(lambda: sink.span_ids() == confirmed)
        sink.gate.clear()
        running.ask("steps 50")
        # so the agent has nothing under way, and the collector all of this
        poll(lambda: is_all_taken(running))
        planted = recorded_spans(running.recording).keys() - confirmed
        poll(lambda: sink.unanswered.keys() >= planted)
        collector.kill()
        assert sink.unanswered == dict.fromkeys(planted, 1)
        sink.gate.set()
        train_for(running, 2)  # so the agent tries in vain
        collector.start()
        poll(lambda: sum(span.span_id in planted for span in sink.spans()) >= 2 * len(planted))
        sink.down = True
        train_for(running, 2)
        # the sink refused what was under way to it; one request of the agent may be under way
        collector.kill()
        train_for(running, 2)
        collector.start()
        sink.down = False
        expected = finish(running)
    assert sink.wait_for(lambda sink: sink.span_ids() >= expected.keys(), CATCH_UP_S)
    times = Counter(span.span_id for span in sink.spans())
    assert times.keys() == expected.keys()
    assert {
        span.span_id: replace(span, resource=expected[span.span_id].resource) for span in sink.spans()
    } == expected
    assert {times[span_id] for span_id in planted} == {2}, (
        "the first kill repeats what was stored and not answered, once"
    )
    assert {times[span_id] for span_id in confirmed} == {1}, "what was answered is not repeated"
    again = Counter(
        {span_id: count - 1 for span_id, count in times.items() if count > 1 and span_id not in planted}
    )
    assert set(again.values()) <= {1}, "all else was made after the first kill"
    assert again.total() <= ITEMS_PER_BATCH, (
        "one request of the agent: the second kill repeats what was taken and not answered"
    )
    assert_nothing_dropped(collector.log)


MANY_LINKS = """
import queue
import otel_dflash

telemetry = otel_dflash.start()
target, drafter = telemetry.worker("target", 0), telemetry.worker("drafter", 0)
items = telemetry.wrap_queue(queue.Queue(), "hidden_states")
for number in range(400):
    with target.step() as step:
        step.set(bucket=512)
        for _ in range(200):
            items.put(number)
    with drafter.step(), drafter.queue_get:
        for _ in range(200):
            items.get()
"""


def test_spans_of_200_links_arrive_after_an_outage_in_requests_that_fit(
    stack: Stack, sink: Sink, tmp_path: Path
) -> None:
    collector = collector_to(stack, sink)
    sink.down = True
    script = tmp_path / "many_links.py"
    script.write_text(MANY_LINKS)
    endpoint, ring = collector.url("OTELCOL_GRPC_PORT"), f"{16 * MIB}"
    # taken by the collector, so each request fits
    recording = send_run(tmp_path, endpoint, str(script), OTEL_DFLASH_RING_BYTES=ring)
    assert sink.spans() == []
    sink.down = False
    expected = recorded_spans(recording)
    assert sum(len(span.links) for span in expected.values()) == 400 * 200
    assert sink.wait_for(lambda sink: sink.span_ids() >= expected.keys(), CATCH_UP_S)
    assert Counter(span.span_id for span in sink.spans()) == dict.fromkeys(expected, 1)
    assert sum(sink.request_bytes) > 5 * GRPC_BYTES_MAX, "else the limit was not tried"
    assert max(sink.request_bytes) < GRPC_BYTES_MAX
    assert_nothing_dropped(collector.log)


@pytest.mark.parametrize(
    ("variable", "scarce", "enough", "said"),
    [
        ("OTELCOL_MEMORY_MIB", "4", "1024", "data refused due to high memory usage"),
        ("OTELCOL_QUEUE_BYTES", f"{MIB}", "4000000000", "sending queue is full"),
    ],
    ids=["memory", "queue"],
)
def test_a_collector_without_room_refuses_and_the_agent_waits_for_one_that_has_it(
    variable: str, scarce: str, enough: str, said: str, stack: Stack, sink: Sink, tmp_path: Path
) -> None:
    collector = collector_to(stack, sink, **{variable: enough})
    with running_to(collector, tmp_path) as running:
        running.start_agent()
        running.start_trainer()
        poll(lambda: train_for(running, 0.1) or sink.spans())  # type: ignore[func-returns-value]
        collector.kill()
        collector.variables[variable] = scarce
        sink.down = True
        collector.start()
        poll(lambda: train_for(running, 0.5) or said in running.log.read_text())  # type: ignore[func-returns-value]
        position = cursor(running)
        assert position > 0, "spans were taken before"
        train_for(running, 2)
        assert cursor(running) == position, "the agent waits where it was refused"
        collector.kill()
        collector.variables[variable] = enough
        collector.start()
        sink.down = False
        expected = finish(running)
    assert sink.wait_for(lambda sink: sink.span_ids() >= expected.keys(), CATCH_UP_S)
    assert sink.span_ids() == expected.keys()
    assert_nothing_dropped(collector.log)


def cursor(running: Running) -> int:
    """Return the number of the frame at which the spans' cursor stands, 0 while nothing was ever taken."""
    return max(
        (json.loads(path.read_bytes())["position"] for path in running.recording.glob("cursor-spans-*.json")),
        default=0,
    )


def is_all_taken(running: Running) -> bool:
    """Return whether the collector has answered the agent for all that is recorded. The trainer must be at
    rest."""
    return running.is_drained() and cursor(running) == running.frames()[-1].number + 1
