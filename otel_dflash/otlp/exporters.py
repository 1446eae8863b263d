"""SDK exporters from the standard environment.

Which exporters: ``OTEL_TRACES_EXPORTER`` and ``OTEL_METRICS_EXPORTER`` name entry points (``otlp``,
``console``, ``none``, or any installed plugin); unset means ``otlp`` if an OTLP endpoint is set, else none.
Each exporter reads its own settings (endpoint, TLS, headers, compression, timeout) from the environment.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_dflash.config import ConfigError
from otel_dflash.console import report
from otel_dflash.otlp.credentials import (
    check_certificates,
    credential_files,
    headers_in_environment,
    read_headers_file,
)
from otel_dflash.otlp.failures import describe
from otel_dflash.otlp.settings import (
    OTLP_PREFIX,
    PROTOCOLS,
    SIGNALS,
    Signal,
    entry_point,
    exporter_names,
    protocol_of,
    setting,
    uses_tls,
)

E = TypeVar("E", bound=SpanExporter | MetricExporter)

_CA_BUNDLES: Final = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_SELF_FILTERED: Final = "opentelemetry.exporter.otlp.proto.grpc.exporter"
# an exporter reads the environment while it is created, in the thread of its sink
_MAKING: Final = threading.Lock()


def validate_environment(environ: Mapping[str, str] | None = None) -> None:
    """Check the exporter settings without creating an exporter.

    Checked are names, protocols, endpoints, temporality, headers and certificate files.

    Raises:
        ConfigError: A setting cannot work; the text names it, its value, and the remedy.
    """
    environ = os.environ if environ is None else environ
    for signal in SIGNALS:
        for name in exporter_names(signal, environ):
            _speaks_tls(signal, name, environ)
    read_headers_file(environ)


def prepare_environment(environ: MutableMapping[str, str] | None = None) -> None:
    """Normalize the agent's own environment.

    An empty variable counts as unset, and no other CA bundle overrides the configured certificate.
    """
    environ = os.environ if environ is None else environ
    for variable in [name for name in environ if name.startswith(OTLP_PREFIX)]:
        value = environ.pop(variable).strip()
        # the SDK reads an empty INSECURE as false, and an empty certificate as its library's own list
        if value:
            environ[variable] = value
    # a failed export carries its reason; gRPC's own log is noise
    environ.setdefault("GRPC_VERBOSITY", "NONE")
    if any(setting(signal, "CERTIFICATE", environ)[1] for signal in SIGNALS):
        # requests prefers these to the certificate that is set for OTLP
        bundles = [environ.pop(name, "") for name in _CA_BUNDLES]
        for signal in SIGNALS:
            if any(bundles) and not setting(signal, "CERTIFICATE", environ)[1] and _is_https(signal, environ):
                environ[f"{OTLP_PREFIX}{signal.upper()}_CERTIFICATE"] = next(filter(None, bundles))


def span_exporters(environ: MutableMapping[str, str] | None = None) -> dict[str, SpanExporter]:
    """Return the exporters for spans by name, {} if none is configured. They read os.environ themselves.

    Raises:
        ConfigError: An exporter cannot be created.
    """
    return _made("traces", SpanExporter, RenewedSpanExporter, os.environ if environ is None else environ)


def metric_exporters(environ: MutableMapping[str, str] | None = None) -> dict[str, MetricExporter]:
    """Return the exporters for metrics by name, {} if none is configured. They read os.environ themselves.

    Raises:
        ConfigError: An exporter cannot be created.
    """
    return _made("metrics", MetricExporter, RenewedMetricExporter, os.environ if environ is None else environ)


class _Renewal(Generic[E]):
    """Creates an exporter anew when one of its credential files has changed.

    Exporters read the files only once, and a token expires within hours.
    """

    def __init__(self, make: Callable[[], E], files: Sequence[Path]) -> None:
        self._make = make
        self._files = files
        self._versions = [_version(file) for file in files]
        self._exporter = make()

    def exporter(self) -> E:
        """Return the exporter to use now.

        If the new files cannot work, it is the old one, until they change again.
        """
        versions = [_version(file) for file in self._files]
        if versions != self._versions:
            # read before the exporter is created: a later change is noticed by the next call
            self._versions = versions
            try:
                made = self._make()
            except ConfigError as error:
                report(f"the credentials have changed, but the new ones cannot be used: {error}")
            else:
                report("the credentials have changed and were reloaded")
                self._exporter.shutdown()
                self._exporter = made
        return self._exporter


class RenewedSpanExporter(SpanExporter):
    """Exports spans with the credentials that the files hold now."""

    def __init__(self, make: Callable[[], SpanExporter], files: Sequence[Path]) -> None:
        self._renewal = _Renewal(make, files)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Return the exporter's result."""
        return self._renewal.exporter().export(spans)

    def shutdown(self) -> None:
        """End the exporter."""
        self._renewal.exporter().shutdown()


