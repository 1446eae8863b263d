"""What several commands share: options, exit codes, and the order they are listed in."""

from __future__ import annotations

import os
from pathlib import Path

import click

from otel_dflash.config import KEEP_VARIABLE

EXIT_OK = 0
EXIT_FAILED = 1


class CommandsInOrder(click.Group):
    """Lists commands in the order of the source: the first to use comes first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names as they were added."""
        return list(self.commands)


directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory of the recordings.  [default: $OTEL_DFLASH_DIR, else ./dflash-runs]",
)
endpoint_option = click.option(
    "--endpoint",
    metavar="URL",
    help="OTLP endpoint, such as http://localhost:4317.  [default: $OTEL_EXPORTER_OTLP_ENDPOINT]",
)
protocol_option = click.option(
    "--protocol",
    type=click.Choice(["grpc", "http/protobuf"]),
    help="OTLP protocol.  [default: $OTEL_EXPORTER_OTLP_PROTOCOL, else grpc]",
)


def _set_keep(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Set the variable from which the agent reads this."""
    if value is not None:
        os.environ[KEEP_VARIABLE] = value


keep_option = click.option(
    "--keep",
    metavar="WHAT",
    expose_value=False,
    callback=_set_keep,
    help="Traces to send whatever OTEL_TRACES_SAMPLER decides, with those of the items consumed: slow (over "
    "the p99 of its role), "
    "error, or slow,error.  [default: $OTEL_DFLASH_KEEP, else none]",
)
