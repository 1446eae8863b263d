"""The dashboards and alerts as files: what can be said of them without an engine."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_dflash import semconv

COLLECTOR = Path(__file__).parents[2] / "collector"
GRAFANA = COLLECTOR / "grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
UNITS = {"s": "_seconds", "1": "_ratio"}  # as Prometheus appends them; {item} vanishes


def dashboards() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in FILES}


def panels() -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, panel)
        for name, board in dashboards().items()
        for panel in board["panels"]
        if panel["type"] != "row"
    ]


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for group in yaml.safe_load((COLLECTOR / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]


def queries() -> dict[str, str]:
    """Return every PromQL expression by where it is."""
    found = {
        f"{name}: {panel['title']} {target['refId']}": target["expr"]
        for name, panel in panels()
        for target in panel["targets"]
    }
    for name, board in dashboards().items():
        found |= {
            f"{name}: ${item['name']}": item["query"]["query"]
            for item in board["templating"]["list"]
            if item["type"] == "query"
        }
    return found | {str(rule.get("alert") or rule["record"]): rule["expr"] for rule in rules()}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="grafana-foundation-sdk needs Python 3.11")
def test_the_committed_dashboards_are_the_generated_ones() -> None:
    from collector.grafana.dashboards import generate

    generated = generate()
    assert {path.name for path in FILES} == set(generated)
    stale = [path.name for path in FILES if path.read_text() != generated[path.name]]
    assert stale == [], "generate them again: python -m collector.grafana.dashboards"


def test_every_panel_says_what_it_shows_and_how_to_read_it() -> None:
    for name, panel in panels():
        where = f"{name}: {panel['title']}"
        assert panel["title"], where
        assert panel["fieldConfig"]["defaults"]["unit"], where
        assert len(panel["description"]) >= 20, where
        assert panel["description"].endswith("."), where
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, where
        assert panel["targets"], where
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"]), where
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]), where


def test_panels_have_ids_and_titles_of_their_own_and_do_not_overlap() -> None:
    for name, board in dashboards().items():
        shown = [panel for panel in board["panels"] if panel["type"] != "row"]
        assert (
            len({panel["id"] for panel in shown}) == len({panel["title"] for panel in shown}) == len(shown)
        ), name
        cells = [cell for panel in board["panels"] for cell in cells_of(panel["gridPos"])]
        assert len(set(cells)) == len(cells), name
        assert max(x for x, _ in cells) < 24, name


def cells_of(position: dict[str, int]) -> list[tuple[int, int]]:
    x, y = position.get("x", 0), position.get("y", 0)
    return [(x + i, y + j) for i in range(position["w"]) for j in range(position["h"])]


def test_a_dashboard_has_what_grafana_requires() -> None:
    wanted = {"dflash-gpus", "dflash-pipeline", "dflash-telemetry"}
    assert {board["uid"] for board in dashboards().values()} == set(dashboards()) == wanted
    for board in dashboards().values():
        assert board["schemaVersion"] >= 39
        assert board["title"]
        assert "id" not in board  # Grafana gives it
        assert [item["name"] for item in board["templating"]["list"]][:3] == ["datasource", "run", "host"]


def test_queries_use_only_variables_that_the_dashboard_has() -> None:
    for board in dashboards().values():
        known = {item["name"] for item in board["templating"]["list"]} | {"__rate_interval", "__range"}
        assert set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]))) <= known


def test_every_name_in_a_query_is_in_semconv() -> None:
    constants = [value for name, value in vars(semconv).items() if name.isupper()]
    labels = {value.replace(".", "_") for value in constants if isinstance(value, str)}
    metrics = {
        name.replace(".", "_") + UNITS.get(unit, "")
        for name, unit, _ in (item for item in constants if isinstance(item, tuple))
    }
    known = labels | metrics | {f"{metric}_total" for metric in metrics}
    used = {
        (where, name)
        for where, query in queries().items()
        for name in re.findall(r"\b(?:dflash|host)_\w+", query)
    }
    assert {(where, name) for where, name in used if name not in known and name != "dflash_"} == set()


def test_no_query_is_made_to_answer_when_there_is_nothing() -> None:
    made_up = re.compile(r"\bor\b|\bvector\s*\(|\babsent\w*\s*\(|\bscalar\s*\(")
    assert made_up.search("a or vector(0)")
    assert {where: query for where, query in queries().items() if made_up.search(query)} == {}


def test_every_alert_has_a_severity_and_says_what_it_found_and_what_to_do() -> None:
    for rule in (rule for rule in rules() if "alert" in rule):
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "runbook"}, rule["alert"]
        kept = {
            label
            for by in re.findall(r"\bby \(([^)]*)\)", full_expression(rule))
            for label in re.split(r",\s*", by)
        }
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert {"dflash_run_id", "host_name"} <= used <= kept, rule["alert"]


def full_expression(rule: dict[str, Any]) -> str:
    """Return an alert's expression with what is recorded for it."""
    expression: str = rule["expr"]
    for other in rules():
        if "record" in other:
            expression = expression.replace(other["record"], f"({other['expr']})")
    return expression


def test_every_alert_is_tested_firing() -> None:
    tests = yaml.safe_load((COLLECTOR / "alerts_test.yaml").read_text())["tests"]
    samples = [
        sample for test in tests for check in test["promql_expr_test"] for sample in check["exp_samples"]
    ]
    fired = {
        name
        for sample in samples
        for name in re.findall(r'alertname="(\w+)".*alertstate="firing"', sample["labels"])
    }
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}


def test_provisioning_gives_the_data_sources_and_finds_the_dashboards() -> None:
    sources = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "otel-dflash.yaml").read_text())[
        "datasources"
    ]
    assert {source["uid"]: source["type"] for source in sources} == {
        "otel-dflash-prometheus": "prometheus",
        "otel-dflash-jaeger": "jaeger",
    }
    (prometheus,) = (source for source in sources if source["type"] == "prometheus")
    assert prometheus["jsonData"]["exemplarTraceIdDestinations"] == [
        {"name": "trace_id", "datasourceUid": "otel-dflash-jaeger"}
    ]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "otel-dflash.yaml").read_text())[
        "providers"
    ]
    assert (provider["type"], provider["options"]["path"]) == ("file", "/var/lib/grafana/dashboards")
