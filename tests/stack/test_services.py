from __future__ import annotations

import pytest

from otel_dflash.stack.engines import EngineError
from tests.stack.conftest import Stack


def test_a_service_is_healthy_ends_and_starts_again_at_its_place(stack: Stack) -> None:
    collector = stack.start("otelcol")
    collector.kill()
    collector.start()
    collector.end()
    assert "Everything is ready" in collector.log


def test_a_busy_port_is_said_with_the_variable_that_chooses_another(stack: Stack) -> None:
    first = stack.start("otelcol")
    second = stack.prepare("otelcol", "second", OTELCOL_GRPC_PORT=first.values["OTELCOL_GRPC_PORT"])
    with pytest.raises(EngineError, match=r"address already in use.* choose another port: OTELCOL_GRPC_PORT="):
        second.start()


def test_every_service_takes_the_shipped_configuration(stack: Stack) -> None:
    for name in ("otelcol", "jaeger"):
        stack.start(name)
