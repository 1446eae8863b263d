"""Totals to the SDK's metric data, with the recorded times: what any ordinary MetricExporter takes.

One resource per training process, and one for the agent (instance ``<run>-<host>-agent``: its CPU time goes on over restarts). Points are
cumulative. A series starts when its ring was created, so its start time is as old as the recording says and never moves. Rings of
one process with the same role and index, a worker made again, are one series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    DataT,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_dflash import semconv
from otel_dflash.agent.catalog import RingNames
from otel_dflash.agent.fold import Fold, RingTotals
from otel_dflash.agent.histogram import NS_PER_S, SCALE, Histogram
from otel_dflash.agent.recording import RunInfo
from otel_dflash.agent.resources import Resources
from otel_dflash.records import Kind, State

_UNKNOWN_SERVICE: Final = "unknown_service"  # what the SDK says when nobody named the service
_Attributes = dict[str, str | int]
_Definition = tuple[str, str, str]  # name, unit, description: semconv


@dataclass(frozen=True)
class _Worker:
    """One series: the rings of one role and index in one process."""

    attributes: _Attributes
    start_ns: int  # wall
    rings: list[tuple[RingTotals, RingNames]]

    def sum(self, value: Callable[[RingTotals], int]) -> int:
        return sum(value(totals) for totals, _ in self.rings)


@dataclass(frozen=True)
class _Points:
    """Makes the points of one resource, all with one end time."""

    time_ns: int

    def number(self, attributes: _Attributes, start_ns: int, value: int | float) -> NumberDataPoint:
        return NumberDataPoint(attributes, start_ns, max(self.time_ns, start_ns), value)

    def histogram(self, attributes: _Attributes, start_ns: int, value: Histogram) -> ExponentialHistogramDataPoint:
        return ExponentialHistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=start_ns,
            time_unix_nano=max(self.time_ns, start_ns),
            count=value.count,
            sum=value.sum_ns / NS_PER_S,
            scale=SCALE,
            zero_count=value.zero_count,
            positive=Buckets(*value.dense()),
            negative=Buckets(0, []),
            flags=0,
            min=value.min_ns / NS_PER_S,
            max=value.max_ns / NS_PER_S,
        )


def metrics_data(fold: Fold, info: RunInfo, time_ns: int, lags: Mapping[str, float]) -> MetricsData:
    """Return one cumulative point of every series.

    Args:
        fold: The totals.
        info: The recording's run.
        time_ns: End of the interval the points stand for, monotonic.
        lags: Sink -> seconds it is behind.
    """
    points = _Points(info.wall_ns(time_ns))
    resources = Resources(info)
    scope = InstrumentationScope(semconv.SCOPE_NAME, info.version)
    resource_metrics = []
    for pid, workers in sorted(_processes(fold, info).items()):
        resource_metrics.append(_resource_metrics(resources.for_process(pid), scope, _worker_metrics(points, workers, fold.agent.cost_ns)))
    agent_metrics = _agent_metrics(points, fold, info.created_ns, lags)
    if agent_metrics:
        resource_metrics.append(_resource_metrics(resources.for_agent(), scope, agent_metrics))
    return MetricsData(resource_metrics)


def _processes(fold: Fold, info: RunInfo) -> dict[int, list[_Worker]]:
    processes: dict[int, list[_Worker]] = {}
    for (pid, role, index), rings in sorted(fold.workers().items(), key=lambda item: item[0]):
        attributes: _Attributes = {semconv.WORKER_ROLE: role, semconv.WORKER_ID: str(index)}
        start_ns = info.wall_ns(min(totals.created_ns for totals, _ in rings))
        processes.setdefault(pid, []).append(_Worker(attributes, start_ns, rings))
    return processes


def _resource_metrics(resource: Resource, scope: InstrumentationScope, metrics: list[Metric]) -> ResourceMetrics:
    return ResourceMetrics(resource, [ScopeMetrics(scope, metrics, "")], "")


def _worker_metrics(points: _Points, workers: list[_Worker], cost_ns: float | None) -> list[Metric]:
    counters: list[tuple[_Definition, Callable[[RingTotals], int]]] = [
        (semconv.WORKER_BATCHES, lambda totals: totals.batches),
        (semconv.WORKER_TOKENS, lambda totals: totals.batch_tokens),
        (semconv.TELEMETRY_EVENTS, lambda totals: totals.records),
    ]
    metrics = [
        _histograms(semconv.PHASE_DURATION, points, workers, Kind.PHASE),
        _histograms(semconv.STEP_DURATION, points, workers, Kind.STEP),
        _counter(semconv.WORKER_TIME, (point for worker in workers for point in _state_points(points, worker))),
    ]
    for definition, value in counters:
        numbers = (points.number(worker.attributes, worker.start_ns, worker.sum(value)) for worker in workers)
        metrics.append(_counter(definition, numbers))
    metrics.append(_counter(semconv.TELEMETRY_EVENTS_DROPPED, (point for worker in workers for point in _dropped_points(points, worker))))
    fills = (points.number(worker.attributes, worker.start_ns, max(totals.fill for totals, _ in worker.rings)) for worker in workers)
    metrics.append(_gauge(semconv.TELEMETRY_RING_UTILIZATION, fills))
    if cost_ns is not None:
        costs = (points.number(worker.attributes, worker.start_ns, _overhead(worker, cost_ns)) for worker in workers)
        metrics.append(_gauge(semconv.TELEMETRY_OVERHEAD, costs))
    return [metric for metric in metrics if metric.data.data_points]


def _histograms(definition: _Definition, points: _Points, workers: list[_Worker], kind: Kind) -> Metric:
    found = []
    for worker in workers:
        series: dict[tuple[str, str], Histogram] = {}  # two name ids may carry one text: another state, another ring
        for totals, names in worker.rings:
            for name_id, error_id, histogram in totals.histograms(kind):
                phase = names.phase(name_id)[1] if kind == Kind.PHASE else ""
                error = names.text(error_id) if error_id else ""
                series.setdefault((phase, error), Histogram()).merge(histogram)
        for (phase, error), histogram in sorted(series.items(), key=lambda item: item[0]):
            attributes = dict(worker.attributes)
            if phase:
                attributes[semconv.PHASE] = phase
            if error:
                attributes[semconv.ERROR_TYPE] = error
            found.append(points.histogram(attributes, worker.start_ns, histogram))
    return _metric(definition, ExponentialHistogram(found, AggregationTemporality.CUMULATIVE))


def _state_points(points: _Points, worker: _Worker) -> Iterable[NumberDataPoint]:
    states = dict.fromkeys(State, 0)
    for totals, names in worker.rings:
        for state, state_ns in totals.state_ns(names, settled=True).items():
            states[state] += state_ns
    for state, state_ns in states.items():
        yield points.number({**worker.attributes, semconv.STATE: state.name.lower()}, worker.start_ns, state_ns / NS_PER_S)


def _dropped_points(points: _Points, worker: _Worker) -> Iterable[NumberDataPoint]:
    lost: dict[str, int] = {}
    for totals, _ in worker.rings:
        for reason, count in totals.dropped().items():
            lost[reason] = lost.get(reason, 0) + count
    for reason, count in lost.items():
        yield points.number({**worker.attributes, semconv.DROP_REASON: reason}, worker.start_ns, count)


def _overhead(worker: _Worker, cost_ns: float) -> float:
    wall_ns = worker.sum(lambda totals: totals.wall_ns)
    return cost_ns * worker.sum(lambda totals: totals.records) / wall_ns if wall_ns else 0.0


def _agent_metrics(points: _Points, fold: Fold, start_ns: int, lags: Mapping[str, float]) -> list[Metric]:
    agent = fold.agent
    metrics = []
    if agent.wall_offset_ns is not None:  # an AGENT frame has been seen
        cpu = points.number({semconv.COMPONENT: semconv.COMPONENT_AGENT}, start_ns, agent.cpu_ns / NS_PER_S)
        metrics.append(_counter(semconv.TELEMETRY_CPU_TIME, [cpu]))
        metrics.append(_gauge(semconv.TELEMETRY_CLOCK_OFFSET, [points.number({}, start_ns, agent.wall_offset_ns / NS_PER_S)]))
    if lags:
        behind = [points.number({semconv.SINK: sink}, start_ns, float(lag_s)) for sink, lag_s in sorted(lags.items())]
        metrics.append(_gauge(semconv.TELEMETRY_LAG, behind))
    return metrics


def _counter(definition: _Definition, points: Iterable[NumberDataPoint]) -> Metric:
    return _metric(definition, Sum(list(points), AggregationTemporality.CUMULATIVE, is_monotonic=True))


def _gauge(definition: _Definition, points: Iterable[NumberDataPoint]) -> Metric:
    return _metric(definition, Gauge(list(points)))


def _metric(definition: _Definition, data: DataT) -> Metric:
    name, unit, description = definition
    return Metric(name, description, unit, data)
