"""The stack as processes of built engines: started, checked, stopped."""

from __future__ import annotations

import os
import select
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from otel_dflash.config import ConfigError
from otel_dflash.session import process_start
from otel_dflash.stack import state
from otel_dflash.stack.engines import EngineError, find
from otel_dflash.stack.services import SERVICES, Service, launch, wait_healthy
from otel_dflash.stack.state import Stack, Started

NAMES: Final = ("prometheus", "jaeger", "otelcol")
"""The services of one host, each before those that send to it."""

DERIVED: Final = {
    "JAEGER_PROMETHEUS_URL": "http://{PROMETHEUS_HOST}:{PROMETHEUS_PORT}",
    "OTELCOL_TRACES_ENDPOINT": "http://{JAEGER_HOST}:{JAEGER_HTTP_PORT}",
    "OTELCOL_METRICS_ENDPOINT": "http://{PROMETHEUS_HOST}:{PROMETHEUS_PORT}/api/v1/otlp",
}
"""Variables that are derived from others unless they are set."""

ROOM_BYTES: Final = 256 << 20
"""What must be free before anything is started: on a full disk the engines start, report that they are
healthy, and store nothing."""

TERM_S: Final = 15.0
"""How long a service may take to shut down: the collector sends what it holds."""

Report = Callable[[str], object]


def variables(environment: Mapping[str, str], recorded: Mapping[str, str]) -> dict[str, str]:
    """Return every variable of the stack: from the environment, else from `recorded`, with which it was
    started, else the default.

    Raises:
        ConfigError: A port is not a number from 1 to 65535, or two are the same.
    """
    defaults = {name: value for service in NAMES for name, value in SERVICES[service].variables.items()}
    given = {name: environment[name] for name in defaults if environment.get(name)}
    before = {**defaults, **recorded}
    values = {**before, **given}
    for name, template in DERIVED.items():
        if name not in given and before[name] == template.format(**before):
            values[name] = template.format(**values)
    check_ports(values, defaults)
    return values


def up(report: Report, environment: Mapping[str, str]) -> dict[str, str]:
    """Start what is not running yet, wait until all is healthy, and return the variables. The caller holds
    the lock.

    If it fails or is interrupted, everything that this call started is stopped again.

    Raises:
        ConfigError: A variable is wrong. EngineError: An engine is not built, the disk is full, a port is
        busy, or a service does not become healthy
            or is running with other settings.
    """
    stack = state.read()
    running = stack.alive()
    values = variables(environment, stack.variables())
    require_engines([SERVICES[name] for name in NAMES if name not in running])
    if len(running) < len(NAMES):
        require_room(state.directory(), "free some space, or set XDG_STATE_HOME to a larger disk")
    for name, started in running.items():
        _require_same(name, started, values)
    services = dict(stack.services)
    with ExitStack() as undo:
        undo.callback(_stop_begun, report, stack, services)
        for name in NAMES:
            if name not in running:
                _start(SERVICES[name], values, services)
            started = services[name]
            wait_healthy(SERVICES[name], started, state.directory(), started.variables)
            report(
                f"{name} {started.version} {'is already running' if name in running else 'is running'}: "
                f"pid {started.pid}"
            )
        undo.pop_all()
    return values


def _stop_begun(report: Report, stack: Stack, services: dict[str, Started]) -> None:
    """Stop those of `services` that `stack` did not contain."""
    begun = [name for name in NAMES if services.get(name) is not stack.services.get(name)]
    for name in reversed(begun):
        _end(services.pop(name))
    state.write(Stack(services))
    if begun:
        report(f"stopped what this command had started: {', '.join(begun)}")


def require_room(place: Path, remedy: str) -> None:
    """Check that the disk has room for the stack to start.

    Raises:
        EngineError: The disk is too full.
        OSError: `place` does not exist.
    """
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < ROOM_BYTES:
        raise EngineError(
            f"{place} has {free_bytes >> 20} MiB free, and the stack needs {ROOM_BYTES >> 20} MiB to "
            f"start; {remedy}"
        )


def down(report: Report) -> None:
    """Stop what `up` started and is still running, senders before receivers. The caller holds the lock."""
    stack = state.read()
    for name in reversed(NAMES):
        if started := stack.services.get(name):
            report(f"{name} {_end(started)}")
    state.write(Stack())


def remove_data() -> None:
    """Remove the storage and logs of the services, which must not be running.

    Raises:
        EngineError: Something cannot be removed.
    """
    for name in NAMES:
        try:
            shutil.rmtree(state.directory() / name)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise state.unusable(error) from None
        (state.directory() / f"{name}.log").unlink(missing_ok=True)


def require_engines(services: list[Service]) -> None:
    """Check that the engines of the services are built.

    Raises:
        EngineError: One is not built; the text names them and the remedy.
    """
    missing = [service.engine for service in services if find(service.engine) is None]
    if missing:
        names = " ".join(engine.name for engine in missing)
        minutes = sum(engine.minutes for engine in missing)
        raise EngineError(
            f"not built here: {names}; build, once, about {minutes} minutes: otel-dflash stack build {names}"
        )


def check_ports(values: Mapping[str, str], defaults: Mapping[str, str]) -> None:
    """Check the variables that hold ports.

    Raises:
        ConfigError: A port is not a number from 1 to 65535, or two are the same.
    """
    names: dict[int, str] = {}
    for name, port in values.items():
        if not name.endswith("_PORT"):
            continue
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise ConfigError(
                f"{name} must be a port from 1 to 65535, got {port!r}; unset it for {defaults[name]}"
            )
        if int(port) in names:
            raise ConfigError(
                f"{names[int(port)]} and {name} are both {port}; choose another for one of them"
            )
        names[int(port)] = name


def _start(service: Service, values: Mapping[str, str], services: dict[str, Started]) -> None:
    """Start a service; it is in `services` and in stack.json before its engine starts."""
    own = {name: values[name] for name in service.variables}

    def remember(pid: int) -> None:
        services[service.name] = Started(pid, process_start(pid) or 0, service.engine.version, own)
        state.write(Stack(services))

    launch(
        service,
        state.directory(),
        own,
        remember,
        [value for name, value in values.items() if name.endswith("_HOST")],
    )


def _require_same(name: str, started: Started, values: Mapping[str, str]) -> None:
    for variable, value in started.variables.items():
        if values[variable] != value:
            raise EngineError(
                f"{name} is running with {variable}={value}, not {values[variable]}; stop it first: "
                "otel-dflash stack down"
            )


def _end(started: Started) -> str:
    """End the process that was started, and no other; return what became of it."""
    try:
        descriptor = os.pidfd_open(started.pid)
    except ProcessLookupError:
        return "had already ended"
    try:
        # checked after opening: the descriptor refers to this process whatever becomes of the pid
        if not started.is_alive():
            return "had already ended"
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if select.select([descriptor], [], [], TERM_S)[0]:
            return "stopped"
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [])
        return f"did not end within {TERM_S:g} s and was killed"
    except ProcessLookupError:
        return "stopped"
    finally:
        os.close(descriptor)
