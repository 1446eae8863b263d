"""The way over Apache Kafka: node collectors give to a broker, gateways take from it, and no kill on the way
loses anything."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.otlp_receiver import OtlpReceiver
from tests.running import poll
from tests.stack.conftest import Stack
from tests.stack.kafka_broker import KafkaBroker
from tests.stack.nodes import ADDRESSES, KAFKA_GATEWAY, KAFKA_NODE, TwoNodes, await_live, step_totals, steps

KAFKA_S = 120.0
FAULTS = 4  # of broker, node collector, backend and gateway


@pytest.mark.timeout(300)
def test_kills_of_collector_gateway_and_broker_lose_nothing(stack: Stack, tmp_path: Path) -> None:
    with KafkaBroker(tmp_path / "kafka") as kafka, OtlpReceiver() as receiver, TwoNodes(tmp_path) as run:
        gateway = stack.start(
            "kafka-gateway",
            service=KAFKA_GATEWAY,
            KAFKA_BROKERS=kafka.brokers,
            OTELCOL_TRACES_ENDPOINT=receiver.http_endpoint,
            OTELCOL_METRICS_ENDPOINT=receiver.http_endpoint,
        )
        nodes = {
            node: stack.start(
                "kafka-node", node, KAFKA_NODE, OTELCOL_HOST=address, KAFKA_BROKERS=kafka.brokers
            )
            for node, address in ADDRESSES.items()
        }
        run.start({node: collector.url("OTELCOL_HTTP_PORT") for node, collector in nodes.items()})

        await_live([receiver], KAFKA_S)
        kafka.end(signal.SIGKILL)
        run.await_delivery()  # the node collectors hold it
        nodes["node-a"].kill()
        nodes["node-a"].start()
        kafka.start()
        await_live([receiver], KAFKA_S)
        receiver.down = True
        run.await_delivery()  # the gateway holds it
        gateway.kill()
        gateway.start()
        receiver.down = False
        await_live([receiver], KAFKA_S)
        run.finish()
        expected = {span.span_id for span in run.spans()}
        poll(lambda: receiver.span_ids() >= expected, KAFKA_S)
        poll(lambda: step_totals([receiver]) == steps([receiver]), KAFKA_S)
        arrived = receiver.spans()
    assert {span.span_id for span in arrived} == expected
    assert max(Counter(span.span_id for span in arrived).values()) <= 1 + FAULTS, (
        "a fault doubles what was under way, once"
    )
