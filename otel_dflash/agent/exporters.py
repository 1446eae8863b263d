"""SDK exporters from the standard environment.

Which exporters: ``OTEL_TRACES_EXPORTER`` and ``OTEL_METRICS_EXPORTER`` name entry points (``otlp``, ``console``, ``none``, or any
installed plugin); unset means ``otlp`` when an OTLP endpoint is set, else none. All that concerns one exporter (endpoint, TLS,
headers, compression, timeout) is its own reading of the environment.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlsplit

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_dflash.agent.credentials import (
    Signal,
    check_certificates,
    credential_files,
    headers_in_environment,
    read_headers_file,
    setting,
    uses_tls,
)
from otel_dflash.agent.noise import describe, redact
from otel_dflash.config import GRPC_TARGETS, ConfigError, check_no_user

E = TypeVar("E", bound=SpanExporter | MetricExporter)

_PROTOCOLS: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_OTLP_PREFIX: Final = "OTEL_EXPORTER_OTLP_"
_TEMPORALITY: Final = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
_CA_BUNDLES: Final = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_SELF_FILTERED: Final = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_MAKING: Final = threading.Lock()  # an exporter reads the environment while it is made, each in the thread of its sink
_SIGNALS: Final[tuple[Signal, ...]] = ("traces", "metrics")


def validate_environment(environ: Mapping[str, str] | None = None) -> None:
    """Check what can be checked without making an exporter: names, protocols, endpoints, temporality, headers and certificate files.

    Raises:
        ConfigError: One of them cannot work; the text says what, the value, and the remedy.
    """
    environ = os.environ if environ is None else environ
    for signal in _SIGNALS:
        for name in exporter_names(signal, environ):
            _speaks_tls(signal, name, environ)
    read_headers_file(environ)


def prepare_environment(environ: MutableMapping[str, str] | None = None) -> None:
    """Make the agent's own environment say what its user means by it: an empty variable is unset, no other CA bundle wins."""
    environ = os.environ if environ is None else environ
    for variable in [name for name in environ if name.startswith(_OTLP_PREFIX)]:
        value = environ.pop(variable).strip()
        if value:  # the SDK takes an empty INSECURE for false, an empty certificate for its library's list
            environ[variable] = value
    environ.setdefault("GRPC_VERBOSITY", "NONE")  # the reason of a failed export comes with it; gRPC's own log is noise
    if any(setting(signal, "CERTIFICATE", environ)[1] for signal in _SIGNALS):
        bundles = [environ.pop(name, "") for name in _CA_BUNDLES]  # requests prefers them to the certificate that was set for OTLP
        for signal in _SIGNALS:
            if any(bundles) and not setting(signal, "CERTIFICATE", environ)[1] and _is_https(signal, environ):
                environ[f"{_OTLP_PREFIX}{signal.upper()}_CERTIFICATE"] = next(filter(None, bundles))


def span_exporters(environ: MutableMapping[str, str] | None = None) -> dict[str, SpanExporter]:
    """Return the exporters for spans by name, {} when none is configured. They read os.environ themselves.

    Raises:
        ConfigError: One cannot be made.
    """
    return _made("traces", SpanExporter, RenewedSpanExporter, os.environ if environ is None else environ)


def metric_exporters(environ: MutableMapping[str, str] | None = None) -> dict[str, MetricExporter]:
    """Return the exporters for metrics by name, {} when none is configured. They read os.environ themselves.

    Raises:
        ConfigError: One cannot be made.
    """
    return _made("metrics", MetricExporter, RenewedMetricExporter, os.environ if environ is None else environ)


