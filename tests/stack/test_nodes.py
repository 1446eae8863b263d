"""Two nodes with a collector each, gateways behind them, and what becomes of a trace whose parts come from
both."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from otel_dflash.spans import identity
from tests.otlp_receiver import OtlpReceiver, Span
from tests.running import Running, death, poll
from tests.stack.conftest import Stack, Started
from tests.stack.jaeger_api import Jaeger
from tests.stack.nodes import (
    ADDRESSES,
    GATEWAY,
    TAIL_SAMPLING,
    TwoNodes,
    await_live,
    backends,
    step_totals,
    steps,
)
from tests.stack.sending import recorded_spans, send_run

WARNINGS = "@jaeger@warnings"
FAULTS = 4  # three kills and an outage
DOWN_S = 10.0


STEPS = """
import otel_dflash

worker = otel_dflash.start().worker("target", 0)
for _ in range(300):
    with worker.step(), worker.forward:
        pass
"""


def span_id(step: int) -> str:
    return f"{identity.step_span_id(step):016x}"


def start_nodes(stack: Stack, gateways: list[Started]) -> dict[str, Started]:
    """Start a collector for each node, at the node's address; each sends to a gateway of its own."""
    return {
        node: stack.start(
            "otelcol",
            node,
            OTELCOL_HOST=address,
            OTELCOL_TRACES_ENDPOINT=gateway.url("OTELCOL_HTTP_PORT"),
            OTELCOL_METRICS_ENDPOINT=gateway.url("OTELCOL_HTTP_PORT"),
        )
        for (node, address), gateway in zip(ADDRESSES.items(), gateways, strict=True)
    }


def endpoints(nodes: dict[str, Started]) -> dict[str, str]:
    return {node: collector.url("OTELCOL_HTTP_PORT") for node, collector in nodes.items()}


def test_a_backend_that_is_down_does_not_flood_the_other(stack: Stack, tmp_path: Path) -> None:
    with ExitStack() as entered:
        receivers = [entered.enter_context(OtlpReceiver()) for _ in range(2)]
        metrics = receivers[0].http_endpoint
        gateway = stack.start(
            "gateway",
            "gateway",
            GATEWAY,
            GATEWAY_BACKENDS=backends(receivers),
            OTELCOL_METRICS_ENDPOINT=metrics,
        )
        receivers[1].down = True
        script = tmp_path / "trainer.py"
        script.write_text(STEPS)
        recording = send_run(tmp_path, gateway.url("OTELCOL_GRPC_PORT"), str(script))
        over_s = time.monotonic() + DOWN_S
        poll(lambda: time.monotonic() > over_s)
        times = Counter(span.span_id for span in receivers[0].spans())
        receivers[1].down = False
        poll(lambda: receivers[0].span_ids() | receivers[1].span_ids() == recorded_spans(recording).keys())
    assert 2 <= max(times.values()) <= 10


def test_a_trace_of_two_nodes_is_one_in_jaeger(stack: Stack, tmp_path: Path) -> None:
    jaeger = stack.start("jaeger")
    query = Jaeger(jaeger.url("JAEGER_QUERY_HTTP_PORT"))
    to_jaeger = f"[127.0.0.1:{jaeger.values['JAEGER_GRPC_PORT']}]"
    gateways = [stack.start("gateway", f"gateway-{n}", GATEWAY, GATEWAY_BACKENDS=to_jaeger) for n in range(2)]
    nodes = start_nodes(stack, gateways)
    with TwoNodes(tmp_path) as run:
        run.start(endpoints(nodes))
        poll(lambda: "dflash-drafter" in query.services())
        taken = run.finish()
        expected = {span.span_id for span in run.spans()}
    services = ["dflash-drafter", "dflash-target"]
    poll(lambda: query.span_ids(services) >= expected)
    assert query.span_ids(services) == expected
    spans = {span.span_id: span for span in query.spans("dflash-drafter")}
    links: dict[str, list[str]] = {}
    for span in spans.values():
        links.setdefault(span.parent_id, []).extend(link.span_id for link in span.links)
    for step, items in taken:
        drafter, target = spans[span_id(step)], spans[span_id(items[0])]
        assert (drafter.name, drafter.resource["host.name"]) == ("drafter.step", "node-b")
        assert (target.name, target.resource["host.name"]) == ("target.step", "node-a")
        assert (drafter.trace_id, drafter.parent_id) == (target.trace_id, target.span_id)
        assert {span.resource["dflash.run.id"] for span in (drafter, target)} == {"night-7"}
        assert sorted([*links[drafter.span_id], *(link.span_id for link in drafter.links)]) == sorted(
            map(span_id, items)
        )
    # Another host and a start after its parent's end: Jaeger takes that for a clock's fault, and says so; the
    # times stay as they are.
    doubted = query.warnings("dflash-drafter")
    assert set(doubted) == {"drafter.step", "drafter.queue_get", "drafter.forward", "drafter.optimizer"}
    said = {text.partition(" of ")[0] for texts in doubted.values() for text in texts}
    assert said == {"clock skew adjustment disabled; not applying calculated delta"}
    raw = query.spans("dflash-drafter", raw_traces="true")
    assert {span.span_id for span in raw} == set(spans)
    assert [span.name for span in raw if WARNINGS in span.attributes] == []


