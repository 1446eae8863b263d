"""What collectors report about their own exporters: a canary that was accepted and cannot be passed on waits
in a queue."""

from __future__ import annotations

import http.client
import re
import time
from dataclasses import dataclass
from typing import Final, NamedTuple

from otel_dflash.doctor.backends import Prometheus, fetch
from otel_dflash.doctor.finding import HopError
from otel_dflash.doctor.sockets import within

OWN_METRICS_PORT: Final = 8888  # where a collector shows its own metrics, unless it pushes them
_WINDOW: Final = "90s"  # a collector that pushes does so every 10 to 60 s
_NAMED_MAX: Final = 3
_NAMES: Final = "otelcol_exporter_(?:queue_size|(?:sent|send_failed)_(?:spans|metric_points)(?:_total)?)"
_LINE: Final = re.compile(rf"({_NAMES})\{{([^}}]*)\}} (\S+)")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_SIGNALS: Final = {"span": "traces", "metric": "metrics"}
_DATA_TYPES: Final = {"spans": "traces", "metric_points": "metrics"}


class Exporter(NamedTuple):
    """One exporter of one collector, for one kind of data ('traces' or 'metrics'), named so that a person can
    find it."""

    collector: str
    name: str
    data_type: str

    def __str__(self) -> str:
        return f"exporter {self.name} of {self.collector}"


@dataclass
class Backlog:
    """Items in an exporter's queue; items sent and items dropped since its start; when the collector reported
    them, in s since 1970."""

    queued: float = 0.0
    sent: float = 0.0
    failed: float = 0.0
    reported_s: float = 0.0


def read(prometheus: Prometheus | None, host: str, timeout_s: float) -> dict[Exporter, Backlog]:
    """Return the backlog of each exporter: of all collectors that push to Prometheus, else of the collector
    at `host`, from its own port."""
    found: dict[Exporter, Backlog] = {}
    try:
        for series in (
            prometheus.query(f'{{__name__=~"{_NAMES}"}}[{_WINDOW}]', timeout_s) if prometheus else ()
        ):
            labels = series["metric"]
            reported_s, value = series["values"][-1]
            # Summed over all collectors, one that is busy would hide one that is stuck.
            _add(
                found,
                f"{labels.get('job', 'otelcol')} {labels.get('instance', '')}".rstrip(),
                labels,
                float(value),
                reported_s,
            )
    except HopError:  # reported where Prometheus is asked for the canary
        pass
    if not found and host:
        now_s = time.time()
        for name, labels, value in _LINE.findall(_own_metrics(host, timeout_s)):
            named = {**dict(_LABEL.findall(labels)), "__name__": name}
            _add(found, f"the collector at {host}:{OWN_METRICS_PORT}", named, float(value), now_s)
    return found


def explain(
    what: str, where: str, waited_s: float, before: dict[Exporter, Backlog], after: dict[Exporter, Backlog]
) -> str:
    """Return why the canary's `what` ('span' or 'metric') was accepted and not seen, as far as one can know,
    with the remedy."""
    stuck, dropping = [], []
    for exporter, now in after.items():
        then = before.get(exporter, Backlog())
        # it has reported nothing since, or has ended
        if exporter.data_type != _SIGNALS[what] or now.reported_s == then.reported_s:
            continue
        if now.queued > 0 and now.sent == then.sent:
            stuck.append(exporter)
        if now.failed > then.failed:
            dropping.append(exporter)
    if stuck:
        return (
            f"the collector accepted the {what}, but {what}s wait in the queue of {_listed(stuck)}, which "
            "sends none; start its destination, or fix its endpoint (that collector's log has the reason)"
        )
    if dropping:
        return (
            f"the collector accepted the {what}, but {what}s are dropped by {_listed(dropping)}: its "
            "destination refuses them; fix that exporter's endpoint or credentials (that collector's log has "
            "the reason)"
        )
    sampler = ", whether it samples," if what == "span" else ""
    return (
        f"the collector accepted the {what}, but {where} has not shown it within {waited_s:.0f} s; check the "
        f"collector's exporter and log{sampler} and whether it sends to this {where}"
    )


def _add(
    found: dict[Exporter, Backlog], collector: str, labels: dict[str, str], value: float, reported_s: float
) -> None:
    """Add one series; series that differ in other labels, such as the kind of an error, are added up."""
    name = labels["__name__"]
    data_type = next(
        (kind for items, kind in _DATA_TYPES.items() if items in name), labels.get("data_type", "")
    )
    backlog = found.setdefault(Exporter(collector, labels.get("exporter", ""), data_type), Backlog())
    backlog.reported_s = max(backlog.reported_s, reported_s)
    if name.endswith("queue_size"):
        backlog.queued += value
    elif "failed" in name:
        backlog.failed += value
    else:
        backlog.sent += value


def _listed(exporters: list[Exporter]) -> str:
    more = len(exporters) - _NAMED_MAX
    return ", ".join(map(str, sorted(exporters)[:_NAMED_MAX])) + (f" and {more} more" if more > 0 else "")


def _own_metrics(host: str, timeout_s: float) -> str:
    limit_s = max(0.1, min(1.0, timeout_s))
    connection = http.client.HTTPConnection(host, OWN_METRICS_PORT, timeout=limit_s)
    try:
        return within(limit_s, lambda: fetch(connection, "/metrics"))[1].decode("utf-8", "replace")
    except (OSError, UnicodeError, http.client.HTTPException):
        return ""
