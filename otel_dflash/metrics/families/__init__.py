"""The metric families: each is a file here and a line in `families`."""

from __future__ import annotations

from typing import Any

from otel_dflash.metrics.families.phases import Phases
from otel_dflash.metrics.families.telemetry import TelemetryFigures
from otel_dflash.metrics.families.tokens import Tokens
from otel_dflash.metrics.families.workers import Workers
from otel_dflash.metrics.family import Family


def families(exemplars: int) -> list[Family[Any]]:
    """Return a new instance of each family, in the order of their metrics.

    The `exemplars` longest phases and steps of each series are kept.
    """
    return [
        Phases(exemplars),
        Workers(),
        Tokens(),
        TelemetryFigures(),
    ]