def test_a_gateway_keeps_a_trace_together_and_kills_lose_nothing(stack: Stack, tmp_path: Path) -> None:
    with ExitStack() as entered:
        receivers = [entered.enter_context(OtlpReceiver()) for _ in range(2)]
        variables = {
            "GATEWAY_BACKENDS": backends(receivers),
            "OTELCOL_METRICS_ENDPOINT": receivers[0].http_endpoint,
        }
        gateways = [stack.start("gateway", f"gateway-{n}", GATEWAY, **variables) for n in range(2)]
        nodes = start_nodes(stack, gateways)
        run = entered.enter_context(TwoNodes(tmp_path))
        run.start(endpoints(nodes))

        await_live(receivers)
        gateways[0].kill()
        run.await_delivery()  # node-a's collector holds it
        nodes["node-a"].kill()
        nodes["node-a"].start()
        gateways[0].start()
        await_live(receivers)
        receivers[0].down = receivers[1].down = True
        run.await_delivery()  # the gateways hold it
        gateways[1].kill()
        gateways[1].start()
        receivers[0].down = receivers[1].down = False
        await_live(receivers)
        run.finish()
        expected = {span.span_id for span in run.spans()}
        poll(lambda: set().union(*(receiver.span_ids() for receiver in receivers)) >= expected)
        arrived = [receiver.spans() for receiver in receivers]
        poll(lambda: step_totals(receivers) == steps(receivers))
    assert {span.span_id for spans in arrived for span in spans} == expected
    assert {span.trace_id for span in arrived[0]} & {span.trace_id for span in arrived[1]} == set()
    assert all(arrived), "both backends have a share"
    times = Counter(span.span_id for spans in arrived for span in spans)
    assert max(times.values()) <= 1 + FAULTS, "a fault doubles what was under way, once"
    hosts = Counter(
        frozenset(hosts_of_trace) for hosts_of_trace in hosts_by_trace([*arrived[0], *arrived[1]]).values()
    )
    # every second target step began a trace that a drafter went on with
    assert hosts[frozenset(ADDRESSES)] > hosts.total() // 3


def test_a_tail_sampler_behind_gateways_keeps_whole_traces(stack: Stack, tmp_path: Path) -> None:
    with OtlpReceiver() as receiver, TwoNodes(tmp_path) as run:
        sampler = tail_sampler(stack, receiver, decision_wait_s=3, percentage=30)
        backend = f"[127.0.0.1:{sampler.values['OTELCOL_GRPC_PORT']}]"
        gateways = [
            stack.start(
                "gateway",
                f"gateway-{n}",
                GATEWAY,
                GATEWAY_BACKENDS=backend,
                OTELCOL_METRICS_ENDPOINT=receiver.http_endpoint,
            )
            for n in range(2)
        ]
        run.start(
            {
                node: gateway.url("OTELCOL_HTTP_PORT")
                for node, gateway in zip(ADDRESSES, gateways, strict=True)
            }
        )
        poll(lambda: len(receiver.span_ids()) > 100)
        run.finish()
        traces = ids_by_trace(run.spans())
        failed = {span.trace_id for span in run.spans() if span.status == "ERROR"}

        def is_decided() -> bool:
            kept = ids_by_trace(receiver.spans())
            return failed <= set(kept) and all(len(ids) == len(traces[trace]) for trace, ids in kept.items())

        poll(is_decided)
        kept = ids_by_trace(receiver.spans())
    assert all(ids == traces[trace] for trace, ids in kept.items())
    others = len(set(kept) - failed) / len(set(traces) - failed)
    assert failed
    assert 0.05 < others < 0.6, others


def test_a_tail_sampler_keeps_the_trace_of_a_step_that_was_cut_off(stack: Stack, tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        sampler = tail_sampler(stack, receiver, decision_wait_s=1, percentage=0)
        with Running(
            tmp_path,
            OTEL_EXPORTER_OTLP_ENDPOINT=sampler.url("OTELCOL_GRPC_PORT"),
            OTEL_METRICS_EXPORTER="none",
        ) as run:
            agent = run.start_agent()
            run.start_trainer()
            run.ask("steps 20")
            run.ask("hang")
            run.kill_trainer()
            assert death(agent) == 0
            recorded = recorded_spans(run.recording)
        cut_off = {
            span.trace_id for span in recorded.values() if span.attributes.get("dflash.span.truncated")
        }
        expected = {span.span_id for span in recorded.values() if span.trace_id in cut_off}
        poll(lambda: receiver.span_ids() >= expected)
        assert receiver.span_ids() == expected
    assert len(cut_off) == 1
    assert len({span.trace_id for span in recorded.values()}) == 21
    assert {span.status for span in recorded.values()} == {"UNSET"}, "no other policy keeps it"


def tail_sampler(stack: Stack, receiver: OtlpReceiver, decision_wait_s: int, percentage: int) -> Started:
    return stack.start(
        "tail-sampling",
        service=TAIL_SAMPLING,
        SAMPLING_DECISION_WAIT=f"{decision_wait_s}s",
        SAMPLING_PERCENTAGE=str(percentage),
        OTELCOL_TRACES_ENDPOINT=receiver.http_endpoint,
    )


def ids_by_trace(spans: list[Span]) -> dict[str, set[str]]:
    traces: dict[str, set[str]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, set()).add(span.span_id)
    return traces


def hosts_by_trace(spans: list[Span]) -> dict[str, set[str]]:
    hosts: dict[str, set[str]] = {}
    for span in spans:
        hosts.setdefault(span.trace_id, set()).add(span.resource["host.name"])
    return hosts
