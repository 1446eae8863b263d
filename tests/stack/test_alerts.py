"""The alerts, as promtool sees them: alerts_test.yaml has a case that fires and ones that don't for each."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.stack.conftest import need_engine
from tests.test_dashboards import COLLECTOR


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = need_engine("prometheus").with_name("promtool")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_rules_are_well_formed() -> None:
    checked = promtool("check", "rules", "--lint=all", "--lint-fatal", COLLECTOR / "alerts.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alerts_fire_when_they_should_and_only_then() -> None:
    tested = promtool("test", "rules", COLLECTOR / "alerts_test.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_cases_see_another_threshold(tmp_path: Path) -> None:
    shutil.copy(COLLECTOR / "alerts_test.yaml", tmp_path)
    shipped = (COLLECTOR / "alerts.yaml").read_text()
    for before, after in (
        ("> 0.25", "> 0.45"),
        ("> 1.25", "> 1.6"),
        ("> 120", "> 600"),
        ("> 60", "> 1000"),
        ("[10m]))\n          > 0\n", "[10m]))\n          > 5\n"),
    ):
        assert before in shipped
        (tmp_path / "alerts.yaml").write_text(shipped.replace(before, after))
        assert promtool("test", "rules", tmp_path / "alerts_test.yaml").returncode == 1, f"{before} -> {after}"
