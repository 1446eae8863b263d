"""The commands that show a view, made from the lines of views/registry.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from otel_dflash import config
from otel_dflash.cli.options import directory_option
from otel_dflash.config import ConfigError
from otel_dflash.console import report
from otel_dflash.recording.directory import find_recording, list_recordings
from otel_dflash.recording.run_info import RUN_FILE, read_info
from otel_dflash.views.registry import Option, Subject, View


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

    def show(directory: Path | None, runs: Sequence[str] = (), **options: str | bool | None) -> int:
        from rich.console import Console

        from otel_dflash.cli import recovery

        recovery.finish(wait=True)
        return view.load()(_paths(view.subject, runs, directory), Console(), **options)

    takes = directory_option(show)
    for option in reversed(view.options):
        takes = _option(option)(takes)
    if view.subject == Subject.TWO_RUNS:
        takes = click.argument("runs", nargs=2, metavar=view.subject.value)(takes)
    elif view.subject == Subject.NODES:
        takes = click.argument("runs", nargs=-1, metavar="[RUN]...")(takes)
    elif view.subject == Subject.RECORDING:
        takes = click.argument("runs", nargs=1, default="latest", metavar="[RUN]", callback=_as_list)(takes)
    return click.command(view.name, cls=ViewCommand, view=view)(takes)


def _as_list(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    return [value]


def _option(option: Option) -> Any:
    names = (option.flag, *filter(None, [option.name]))
    if not option.metavar:
        return click.option(*names, is_flag=True, help=option.help)
    choice = click.Choice(option.choices) if option.choices else None
    return click.option(*names, metavar=option.metavar, type=choice, help=option.help)


def _paths(subject: Subject, runs: Sequence[str], directory: Path | None) -> list[Path]:
    if subject == Subject.DIRECTORY:
        return [directory.absolute() if directory else config.recordings_directory()]
    found = []
    for run in runs or ["latest"]:
        path = find_recording(run, directory, report)
        found += [path] if subject != Subject.NODES else _nodes(path)
    return list(dict.fromkeys(found))


def _nodes(path: Path) -> list[Path]:
    """Return the recordings in a directory of them, else the path.

    Raises:
        ConfigError: They are of several runs.
        RecordingError: One of them cannot be read.
    """
    nodes = [] if (path / RUN_FILE).exists() else list_recordings(path)
    runs = sorted({read_info(node).run for node in nodes})
    if len(runs) > 1:
        raise ConfigError(
            f"{path} holds {len(runs)} runs ({', '.join(runs[:3])}{', ...' if len(runs) > 3 else ''}), and a "
            "view shows one; name it: otel-dflash summary RUN"
        )
    return nodes or [path]
