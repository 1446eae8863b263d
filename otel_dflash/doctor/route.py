"""The route that OTLP takes from here: read from the environment by the rules of the SDK's exporters, which
differ by protocol."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple
from urllib.parse import urlsplit

from otel_dflash.otlp.redaction import redact
from otel_dflash.otlp.settings import Signal, exporter_names, protocol_of, setting, uses_tls

Protocol = Literal["gRPC", "HTTP"]

_PROTOCOLS: Final[dict[str, Protocol]] = {"otlp_proto_grpc": "gRPC", "otlp_proto_http": "HTTP"}
_DEFAULT_PORTS: Final = {("gRPC", False): 443, ("gRPC", True): 443, ("HTTP", False): 80, ("HTTP", True): 443}
_DEFAULT_URLS: Final = {"gRPC": "http://localhost:4317", "HTTP": "http://localhost:4318"}
# Tried with grpcio 1.85: gRPC reads only these, in this order, only in lower case, and of them only http://
# URLs.
_GRPC_PROXIES: Final[tuple[str, ...]] = ("grpc_proxy", "https_proxy", "http_proxy")
_GRPC_BYPASS: Final[tuple[str, ...]] = ("no_grpc_proxy", "no_proxy")


class Credentials(NamedTuple):
    """The files of TLS, '' where no file is named."""

    ca: str = ""
    certificate: str = ""
    key: str = ""


@dataclass(frozen=True)
class Proxy:
    """A proxy that a variable puts between this machine and the collector."""

    variable: str
    host: str
    port: int
    bypass: str
    """The variable that exempts a host: gRPC reads it in lower case only."""


@dataclass(frozen=True)
class Route:
    """Where one exporter sends to. Two signals that go the same way have equal routes."""

    protocol: Protocol
    url: str
    """The base URL, as a person writes it, without a password."""
    host: str
    """'' for a target that gRPC alone understands (unix:, dns:)."""
    port: int
    tls: bool
    credentials: Credentials
    proxy: Proxy | None

    @property
    def is_local(self) -> bool:
        """Return whether the route ends on this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def routes(environ: Mapping[str, str]) -> dict[Route, list[Signal]]:
    """Return the routes of the OTLP exporters that the environment names, each with its signals; {} when
    there is no OTLP exporter.

    Raises:
        ConfigError: A setting cannot work.
    """
    found: dict[Route, list[Signal]] = {}
    signals: tuple[Signal, ...] = ("traces", "metrics")
    for signal in signals:
        for name in exporter_names(signal, environ):
            protocol = _PROTOCOLS.get(protocol_of(signal, name, environ))
            if protocol:
                found.setdefault(_route(signal, protocol, environ), []).append(signal)
    return found


def _route(signal: Signal, protocol: Protocol, environ: Mapping[str, str]) -> Route:
    text = setting(signal, "ENDPOINT", environ)[1] or _DEFAULT_URLS[protocol]
    own = text.startswith(("unix:", "dns:"))
    url = urlsplit("") if own else urlsplit(text if "://" in text else f"//{text}")
    tls = uses_tls(signal, protocol == "gRPC", environ)
    host = url.hostname or ""
    port = url.port or _DEFAULT_PORTS[protocol, tls]
    shown = (
        text
        if own
        else f"{'https' if tls else 'http'}://{url.netloc}{url.path if protocol == 'HTTP' else ''}"
    )
    proxy = _proxy(protocol, url.scheme, host, environ) if host else None
    return Route(
        protocol,
        redact(shown),
        host,
        port,
        tls,
        _credentials(signal, protocol, environ) if tls else Credentials(),
        proxy,
    )


def _credentials(signal: Signal, protocol: Protocol, environ: Mapping[str, str]) -> Credentials:
    ca = setting(signal, "CERTIFICATE", environ)[1]
    if protocol == "HTTP" and not ca:  # requests' own variables
        ca = next(
            (environ[name] for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE") if environ.get(name)), ""
        )
    return Credentials(
        ca, setting(signal, "CLIENT_CERTIFICATE", environ)[1], setting(signal, "CLIENT_KEY", environ)[1]
    )


def _proxy(protocol: Protocol, scheme: str, host: str, environ: Mapping[str, str]) -> Proxy | None:
    """Return the proxy that the exporter's client would use: gRPC's core and requests read different
    variables."""
    names, bypass = _GRPC_PROXIES, _GRPC_BYPASS
    if protocol == "HTTP":
        names = (f"{scheme}_proxy", f"{scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
        bypass = ("no_proxy", "NO_PROXY")
    variable = next((name for name in names if environ.get(name)), "")
    if not variable:
        return None
    value = environ[variable]
    proxy = urlsplit(value if "://" in value or protocol == "gRPC" else f"http://{value}")
    if not proxy.hostname or (protocol == "gRPC" and proxy.scheme != "http"):
        return None
    kept_off = next((environ[name] for name in bypass if environ.get(name)), "")
    if any(_matches(entry, host, protocol) for entry in kept_off.replace(" ", "").split(",") if entry):
        return None
    try:
        port = proxy.port
    except ValueError:
        port = None
    return Proxy(
        variable,
        proxy.hostname,
        port or (443 if proxy.scheme == "https" else 80),
        "no_proxy" if protocol == "gRPC" else "NO_PROXY",
    )


def _matches(entry: str, host: str, protocol: Protocol) -> bool:
    if entry == "*":
        return protocol == "HTTP"  # gRPC's core treats it as a name
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:  # one of them is a name
        entry = entry.partition(":")[0].lstrip(".").lower()
        return host == entry or host.endswith(f".{entry}")
