"""`otel-dflash doctor`: does telemetry leave this machine and arrive, and if not, why. The exit code is 0
when nothing is wrong, else 1."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import click

from otel_dflash.cli.options import endpoint_option, protocol_option
from otel_dflash.console import printable

if TYPE_CHECKING:
    from otel_dflash.doctor.finding import Finding

COLORS: Final = {"ok": "green", "warn": "yellow", "WRONG": "red", "-": "bright_black"}


@click.command("doctor", short_help="Prove that telemetry arrives, or find out why not.")
@endpoint_option
@protocol_option
@click.option(
    "--jaeger",
    metavar="URL",
    help="Look for the span there.  [default: that of the stack, when the endpoint is the stack's]",
)
@click.option("--prometheus", metavar="URL", help="Look for the metric there.  [default: as for --jaeger]")
@click.option("--local", is_flag=True, help="Check this machine only; send nothing.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=15.0,
    metavar="SECONDS",
    help="End the check of the path then.  [default: 15]",
)
def doctor_command(
    endpoint: str | None,
    protocol: str | None,
    jaeger: str | None,
    prometheus: str | None,
    local: bool,
    timeout_s: float,
) -> int:
    """Check this machine, then send one span and one metric by the configured route and look for them in
    Jaeger and Prometheus.

    Each line is one check; hops show the time they took. A line marked WRONG has the fault and the remedy.
    The exit code is 0 when nothing is wrong, 1 when something is, 2 for a setting that cannot work.

    \b
    Examples:
      otel-dflash doctor
      otel-dflash doctor --endpoint http://localhost:4317 --jaeger http://localhost:16686 --prometheus
      http://localhost:9090
    """
    from otel_dflash.doctor.gpu import NVML_S, Nvml

    path = None
    if not local:
        from otel_dflash.doctor import local_stack
        from otel_dflash.doctor.delivery_path import DeliveryPath

        prepare(endpoint, protocol)
        found = local_stack.addresses(os.environ)
        path = DeliveryPath(
            os.environ, jaeger or found.get("Jaeger"), prometheus or found.get("Prometheus"), timeout_s
        )
    nvml = Nvml()
    wrong = _print("this machine", _local_findings())
    wrong += _print("", [nvml.check(NVML_S)])
    if path:
        wrong += _print("the path", path.check())
    if wrong:
        click.secho(f"\n{wrong} WRONG: see above", fg="red")
    elif path and path.is_checked:
        click.secho("\nall right", fg="green")
    else:
        click.secho("\nnothing is wrong here; the path was not checked", fg="yellow")
    if path and path.is_stuck:  # in a call of an exporter that would delay the exit
        sys.stdout.flush()
        os._exit(1 if wrong else 0)
    return 1 if wrong else 0


def prepare(endpoint: str | None, protocol: str | None) -> None:
    """Make os.environ what an agent would see.

    Raises:
        ConfigError: A setting cannot work.
    """
    from otel_dflash.cli import environment
    from otel_dflash.otlp.exporters import prepare_environment

    environment.take_up(endpoint, protocol)
    prepare_environment()


def _local_findings() -> Iterator[Finding]:
    from otel_dflash.doctor import agents, local_stack, machine

    yield from machine.check()
    yield from agents.check()
    yield from local_stack.check()


def _print(title: str, findings: Iterable[Finding]) -> int:
    """Print findings as they arrive; return how many are wrong."""
    wrong = 0
    if title:
        click.echo(click.style(f"\n{title}", bold=True))
    for finding in findings:
        status = finding.status.value
        wrong += status == "WRONG"
        took = "" if finding.took_s is None else f"{finding.took_s * 1e3:.1f} ms"
        shown = (
            f"  {click.style(f'{status:<5}', fg=COLORS[status])}  {finding.check:<18}  {took:>10}  "
            f"{printable(finding.text)}"
        )
        click.echo(shown.rstrip())
        sys.stdout.flush()
    return wrong