class _Renewal(Generic[E]):
    """Makes an exporter again when a file of its credentials has changed: exporters read them once, and a token lives for hours."""

    def __init__(self, make: Callable[[], E], files: Sequence[Path]) -> None:
        self._make = make
        self._files = files
        self._versions = [_version(file) for file in files]
        self._exporter = make()

    def exporter(self) -> E:
        """Return the exporter to use now. When the new files cannot work it is the old one, until they change again."""
        versions = [_version(file) for file in self._files]
        if versions != self._versions:
            self._versions = versions  # of before it is made: a change while it is made is seen the next time
            try:
                made = self._make()
            except ConfigError as error:
                _say(f"credentials have changed and are not taken up: {error}")
            else:
                _say("credentials have changed and were read again")
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

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **arguments: Any) -> MetricExportResult:
        """Return the exporter's result."""
        return self._renewal.exporter().export(metrics_data, timeout_millis, **arguments)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Return whether nothing is left to send."""
        return self._renewal.exporter().force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **arguments: Any) -> None:
        """End the exporter."""
        self._renewal.exporter().shutdown(timeout_millis, **arguments)


def exporter_names(signal: Signal, environ: Mapping[str, str]) -> list[str]:
    """Return the checked names of the exporters for a signal, [] when nothing is to be sent.

    Raises:
        ConfigError: A name, a protocol, an endpoint or a temporality preference cannot work.
    """
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    text = environ.get(variable, "").strip()
    if not text:
        text = "otlp" if setting(signal, "ENDPOINT", environ)[1] else "none"
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if "none" in names:
        if len(names) > 1:
            raise ConfigError(f"{variable} names 'none' beside others, got {text!r}; leave one of them out")
        return []
    for name in names:
        _entry_point(signal, name, environ)
        if protocol_of(signal, name, environ) in _PROTOCOLS.values():
            _check_endpoint(signal, name, environ)
    if signal == "metrics" and names:
        _check_temporality(environ)
    return names


def protocol_of(signal: Signal, name: str, environ: Mapping[str, str]) -> str:
    """Return the entry point that an exporter name stands for."""
    if name != "otlp":
        return name
    variable, protocol = setting(signal, "PROTOCOL", environ)
    if not protocol:
        return _PROTOCOLS["grpc"]
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"{variable} must be one of {', '.join(_PROTOCOLS)}, got {protocol!r}; unset it for grpc")
    return _PROTOCOLS[protocol]


def _entry_point(signal: Signal, name: str, environ: Mapping[str, str]) -> EntryPoint:
    group = f"opentelemetry_{signal}_exporter"
    wanted = protocol_of(signal, name, environ)
    found = list(entry_points(group=group, name=wanted))
    if found:
        return found[0]
    if name == "otlp":
        raise ConfigError(f"no exporter {wanted!r} is installed for {signal}; pip install opentelemetry-exporter-otlp")
    installed = sorted({"none", *(point.name for point in entry_points(group=group))})
    raise ConfigError(
        f"OTEL_{signal.upper()}_EXPORTER names an unknown exporter, got {name!r}; use one of {', '.join(installed)}, "
        f"or install the package with that entry point (group {group})"
    )


def _check_endpoint(signal: Signal, name: str, environ: Mapping[str, str]) -> None:
    variable, value = setting(signal, "ENDPOINT", environ)
    if not variable:
        return
    check_no_user(variable, value)
    grpc = protocol_of(signal, name, environ) == _PROTOCOLS["grpc"]
    has_scheme = "://" in value or value.startswith("unix:")
    try:
        url = urlsplit(value if has_scheme else f"//{value}")
        usable = bool(url.hostname) and url.port != 0 and not re.search(r"\s", value)
    except ValueError:
        usable = False
        url = urlsplit("")
    if grpc:
        is_usable_url = usable and (url.scheme in ("http", "https") if has_scheme else not url.path)
        usable = value.startswith(GRPC_TARGETS) or is_usable_url
        example = "http://localhost:4317 or https://collector.example:4317"
    else:
        usable = usable and has_scheme and url.scheme in ("http", "https")
        example = "http://localhost:4318 or https://collector.example:4318"
    if not usable:
        raise ConfigError(
            f"{variable} is not an endpoint that OTLP over {'gRPC' if grpc else 'HTTP'} can use, got {redact(value)!r}; try {example}"
        )


def _check_temporality(environ: Mapping[str, str]) -> None:
    preference = environ.get(_TEMPORALITY, "").strip().lower()
    if preference not in ("", "cumulative"):
        raise ConfigError(
            f"{_TEMPORALITY} must be cumulative, got {preference!r}: a delta that is sent again counts twice; "
            "unset it, and let a collector's cumulativetodelta processor convert"
        )


def _is_https(signal: Signal, environ: Mapping[str, str]) -> bool:
    protocols = {protocol_of(signal, name, environ) for name in exporter_names(signal, environ)}
    return _PROTOCOLS["http/protobuf"] in protocols and uses_tls(signal, False, environ)


def _speaks_tls(signal: Signal, name: str, environ: Mapping[str, str]) -> bool:
    """Return whether it does; its certificate files are checked then. A plugin's own ways are not known here."""
    protocol = protocol_of(signal, name, environ)
    is_grpc = protocol == _PROTOCOLS["grpc"]
    tls = protocol not in _PROTOCOLS.values() or uses_tls(signal, is_grpc, environ)
    if tls and protocol in _PROTOCOLS.values():
        check_certificates(signal, is_grpc, environ)
    return tls


def _made(
    signal: Signal, kind: type[Any], renewed: Callable[[Callable[[], Any], Sequence[Path]], E], environ: MutableMapping[str, str]
) -> dict[str, E]:
    files = credential_files(signal, environ)
    makers = {name: partial(_make, signal, name, kind, environ) for name in exporter_names(signal, environ)}
    return {name: renewed(make, files) if files else make() for name, make in makers.items()}


def _make(signal: Signal, name: str, kind: type[Any], environ: MutableMapping[str, str]) -> Any:
    point = _entry_point(signal, name, environ)
    certificate = setting(signal, "CERTIFICATE", environ)[0]
    if not _speaks_tls(signal, name, environ) and certificate:
        _say(f"{certificate} has no effect on {signal}: their endpoint does not begin with https://, so nothing is encrypted")
    with _MAKING, headers_in_environment(signal, environ):
        try:
            exporter = point.load()()
        except Exception as error:  # a plugin may raise anything; it is raised again, with what and where
            raise ConfigError(f"the {signal} exporter {name!r} ({point.value}) cannot be made: {describe(error)}") from error
    if not isinstance(exporter, kind):
        raise ConfigError(
            f"the {signal} exporter {name!r} ({point.value}) is no {kind.__name__}: the agent pushes, so a reader that is scraped "
            "does not fit; use otlp and let a collector expose it"
        )
    # The SDK's own filter drops a repeated template for 20 s, also when the reason is another: then no count is true.
    logging.getLogger(_SELF_FILTERED).filters.clear()
    return exporter


def _version(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()  # of what a link leads to: a secret that is mounted changes by a link
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _say(text: str) -> None:
    with suppress(OSError):  # the log may lie on a full disk
        print(f"otel-dflash: {text}", file=sys.stderr, flush=True)
