"""The views of the command line. A view is one file in this folder and one line in VIEWS."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Subject(Enum):
    """What a view shows, and so what its command takes."""

    RECORDING = "RUN"  # one recording
    NODES = "RUN..."  # those of the nodes of one run
    TWO_RUNS = "RUN_A RUN_B"
    DIRECTORY = ""  # the directory of recordings


class Show(Protocol):
    """The function `show` of a view's module. Its docstring is the help of the command."""

    def __call__(self, paths: Sequence[Path], console: Console, /, **options: str | bool | None) -> int:
        """Print the view of what lies at `paths`; return the exit code.

        Options that were not given are None, flags False.

        Raises:
            RecordingError: There is no recording, or it cannot be read.
            ConfigError: An option has a wrong value.
        """


@dataclass(frozen=True)
class Option:
    """An option of a view's command, such as "--last". The view gets it as `last`, or under `name`."""

    flag: str
    metavar: str  # "" if it takes no value
    help: str
    name: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """One view. Its module is imported when it is shown, so listing the commands stays quick."""

    name: str
    module: str
    subject: Subject
    short_help: str
    options: tuple[Option, ...] = ()

    def load(self) -> Show:
        """Import the module and return its `show`."""
        show: Show = importlib.import_module(self.module).show
        return show


# In the order in which `otel-dflash --help` lists them.
VIEWS: Final = (
    View("runs", "otel_dflash.views.runs", Subject.DIRECTORY, "List recordings."),
    View("summary", "otel_dflash.views.render", Subject.RECORDING, "Show where the time of a run went."),
)
