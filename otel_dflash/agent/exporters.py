"""SDK exporters from the standard environment.

Which exporters: ``OTEL_TRACES_EXPORTER`` and ``OTEL_METRICS_EXPORTER`` name entry points (``otlp``, ``console``, ``none``, or any
installed plugin); unset means ``otlp`` when an OTLP endpoint is set, else none. All that concerns one exporter (endpoint, TLS,
headers, compression, timeout) is its own reading of the environment.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, MutableMapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace.export import SpanExporter

from otel_dflash.agent.noise import describe, redact
from otel_dflash.config import HEADERS_FILE_VARIABLE, ConfigError

Signal = Literal["traces", "metrics"]

_PROTOCOLS: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_GRPC_SCHEMES: Final = ("http", "https", "dns", "unix")  # dns and unix are gRPC's own way to name a target
_HEADERS: Final = "OTEL_EXPORTER_OTLP_HEADERS"
_TEMPORALITY: Final = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
_CERTIFICATES: Final = tuple(f"OTEL_EXPORTER_OTLP_{signal}CERTIFICATE" for signal in ("", "TRACES_", "METRICS_"))
_CA_BUNDLES: Final = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_SELF_FILTERED: Final = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def validate_environment(environ: Mapping[str, str] | None = None) -> None:
    """Check what can be checked without making an exporter: names, protocols, endpoints, temporality, headers file.

    Raises:
        ConfigError: One of them cannot work; the text says what, the value, and the remedy.
    """
    environ = os.environ if environ is None else environ
    for signal in ("traces", "metrics"):
        exporter_names(signal, environ)
    _read_headers_file(environ)


def prepare_environment(environ: MutableMapping[str, str] | None = None) -> None:
    """Make the agent's own environment say what the exporters are to read: headers from their file, no other CA bundle.

    Raises:
        ConfigError: The headers file cannot be read.
    """
    environ = os.environ if environ is None else environ
    headers = _read_headers_file(environ)
    if headers:
        before = environ.get(_HEADERS, "")
        environ[_HEADERS] = f"{before},{headers}" if before else headers  # of one name the last value counts
    environ.setdefault("GRPC_VERBOSITY", "NONE")  # the reason of a failed export comes with it; gRPC's own log is noise
    if any(environ.get(name) for name in _CERTIFICATES):
        for name in _CA_BUNDLES:  # requests prefers them to the certificate that was set for OTLP
            environ.pop(name, None)


def span_exporters(environ: Mapping[str, str] | None = None) -> dict[str, SpanExporter]:
    """Return the exporters for spans by name, {} when none is configured. They read os.environ themselves.

    Raises:
        ConfigError: One cannot be made.
    """
    environ = os.environ if environ is None else environ
    return {name: _make("traces", name, SpanExporter, environ) for name in exporter_names("traces", environ)}


def metric_exporters(environ: Mapping[str, str] | None = None) -> dict[str, MetricExporter]:
    """Return the exporters for metrics by name, {} when none is configured. They read os.environ themselves.

    Raises:
        ConfigError: One cannot be made.
    """
    environ = os.environ if environ is None else environ
    return {name: _make("metrics", name, MetricExporter, environ) for name in exporter_names("metrics", environ)}


def exporter_names(signal: Signal, environ: Mapping[str, str]) -> list[str]:
    """Return the checked names of the exporters for a signal, [] when nothing is to be sent.

    Raises:
        ConfigError: A name, a protocol, an endpoint or a temporality preference cannot work.
    """
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    text = environ.get(variable, "").strip()
    if not text:
        text = "otlp" if _setting(signal, "ENDPOINT", environ)[1] else "none"
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if "none" in names:
        if len(names) > 1:
            raise ConfigError(f"{variable} names 'none' beside others, got {text!r}; leave one of them out")
        return []
    for name in names:
        _entry_point(signal, name, environ)
        if _protocol_of(signal, name, environ) in _PROTOCOLS.values():
            _check_endpoint(signal, name, environ)
    if signal == "metrics" and names:
        _check_temporality(environ)
    return names


def _setting(signal: Signal, name: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return (variable, value) of an OTLP setting: the signal's own, else the one for all; ('', '') when neither is set."""
    for variable in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", f"OTEL_EXPORTER_OTLP_{name}"):
        value = environ.get(variable, "").strip()
        if value:
            return variable, value
    return "", ""


def _protocol_of(signal: Signal, name: str, environ: Mapping[str, str]) -> str:
    """Return the entry point that an exporter name stands for."""
    if name != "otlp":
        return name
    variable, protocol = _setting(signal, "PROTOCOL", environ)
    if not protocol:
        return _PROTOCOLS["grpc"]
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"{variable} must be one of {', '.join(_PROTOCOLS)}, got {protocol!r}; unset it for grpc")
    return _PROTOCOLS[protocol]


def _entry_point(signal: Signal, name: str, environ: Mapping[str, str]) -> EntryPoint:
    group = f"opentelemetry_{signal}_exporter"
    wanted = _protocol_of(signal, name, environ)
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
    variable, value = _setting(signal, "ENDPOINT", environ)
    if not variable:
        return
    grpc = _protocol_of(signal, name, environ) == _PROTOCOLS["grpc"]
    has_scheme = "://" in value or value.startswith("unix:")
    try:
        url = urlsplit(value if has_scheme else f"//{value}")
        usable = bool(url.hostname) and url.port != 0 and not re.search(r"\s", value)
    except ValueError:
        usable = False
        url = urlsplit("")
    if grpc:
        own = url.scheme in _GRPC_SCHEMES[2:]
        usable = own or (usable and (url.scheme in _GRPC_SCHEMES if has_scheme else not url.path))
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


def _read_headers_file(environ: Mapping[str, str]) -> str:
    """Return the headers in the file of OTEL_DFLASH_OTLP_HEADERS_FILE as one line, '' when unset. No message shows a value."""
    name = environ.get(HEADERS_FILE_VARIABLE, "").strip()
    if not name:
        return ""
    try:
        text = Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"{HEADERS_FILE_VARIABLE} names a file that cannot be read, got {name!r} ({reason}); check path and mode"
        ) from None
    headers = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        for header in filter(None, (part.strip() for part in line.split(","))):
            key, separator, value = header.partition("=")
            if not separator or not _HEADER_NAME.fullmatch(key.strip()) or not value.isprintable():
                raise ConfigError(f"{HEADERS_FILE_VARIABLE}: line {number} of {name!r} is not key=value; write one header a line")
            headers.append(f"{key.strip()}={value.strip()}")
    return ",".join(headers)


def _make(signal: Signal, name: str, kind: type[Any], environ: Mapping[str, str]) -> Any:
    point = _entry_point(signal, name, environ)
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
