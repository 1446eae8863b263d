"""The list of recordings: `list_runs` reads, `render` prints."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.text import Text

from otel_dflash.agent.recording import RecordingError, list_recordings
from otel_dflash.views.render import new_table, print_uncut
from otel_dflash.views.summary import Summary, summarise
from otel_dflash.views.units import duration, integer, size


@dataclass(frozen=True)
class RunRow:
    """One recording. `problem` says why it can't be read; then the rest is what could be had."""

    run: str
    directory: Path
    started_wall_ns: int = 0
    duration_ns: int = 0
    workers: int = 0
    records: int = 0
    size_bytes: int = 0
    state: str = ""  # what the recording says of its workers' ends
    problem: str | None = None


def list_runs(base: Path) -> list[RunRow]:
    """Return the recordings below `base`, newest first, those that can't be read last. Reads all of them."""
    rows = [_row(directory) for directory in list_recordings(base)]
    return sorted(rows, key=lambda row: (row.problem is not None, -row.started_wall_ns, row.run))


def render(rows: list[RunRow], base: Path, console: Console) -> None:
    """Print the list of what lies below `base`."""
    if not rows:
        console.print(f"no recordings in {base}; record one: otel-dflash run -- python train.py", soft_wrap=True, highlight=False)
        return
    table = new_table("<run", "<started (UTC)", "duration", "workers", "records", "size", "<state")
    for row in rows:
        if row.problem is None:
            started = datetime.fromtimestamp(row.started_wall_ns / 1e9, tz=timezone.utc)
            numbers = (duration(row.duration_ns), integer(row.workers), integer(row.records), size(row.size_bytes))
            table.add_row(Text(row.run, style="bold"), f"{started:%Y-%m-%d %H:%M:%S}", *numbers, row.state)
    print_uncut(console, table)
    for row in rows:
        if row.problem is not None:
            console.print(Text(f"not readable: {row.problem}"), soft_wrap=not console.is_terminal)


def _row(directory: Path) -> RunRow:
    try:
        summary = summarise(directory)
    except (RecordingError, OSError) as error:
        return RunRow(directory.name, directory, problem=str(error))
    return RunRow(
        run=directory.name,  # which is what commands take: a further node of a run is `<run>@<node>`
        directory=directory,
        started_wall_ns=summary.started_wall_ns,
        duration_ns=summary.duration_ns,
        workers=len(summary.workers),
        records=summary.records,
        size_bytes=summary.size_bytes,
        state=_state(summary),
    )


def _state(summary: Summary) -> str:
    if not summary.workers:
        return "no workers"
    going_on = sum(not worker.finished for worker in summary.workers)
    killed = sum(worker.killed for worker in summary.workers)
    parts = [f"{going_on} of {len(summary.workers)} not finished"] if going_on else ["finished"]
    parts += [f"{killed} killed"] if killed else []
    parts += [f"{' and '.join(summary.undelivered)} not sent"] if summary.undelivered else []
    return ", ".join(parts)
