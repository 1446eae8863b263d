"""`otel-dflash stack`: builds, starts, shows and stops the engines on this host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from otel_dflash.cli.options import EXIT_FAILED, EXIT_OK, CommandsInOrder

if TYPE_CHECKING:
    from otel_dflash.stack.control import Way


@click.group(
    "stack", cls=CommandsInOrder, short_help="Start a collector, Jaeger and Prometheus on this host."
)
def stack_group() -> None:
    """Start a collector, Jaeger and Prometheus on this host, to look at traces and metrics.

    They listen at 127.0.0.1 only. Ports are chosen by variables such as OTELCOL_GRPC_PORT;
    collector/README.md lists all.

    \b
    Examples:
      otel-dflash stack up
      otel-dflash run --stack -- python train.py
      OTELCOL_GRPC_PORT=24317 otel-dflash stack up
    """


@stack_group.command("build", short_help="Build the engines, once.")
@click.argument("engines", nargs=-1, metavar="[ENGINE]...")
def build_command(engines: tuple[str, ...]) -> int:
    """Build ENGINEs (otelcol, prometheus, jaeger; default: all) from their modules into ~/.cache/otel-dflash.

    An engine that is already built is not built again. With Docker nothing needs to be built.
    """
    from otel_dflash.stack import engines as known
    from otel_dflash.stack.control import interruptible

    unknown = [name for name in engines if name not in known.ENGINES]
    if unknown:
        raise click.UsageError(f"{unknown[0]!r} is not an engine; choose from {', '.join(known.ENGINES)}")
    with interruptible():
        for engine in known.ENGINES.values():
            if engines and engine.name not in engines:
                continue
            was_there = known.find(engine) is not None
            begun = time.monotonic()
            path = known.build(engine, click.echo)
            took = "is already built" if was_there else f"built in {time.monotonic() - begun:.0f} s"
            click.echo(f"{engine.name} {engine.version} {took}: {path}")
    return EXIT_OK


@stack_group.command("up", short_help="Start the stack, and wait until it is healthy.")
@click.option(
    "--docker", "way", flag_value="docker", help="In containers, even if the images must be fetched."
)
@click.option("--native", "way", flag_value="native", help="As processes of the built engines.")
def up_command(way: Way | None) -> int:
    """Start what is not running yet, wait until all is healthy, and print the addresses.

    It runs in containers if Docker answers and the images are here, else as processes of the built engines.
    """
    from otel_dflash.stack import control

    addresses = control.up(click.echo, way)
    click.echo()
    for line in addresses.lines():
        click.echo(line)
    click.echo("\nsend it a run: otel-dflash run --stack -- python train.py")
    return EXIT_OK


@stack_group.command("status", short_help="Show the state of each service.")
def status_command() -> int:
    """Show state, process, version and addresses of each service. The exit code is 0 when all are healthy,
    else 1."""
    from rich.console import Console

    from otel_dflash.stack import control
    from otel_dflash.views.table import Table

    rows = control.status()
    table = Table("<service", "<state", "pid", "<version", "<addresses")
    for row in rows:
        table.add_row(
            row.name,
            row.state,
            "" if row.pid is None else str(row.pid),
            row.version,
            "  ".join(row.addresses),
        )
    table.print(Console())
    return EXIT_OK if all(row.state == "healthy" for row in rows) else EXIT_FAILED


@stack_group.command("down", short_help="Stop what `up` started.")
@click.option("--volumes", is_flag=True, help="Remove the stored traces and metrics, and the logs.")
def down_command(volumes: bool) -> int:
    """Stop what `up` started, and nothing else. Stored traces and metrics are kept, unless --volumes."""
    from otel_dflash.stack import control

    control.down(click.echo, volumes=volumes)
    return EXIT_OK
