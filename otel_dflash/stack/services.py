"""The engines as services: how each is started with the shared configuration, where it listens, and when it
is healthy.

Everything that differs between deployments is a variable: compose.yaml sets them in containers, `otel-dflash
stack` and the tests for the built binaries. The files of collector/ are the same everywhere.
"""

from __future__ import annotations

import errno
import http.client
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from otel_dflash.stack.engines import ENGINES, Engine, EngineError, collector_directory, find

HEALTHY_S: Final = 30.0
"""How long a service may take from its start until it is healthy."""

_GATE: Final = ("/bin/sh", "-c", 'read -r go && exec "$@" < /dev/null', "sh")
"""Waits for a line, then becomes the engine, with the same pid. It ends without one when its starter was
killed."""


class Process(Protocol):
    """A process that may still be running: subprocess.Popen, or one that another command started."""

    def poll(self) -> int | None:
        """Return None while it is running."""


@dataclass(frozen=True)
class Service:
    """One engine with one configuration. Arguments, health and addresses are templates over the variables,
    `config` and `storage`."""

    name: str
    engine: Engine
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    """All variables that its configuration reads, with the defaults; those whose names end in _PORT are ports
    that it listens on."""
    health: str
    """A URL that answers 200 once the service accepts data."""
    addresses: Mapping[str, str]
    """What listens -> its URL."""

    def values(self, variables: Mapping[str, str], storage: Path) -> dict[str, str]:
        """Return every variable: the defaults, overridden by `variables`, and the directories of
        configuration and storage.

        Raises:
            ValueError: This service has no such variable.
        """
        unknown = sorted(set(variables) - set(self.variables))
        if unknown:
            raise ValueError(
                f"{self.name} has no variable {', '.join(unknown)}; it has {', '.join(self.variables)}"
            )
        return {**self.variables, **variables, "config": str(collector_directory()), "storage": str(storage)}

    def ports(self, values: Mapping[str, str]) -> dict[str, int]:
        """Return the ports that it listens on, by variable."""
        return {name: int(values[name]) for name in self.variables if name.endswith("_PORT")}


_OTELCOL_PORTS: Final = {
    "OTELCOL_HOST": "127.0.0.1",
    "OTELCOL_GRPC_PORT": "4317",
    "OTELCOL_HTTP_PORT": "4318",
    "OTELCOL_HEALTH_PORT": "13133",
    "OTELCOL_STORAGE": "{storage}",
    "OTELCOL_QUEUE_BYTES": "4000000000",
    "OTELCOL_MEMORY_MIB": "1024",
}

SERVICES: Final = {
    service.name: service
    for service in (
        Service(
            "prometheus",
            ENGINES["prometheus"],
            (
                "--config.file={config}/prometheus.yaml",
                "--storage.tsdb.path={storage}",
                "--storage.tsdb.retention.time=90d",
                "--web.listen-address={PROMETHEUS_HOST}:{PROMETHEUS_PORT}",
                "--web.enable-otlp-receiver",
                "--enable-feature=exemplar-storage,created-timestamp-zero-ingestion",
            ),
            {"PROMETHEUS_HOST": "127.0.0.1", "PROMETHEUS_PORT": "9090"},
            "http://{PROMETHEUS_HOST}:{PROMETHEUS_PORT}/-/ready",
            {"Prometheus": "http://{PROMETHEUS_HOST}:{PROMETHEUS_PORT}"},
        ),
        Service(
            "jaeger",
            ENGINES["jaeger"],
            ("--config={config}/jaeger.yaml",),
            {
                "JAEGER_HOST": "127.0.0.1",
                "JAEGER_GRPC_PORT": "14317",
                "JAEGER_HTTP_PORT": "14318",
                "JAEGER_QUERY_HTTP_PORT": "16686",
                "JAEGER_QUERY_GRPC_PORT": "16685",
                "JAEGER_HEALTH_PORT": "14133",
                "JAEGER_STORAGE": "{storage}",
                "JAEGER_PROMETHEUS_URL": "http://127.0.0.1:9090",
            },
            "http://{JAEGER_HOST}:{JAEGER_HEALTH_PORT}/status",
            {"Jaeger": "http://{JAEGER_HOST}:{JAEGER_QUERY_HTTP_PORT}"},
        ),
        Service(
            "otelcol",
            ENGINES["otelcol"],
            ("--config={config}/otelcol.yaml",),
            {
                **_OTELCOL_PORTS,
                "OTELCOL_TRACES_ENDPOINT": "http://127.0.0.1:14318",
                "OTELCOL_METRICS_ENDPOINT": "http://127.0.0.1:9090/api/v1/otlp",
            },
            "http://{OTELCOL_HOST}:{OTELCOL_HEALTH_PORT}/",
            {
                "OTLP over gRPC": "http://{OTELCOL_HOST}:{OTELCOL_GRPC_PORT}",
                "OTLP over HTTP": "http://{OTELCOL_HOST}:{OTELCOL_HTTP_PORT}",
            },
        ),
    )
}
"""In the order in which they are started: each before those that send to it."""


