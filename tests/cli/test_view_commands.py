"""Commands made from the registry of views: a view is a file and a line."""

from __future__ import annotations

import inspect
from pathlib import Path

import click
import pytest

from otel_dflash.cli.view_commands import view_command
from otel_dflash.config import ConfigError
from otel_dflash.views.registry import VIEWS, Option, Subject, View
from tests.cli.test_cli import make_recording

VIEW_FILE = '''\
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console


def show(paths: Sequence[Path], console: Console, **options: str | bool | None) -> int:
    """Show where it lies.

    \\b
    Examples:
      otel-dflash place
    """
    console.print(*(path.name for path in paths), *(f"{name}={value}" for name, value in options.items()))
    return 3
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a file with a view and return the name of its module."""
    (tmp_path / "planted_view.py").write_text(VIEW_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OTEL_DFLASH_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("OTEL_DFLASH_SHM", str(tmp_path))
    return "planted_view"


def run(command: click.Command, *arguments: str) -> None:
    assert command.main(list(arguments), prog_name="otel-dflash place", standalone_mode=False) in (0, 3)


def test_a_view_of_a_recording_takes_a_run(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_recording(tmp_path / "runs", "night-6", 2_000_000_000)
    make_recording(tmp_path / "runs", "night-7", 1_000_000_000)
    command = view_command(View("place", module, Subject.RECORDING, "Show a place."))
    run(command)
    run(command, "night-7")
    run(command, "night-7", "--dir", str(tmp_path / "runs"))
    assert capsys.readouterr().out == "night-6\nnight-7\nnight-7\n"


def test_a_view_of_the_directory_takes_no_run(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = view_command(View("place", module, Subject.DIRECTORY, "Show a place."))
    run(command)
    run(command, "--dir", str(tmp_path / "elsewhere"))
    assert capsys.readouterr().out == "runs\nelsewhere\n"
    with pytest.raises(click.UsageError):
        run(command, "night-7")


def test_a_view_of_nodes_takes_runs_and_directories_of_one_run(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("runs/night-6", "runs/night-7", "runs/night-7@b", "nodes/night-7", "nodes/night-7@b"):
        info = make_recording(tmp_path, place) / "run.json"
        info.write_text(info.read_text().replace(place, place.partition("/")[2].partition("@")[0]))
    command = view_command(View("place", module, Subject.NODES, "Show a place."))
    run(command, "night-7", "night-7@b")
    run(command, f"{tmp_path}/nodes/", "night-6")
    assert capsys.readouterr().out == "night-7 night-7@b\nnight-7 night-7@b night-6\n"
    with pytest.raises(ConfigError) as refused:
        run(command, f"{tmp_path}/runs")
    assert str(refused.value) == (
        f"{tmp_path}/runs holds 2 runs (night-6, night-7), and a view shows one; name it: otel-dflash summary RUN"
    )


def test_a_view_of_two_runs_takes_two(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("night-6", "night-7"):
        make_recording(tmp_path / "runs", name, 1_000_000_000)
    command = view_command(View("place", module, Subject.TWO_RUNS, "Show a place."))
    run(command, "night-7", "night-6")
    assert capsys.readouterr().out == "night-7 night-6\n"
    with pytest.raises(click.UsageError):
        run(command, "night-7")


def test_a_view_has_options(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        Option("--from", "TIME", "Where it begins.", "since"),
        Option("--format", "FORMAT", "In which form.", choices=("csv", "json")),
        Option("--live", "", "Again and again."),
    )
    command = view_command(View("place", module, Subject.DIRECTORY, "Show a place.", options))
    run(command, "--from", "5s", "--live")
    assert capsys.readouterr().out == "runs since=5s live=True format=None\n"
    with pytest.raises(click.BadParameter):
        run(command, "--format", "xml")


def test_the_help_of_a_command_is_that_of_its_view(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = view_command(View("place", module, Subject.RECORDING, "Show a place."))
    assert command.get_short_help_str() == "Show a place."
    run(command, "--help")
    assert capsys.readouterr().out.partition("\n\nOptions:")[0] == (
        "Usage: otel-dflash place [OPTIONS] [RUN]\n\n"
        "  Show where it lies.\n\n"
        "  Examples:\n"
        "    otel-dflash place"
    )


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_every_view_has_a_show_with_help(view: View) -> None:
    show = view.load()
    assert list(inspect.signature(show).parameters.values())[1].name == "console"
    assert show.__doc__
