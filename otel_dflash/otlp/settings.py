"""What the OTEL_* variables configure: exporters, protocols, endpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Literal
from urllib.parse import urlsplit

from otel_dflash.config import GRPC_TARGETS, ConfigError, check_no_user
from otel_dflash.otlp.redaction import redact

Signal = Literal["traces", "metrics"]


def setting(signal: Signal, name: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return (variable, value) of an OTLP setting, ('', '') if it is not set.

    The signal's own variable comes before the one for all signals.
    """
    for variable in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", f"OTEL_EXPORTER_OTLP_{name}"):
        value = environ.get(variable, "").strip()
        if value:
            return variable, value
    return "", ""


def uses_tls(signal: Signal, is_grpc: bool, environ: Mapping[str, str]) -> bool:
    """Return whether an OTLP exporter uses TLS, by the SDK's own rules.

    Raises:
        ConfigError: The endpoint begins with http://, but the INSECURE variable asks for TLS.
    """
    endpoint_variable, endpoint = setting(signal, "ENDPOINT", environ)
    scheme = urlsplit(endpoint).scheme if "://" in endpoint else ""
    if not is_grpc or not endpoint or scheme == "https":
        return scheme == "https"
    variable, insecure = setting(signal, "INSECURE", environ)
    if scheme == "http" and insecure and insecure.lower() != "true":
        raise ConfigError(
            f"{variable}={insecure} asks for TLS, and {endpoint_variable} begins with http://; begin it "
            f"with https://, or unset {variable}"
        )
    return scheme != "http" and insecure.lower() != "true"


PROTOCOLS: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
OTLP_PREFIX: Final = "OTEL_EXPORTER_OTLP_"
_TEMPORALITY: Final = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
SIGNALS: Final[tuple[Signal, ...]] = ("traces", "metrics")


def exporter_names(signal: Signal, environ: Mapping[str, str]) -> list[str]:
    """Return the checked names of the exporters for a signal, [] if nothing is to be sent.

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
            raise ConfigError(
                f"{variable} names 'none' together with others, got {text!r}; leave out one or the other"
            )
        return []
    for name in names:
        entry_point(signal, name, environ)
        if protocol_of(signal, name, environ) in PROTOCOLS.values():
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
        return PROTOCOLS["grpc"]
    if protocol not in PROTOCOLS:
        raise ConfigError(
            f"{variable} must be one of {', '.join(PROTOCOLS)}, got {protocol!r}; unset it for grpc"
        )
    return PROTOCOLS[protocol]


def entry_point(signal: Signal, name: str, environ: Mapping[str, str]) -> EntryPoint:
    """Return the installed entry point that an exporter name stands for.

    Raises:
        ConfigError: No such exporter is installed.
    """
    group = f"opentelemetry_{signal}_exporter"
    wanted = protocol_of(signal, name, environ)
    found = list(entry_points(group=group, name=wanted))
    if found:
        return found[0]
    if name == "otlp":
        raise ConfigError(
            f"no exporter {wanted!r} is installed for {signal}; pip install opentelemetry-exporter-otlp"
        )
    installed = sorted({"none", *(point.name for point in entry_points(group=group))})
    raise ConfigError(
        f"OTEL_{signal.upper()}_EXPORTER names an unknown exporter, got {name!r}; use one of "
        f"{', '.join(installed)}, "
        f"or install the package with that entry point (group {group})"
    )


def _check_endpoint(signal: Signal, name: str, environ: Mapping[str, str]) -> None:
    variable, value = setting(signal, "ENDPOINT", environ)
    if not variable:
        return
    check_no_user(variable, value)
    grpc = protocol_of(signal, name, environ) == PROTOCOLS["grpc"]
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
            f"{variable} is not an endpoint that OTLP over {'gRPC' if grpc else 'HTTP'} can use, got "
            f"{redact(value)!r}; try {example}"
        )


def _check_temporality(environ: Mapping[str, str]) -> None:
    preference = environ.get(_TEMPORALITY, "").strip().lower()
    if preference not in ("", "cumulative"):
        raise ConfigError(
            f"{_TEMPORALITY} must be cumulative, got {preference!r}: a delta that is sent twice "
            "counts twice; unset it, and let a collector's cumulativetodelta processor convert"
        )
