"""What the gate says of counts. That it counts the same each time is callgrind's part: make instructions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.instructions import gate

COUNTS = {"two clock reads": 1_000_000, "phase": 6_000_000, "step": 15_500_000}


def test_ten_percent_more_is_taken_and_more_names_the_line() -> None:
    assert gate.verdicts({"phase": 6.60, "step": 13.95}, {"phase": 6.0, "step": 15.5}) == []
    assert gate.verdicts({"phase": 6.61, "step": 20.0}, {"phase": 6.0, "step": 15.5}) == [
        "phase costs 6.61 x two clock reads, +10.2% over the baseline of 6.00 x (at most +10%); "
        "if it is worth that: make instructions-baseline, and say why in the commit",
        "step costs 20.00 x two clock reads, +29.0% over the baseline of 15.50 x (at most +10%); "
        "if it is worth that: make instructions-baseline, and say why in the commit",
    ]


def test_a_line_that_only_one_side_has_is_wrong() -> None:
    assert gate.verdicts({"phase": 6.0}, {"step": 15.5}) == [
        "phase is not in the baseline: make instructions-baseline",
        "step is in the baseline and is not counted: make instructions-baseline",
    ]


def test_the_table_shows_counts_ratios_and_changes() -> None:
    assert gate.table(COUNTS, {"phase": 5.0, "step": 15.5}) == [
        "100,000 times                          instructions  / two clock reads  baseline  change",
        "two clock reads                           1,000,000               1.00",
        "phase                                     6,000,000               6.00      5.00  +20.0%",
        "step                                     15,500,000              15.50     15.50   +0.0%",
    ]


def test_a_python_without_baseline_fails_and_renewing_adds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = tmp_path / "baseline.json"
    baseline.write_text('{"3.9": {"phase": 1}}')
    monkeypatch.setattr(gate, "BASELINE", baseline)
    monkeypatch.setattr(gate, "count", lambda python: COUNTS)
    version = f"3.{sys.version_info[1]}"
    assert gate.main([]) == 1
    assert capsys.readouterr().err == (
        f"error: no baseline for Python {version}: make instructions-baseline with that Python, "
        "and commit baseline.json\n"
    )
    assert gate.main(["--renew"]) == 0
    found = {"phase": 6.0, "step": 15.5}
    assert json.loads(baseline.read_text()) == {"3.9": {"phase": 1}, version: found}
    assert gate.main([]) == 0


def test_without_valgrind_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="valgrind is missing: apt-get install valgrind"):
        gate.count(sys.executable)


def test_every_line_of_the_baselines_is_counted() -> None:
    lines = {tuple(lines) for lines in json.loads(gate.BASELINE.read_text()).values()}
    assert lines == {("phase", "step", "step with three attributes", "queue.Queue put and get, wrapped")}
