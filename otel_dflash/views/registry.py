"""The views of the command line. A view is one file in this folder and one line in VIEWS."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Subject(Enum):
    """What a view shows, and so what its command takes."""

    RECORDING = "recording"  # one recording, which the argument RUN names
    DIRECTORY = "directory"  # the directory of recordings


class Show(Protocol):
    """The function `show` of a view's module. Its docstring is the help of the command."""

    def __call__(self, path: Path, console: Console, /) -> None:
        """Print the view of what lies at `path`.

        Raises:
            RecordingError: There is no recording, or it cannot be read.
        """


@dataclass(frozen=True)
class View:
    """One view. Its module is imported when it is shown, so listing the commands stays quick."""

    name: str
    module: str
    subject: Subject
    short_help: str

    def load(self) -> Show:
        """Import the module and return its `show`."""
        show: Show = importlib.import_module(self.module).show
        return show


# In the order in which `otel-dflash --help` lists them.
VIEWS: Final = (
    View("runs", "otel_dflash.views.runs", Subject.DIRECTORY, "List recordings."),
    View("summary", "otel_dflash.views.render", Subject.RECORDING, "Show where the time of a run went."),
)
