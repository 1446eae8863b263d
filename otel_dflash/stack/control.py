"""The stack of this host, in containers or as processes: `otel-dflash stack up|status|down` and `run
--stack`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from otel_dflash.stack import compose, native, state
from otel_dflash.stack.engines import EngineError, find
from otel_dflash.stack.native import NAMES, Report
from otel_dflash.stack.services import SERVICES, is_healthy
from otel_dflash.stack.state import Stack

Way = Literal["docker", "native"]

NO_UI: Final = (
    "Built from their modules, Jaeger and Prometheus have no user interface, only their APIs; their "
    "container images have both."
)


@dataclass(frozen=True)
class Addresses:
    """Where the stack listens."""

    urls: Mapping[str, str]
    """What listens -> its URL."""
    has_ui: bool
    """Whether Jaeger and Prometheus have a user interface."""

    def endpoint(self, protocol: str) -> str:
        """Return the URL for OTLP over `protocol`, grpc or http/protobuf."""
        return self.urls["OTLP over gRPC" if protocol == "grpc" else "OTLP over HTTP"]

    def views(self) -> dict[str, str]:
        """Return the URLs that are queried, not sent to."""
        return {what: url for what, url in self.urls.items() if not what.startswith("OTLP")}

    def lines(self) -> list[str]:
        """Return the lines that tell the user."""
        width = max(map(len, self.urls))
        return [
            *(f"{what:<{width}}  {url}" for what, url in self.urls.items()),
            *([] if self.has_ui else [NO_UI]),
        ]


@dataclass(frozen=True)
class ServiceStatus:
    """One service as `status` shows it."""

    name: str
    state: str
    """healthy, not healthy, ended, or not started."""
    pid: int | None
    """None unless it was started as a process."""
    version: str
    addresses: tuple[str, ...]


def up(report: Report, way: Way | None = None) -> Addresses:
    """Start the stack and wait until it is healthy; a second call changes nothing.

    Args:
        report: Gets each line for the user. way: In containers or as processes of built engines; None for the
        one that is running, else Docker if it
            and the images are here, else the built engines.

    Raises:
        ConfigError: A variable is wrong.
        EngineError: It cannot be started; the text has the remedy.
    """
    with interruptible(), state.locked(report):
        stack = state.read()
        way = _choose(stack, way)
        if way == "native":
            return Addresses(_urls(native.up(report, os.environ)), has_ui=False)
        values = compose.up(os.environ)
        return Addresses(
            {**_urls(values), "Grafana": f"http://127.0.0.1:{values['GRAFANA_PORT']}"}, has_ui=True
        )


def down(report: Report, *, volumes: bool = False) -> None:
    """Stop what `up` started, and nothing else; with `volumes` remove its data too.

    Raises:
        EngineError: Something cannot be stopped or removed.
    """
    with state.locked(report):
        stack = state.read()
        if stack.compose is not None:
            compose.down(volumes=volumes)
            return
        if not stack.services:
            report("nothing to stop")
        native.down(report)
        if volumes:
            native.remove_data()
            report(f"data and logs removed from {state.directory()}")
        elif stack.services:
            report(
                f"data and logs are kept in {state.directory()}; remove them: otel-dflash stack down "
                "--volumes"
            )


def status() -> list[ServiceStatus]:
    """Return the state of each service of the stack.

    Raises:
        EngineError: The record of what was started cannot be read.
    """
    stack = state.read()
    rows = []
    for name in NAMES:
        service = SERVICES[name]
        started = stack.services.get(name)
        values = {**service.variables, **(started.variables if started else stack.compose or {})}
        if started is None and stack.compose is None:
            word = "not started"
        elif started and not started.is_alive():
            word = "ended"
        else:
            word = "healthy" if is_healthy(service, values) else "not healthy"
        urls = tuple(template.format(**values) for template in service.addresses.values())
        rows.append(
            ServiceStatus(
                name,
                word,
                started.pid if started else None,
                started.version if started else service.engine.version,
                urls,
            )
        )
    return rows


def _choose(stack: Stack, way: Way | None) -> Way:
    running: Way | None = "docker" if stack.compose is not None else "native" if stack.alive() else None
    if running and way not in (None, running):
        other = "as processes of built engines" if running == "native" else "in containers"
        raise EngineError(f"the stack is already running {other}; stop it first: otel-dflash stack down")
    if way == "docker" and (reason := compose.problem(may_fetch=True)):
        raise EngineError(
            f"Docker cannot run the stack: {reason}; start Docker, or use the built engines: "
            "otel-dflash stack up --native"
        )
    if way or running:
        return way or running or "native"
    reason = compose.problem(may_fetch=False)
    if reason is None:
        return "docker"
    if all(find(SERVICES[name].engine) for name in NAMES):
        return "native"
    try:
        native.require_engines([SERVICES[name] for name in NAMES])
    except EngineError as error:
        raise EngineError(f"{error}. Nor can Docker run it: {reason}") from None
    return "native"


def _urls(values: Mapping[str, str]) -> dict[str, str]:
    services = [SERVICES[name] for name in reversed(NAMES)]
    return {
        what: template.format(**{**service.variables, **values})
        for service in services
        for what, template in service.addresses.items()
    }


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise an exception as Ctrl-C does, so that what was begun is undone."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    changed = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in changed:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
