"""What was read from a file is checked against annotations, down to its last element."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from otel_dflash.metrics.typed import check


class Pair(NamedTuple):
    first: int
    second: bool


@dataclass(slots=True)
class Totals:
    count: int
    mean: float | None = None
    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    words: tuple[int, int] = 0, 0
    ids: set[int] = field(default_factory=set)


@pytest.mark.parametrize(
    "value",
    [
        Totals(1),
        Totals(-1, 2, {"a": [Pair(1, True)]}, (1, 2), {3}),
        Totals(1 << 80, 2.5),
    ],
    ids=repr,
)
def test_a_value_of_its_types_passes(value: Totals) -> None:
    check(value, Totals)


@pytest.mark.parametrize(
    "value",
    [
        *("text", None, 1, [Totals(1)]),
        *(Totals(wrong) for wrong in ("1", None, 1.0, True, [1])),
        *(Totals(1, wrong) for wrong in ("1", False, float("nan"), float("inf"))),
        *(Totals(1, None, wrong) for wrong in ([], {1: []}, {"a": [(1, True)]}, {"a": [Pair(1, 1)]})),
        *(Totals(1, None, {}, wrong) for wrong in ([1, 2], (1,), (1, 2, 3), ("1", 2))),
        *(Totals(1, None, {}, (0, 0), wrong) for wrong in ([1], {"1"})),
    ],
    ids=repr,
)
def test_a_value_with_another_type_anywhere_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^not of type Totals: "):
        check(value, Totals)