class RenewedMetricExporter(MetricExporter):
    """Exports metrics with the credentials that the files hold now."""

    def __init__(self, make: Callable[[], MetricExporter], files: Sequence[Path]) -> None:
        super().__init__()
        self._renewal = _Renewal(make, files)

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **arguments: Any
    ) -> MetricExportResult:
        """Return the exporter's result."""
        return self._renewal.exporter().export(metrics_data, timeout_millis, **arguments)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Return whether nothing is left to send."""
        return self._renewal.exporter().force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **arguments: Any) -> None:
        """End the exporter."""
        self._renewal.exporter().shutdown(timeout_millis, **arguments)


def _is_https(signal: Signal, environ: Mapping[str, str]) -> bool:
    protocols = {protocol_of(signal, name, environ) for name in exporter_names(signal, environ)}
    return PROTOCOLS["http/protobuf"] in protocols and uses_tls(signal, False, environ)


def _speaks_tls(signal: Signal, name: str, environ: Mapping[str, str]) -> bool:
    """Return whether an exporter uses TLS, and if so, check its certificate files.

    How a plugin connects is unknown: it counts as using TLS.
    """
    protocol = protocol_of(signal, name, environ)
    is_grpc = protocol == PROTOCOLS["grpc"]
    tls = protocol not in PROTOCOLS.values() or uses_tls(signal, is_grpc, environ)
    if tls and protocol in PROTOCOLS.values():
        check_certificates(signal, is_grpc, environ)
    return tls


def _made(
    signal: Signal,
    kind: type[Any],
    renewed: Callable[[Callable[[], Any], Sequence[Path]], E],
    environ: MutableMapping[str, str],
) -> dict[str, E]:
    files = credential_files(signal, environ)
    makers = {name: partial(_make, signal, name, kind, environ) for name in exporter_names(signal, environ)}
    return {name: renewed(make, files) if files else make() for name, make in makers.items()}


def _make(signal: Signal, name: str, kind: type[Any], environ: MutableMapping[str, str]) -> Any:
    point = entry_point(signal, name, environ)
    certificate = setting(signal, "CERTIFICATE", environ)[0]
    if not _speaks_tls(signal, name, environ) and certificate:
        report(
            f"{certificate} has no effect on {signal}: their endpoint does not begin with https://, so "
            "nothing is encrypted"
        )
    with _MAKING, headers_in_environment(signal, environ):
        try:
            exporter = point.load()()
        except Exception as error:  # a plugin may raise anything; it is raised again, with what and where
            raise ConfigError(
                f"the {signal} exporter {name!r} ({point.value}) cannot be made: {describe(error)}"
            ) from error
    if not isinstance(exporter, kind):
        raise ConfigError(
            f"the {signal} exporter {name!r} ({point.value}) is not a {kind.__name__}: the agent pushes, "
            "so a reader that is scraped cannot be used; use otlp and let a collector expose the metrics"
        )
    # The SDK's own filter drops a repeated template for 20 s, even if the reason differs: counts would be
    # wrong.
    logging.getLogger(_SELF_FILTERED).filters.clear()
    return exporter


def _version(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()  # follows links: a mounted secret is replaced by changing a link
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size
