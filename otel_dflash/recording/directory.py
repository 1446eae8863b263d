"""The directory of recordings: list them, measure them, find one by name."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from otel_dflash import config
from otel_dflash.config import ConfigError
from otel_dflash.recording.overview import read_overview
from otel_dflash.recording.run_info import RUN_FILE, read_info


def list_recordings(base: Path) -> list[Path]:
    """Return the recordings below `base` in the order of their names, [] if there is no such directory."""
    return sorted(path.parent for path in base.glob(f"*/{RUN_FILE}"))


def recording_bytes(directory: Path) -> int:
    """Return the size of all files of a recording.

    Raises:
        OSError: The directory cannot be read.
    """
    size = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # a temporary file of a running agent, or removed by the size cap
            status = path.stat()
            size += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return size


def find_recording(run: str, directory: Path | None, report: Callable[[str], None]) -> Path:
    """Return the recording that `run` names.

    `run` is a path, `latest`, a run id, `<run>@<node>`, or the beginning of exactly one of these.
    `latest` is the newest recording that has records; `report` gets a line if newer ones have none.

    Raises:
        ConfigError: No recording has that name, or several begin with it.
    """
    base = directory.absolute() if directory else config.recordings_directory()
    if os.sep in run or (Path(run) / RUN_FILE).is_file():
        return Path(run)
    found = {path.name: path for path in list_recordings(base)}
    if not found:
        raise ConfigError(
            f"no recordings in {base}; make one: otel-dflash run -- python train.py, or point --dir at them"
        )
    newest_first = sorted(found.values(), key=lambda path: -(path / RUN_FILE).stat().st_mtime_ns)
    if run == "latest":
        return _newest_with_records(newest_first, report)
    first, _, node = run.partition("@")  # the first node of a run records under its bare id
    if node and first in found and read_info(found[first]).host == node:
        return found[first]
    matches = [run] if run in found else [name for name in found if name.startswith(run)]
    if len(matches) == 1:
        return found[matches[0]]
    if matches:
        names = ", ".join(matches[:4]) + (", ..." if len(matches) > 4 else "")
        raise ConfigError(f"{len(matches)} runs begin with {run!r}: {names}; give more of the id")
    raise ConfigError(
        f"no run {run!r} in {base}; the newest is {newest_first[0].name}, `otel-dflash runs` lists all"
    )


def _newest_with_records(newest_first: list[Path], report: Callable[[str], None]) -> Path:
    """Return the first recording that has records; if none has, the newest."""
    for position, path in enumerate(newest_first):
        if _has_records(path):
            if position:
                empty = newest_first[0].name if position == 1 else f"{position} newer runs"
                verb = "is newer, but has" if position == 1 else "have"
                report(f"{empty} {verb} no records; showing {path.name}")
            return path
    return newest_first[0]


def _has_records(recording: Path) -> bool:
    with suppress(OSError):
        return read_overview(recording).records > 0
    return False
