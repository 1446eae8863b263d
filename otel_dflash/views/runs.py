"""The list of recordings, from their overviews: no frame of a run that has ended is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console

from otel_dflash.recording.delivery import read_delivery
from otel_dflash.recording.directory import list_recordings, recording_bytes
from otel_dflash.recording.overview import Overview, read_overview
from otel_dflash.recording.run_info import RecordingError, read_info
from otel_dflash.session_list import find_session
from otel_dflash.views.service import unserved
from otel_dflash.views.table import Table, styled
from otel_dflash.views.units import duration, integer, size


@dataclass(frozen=True)
class RunRow:
    """One recording. If it cannot be read, `problem` says why, and only its name and place are set."""

    run: str
    directory: Path
    started_wall_ns: int = 0
    duration_ns: int = 0
    workers: int = 0
    records: int = 0
    size_bytes: int = 0
    state: str = ""  # how its workers ended
    problem: str | None = None
    unserved: str | None = None  # that no agent records it, although it has not ended


def show(paths: Sequence[Path], console: Console) -> int:
    """List the recordings, the newest first."""
    render(list_runs(paths[0]), paths[0], console)
    return 0


def list_runs(base: Path) -> list[RunRow]:
    """Return the recordings below `base`, the newest first, those that cannot be read last."""
    rows = [_row(directory) for directory in list_recordings(base)]
    return sorted(rows, key=lambda row: (row.problem is not None, -row.started_wall_ns, row.run))


def render(rows: list[RunRow], base: Path, console: Console) -> None:
    """Print the list of what lies below `base`."""
    if not rows:
        console.print(
            styled(f"no recordings in {base}; record one: otel-dflash run -- python train.py"), soft_wrap=True
        )
        return
    table = Table("<run", "<started (UTC)", "duration", "workers", "records", "size", "<state")
    for row in rows:
        if row.problem is None:
            started = datetime.fromtimestamp(row.started_wall_ns / 1e9, tz=timezone.utc)
            table.add_row(
                styled(row.run, style="bold"),
                f"{started:%Y-%m-%d %H:%M:%S}",
                duration(row.duration_ns),
                integer(row.workers),
                integer(row.records),
                size(row.size_bytes),
                row.state,
            )
    table.print(console)
    for row in rows:
        if row.unserved is not None:
            console.print(styled(f"{row.run}: {row.unserved}"), soft_wrap=not console.is_terminal)
        if row.problem is not None:
            console.print(styled(f"not readable: {row.problem}"), soft_wrap=not console.is_terminal)


def _row(directory: Path) -> RunRow:
    # What commands take is the directory's name: another node of a run is `<run>@<node>`.
    try:
        info = read_info(directory)
        overview = read_overview(directory)
        size_bytes = recording_bytes(directory)
    except (RecordingError, OSError) as error:
        return RunRow(directory.name, directory, problem=str(error))
    session = find_session(directory)
    no_agent = unserved(session) if session else None
    return RunRow(
        run=directory.name,
        directory=directory,
        started_wall_ns=info.wall_ns(overview.first_ns) if overview.workers else info.anchor_wall_ns,
        duration_ns=overview.last_ns - overview.first_ns,
        workers=len(overview.workers),
        records=overview.records,
        size_bytes=size_bytes,
        state=_state(overview, read_delivery(directory).undelivered) + (", no agent" if no_agent else ""),
        unserved=no_agent,
    )


def _state(overview: Overview, not_sent: dict[str, str]) -> str:
    if not overview.workers:
        return "no workers"
    parts = ["finished"]
    if overview.unfinished:
        parts = [f"{overview.unfinished} of {len(overview.workers)} not finished"]
    if overview.killed:
        parts.append(f"{overview.killed} killed")
    if not_sent:
        parts.append(f"{' and '.join(not_sent)} not sent")
    return ", ".join(parts)
