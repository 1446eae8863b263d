"""Metric points as plain data, for any writer: OTLP or another.

Times are wall ns; a series is cumulative from its start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from otel_dflash.metrics.histogram import Histogram

Attributes = Mapping[str, str | int]
Definition = tuple[str, str, str]
"""Name, unit and description of a metric: semconv."""


class Instrument(Enum):
    """What a metric's numbers are."""

    COUNTER = "counter"
    UP_DOWN_COUNTER = "up_down_counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"  # base-2 exponential, of durations


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One measurement of a point, and its span."""

    value: float
    time_ns: int
    trace_id: int
    span_id: int


@dataclass(frozen=True, slots=True)
class NumberPoint:
    """One number of one series."""

    attributes: Attributes
    start_ns: int
    time_ns: int
    value: int | float


@dataclass(frozen=True, slots=True)
class HistogramPoint:
    """One histogram of one series."""

    attributes: Attributes
    start_ns: int
    time_ns: int
    histogram: Histogram
    exemplars: tuple[Exemplar, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """The points of one metric and resource: the training process `pid`, or the agent (None)."""

    definition: Definition
    instrument: Instrument
    pid: int | None
    points: Sequence[NumberPoint] | Sequence[HistogramPoint]
