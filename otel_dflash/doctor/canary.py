"""The canary: one span and one metric, sent by the exporters that an agent would use here."""

from __future__ import annotations

import io
import math
import os
import re
import threading
import time
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.sdk.metrics.export import (
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from otel_dflash import semconv
from otel_dflash.doctor.finding import Finding, ok, wrong
from otel_dflash.otlp.exporters import metric_exporters, span_exporters
from otel_dflash.otlp.failures import describe, remedy_in
from otel_dflash.otlp.sdk_log import SdkLog
from otel_dflash.otlp.settings import Signal
from otel_dflash.version import __version__

_TIMEOUTS: Final = tuple(f"OTEL_EXPORTER_OTLP_{signal}TIMEOUT" for signal in ("", "TRACES_", "METRICS_"))
_SIGNALS: Final = {"span": "traces", "metric": "metrics"}
# How an exporter words a refusal -> what that means on this path, and the remedy; otlp/failures.py explains
# the others.
_MEANINGS: Final = (
    ("405|415|501", "that is not the path of an OTLP receiver; give the collector's base URL"),
    (
        "UNAVAILABLE|RESOURCE_EXHAUSTED|Service Unavailable|Too Many Requests|Bad Gateway|Gateway Timeout",
        "the collector is up but accepts nothing now: its queue, memory or storage is full; see its log",
    ),
    ("DEADLINE_EXCEEDED|no success", "the collector does not answer; see its log"),
)


@dataclass(frozen=True)
class Canary:
    """What distinguishes this canary from all others."""

    trace_id: int
    span_id: int
    time_ns: int

    @property
    def value(self) -> float:
        """Return the metric's value: its own time, so that all canaries of a host share one series."""
        return self.time_ns / 1e9


def new() -> Canary:
    """Return a new canary."""
    return Canary(
        int.from_bytes(os.urandom(16), "big") | 1, int.from_bytes(os.urandom(8), "big") | 1, time.time_ns()
    )


class Sending:
    """Sends a canary by all configured exporters at once."""

    def __init__(self, canary: Canary, environ: MutableMapping[str, str]) -> None:
        """`environ` is os.environ, which the exporters read."""
        self._canary = canary
        self._environ = environ
        self.accepted: dict[str, bool] = {}
        """'span' and 'metric' -> whether every exporter's receiver accepted it; only what is configured."""
        self.is_stuck = False
        """Whether an exporter hangs in a call that nothing can end."""

    def send(self, signals: Collection[Signal], timeout_s: float) -> Iterator[Finding]:
        """Yield a finding for each exporter of these signals.

        Raises:
            ConfigError: An exporter cannot be made.
        """
        _limit_timeouts(self._environ, timeout_s)
        with SdkLog(io.StringIO()) as log:
            tasks: list[_Task] = []
            if "traces" in signals:
                tasks += [
                    _Task("span", name, exporter, [_span(self._canary)])
                    for name, exporter in span_exporters().items()
                ]
            if "metrics" in signals:
                tasks += [
                    _Task("metric", name, exporter, _metric(self._canary))
                    for name, exporter in metric_exporters().items()
                ]
            deadline = time.monotonic() + timeout_s + 1.0
            for task in tasks:
                task.start()
            for task in tasks:
                task.join(max(0.0, deadline - time.monotonic()))
                self.accepted[task.what] = self.accepted.get(task.what, True) and task.accepted
                self.is_stuck |= task.is_alive()
                if task.accepted:
                    yield ok(f"{task.what} accepted", task.shown, task.took_s)
                else:
                    reason = (
                        task.failure or log.reasons.get(task.name) or f"no success within {timeout_s:.2g} s"
                    )
                    yield wrong(
                        f"{task.what} accepted",
                        _explained(reason, _SIGNALS[task.what]),
                        task.took_s or timeout_s,
                    )


class _Task(threading.Thread):
    """One export. The SDK's log names the thread, which is how the reason of a failure is found."""

    def __init__(self, what: str, exporter_name: str, exporter: Any, data: Any) -> None:
        super().__init__(name=f"canary {what} {exporter_name}", daemon=True)
        self.what = what
        self.shown = "" if exporter_name == "otlp" else f"by {exporter_name}"
        self.accepted = False
        self.failure = ""
        self.took_s = 0.0
        self._exporter = exporter
        self._data = data

    def run(self) -> None:
        start = time.monotonic()
        try:
            result = self._exporter.export(self._data)
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            self.failure = describe(error)
        else:
            self.accepted = result in (SpanExportResult.SUCCESS, MetricExportResult.SUCCESS)
            self._exporter.shutdown()
        self.took_s = time.monotonic() - start


def _explained(reason: str, signal: str) -> str:
    """Return the reason with a remedy, unless otlp/failures.py has already added one in brackets."""
    if reason.startswith("404"):
        return (
            f"{reason}; if only {signal} are refused, that receiver accepts none: set "
            f"OTEL_{signal.upper()}_EXPORTER=none"
        )
    meaning = next((meaning for pattern, meaning in _MEANINGS if re.match(rf"({pattern})\b", reason)), "")
    return f"{meaning} ({reason})" if meaning and not remedy_in(reason) else reason


def _limit_timeouts(environ: MutableMapping[str, str], timeout_s: float) -> None:
    """Limit every export to `timeout_s`; a value that is not a number stays for its exporter to report."""
    for name in _TIMEOUTS:
        try:
            given_s = float(environ.get(name) or (math.inf if name == _TIMEOUTS[0] else 0))
        except ValueError:
            continue
        if given_s > timeout_s:
            environ[name] = f"{timeout_s:.3f}"


def _resource() -> Resource:
    host = os.uname().nodename
    service = {semconv.SERVICE_NAME: semconv.DOCTOR_SERVICE_NAME, semconv.SERVICE_INSTANCE_ID: host}
    return Resource({**service, semconv.HOST_NAME: host})


def _scope() -> InstrumentationScope:
    return InstrumentationScope(semconv.SCOPE_NAME, __version__)


def _span(canary: Canary) -> ReadableSpan:
    return ReadableSpan(
        semconv.DOCTOR_SPAN,
        SpanContext(canary.trace_id, canary.span_id, False, TraceFlags(TraceFlags.SAMPLED)),
        resource=_resource(),
        start_time=canary.time_ns,
        end_time=time.time_ns(),
        instrumentation_scope=_scope(),
    )


def _metric(canary: Canary) -> MetricsData:
    name, unit, description = semconv.DOCTOR_CANARY
    point = NumberDataPoint({}, canary.time_ns, canary.time_ns, canary.value)
    scope = ScopeMetrics(_scope(), [Metric(name, description, unit, Gauge([point]))], "")
    return MetricsData([ResourceMetrics(_resource(), [scope], "")])
