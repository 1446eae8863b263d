"""Neutral metric points to the SDK's metric data, which any MetricExporter accepts.

One resource per training process, and one for the agent. Points are cumulative. The same points always
give the same data: Prometheus refuses a request in which a point that it has seen has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    DataT,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as SdkMetric
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_dflash import semconv
from otel_dflash.metrics.histogram import NS_PER_S, SCALE
from otel_dflash.metrics.points import HistogramPoint, Instrument, Metric, NumberPoint
from otel_dflash.otlp.batches import batches
from otel_dflash.otlp.resources import Resources
from otel_dflash.recording.run_info import RunInfo
from otel_dflash.spans.attributes import otlp_bytes

BYTES_PER_PIECE: Final = 1 << 16  # of one metric's points: the least that a refused request is split into

# Upper estimates of sizes in OTLP, in bytes.
_METRIC_BYTES: Final = 256  # tags and lengths of a metric, its scope and its resource, and the pid
_POINT_BYTES: Final = 128  # all but attributes, buckets and exemplars
_EXEMPLAR_BYTES: Final = 64
_VARINT_BYTES_MAX: Final = 10


class MetricWriter:
    """Converts the metric points of one run."""

    def __init__(self, info: RunInfo) -> None:
        """Read the environment, for resources."""
        self._resources = Resources(info)
        self._scope = InstrumentationScope(semconv.SCOPE_NAME, info.version)
        resource: Any = self._resources.for_agent().attributes
        self._header_bytes = _METRIC_BYTES + otlp_bytes(resource)

    def requests(self, metrics: Sequence[Metric]) -> Iterator[list[Metric]]:
        """Yield all metrics in order, in requests of a size that receivers accept.

        A metric of many points is in several pieces, and they may be in several requests.
        """
        pieces = (piece for metric in metrics for piece in _pieces(metric))
        return batches(pieces, self._metric_bytes)

    def data(self, metrics: Sequence[Metric]) -> MetricsData:
        """Return the data of all metrics or a part of them, in the order of their resources."""
        return MetricsData(
            [self._resource(pid, list(found)) for pid, found in groupby(metrics, lambda metric: metric.pid)]
        )

    def _metric_bytes(self, metric: Metric) -> int:
        definition_bytes = sum(len(text.encode()) for text in metric.definition)
        return self._header_bytes + definition_bytes + sum(map(_point_bytes, metric.points))

    def _resource(self, pid: int | None, metrics: Sequence[Metric]) -> ResourceMetrics:
        resource = self._resources.for_agent() if pid is None else self._resources.for_process(pid)
        whole = [_metric(list(pieces)) for _, pieces in groupby(metrics, lambda metric: metric.definition)]
        return ResourceMetrics(resource, [ScopeMetrics(self._scope, whole, "")], "")


def _pieces(metric: Metric) -> Iterator[Metric]:
    points: Sequence[Any] = metric.points
    for some in batches(points, _point_bytes, BYTES_PER_PIECE):
        yield replace(metric, points=some)


def _metric(pieces: Sequence[Metric]) -> SdkMetric:
    name, unit, description = pieces[0].definition
    points = [point for piece in pieces for point in piece.points]
    return SdkMetric(name, description, unit, _data(pieces[0].instrument, points))


def _point_bytes(point: NumberPoint | HistogramPoint) -> int:
    size = _POINT_BYTES + otlp_bytes(point.attributes)
    if isinstance(point, NumberPoint):
        return size
    buckets = point.histogram.buckets
    if buckets:  # one byte for each empty one between them
        size += max(buckets) - min(buckets) + _VARINT_BYTES_MAX * len(buckets)
    return size + _EXEMPLAR_BYTES * len(point.exemplars)


def _data(instrument: Instrument, points: Sequence[Any]) -> DataT:
    cumulative = AggregationTemporality.CUMULATIVE
    if instrument is Instrument.HISTOGRAM:
        return ExponentialHistogram([_histogram(point) for point in points], cumulative)
    numbers = [_number(point) for point in points]
    if instrument is Instrument.GAUGE:
        return Gauge(numbers)
    return Sum(numbers, cumulative, is_monotonic=instrument is Instrument.COUNTER)


def _number(point: NumberPoint) -> NumberDataPoint:
    return NumberDataPoint(point.attributes, point.start_ns, point.time_ns, point.value)


def _histogram(point: HistogramPoint) -> ExponentialHistogramDataPoint:
    value = point.histogram
    return ExponentialHistogramDataPoint(
        attributes=point.attributes,
        start_time_unix_nano=point.start_ns,
        time_unix_nano=point.time_ns,
        count=value.count,
        sum=value.sum_ns / NS_PER_S,
        scale=SCALE,
        zero_count=value.zero_count,
        positive=Buckets(*value.dense()),
        negative=Buckets(0, []),
        flags=0,
        min=value.min_ns / NS_PER_S,
        max=value.max_ns / NS_PER_S,
        exemplars=[
            Exemplar({}, exemplar.value, exemplar.time_ns, exemplar.span_id, exemplar.trace_id)
            for exemplar in point.exemplars
        ],
    )
