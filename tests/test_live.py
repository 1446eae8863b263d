"""A run while it is running, and time stands: what people see is true to about a second ago."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from otel_dflash.recording.run_info import RecordingError
from otel_dflash.records import State
from otel_dflash.views.summary import OpenPhase, Place, Summary, WorkerRow, summarise
from tests.otlp_receiver import OtlpReceiver
from tests.processes import clean_environment
from tests.running import DEADLINE_S, TESTS, Running, poll

S = 1_000_000_000
TRAINER = [sys.executable, str(TESTS / "waiting_trainer.py")]
CLI = [sys.executable, "-m", "otel_dflash"]
HOW = {"run": [*CLI, "run", "--quiet", "--", *TRAINER], "start": TRAINER}


class Live:
    """A running trainer, and what `otel-dflash` commands of its user see."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.recording = directory / "run-1"
        self._environment = environment

    def summary(self) -> Summary | None:
        try:
            return summarise(self.recording)
        except RecordingError:  # it begins
            return None

    def worker(self, role: str) -> WorkerRow | None:
        found = self.summary()
        return next((row for row in found.workers if row.role == role), None) if found else None

    def waits_s(self) -> float:
        """Return for how long the drafter's get is known to be open."""
        row = self.worker("drafter")
        phases = row.place.open_phases if row and row.place else []
        return phases[-1].age_ns / S if phases else 0.0

    def command(self, *arguments: str) -> str:
        return subprocess.run(
            [*CLI, *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=DEADLINE_S,
        ).stdout


@contextmanager
def live(how: str, directory: Path, **variables: str) -> Iterator[Live]:
    environment = {
        **clean_environment(),
        "OTEL_DFLASH_DIR": str(directory),
        "OTEL_DFLASH_RUN_ID": "run-1",
        "OTEL_DFLASH_METRIC_MS": "1500",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_TRACES_EXPORTER": "none",
        **variables,
    }
    process = subprocess.Popen(HOW[how], env=environment, stdin=subprocess.PIPE)
    try:
        yield Live(directory, environment)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        poll(lambda: (directory / "run-1" / "delivery.json").exists())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", HOW)
def test_a_summary_knows_what_is_open_and_since_when(how: str, tmp_path: Path) -> None:
    with live(how, tmp_path) as run:
        poll(lambda: run.waits_s() > 2)
        first = run.worker("drafter")
        poll(lambda: run.waits_s() > 3.5)
        found = {row.role: row for row in run.summary().workers}  # type: ignore[union-attr]
        text = run.command("summary", "run-1")
    drafter, target, copier = (found[role] for role in ("drafter", "target", "postprocess"))
    assert first
    for row in (first, *found.values()):
        assert sum(row.states.values()) == row.wall_ns
    assert drafter.wall_ns - first.wall_ns == drafter.states[State.STARVED] - first.states[State.STARVED] > S
    assert drafter.states[State.STARVED] > 0.9 * drafter.wall_ns
    assert drafter.place == Place(
        "its step 5", "", 0, [OpenPhase("queue_get", drafter.place.open_phases[0].age_ns)]
    )  # type: ignore[union-attr]
    assert target.place == Place("step 104", "ZeroDivisionError", target.place.age_ns, [])  # type: ignore[union-attr]
    assert target.place.age_ns > 3 * S
    assert (copier.place, copier.states[State.OTHER]) == (None, copier.wall_ns)
    assert copier.wall_ns > 3 * S
    assert text.startswith("target 0 ended with ZeroDivisionError in step 104, ")
    lines = [line.split(",")[0] for line in text.splitlines() if line.startswith(("open ", "failed "))]
    assert lines[0] == "failed    target 0 in step 104: ZeroDivisionError"
    assert lines[1].startswith("open      drafter 0 in its step 5 > queue_get (")


@pytest.mark.parametrize("how", HOW)
def test_an_interval_of_metrics_holds_exactly_its_length(how: str, tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        variables = {**receiver.environment("grpc"), "OTEL_METRICS_EXPORTER": "otlp"}
        with live(how, tmp_path, **variables):
            poll(lambda: len({point.time_ns for point in receiver.points()}) >= 4)
        points = receiver.points()
    times_s: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    lengths_s: dict[tuple[str, int], float] = {}
    for point in points:
        if point.name == "dflash.worker.time":
            key = str(point.attributes["dflash.worker.role"]), point.time_ns
            times_s[key][str(point.attributes["dflash.worker.state"])] = point.value
            lengths_s[key] = (point.time_ns - point.start_ns) / S
    assert len(times_s) >= 9
    last_ns = max(time_ns for _, time_ns in times_s)
    sums_s = {key: sum(states.values()) for key, states in times_s.items() if key[1] != last_ns}
    assert sums_s == pytest.approx({key: lengths_s[key] for key in sums_s}, abs=1e-6)
    waits = sorted(
        (time_ns, states["starved"]) for (role, time_ns), states in times_s.items() if role == "drafter"
    )
    pairs = list(itertools.pairwise(waits[1:-1]))
    assert [later[1] - earlier[1] for earlier, later in pairs] == pytest.approx(
        [(later[0] - earlier[0]) / S for earlier, later in pairs]
    )
    ages = {
        (point.attributes["dflash.worker.role"], point.value > 1)
        for point in points
        if point.name == "dflash.worker.open_span.age"
    }
    assert {("drafter", True), ("target", False), ("postprocess", False)} <= ages


@pytest.mark.parametrize("how", HOW)
def test_time_without_capture_has_a_state_of_its_own(how: str, tmp_path: Path) -> None:
    with live(how, tmp_path) as run:
        poll(lambda: run.waits_s() > 0)
        off_ns = time.monotonic_ns()
        run.command("detail", "off", "--run", "run-1")
        turned_off_ns = time.monotonic_ns()
        poll(lambda: (row := run.worker("target")) and row.states[State.UNCAPTURED] > 2 * S)
        on_ns = time.monotonic_ns()
        run.command("detail", "phases", "--run", "run-1")
        turned_on_ns = time.monotonic_ns()
        seen_s = run.waits_s()
        poll(lambda: run.waits_s() > seen_s + 1.5)  # the agent has seen the change
    found = {row.role: row for row in summarise(run.recording).workers}
    for row in found.values():
        assert sum(row.states.values()) == row.wall_ns
    tolerance_ns = S  # of two polls of a busy machine
    for role in ("target", "postprocess"):
        uncaptured_ns = found[role].states[State.UNCAPTURED]
        assert on_ns - turned_off_ns - tolerance_ns < uncaptured_ns < turned_on_ns - off_ns + tolerance_ns
    assert found["drafter"].states[State.UNCAPTURED] == 0  # its get was open all the time
    assert "uncaptured" in run.command("summary", "run-1")


def test_what_a_killed_run_left_ends_at_the_last_sign_of_life(tmp_path: Path) -> None:
    """The agent was killed before, so nobody saw the trainer die, and the next command comes later."""
    with Running(tmp_path) as running:
        agent = running.start_agent()
        running.start_trainer()
        running.ask("steps 5")
        poll(lambda: running.is_drained())
        running.ask("hang")
        agent.kill()
        agent.wait()
        running.kill_trainer()
        killed_ns = time.monotonic_ns()
        poll(lambda: time.monotonic_ns() > killed_ns + 2 * S)
        running.start_agent().wait(DEADLINE_S)
        summary = summarise(running.recording)
    (target,) = [row for row in summary.workers if row.role == "target"]
    assert target.place
    assert [phase.name for phase in target.place.open_phases] == ["outer", "inner"]
    assert (target.killed, target.unseen) == (True, True)
    assert target.place.open_phases[0].age_ns < S
    for row in summary.workers:
        assert sum(row.states.values()) == row.wall_ns
    assert summary.started_wall_ns + summary.duration_ns < time.time_ns() - S
