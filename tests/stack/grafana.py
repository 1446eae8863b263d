"""Asks Prometheus as Grafana does for a panel, a variable or an alert."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any

from tests.stack.prometheus_api import Labels, Prometheus

Series = tuple[Labels, list[float]]
"""Labels, and the values that are numbers."""


class Grafana(Prometheus):
    """Queries with their variables replaced; what is no number does not count as an answer."""

    def panel(self, target: Mapping[str, Any], variables: Mapping[str, str], seconds: float) -> list[Series]:
        """Return what a panel shows of one of its queries: the last `seconds`, or only the newest values."""
        query = filled_in(target["expr"], variables)
        return self.range(query, seconds) if target.get("range") else self.instant(query)

    def instant(self, query: str, after_s: float = 0.0) -> list[Series]:
        """Return the value of each series, as it is in `after_s` if nothing more comes."""
        found = self.query(query, time.time() + after_s)
        return [(labels, [value]) for labels, value in found if not math.isnan(value)]

    def range(self, query: str, seconds: float) -> list[Series]:
        """Return each series over the last `seconds`."""
        now = time.time()
        found = self._get("query_range", {"query": query, "start": now - seconds, "end": now, "step": 1})[
            "result"
        ]
        numbers = ((item["metric"], [float(value) for _, value in item["values"]]) for item in found)
        series = (
            (labels, [value for value in values if not math.isnan(value)]) for labels, values in numbers
        )
        return [(labels, values) for labels, values in series if values]

    def variable(self, query: str, variables: Mapping[str, str]) -> list[str]:
        """Return what a variable ``label_values(selector, label)`` offers."""
        form = re.fullmatch(r"label_values\((.+), (\w+)\)", filled_in(query, variables))
        assert form, query
        values: list[str] = self._get(f"label/{form[2]}/values", {"match[]": form[1]})
        return values

    def evaluated_rules(self) -> dict[str, dict[str, Any]]:
        """Return the rules that Prometheus has evaluated at least once, by name."""
        rules = [rule for group in self._get("rules", {})["groups"] for rule in group["rules"]]
        return {rule["name"]: rule for rule in rules if not rule["lastEvaluation"].startswith("0001")}


def filled_in(query: str, variables: Mapping[str, str]) -> str:
    """Return a query with its variables replaced."""
    for name in sorted(variables, key=len, reverse=True):
        query = query.replace(f"${name}", variables[name])
    assert "$" not in query, query
    return query
