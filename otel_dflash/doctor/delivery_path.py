"""The delivery path: from this machine by every configured route to Jaeger and Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Final

from otel_dflash.doctor import backlog, canary, local_stack
from otel_dflash.doctor.backends import METRIC, Jaeger, Prometheus
from otel_dflash.doctor.clock import Clock
from otel_dflash.doctor.finding import Finding, HopError, ok, unknown, warning, wrong
from otel_dflash.doctor.hops import Hops
from otel_dflash.doctor.route import routes
from otel_dflash.otlp.settings import Signal, exporter_names
from otel_dflash.spans.sampling import KEEP, Sampling

POLL_S: Final = 0.1
_SIGNALS: Final[tuple[Signal, ...]] = ("traces", "metrics")
_NO_ROUTE: Final = (
    "no endpoint is set: runs are recorded, but nothing is sent; {}, or set OTEL_EXPORTER_OTLP_ENDPOINT"
)
_USUAL: Final = "give --endpoint http://localhost:4317"


class DeliveryPath:
    """One check of the delivery path."""

    def __init__(
        self,
        environ: MutableMapping[str, str],
        jaeger_url: str | None,
        prometheus_url: str | None,
        timeout_s: float,
    ) -> None:
        """Prepare the check.

        Args:
            environ: os.environ, prepared for the exporters.
            jaeger_url: Where to look for the span; None: nowhere.
            prometheus_url: Where to look for the metric; None: nowhere.
            timeout_s: How long the check may take.

        Raises:
            ConfigError: A URL is not that of an HTTP API.
        """
        self._environ = environ
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._clock = Clock()
        self._jaeger = Jaeger("Jaeger", jaeger_url, self._clock) if jaeger_url else None
        self._prometheus = Prometheus("Prometheus", prometheus_url, self._clock) if prometheus_url else None
        self._canary = canary.new()
        self.is_checked = False
        """Whether an exporter is configured, so that there is a path to check."""
        self.is_stuck = False
        """Whether an exporter hangs in a call that nothing can end."""

    def check(self) -> Iterator[Finding]:
        """Yield a finding for each hop.

        Raises:
            ConfigError: A setting cannot work.
        """
        self._deadline = time.monotonic() + self._timeout_s
        sent = [signal for signal in _SIGNALS if exporter_names(signal, self._environ)]
        if not sent:
            here = local_stack.endpoint(self._environ)
            yield warning(
                "route",
                _NO_ROUTE.format(
                    f"the stack of this host accepts it: give --endpoint {here}" if here else _USUAL
                ),
            )
            return
        self.is_checked = True
        for signal in (signal for signal in _SIGNALS if signal not in sent):
            yield warning(
                "route",
                f"no {signal} are sent: OTEL_{signal.upper()}_EXPORTER or the endpoint leaves them out",
            )
        if "traces" in sent:
            yield from _sampling(self._environ)
        found = routes(self._environ)
        for route, signals in found.items():
            yield ok("route", f"{' and '.join(signals)} to {route.url} by OTLP over {route.protocol}")
            hops = Hops(route, self._clock, self._deadline)
            yield from hops.probe()
            if hops.is_broken:
                sent = [signal for signal in sent if signal not in signals]
        if sent:
            yield from self._send(sent, next((route.host for route in found), ""))
        if sent or self._clock.has_any:
            yield from self._clock.check()

    def _send(self, signals: list[Signal], host: str) -> Iterator[Finding]:
        is_asked = self._jaeger or self._prometheus
        before = backlog.read(self._prometheus, host, self._left_s() / 4) if is_asked else {}
        sending = canary.Sending(self._canary, self._environ)
        yield from sending.send(signals, max(1.0, self._left_s() / 2))
        self.is_stuck = sending.is_stuck
        looks: dict[str, tuple[str, Callable[[], bool]]] = {}
        for what, name, look in (
            ("span", "Jaeger", self._look_in_jaeger),
            ("metric", "Prometheus", self._look_in_prometheus),
        ):
            reason = self._why_not(what, name, sending.accepted)
            if reason:
                yield unknown(f"seen in {name}", f"not checked: {reason}")
            else:
                looks[what] = (name, look)
        start = time.monotonic()
        yield from self._watch(looks, start)
        if looks:
            after = backlog.read(self._prometheus, host, 1.0)
            for what, (name, _) in looks.items():
                yield wrong(
                    f"seen in {name}", backlog.explain(what, name, time.monotonic() - start, before, after)
                )

    def _why_not(self, what: str, name: str, accepted: Mapping[str, bool]) -> str:
        if not accepted.get(what, False):
            return f"the {what} was not {'accepted' if what in accepted else 'sent'}"
        return (
            "" if {"span": self._jaeger, "metric": self._prometheus}[what] else f"give --{name.lower()} URL"
        )

    def _watch(self, looks: dict[str, tuple[str, Callable[[], bool]]], start: float) -> Iterator[Finding]:
        """Poll until all have been seen or the time is up; what remains in `looks` was not seen."""
        while looks:
            for what, (name, look) in list(looks.items()):
                try:
                    if look():
                        shown = f"trace {self._canary.trace_id:032x}" if what == "span" else METRIC
                        yield ok(f"seen in {name}", shown, time.monotonic() - start)
                        del looks[what]
                except HopError as error:
                    yield wrong(f"seen in {name}", str(error))
                    del looks[what]
            if self._left_s() <= 0:
                return
            time.sleep(POLL_S if looks else 0)

    def _look_in_jaeger(self) -> bool:
        assert self._jaeger
        # half, so that the other one is asked even when this one hangs
        return self._jaeger.has_trace(self._canary.trace_id, self._left_s() / 2)

    def _look_in_prometheus(self) -> bool:
        assert self._prometheus
        return self._prometheus.has_value(self._canary.value, self._left_s() / 2)

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()


def _sampling(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding when traces of a run are left out. The sampler never leaves the canary out."""
    sampling = Sampling.from_environment(environ)
    if sampling.sends_all:
        return
    kept = (
        f", except those that OTEL_DFLASH_KEEP={','.join(word for word in KEEP if word in sampling.keep)} "
        f"keeps"
        if sampling.keep
        else ""
    )
    sampler = f"OTEL_TRACES_SAMPLER={sampling.description}"
    if sampling.bound == 0 and not sampling.keep:
        yield wrong(
            "sampling",
            (
                f"{sampler} leaves out every trace of a run (the canary is sent anyway); unset it, or set a "
                "ratio"
            ),
        )
    else:
        yield warning(
            "sampling",
            (f"{sampler} leaves out traces of a run{kept} (the canary is sent anyway); unset it to send all"),
        )
