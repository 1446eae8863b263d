"""Prometheus's HTTP API for tests."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from typing import Any

Labels = dict[str, str]
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Prometheus:
    """Asks one Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def environment(self) -> dict[str, str]:
        """Return the variables that send metrics here by OTLP, and nothing else anywhere."""
        return {
            "OTEL_TRACES_EXPORTER": "none",
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{self.url}/api/v1/otlp/v1/metrics",
        }

    def query(self, query: str, time_s: float) -> list[tuple[Labels, float]]:
        """Return the series of an instant query: labels and value."""
        result = self._get("query", {"query": query, "time": f"{time_s:.3f}"})["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def samples(
        self, selector: str, from_s: float, to_s: float
    ) -> list[tuple[Labels, list[tuple[float, Any]]]]:
        """Return every stored sample of each series with its own time in s: a number, or a native histogram
        as JSON says it."""
        data = self._get(
            "query", {"query": f"{selector}[{int((to_s - from_s) * 1000) + 1}ms]", "time": f"{to_s:.3f}"}
        )
        return [
            (
                series["metric"],
                [(time, float(value)) for time, value in series.get("values", [])]
                + [tuple(pair) for pair in series.get("histograms", [])],
            )
            for series in data["result"]
        ]

    def series(self, *selectors: str, from_s: float, to_s: float) -> list[Labels]:
        """Return the labels of every series that has a sample in that time."""
        found: list[Labels] = self._get(
            "series", [*(("match[]", one) for one in selectors), ("start", from_s), ("end", to_s)]
        )
        return found

    def exemplars(self, query: str, from_s: float, to_s: float) -> list[tuple[Labels, list[dict[str, Any]]]]:
        """Return the exemplars of each series."""
        data = self._get("query_exemplars", {"query": query, "start": from_s, "end": to_s})
        return [(series["seriesLabels"], series["exemplars"]) for series in data]

    def alertmanagers(self) -> list[str]:
        """Return the URLs that alerts are sent to."""
        return [one["url"] for one in self._get("alertmanagers", {})["activeAlertmanagers"]]

    def _get(self, path: str, arguments: Any) -> Any:
        with _DIRECT.open(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}", timeout=30
        ) as answer:
            content = json.load(answer)
        assert content["status"] == "success", content
        return content["data"]
