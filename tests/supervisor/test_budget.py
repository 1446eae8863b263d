"""How often and how soon a process is started again: a table of failures at given times."""

from __future__ import annotations

import pytest

from otel_dflash.supervisor.budget import RestartBudget


@pytest.mark.parametrize(
    ("failures", "waits_s"),
    [
        ([(10, 10), (100, 90), (190, 90)], [0, 0, 0]),  # rare ones: at once
        ([(0, 0)] * 5, [0, 0.1, 0.2, 0.4, 0.8]),  # fast ones: later each time
        ([(0, 20)] * 7, [0, 0, 0, 0, 0, 60, 120]),  # beyond the budget: one a minute
        ([(0, 20)] * 6 + [(60, 20), (150, 20)], [0, 0, 0, 0, 0, 60, 60, 30]),
        (
            [(0, 20)] * 5 + [(600, 20)] * 6,
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 60],
        ),  # it recovers, to the same budget
        ([(0, 0), (0, 0), (50, 50), (51, 1)], [0, 0.1, 0, 0]),  # one that worked begins a new series
        # never healthy, for a day
        ([(60 * n, 1) for n in range(1440)], [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[5] * 1433]),
    ],
)
def test_wait_before_each_restart(failures: list[tuple[float, float]], waits_s: list[float]) -> None:
    budget = RestartBudget(0)
    assert [budget.take(now_s, lived_s) for now_s, lived_s in failures] == pytest.approx(waits_s)
