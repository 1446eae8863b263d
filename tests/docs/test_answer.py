"""docs/answer.md says what the code does: every kind, and the threshold of its rule."""

from __future__ import annotations

import re
from pathlib import Path

from otel_dflash.views.analysis import analyse, verdict, window
from otel_dflash.views.analysis.verdict import Kind

ROOT = Path(__file__).parents[2]


def test_each_kind_is_explained_with_its_thresholds() -> None:
    text = (ROOT / "docs/answer.md").read_text()
    rules = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.M))
    numbers = {
        kind: [float(number) for number in re.findall(r"\d+(?:\.\d+)?", rule)] for kind, rule in rules.items()
    }
    percent = 100.0
    assert numbers == {
        Kind.WORKER_ENDED: [window.LOST_SHARE_MIN * percent],
        Kind.WORKER_DIED: [
            window.SILENT_NS_MIN / 1e9,
            window.SILENT_STEPS,
            99.0,
            window.LOST_SHARE_MIN * percent,
        ],
        Kind.START_UP: [],
        Kind.INCOMPLETE: [
            analyse.WINDOW_NS_MIN / 1e9,
            analyse.TURNS_MIN,
            analyse.LOST_CONTEXTS_MAX * percent,
        ],
        Kind.SKEWED_WORKER: [verdict.SKEW_MIN, verdict.LIFT_MIN * percent],
        Kind.QUEUE_TOO_SMALL: [verdict.COUPLED_BELOW * percent, verdict.COUPLED_WAIT_MIN * percent],
        Kind.LOCK: [verdict.LOCK_SHARE_MIN * percent],
        Kind.BALANCED: [1.0, verdict.BALANCED_RATIO],
        Kind.UNNAMED_TIME: [],
        Kind.SLOW_QUEUE_OPERATION: [],
        Kind.ROLE_BOUND: [],
    }
    assert set(numbers) == set(Kind)
