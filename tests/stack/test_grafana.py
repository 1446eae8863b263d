"""Every query of the dashboards and alerts answers from what real runs of the example sent: agents -> otelcol
-> Prometheus."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.collector import test_dashboards
from tests.processes import clean_environment
from tests.running import Running, death, poll
from tests.stack.conftest import Stack
from tests.stack.grafana import Grafana

EXAMPLE = Path(__file__).parents[2] / "examples" / "dflash" / "train.py"
PAGE = Path(__file__).parents[2] / "docs" / "prometheus.md"
PROMQL = PAGE.read_text().partition("```promql\n")[2].partition("```")[0]
NEEDS_A_GPU: set[str] = set()  # titles of panels
VARIABLES = {
    "__rate_interval": "20s",
    "__range": "5m",
    "run": "trained|failed",
    "host": ".*",
    "role": ".*",
    "gpu": ".*",
}
SHOWN_S = 120.0
ANSWER_S = 40.0  # the collector tells of itself every 10 s
PANELS = [
    (f"{name}: {panel['title']} {target['refId']}", target)
    for name, panel in test_dashboards.panels()
    for target in panel["targets"]
]
ALERTS = {rule["alert"]: rule for rule in test_dashboards.rules() if "alert" in rule}
COMPARISON = re.compile(r"\s*(?:[=!]=|[<>]=?)\s*[\d.]+")


def example(directory: Path, endpoint: str, run: str, *flags: str) -> int:
    """Run the example under `otel-dflash run` with simulated GPUs to the end of the delivery; return its exit
    code."""
    variables = clean_environment(
        OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_DFLASH_METRIC_MS="500", OTEL_DFLASH_EXIT_MS="60000"
    )
    started = [
        sys.executable,
        "-m",
        "otel_dflash",
        "run",
        "--run-id",
        run,
        "--dir",
        str(directory),
        "--quiet",
        "--",
    ]
    trained = [sys.executable, str(EXAMPLE), "--simulate", "--targets", "2", "--drafters", "2", *flags]
    return subprocess.run(
        [*started, *trained], env=variables, capture_output=True, timeout=100, check=False
    ).returncode


@dataclass(frozen=True)
class Observed:
    """Where agents send to, and where what they sent is asked for."""

    endpoint: str
    prometheus: Grafana


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """The stack after two runs: `trained` with one slow target, and `failed` in which a drafter raised."""
    directory = tmp_path_factory.mktemp("grafana")
    stack = Stack(directory)
    try:
        prometheus = stack.start("prometheus").url("PROMETHEUS_PORT")
        jaeger = stack.start("jaeger", JAEGER_PROMETHEUS_URL=prometheus).url("JAEGER_HTTP_PORT")
        collector = stack.start(
            "otelcol", OTELCOL_TRACES_ENDPOINT=jaeger, OTELCOL_METRICS_ENDPOINT=f"{prometheus}/api/v1/otlp"
        )
        endpoint = collector.url("OTELCOL_GRPC_PORT")
        assert (
            example(directory, endpoint, "trained", "--steps", "120", "--slow", "target:1:model_forward=60ms")
            == 0
        )
        assert example(directory, endpoint, "failed", "--slow", "drafter:1:optimizer=1ms:error") == 1
        yield Observed(endpoint, Grafana(prometheus))
    finally:
        stack.end()


@pytest.fixture
def prometheus(observed: Observed) -> Grafana:
    return observed.prometheus


@pytest.mark.parametrize(("where", "target"), PANELS, ids=[where for where, _ in PANELS])
def test_every_panel_shows_data_and_names_its_series(
    where: str, target: dict[str, Any], prometheus: Grafana
) -> None:
    if where.rpartition(" ")[0].partition(": ")[2] in NEEDS_A_GPU:
        assert prometheus.panel(target, VARIABLES, SHOWN_S) == []
        return
    poll(lambda: prometheus.panel(target, VARIABLES, SHOWN_S), ANSWER_S)
    named = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    unnamed = [
        labels
        for labels, _ in prometheus.panel(target, VARIABLES, SHOWN_S)
        if not all(labels.get(name) for name in named)
    ]
    assert unnamed == []


@pytest.mark.parametrize("query", [line for line in PROMQL.splitlines() if not line.startswith("#")])
def test_the_queries_of_the_page_answer(query: str, prometheus: Grafana) -> None:
    assert prometheus.range(query.replace("[5m]", "[20s]"), SHOWN_S)


def test_the_page_names_every_metric(prometheus: Grafana) -> None:
    documented = set(re.findall(r"^\| `dflash\.[\w.]+` \| `(dflash_\w+)`", PAGE.read_text(), re.MULTILINE))
    assert documented == set(
        prometheus.variable('label_values({__name__=~"dflash_.*"}, __name__)', VARIABLES)
    )


def test_nothing_needs_a_gpu_that_does_not_exist() -> None:
    assert {panel["title"] for _, panel in test_dashboards.panels()} >= NEEDS_A_GPU


def test_every_variable_offers_values(prometheus: Grafana) -> None:
    offered = {
        item["name"]: prometheus.variable(item["query"]["query"], VARIABLES)
        for board in test_dashboards.dashboards().values()
        for item in board["templating"]["list"]
        if item["type"] == "query"
    }
    assert set(offered.pop("run")) >= {"failed", "trained"}
    assert offered == {
        "host": [os.uname().nodename],
        "role": ["drafter", "postprocess", "target"],
        "gpu": ["0", "1", "2", "3"],
    }


def test_the_states_of_a_role_sum_to_its_time(prometheus: Grafana) -> None:
    (target,) = (
        target for where, target in PANELS if where.startswith("dflash-pipeline: $role: time by state")
    )
    summed = {**target, "expr": f"sum by (dflash_worker_role) ({target['expr']})"}
    shares = {
        labels["dflash_worker_role"]: values
        for labels, values in prometheus.panel(summed, VARIABLES, SHOWN_S)
    }
    assert set(shares) == {"target", "drafter", "postprocess"}
    assert all(value == pytest.approx(1) for values in shares.values() for value in values)


@pytest.mark.usefixtures("places")
def test_a_killed_agent_is_down_after_two_minutes_and_a_run_that_ended_is_not(
    observed: Observed, tmp_path: Path
) -> None:
    down = ALERTS["DflashAgentDown"]["expr"]

    def runs_down(after_s: float) -> set[str]:
        return {labels["dflash_run_id"] for labels, _ in observed.prometheus.instant(down, after_s)}

    with Running(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=observed.endpoint) as running:
        agent = running.start_agent()
        running.start_trainer()
        running.ask("steps 3")
        run = running.session.run_id
        poll(
            lambda: observed.prometheus.instant(
                f'dflash_worker_count{{dflash_run_id="{run}", dflash_worker_state="running"}} > 0'
            )
        )
        agent.kill()
        assert death(agent) == -signal.SIGKILL
        assert (runs_down(60), runs_down(150), runs_down(1800)) == (set(), {run}, set())
        running.start_agent()
        running.end_trainer()
        poll(lambda: not runs_down(150))


@pytest.mark.parametrize("name", ALERTS)
def test_what_an_alert_compares_is_there(name: str, prometheus: Grafana) -> None:
    query, comparisons = COMPARISON.subn("", test_dashboards.full_expression(ALERTS[name]))
    assert comparisons
    assert not re.search(r"[<>]|==|!=(?!\")", query)
    found = prometheus.instant(query, after_s=30)  # a subquery looks twice a minute
    assert found
    labels = set(re.findall(r"\$labels\.(\w+)", " ".join(ALERTS[name]["annotations"].values())))
    assert [series for series, _ in found if not labels <= set(series)] == []


def test_a_slow_target_is_the_straggler_and_starves_the_drafters(prometheus: Grafana) -> None:
    found = {name: prometheus.instant(test_dashboards.full_expression(rule)) for name, rule in ALERTS.items()}
    trained = {
        name: [labels for labels, _ in series if labels["dflash_run_id"] == "trained"]
        for name, series in found.items()
    }
    said = {
        (name, labels.get("dflash_worker_role"), labels.get("dflash_worker_id"))
        for name, fired in trained.items()
        for labels in fired
    }
    assert said == {("DflashStraggler", "target", "1"), ("DflashConsumerStarved", "drafter", None)}


def test_prometheus_evaluates_the_shipped_rules_and_a_short_run_that_ended_fires_none(
    prometheus: Grafana,
) -> None:
    poll(
        lambda: set(prometheus.evaluated_rules()) == set(ALERTS) | {"dflash:busy_seconds_per_step:rate10m"},
        ANSWER_S,
    )
    rules = prometheus.evaluated_rules()
    assert {name: rule.get("lastError") for name, rule in rules.items() if rule["health"] != "ok"} == {}
    assert {name for name, rule in rules.items() if rule.get("state") == "firing"} == set()


def test_a_failed_phase_is_one_of_the_series(prometheus: Grafana) -> None:
    failed = prometheus.instant(
        'sum by (dflash_phase, error_type) (histogram_count(dflash_phase_duration_seconds{error_type!=""}))'
    )
    assert ({"dflash_phase": "optimizer", "error_type": "sections.PlantedError"}, [1.0]) in failed
