"""The list of recordings."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from otel_dflash.recording.segments import segments
from otel_dflash.session import DELIVERY_FILE
from otel_dflash.views import runs, units
from otel_dflash.views.summary import summarise
from tests.metrics.planted import PlantedRing
from tests.views.test_summary import STARTED, S, record, two_workers


def shown(base: Path, width: int, is_terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=is_terminal, color_system=None)
    runs.show([base], console)
    return file.getvalue()


def test_runs_are_listed_newest_first_with_what_cannot_be_read(tmp_path: Path) -> None:
    two_workers(tmp_path / "old")
    live = PlantedRing(1, "target", 0)
    live.step(0, 2 * S)
    record(tmp_path / "live", [live], [live.flush()], STARTED + 60 * S)
    record(tmp_path / "empty", [], [], STARTED + 30 * S)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    rows = runs.list_runs(tmp_path)
    assert [(row.run, row.workers, row.records, row.duration_ns, row.state) for row in rows[:3]] == [
        ("live", 1, 1, 2 * S, "1 of 1 not finished"),
        ("empty", 0, 0, 0, "no workers"),
        ("old", 2, 11, S, "finished, 1 killed"),
    ]
    assert (rows[3].run, (rows[3].problem or "").partition(": ")[0]) == (
        "broken",
        f"{tmp_path}/broken/run.json cannot be read",
    )


def test_the_list_agrees_with_the_summary(tmp_path: Path) -> None:
    summary = summarise(two_workers(tmp_path / "run-1"))
    (row,) = runs.list_runs(tmp_path)
    assert (
        row.run,
        row.directory,
        row.started_wall_ns,
        row.duration_ns,
        row.workers,
        row.records,
        row.size_bytes,
    ) == (
        summary.run,
        summary.directory,
        summary.started_wall_ns,
        summary.duration_ns,
        len(summary.workers),
        summary.records,
        summary.size_bytes,
    )


def test_no_frame_of_a_run_that_has_ended_is_read(tmp_path: Path) -> None:
    directory = two_workers(tmp_path / "run-1")
    before = runs.list_runs(tmp_path)
    for _, path in segments(directory):
        path.write_bytes(bytes(path.stat().st_size))
    assert runs.list_runs(tmp_path) == before


def test_what_was_not_sent_is_part_of_the_state(tmp_path: Path) -> None:
    directory = two_workers(tmp_path / "run-1")
    states = {
        "spans": {"delivered": False, "reason": "refused"},
        "metrics": {"delivered": True},
        "recording": {"lost_frames": 1},
    }
    (directory / DELIVERY_FILE).write_text(json.dumps(states))
    assert runs.list_runs(tmp_path)[0].state == "finished, 1 killed, spans not sent"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_pipe_gets_the_whole_width(width: int, tmp_path: Path) -> None:
    two_workers(tmp_path / "run-1")
    assert shown(tmp_path, width, is_terminal=False) == (
        "run    started (UTC)        duration  workers  records     size  state\n"
        f"{'─' * 83}\n"
        f"run-1  2026-01-01 12:00:00    1.00 s        2       11  {size_of(tmp_path / 'run-1')}  "
        "finished, 1 killed\n"
    )


@pytest.mark.parametrize("name", ["run[b]1", "20260726-103000-ab12cd34"])
def test_a_terminal_of_60_columns_gets_several_lines_a_run(name: str, tmp_path: Path) -> None:
    two_workers(tmp_path / name)
    assert shown(tmp_path, 60, is_terminal=True) == (
        "run\n"
        "  started (UTC)        duration  workers  records     size\n"
        "  state\n"
        "──────────────────────────────────────────────────────────\n"
        f"{name}\n"
        f"  2026-01-01 12:00:00    1.00 s        2       11  {size_of(tmp_path / name)}\n"
        "  finished, 1 killed\n"
    )


def test_no_runs_says_how_to_make_one(tmp_path: Path) -> None:
    base = tmp_path / "missing"
    assert shown(base, 20, is_terminal=False) == (
        f"no recordings in {base}; record one: otel-dflash run -- python train.py\n"
    )


def size_of(directory: Path) -> str:
    return units.size(sum(path.stat().st_size for path in directory.iterdir()))
