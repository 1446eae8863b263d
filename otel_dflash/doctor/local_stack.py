"""The stack that `otel-dflash stack up` started here: its state, and the addresses of Jaeger and
Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from otel_dflash.doctor.finding import Finding, ok, unknown, warning
from otel_dflash.doctor.route import routes
from otel_dflash.stack import control
from otel_dflash.stack.engines import ENGINES, EngineError, find


def check() -> Iterator[Finding]:
    """Yield which engines are built here, and the state of the stack."""
    try:
        built = [name for name, engine in ENGINES.items() if find(engine)]
        yield ok("engines", f"built here: {', '.join(built) or 'none'}")
        rows = control.status()
    except EngineError as error:
        yield warning("stack", str(error))
        return
    states = ", ".join(f"{row.name} {row.state}" for row in rows)
    if all(row.state == "not started" for row in rows):
        yield unknown("stack", "not started here by `otel-dflash stack up`")
    elif all(row.state == "healthy" for row in rows):
        yield ok("stack", states)
    else:
        yield warning("stack", f"{states}; run: otel-dflash stack up")


def endpoint(environ: Mapping[str, str]) -> str:
    """Return where the stack's collector accepts OTLP over the protocol that `environ` sets, "" when it is
    not healthy."""
    try:
        grpc, http = next(
            (row.addresses for row in control.status() if (row.name, row.state) == ("otelcol", "healthy")),
            ("", ""),
        )
    except EngineError:  # reported by `check`
        return ""
    return grpc if environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc") == "grpc" else http


def addresses(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the URLs of Jaeger and Prometheus by name if a configured route leads to the stack's collector,
    else {}. One that has ended is included, because then it is what is wrong.

    Raises:
        ConfigError: A setting cannot work.
    """
    try:
        started = {row.name: row.addresses for row in control.status() if row.state != "not started"}
    except EngineError:  # reported by `check`
        return {}
    ports = {urlsplit(url).port for url in started.get("otelcol", ())}
    if not any(route.is_local and route.port in ports for route in routes(environ)):
        return {}
    return {name: started[name.lower()][0] for name in ("Jaeger", "Prometheus") if name.lower() in started}
