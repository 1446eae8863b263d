"""The stack that `otel-dflash stack up` started here: how it is, and where its Jaeger and Prometheus are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from otel_dflash.doctor.lines import Line, ok, unknown, warning
from otel_dflash.doctor.route import routes
from otel_dflash.stack import control
from otel_dflash.stack.engines import ENGINES, EngineError, find


def check() -> Iterator[Line]:
    """Yield which engines are built here, and how the stack is."""
    try:
        built = [name for name, engine in ENGINES.items() if find(engine)]
        yield ok("engines", f"built here: {', '.join(built) or 'none'}")
        rows = control.status()
    except EngineError as error:
        yield warning("stack", str(error))
        return
    said = ", ".join(f"{row.name} {row.state}" for row in rows)
    if all(row.state == "not started" for row in rows):
        yield unknown("stack", "not started here by `otel-dflash stack up`")
    elif all(row.state == "healthy" for row in rows):
        yield ok("stack", said)
    else:
        yield warning("stack", f"{said}; otel-dflash stack up")


def endpoint(environ: Mapping[str, str]) -> str:
    """Return where the stack's healthy collector takes OTLP by the protocol that `environ` sets, "" where there is none."""
    try:
        grpc, http = next((row.addresses for row in control.status() if (row.name, row.state) == ("otelcol", "healthy")), ("", ""))
    except EngineError:  # said by `check`
        return ""
    return grpc if environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc") == "grpc" else http


def addresses(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the URLs of Jaeger and Prometheus by name where a configured route leads to the stack's collector, else {}.

    Those that have ended too: then they are what is wrong.

    Raises:
        ConfigError: A setting cannot work.
    """
    try:
        started = {row.name: row.addresses for row in control.status() if row.state != "not started"}
    except EngineError:  # said by `check`
        return {}
    ports = {urlsplit(url).port for url in started.get("otelcol", ())}
    if not any(route.is_local and route.port in ports for route in routes(environ)):
        return {}
    return {name: started[name.lower()][0] for name in ("Jaeger", "Prometheus") if name.lower() in started}