def launch(
    service: Service,
    directory: Path,
    variables: Mapping[str, str],
    remember: Callable[[int], object] = lambda pid: None,
    hosts: Iterable[str] = (),
) -> subprocess.Popen[bytes]:
    """Start a service that outlives its starter: storage in `directory`/<name>, its log in
    `directory`/<name>.log.

    The engine starts once `remember` has returned, so a starter that is killed or interrupted leaves no
    engine that it does not remember. The engine reaches `hosts`, those of the stack, without a proxy, and
    other backends as the environment says.

    Raises:
        EngineError: Its engine is not built, one of its ports is busy, or `directory` cannot be written.
    """
    program = find(service.engine)
    if program is None:
        raise EngineError(
            f"{service.engine.name} {service.engine.version} is not built here; build it: otel-dflash "
            "stack build"
        )
    storage = directory / service.name
    values = service.values(variables, storage)
    _check_ports(service, values)
    try:
        storage.mkdir(parents=True, exist_ok=True)
        with (directory / f"{service.name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*_GATE, program, *(argument.format(**values) for argument in service.arguments)],
                bufsize=0,
                cwd=directory,  # not the user's, who may want to remove or unmount it
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(service, values, hosts),
                start_new_session=True,
            )
        assert process.stdin
        with process.stdin as gate:
            remember(process.pid)
            gate.write(b"\n")
        return process
    except OSError as error:
        raise EngineError(
            f"{service.name} cannot be started in {directory}: {error.strerror or error}"
        ) from None


def wait_healthy(service: Service, process: Process, directory: Path, variables: Mapping[str, str]) -> None:
    """Return once the service is healthy.

    Raises:
        EngineError: The service ended, and the text has the end of its log; or it is not healthy after
        HEALTHY_S.
    """
    values = service.values(variables, directory / service.name)
    deadline = time.monotonic() + HEALTHY_S
    while not is_healthy(service, values):
        if process.poll() is not None:
            log = directory / f"{service.name}.log"
            last = "\n  ".join(log.read_text(errors="replace").splitlines()[-5:])
            raise EngineError(f"{service.name} ended before it was healthy; the end of {log}:\n  {last}")
        if time.monotonic() > deadline:
            log = directory / f"{service.name}.log"
            raise EngineError(
                f"{service.name} is not healthy after {HEALTHY_S:g} s; see {log}; to stop what is "
                "still running: otel-dflash stack down"
            )
        select.select([], [], [], 0.05)


def is_healthy(service: Service, values: Mapping[str, str]) -> bool:
    """Return whether the service reports that it accepts data."""
    url = urlsplit(service.health.format(**values))
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=2.0)  # ignores proxies
    try:
        connection.request("GET", url.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def around_proxies(environment: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Return an environment in which `hosts` are reached without a proxy, and everything else as before.

    Go and Python read both spellings, each prefers another one. Go never uses a proxy for loopback addresses
    and `localhost`.
    """
    around = ",".join(
        dict.fromkeys(filter(None, (environment.get("NO_PROXY"), environment.get("no_proxy"), *hosts)))
    )
    return {**environment, "NO_PROXY": around, "no_proxy": around}


def try_port(host: str, port: int) -> None:
    """Check that a process can listen on host:port now.

    Raises:
        OSError: No process can.
    """
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        # as the engines do: old connections do not block it
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def another_port(variable: str, port: int) -> str:
    """Return the remedy for a port that cannot be used."""
    return f"choose another port: {variable}={port + 20_000 if port < 45_000 else port - 20_000}"


def _environment(service: Service, values: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return around_proxies(
        {**kept, **{name: values[name].format(**values) for name in service.variables}}, hosts
    )


def _check_ports(service: Service, values: Mapping[str, str]) -> None:
    """Find a busy port before the engine does, whose message has neither the variable nor a remedy."""
    host_name, host = next((name, value) for name, value in values.items() if name.endswith("_HOST"))
    for name, port in service.ports(values).items():
        try:
            try_port(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                remedy = f"stop what listens there (ss -ltnp), or {another_port(name, port)}"
            elif isinstance(error, PermissionError):
                remedy = another_port(name, port)
            else:
                remedy = f"use an address of this host: {host_name}=127.0.0.1"
            reason = (error.strerror or str(error)).lower()
            raise EngineError(f"{service.name} cannot listen at {host}:{port}: {reason}; {remedy}") from None
