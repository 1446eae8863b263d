"""Totals to the SDK's metric data, with the recorded times: what any ordinary MetricExporter takes.

One resource per training process, and one for the agent (instance ``<run>-<host>-agent``: its CPU time goes on over restarts). Points are
cumulative. A series starts when its ring was created, so its start time is as old as the recording says and never moves. Rings of
one process with the same role and index, a worker made again, are one series. A histogram's point leads to the span of its longest
phase or step since the point before, of those whose trace is sent.

The same frames give the same points, whoever makes them: one that is sent again differs in nothing, else Prometheus refuses the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from opentelemetry.sdk.metrics import Exemplar
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
from otel_dflash.agent.exemplars import Found
from otel_dflash.agent.fold import Fold, RingTotals
from otel_dflash.agent.histogram import NS_PER_S, SCALE, Histogram
from otel_dflash.agent.recording import RunInfo
from otel_dflash.agent.resources import Resources
from otel_dflash.records import Kind, State

_UNKNOWN_SERVICE: Final = "unknown_service"  # what the SDK says when nobody named the service
_Attributes = dict[str, str | int]
_Definition = tuple[str, str, str]  # name, unit, description: semconv
Sends = Callable[[int], bool]
"""Whether the spans of a trace id are sent."""


@dataclass(frozen=True)
class _Worker:
    """One series: the rings of one role and index in one process."""

    role: str
    attributes: _Attributes
    start_ns: int  # wall
    rings: list[tuple[RingTotals, RingNames]]

    def sum(self, value: Callable[[RingTotals], int]) -> int:
        return sum(value(totals) for totals, _ in self.rings)


@dataclass(frozen=True)
class _Points:
    """Makes the points of one resource, all with one end time."""

    info: RunInfo
    time_ns: int  # wall
    sends: Sends

    def number(self, attributes: _Attributes, start_ns: int, value: int | float) -> NumberDataPoint:
        return NumberDataPoint(attributes, start_ns, self.time_ns, value)

    def histogram(
        self, attributes: _Attributes, start_ns: int, value: Histogram, longest: list[tuple[Found, int]]
    ) -> ExponentialHistogramDataPoint:
        return ExponentialHistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=start_ns,
            time_unix_nano=self.time_ns,
            count=value.count,
            sum=value.sum_ns / NS_PER_S,
            scale=SCALE,
            zero_count=value.zero_count,
            positive=Buckets(*value.dense()),
            negative=Buckets(0, []),
            flags=0,
            min=value.min_ns / NS_PER_S,
            max=value.max_ns / NS_PER_S,
            exemplars=self._exemplars(longest),
        )

    def _exemplars(self, longest: list[tuple[Found, int]]) -> list[Exemplar]:
        """Return one for the longest whose trace is sent, each given with its ring; none when there is none."""
        for found, ring in sorted(longest, key=lambda item: (-item[0].duration_ns, item[0].end_ns)):
            trace_id, span_id = found.span_of(ring)
            if self.sends(trace_id):
                return [Exemplar({}, found.duration_ns / NS_PER_S, self.info.wall_ns(found.end_ns), span_id, trace_id)]
        return []


def metrics_data(fold: Fold, info: RunInfo, time_ns: int, sends: Sends = lambda trace_id: True) -> MetricsData:
    """Return one cumulative point of every series.

    Args:
        fold: The totals.
        info: The recording's run.
        time_ns: End of the interval the points stand for, monotonic. A worker that was made later has no point yet.
        sends: Whether the spans of a trace id are sent: only to such do exemplars lead.
    """
    points = _Points(info, info.wall_ns(time_ns), sends)
    resources = Resources(info)
    scope = InstrumentationScope(semconv.SCOPE_NAME, info.version)
    resource_metrics = []
    for pid, workers in sorted(_processes(fold, points).items()):
        resource_metrics.append(_resource_metrics(resources.for_process(pid), scope, _worker_metrics(points, workers, fold.agent.cost_ns)))
    agent_metrics = _agent_metrics(points, fold)
    if agent_metrics:
        resource_metrics.append(_resource_metrics(resources.for_agent(), scope, agent_metrics))
    return MetricsData(resource_metrics)


Part = tuple[ResourceMetrics, Metric]
"""One metric, with the resource and scope that it belongs to."""


def apart(data: MetricsData) -> list[Part]:
    """Return each metric of each resource."""
    return [(resource, metric) for resource in data.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics]


def together(parts: Sequence[Part]) -> MetricsData:
    """Return what `apart` took apart, or some of it in the same order."""
    found = []
    for _, of_resource in groupby(parts, key=lambda part: id(part[0])):
        resources, metrics = zip(*of_resource, strict=True)
        scope = resources[0].scope_metrics[0]
        found.append(replace(resources[0], scope_metrics=[replace(scope, metrics=list(metrics))]))
    return MetricsData(found)


def _processes(fold: Fold, points: _Points) -> dict[int, list[_Worker]]:
    processes: dict[int, list[_Worker]] = {}
    for (pid, role, index), rings in sorted(fold.workers().items(), key=lambda item: item[0]):
        first, names = min(rings, key=lambda item: item[0].created_ns)
        attributes: _Attributes = {semconv.WORKER_ROLE: role, semconv.WORKER_ID: str(index)}
        if names.worker.gpu is not None:  # of a worker made again the first's: a series keeps its name
            attributes[semconv.GPU_INDEX] = names.worker.gpu
        start_ns = points.info.wall_ns(first.created_ns)
        if start_ns <= points.time_ns:
            processes.setdefault(pid, []).append(_Worker(role, attributes, start_ns, rings))
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
        _metric(semconv.WORKER_COUNT, Sum(list(_count_points(points, workers)), AggregationTemporality.CUMULATIVE, is_monotonic=False)),
        _histograms(semconv.PHASE_DURATION, points, workers, Kind.PHASE),
        _histograms(semconv.STEP_DURATION, points, workers, Kind.STEP),
        _counter(semconv.WORKER_TIME, (point for worker in workers for point in _state_points(points, worker))),
    ]
    for definition, value in counters:
        numbers = (points.number(worker.attributes, worker.start_ns, worker.sum(value)) for worker in workers)
        metrics.append(_counter(definition, numbers))
    metrics.append(_counter(semconv.TRAINING_TOKENS, _token_points(points, workers)))
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
        series: dict[tuple[str, str], tuple[Histogram, list[tuple[Found, int]]]] = {}
        for totals, names in worker.rings:  # two name ids may carry one text: another state, another ring
            for name_id, error_id, histogram in totals.histograms(kind):
                phase = names.phase(name_id)[1] if kind == Kind.PHASE else ""
                error = names.text(error_id) if error_id else ""
                whole, longest = series.setdefault((phase, error), (Histogram(), []))
                whole.merge(histogram)
                longest += [(item, totals.ring) for item in totals.longest_of(kind, name_id, error_id)]
        for (phase, error), (whole, longest) in sorted(series.items(), key=lambda item: item[0]):
            attributes = dict(worker.attributes)
            if phase:
                attributes[semconv.PHASE] = phase
            if error:
                attributes[semconv.ERROR_TYPE] = error
            found.append(points.histogram(attributes, worker.start_ns, whole, longest))
    return _metric(definition, ExponentialHistogram(found, AggregationTemporality.CUMULATIVE))


def _by_role(workers: list[_Worker]) -> Iterable[tuple[str, int, list[_Worker]]]:
    """Yield (role, start in wall ns, workers)."""
    for role in sorted({worker.role for worker in workers}):
        of_role = [worker for worker in workers if worker.role == role]
        yield role, min(worker.start_ns for worker in of_role), of_role


def _token_points(points: _Points, workers: list[_Worker]) -> Iterable[NumberDataPoint]:
    for role, start_ns, of_role in _by_role(workers):
        tokens = sum(worker.sum(lambda totals: totals.input_tokens) for worker in of_role)
        if tokens:
            loss_tokens = sum(worker.sum(lambda totals: totals.loss_tokens) for worker in of_role)
            for kind, count in ((semconv.TOKEN_INPUT, tokens), (semconv.TOKEN_LOSS, loss_tokens)):
                yield points.number({semconv.WORKER_ROLE: role, semconv.TOKEN_TYPE: kind}, start_ns, count)


def _count_points(points: _Points, workers: list[_Worker]) -> Iterable[NumberDataPoint]:
    for role, start_ns, of_role in _by_role(workers):
        ended = sum(all(totals.closed for totals, _ in worker.rings) for worker in of_role)
        for state, count in ((semconv.STATE_RUNNING, len(of_role) - ended), (semconv.STATE_ENDED, ended)):
            yield points.number({semconv.WORKER_ROLE: role, semconv.STATE: state}, start_ns, count)


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


def _agent_metrics(points: _Points, fold: Fold) -> list[Metric]:
    agent = fold.agent
    start_ns = points.info.created_ns
    metrics = []
    if agent.wall_offset_ns is not None:  # an AGENT frame has been seen
        cpu = points.number({semconv.COMPONENT: semconv.COMPONENT_AGENT}, start_ns, agent.cpu_ns / NS_PER_S)
        metrics.append(_counter(semconv.TELEMETRY_CPU_TIME, [cpu]))
        metrics.append(_gauge(semconv.TELEMETRY_CLOCK_OFFSET, [points.number({}, start_ns, agent.wall_offset_ns / NS_PER_S)]))
    if agent.lags_s:
        behind = [points.number({semconv.SINK: sink}, start_ns, lag_s) for sink, lag_s in sorted(agent.lags_s.items())]
        metrics.append(_gauge(semconv.TELEMETRY_LAG, behind))
    return metrics


def _counter(definition: _Definition, points: Iterable[NumberDataPoint]) -> Metric:
    return _metric(definition, Sum(list(points), AggregationTemporality.CUMULATIVE, is_monotonic=True))


def _gauge(definition: _Definition, points: Iterable[NumberDataPoint]) -> Metric:
    return _metric(definition, Gauge(list(points)))


def _metric(definition: _Definition, data: DataT) -> Metric:
    name, unit, description = definition
    return Metric(name, description, unit, data)
