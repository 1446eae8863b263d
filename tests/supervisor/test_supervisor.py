"""The agent of a run is killed, or its supervisor, or both: who serves the run, what is lost, and who says so."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.otlp_receiver import OtlpReceiver
from tests.processes import poll
from tests.supervisor.training import RATE, RING_RECORDS, Training, records

RESTART_S = 2.0


@pytest.mark.parametrize("how", ["start", "run"])
def test_an_agent_that_is_killed_is_started_again_and_nothing_is_lost(how: str, train: Any) -> None:
    training = train(how)
    training.ask(f"1000 {RATE}")
    training.ask("drained")
    agent = training.kill_agent()
    killed_s = time.monotonic()
    poll(lambda: training.agent() not in (None, agent))
    assert time.monotonic() - killed_s < RESTART_S
    training.ask(f"{RING_RECORDS - 20} {RATE}")
    counts = training.ask("drained")
    said = "" if how == "start" else "the agent was killed by SIGKILL; it was started again (restarts: 1)"
    assert training.end() == (said and f"otel-dflash: {said}\n")
    training.wait_for_end()
    summary = training.summary()
    assert (counts["dropped"], summary["losses"]) == (0, "no losses")
    assert records(summary) == 2 * counts["steps"] == 1000 + RING_RECORDS - 20


def test_signals_to_a_job_do_not_end_the_supervisor(train: Any) -> None:
    training = train()
    training.ask(f"1000 {RATE}")
    training.ask("drained")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(training.supervisor(), number)
    agent = training.kill_agent()
    poll(lambda: training.agent() not in (None, agent))
    assert training.end() == ""


def test_the_environment_of_the_run_reaches_each_agent_and_no_command_line(train: Any) -> None:
    secret = "authorization=secret"
    training = train("run", OTEL_EXPORTER_OTLP_HEADERS=secret)
    training.ask(f"1000 {RATE}")
    training.ask("drained")
    agent = training.kill_agent()
    poll(lambda: training.agent() not in (None, agent))
    assert secret in Path(f"/proc/{training.agent()}/environ").read_text()
    assert [line for line in training.processes().values() if "secret" in " ".join(line)] == []
    training.end()
    assert "secret" not in (training.recording / "agent.log").read_text()


def test_an_agent_that_is_killed_again_and_again_is_reported_and_the_records_are_counted(train: Any) -> None:
    training = train()
    training.ask(f"1000 {RATE}")
    training.ask("drained")
    for _ in range(6):
        training.kill_agent()
    log = training.recording / "agent.log"
    poll(lambda: "after 5 restarts" in log.read_text())
    counts = training.ask("20000 1000000")
    assert counts["dropped"] == 20_000 - RING_RECORDS
    dropped = f"{counts['dropped']:,}".replace(",", " ")
    expected = (
        f"no agent is serving this run; its supervisor starts one again within a minute; see {log}\n"
        f"{dropped} more records dropped since the agent last counted them"
    )
    assert training.summary()["losses"] == expected
    assert re.search(r"1 of 1 not finished, no agent\n", training.command("runs"))
    assert training.agent() is None
    said = training.end()
    assert re.fullmatch(
        r"otel-dflash: no agent is serving this run: it was killed by SIGKILL, after 5 restarts\. Training goes on; "
        r"records that memory has no room for are dropped and counted; it is started again in \d+ s, see \S+\n",
        said,
    )
    training.wait_for_end()  # a last agent took what the ring held
    summary = training.summary()
    assert summary["losses"].startswith(f"ring_full {dropped} (target 0: {dropped})\n")
    assert records(summary) == 1000 + RING_RECORDS


def test_an_agent_goes_on_without_its_supervisor(train: Any) -> None:
    training = train()
    training.ask(f"1000 {RATE}")
    training.ask("drained")
    training.kill_supervisor()
    training.ask(f"1000 {RATE}")
    training.ask("drained")
    assert training.end() == ""
    training.wait_for_end()
    summary = training.summary()
    assert (records(summary), summary["losses"]) == (2000, "no losses")


def test_run_replaces_a_supervisor_that_is_killed(train: Any) -> None:
    training = train("run")
    training.ask(f"1000 {RATE}")
    training.ask("drained")
    training.kill_supervisor()
    poll(training.supervisor)
    agent = training.kill_agent()
    poll(lambda: training.agent() not in (None, agent))
    training.ask(f"1000 {RATE}")
    assert training.end() == "otel-dflash: the supervisor of the agent was killed by SIGKILL; started again\n"
    summary = training.summary()
    assert (records(summary), summary["losses"]) == (2000, "no losses")


def kill_both(training: Training) -> None:
    training.kill_supervisor()
    training.kill_agent()


def test_a_trainer_that_nobody_serves_says_so_at_its_end_and_the_next_command_only_records(
    train: Any, receiver: OtlpReceiver
) -> None:
    training = train()
    training.ask(f"1000 {RATE}")
    training.ask("drained")
    kill_both(training)
    dropped = training.ask("20000 1000000")["dropped"]
    log = training.recording / "agent.log"
    assert training.end() == (
        f"otel-dflash: no agent is serving this run (see {log}): {dropped:,} records were dropped, the others stay "
        "in memory until the next `otel-dflash` command takes them\n"
    )
    training.environment.update(receiver.environment("grpc"))
    summary = training.summary()
    assert records(summary) == 21_000 - dropped
    assert summary["losses"].startswith(f"ring_full {dropped:,} ".replace(",", " "))
    reason = "a later command started this agent, which only records: it has not the run's environment"
    again = "everything is recorded: otel-dflash replay r1 --endpoint URL"
    assert summary["not sent"] == f"metrics: {reason}; {again}"  # of two lines with that name, the last
    assert (
        f"{reason}; send the rest: otel-dflash replay {training.recording} --endpoint URL" in log.read_text()
    )
    assert (receiver.spans(), receiver.points()) == ([], [])
    training.command("replay", "r1", OTEL_DFLASH_EXIT_MS="60000")
    assert len(receiver.spans()) == 21_000 - dropped


def test_a_command_starts_an_agent_for_workers_that_nobody_serves(train: Any, receiver: OtlpReceiver) -> None:
    training = train()
    training.ask(f"1000 {RATE}")
    training.ask("drained")
    kill_both(training)
    training.ask(f"2000 {RATE}")
    training.environment.update(receiver.environment("grpc"))
    assert "no agent" not in training.command("runs")
    training.ask("drained")
    counts = training.ask(f"{RING_RECORDS} {RATE}")
    assert training.end() == ""
    training.wait_for_end()
    summary = training.summary()
    assert (records(summary), summary["losses"]) == (2 * counts["steps"], "no losses")
    assert receiver.spans() == []


def test_an_agent_that_cannot_work_is_started_once(train: Any, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    agent = tmp_path / "agent"
    agent.write_text(f"#!/bin/sh\necho started >>{starts}\necho the reason >&2\nexit 2\n")
    agent.chmod(0o755)
    training = train(OTEL_DFLASH_AGENT=str(agent))
    poll(lambda: starts.exists() and training.supervisor() is None)
    log = training.recording / "agent.log"
    assert training.end() == (
        "otel-dflash: no agent is serving this run: it ended with exit code 2: the reason. Training goes on; records "
        f"that memory has no room for are dropped and counted; it is not started again, see {log}\n"
        f"otel-dflash: no agent is serving this run (see {log}): its records stay in memory until the next "
        "`otel-dflash` command takes them\n"
    )
    assert starts.read_text() == "started\n"


def test_a_frozen_application_is_not_started_as_the_supervisor(train: Any) -> None:
    training = train(FROZEN="true", OTEL_DFLASH_AGENT=f"{sys.executable} -m otel_dflash")
    training.ask(f"1000 {RATE}")
    training.ask("drained")
    assert [line[1:4] for line in training.processes().values() if "supervise" in line] == [
        ["-m", "otel_dflash", "supervise"]
    ]
    agent = training.kill_agent()
    poll(lambda: training.agent() not in (None, agent))
    training.ask(f"1000 {RATE}")
    assert training.end() == ""
    training.wait_for_end()
    assert records(training.summary()) == 2000


def test_a_reader_of_the_trainers_streams_sees_their_end_while_the_agent_is_running(
    train: Any, tmp_path: Path
) -> None:
    agent = tmp_path / "agent"
    agent.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import time; time.sleep(1000)" "$2"\n')
    agent.chmod(0o755)
    training = train(OTEL_DFLASH_AGENT=str(agent))
    poll(training.agent)
    assert training.end() == ""
    assert training.supervisor()
    assert training.agent()
