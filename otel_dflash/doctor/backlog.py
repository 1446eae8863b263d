"""What a collector says of its own exporters: a canary that it took and cannot pass on lies in a queue."""

from __future__ import annotations

import http.client
import re
from typing import Final, NamedTuple

from otel_dflash.doctor.backends import Prometheus, fetch
from otel_dflash.doctor.lines import HopError
from otel_dflash.doctor.sockets import within

OWN_METRICS_PORT: Final = 8888  # where a collector shows its own metrics, unless it pushes them
_NAMES: Final = "otelcol_exporter_(?:queue_size|(?:sent|send_failed)_(?:spans|metric_points)(?:_total)?)"
_LINE: Final = re.compile(rf"({_NAMES})\{{([^}}]*)\}} (\S+)")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_DATA_TYPES: Final = {"span": "traces", "metric": "metrics"}
_COUNTED: Final = {"spans": "traces", "metric_points": "metrics"}


class Backlog(NamedTuple):
    """By exporter and kind of data ('traces', 'metrics'): items in its queue; items sent, and items dropped, since its start."""

    queued: dict[tuple[str, str], float]
    sent: dict[tuple[str, str], float]
    failed: dict[tuple[str, str], float]


def read(prometheus: Prometheus | None, host: str, timeout_s: float) -> Backlog:
    """Return what can be learnt: from Prometheus where the collector pushes to it, else from the collector's own port."""
    backlog = Backlog({}, {}, {})
    try:
        for series in prometheus.query(f'{{__name__=~"{_NAMES}"}}', timeout_s) if prometheus else ():
            labels = series["metric"]
            _add(backlog, labels["__name__"], labels, float(series["value"][1]))
    except HopError:  # said where Prometheus is asked for the canary
        pass
    if not backlog.queued and host:
        for name, labels, value in _LINE.findall(_own_metrics(host, timeout_s)):
            _add(backlog, name, dict(_LABEL.findall(labels)), float(value))
    return backlog


def explain(what: str, where: str, waited_s: float, before: Backlog, after: Backlog) -> str:
    """Return why the canary's `what` ('span', 'metric'), which was accepted, was not seen, as far as one can know; with the remedy."""
    for (exporter, data_type), size in after.queued.items():
        stuck = after.sent.get((exporter, data_type), 0.0) == before.sent.get((exporter, data_type), 0.0)
        if data_type == _DATA_TYPES[what] and size > 0 and stuck:
            return (
                f"the collector took the {what} and cannot pass it on: it waits in the queue of its exporter {exporter}, and nothing is "
                "sent; start what that sends to, or mend its endpoint (the collector's log says why)"
            )
    for (exporter, data_type), failed in after.failed.items():
        if data_type == _DATA_TYPES[what] and failed > before.failed.get((exporter, data_type), 0.0):
            return (
                f"the collector took the {what} and dropped it: what its exporter {exporter} sends to refuses it; "
                "mend that exporter's endpoint or credentials (the collector's log says why)"
            )
    sampler = ", whether it samples," if what == "span" else ""
    return (
        f"the collector took the {what}, and {where} has not shown it within {waited_s:.0f} s; look at the collector's exporter and log"
        f"{sampler} and whether it sends to this {where}"
    )


def _add(backlog: Backlog, name: str, labels: dict[str, str], value: float) -> None:
    exporter = labels.get("exporter", "")
    if name.endswith("queue_size"):
        key = exporter, labels.get("data_type", "")
        backlog.queued[key] = backlog.queued.get(key, 0.0) + value
    for items, data_type in _COUNTED.items():
        if items in name:
            counts = backlog.failed if "failed" in name else backlog.sent
            counts[exporter, data_type] = counts.get((exporter, data_type), 0.0) + value


def _own_metrics(host: str, timeout_s: float) -> str:
    limit_s = max(0.1, min(1.0, timeout_s))
    connection = http.client.HTTPConnection(host, OWN_METRICS_PORT, timeout=limit_s)
    try:
        return within(limit_s, lambda: fetch(connection, "/metrics"))[1].decode("utf-8", "replace")
    except (OSError, UnicodeError, http.client.HTTPException):
        return ""
