"""The alerts, as promtool sees them: alerts_test.yaml has a case that fires and ones that don't for each."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.collector.test_dashboards import COLLECTOR, rules
from tests.stack.conftest import need_engine

RULE = re.compile(r"- (?:alert|record): (.*)\n")
LABELS_OR_NEXT = re.compile(r" labels:\n|- (?:alert|record|name): |\Z")
NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([smh]?)\b")
SECONDS = {"s": 1, "m": 60, "h": 3600}
EVALUATION_S = 30  # alerts_test.yaml's
SEEN_THROUGH = {"dflash:busy_seconds_per_step:rate10m": "DflashStraggler"}


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = need_engine("prometheus").with_name("promtool")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_rules_are_well_formed() -> None:
    checked = promtool("check", "rules", "--lint=all", "--lint-fatal", COLLECTOR / "alerts.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alerts_fire_when_they_should_and_only_then() -> None:
    tested = promtool("test", "rules", COLLECTOR / "alerts_test.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_number_of_every_rule_is_seen_by_the_cases_of_its_alert(tmp_path: Path) -> None:
    """One number at a time is made a little smaller, and a little larger: promtool must find it."""
    shutil.copy(COLLECTOR / "alerts_test.yaml", tmp_path)
    changed, survived = set(), []
    for rule, what, text in mutants((COLLECTOR / "alerts.yaml").read_text()):
        changed.add(rule)
        (tmp_path / "alerts.yaml").write_text(text)
        tested = promtool(
            "test", "rules", "--run", SEEN_THROUGH.get(rule, rule), tmp_path / "alerts_test.yaml"
        )
        if (tested.returncode, "FAILED:\n    expr: " in tested.stderr) != (1, True):
            survived.append(f"{rule}, {what}{tested.stderr}")
    assert survived == [], "\n".join(survived)
    assert changed == {rule.get("alert") or rule["record"] for rule in rules()}


def mutants(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield each rule's name with one number of it changed, as words and as the whole text: of its expression
    and its `for`."""
    for head in RULE.finditer(text):
        end = LABELS_OR_NEXT.search(text, head.end())
        assert end
        for number in NUMBER.finditer(text, head.end(), end.start()):
            before, after = text[: number.start()], text[number.end() :]
            for other in others(before, float(number[1]), number[2]):
                yield (
                    head[1],
                    f"line {before.count(chr(10)) + 1}: {number[0]} -> {other}",
                    before + other + after,
                )


def others(before: str, value: float, unit: str) -> list[str]:
    """Return what a number is changed to, by what it is. A resolution only to what is coarser than two
    points: a finer one sees no more."""
    if not unit:
        return [f"{value * factor:g}" for factor in (0.9, 1.1)] if value else ["-1", "2"]
    length_s = round(value * SECONDS[unit])
    if before.endswith(" for: "):
        return [f"{length_s - EVALUATION_S}s", f"{length_s + EVALUATION_S}s"]
    return ["5m"] if before.endswith(":") else [f"{length_s * 3 // 4}s", f"{length_s * 5 // 4}s"]
