"""The commands that show a view, made from the lines of views/registry.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from otel_dflash import config
from otel_dflash.cli.options import EXIT_OK, directory_option
from otel_dflash.console import report
from otel_dflash.recording.directory import find_recording
from otel_dflash.views.registry import Subject, View


class ViewCommand(click.Command):
    """A command whose help is that of its view. The view is imported only for that, or to be shown."""

    def __init__(self, view: View, **settings: Any) -> None:
        super().__init__(short_help=view.short_help, **settings)
        self._view = view

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the docstring of the view."""
        self.help = self._view.load().__doc__
        super().format_help_text(ctx, formatter)


def view_command(view: View) -> click.Command:
    """Return the command that shows a view."""

    def show(directory: Path | None, run: str | None = None) -> int:
        from rich.console import Console

        from otel_dflash.cli import recovery

        recovery.finish(wait=True)
        if run is not None:
            path = find_recording(run, directory, report)
        else:
            path = directory.absolute() if directory else config.recordings_directory()
        view.load()(path, Console())
        return EXIT_OK

    takes = directory_option(show)
    if view.subject == Subject.RECORDING:
        takes = click.argument("run", default="latest")(takes)
    return click.command(view.name, cls=ViewCommand, view=view)(takes)
