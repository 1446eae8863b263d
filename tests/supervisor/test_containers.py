"""A trainer in a PID namespace of its own, such as a container that shares /dev/shm with the machine."""

from __future__ import annotations

from typing import Any

from otel_dflash.session import pid_namespace
from otel_dflash.session_list import FIRST_PID_NAMESPACE
from tests.otlp_receiver import OtlpReceiver
from tests.supervisor.training import RATE, records


def test_the_first_process_waits_at_its_end_until_the_agent_has_sent_all(
    train: Any, receiver: OtlpReceiver
) -> None:
    training = train("first process", **receiver.environment("grpc"))
    counts = training.ask(f"3000 {RATE}")
    assert training.end() == ""
    summary = training.summary()
    assert (records(summary), summary["losses"]) == (2 * counts["steps"], "no losses")
    assert len(receiver.spans()) == 2 * counts["steps"]


def test_a_command_leaves_living_workers_of_another_namespace_alone(train: Any) -> None:
    training = train("first process", OTEL_DFLASH_EXIT_MS="0")
    training.ask(f"1000 {RATE}")
    training.ask("drained")
    training.kill_supervisor()
    training.kill_agent()
    counts = training.ask(f"1000 {RATE}")
    (session,) = training.shm.glob("*/*")
    assert training.command("runs").endswith(
        f"r1: no agent is serving this run; start one where the run was started: otel-dflash agent {session}; see "
        f"{training.recording / 'agent.log'}\n"
    )
    assert training.agent() is None
    assert list(session.glob("ring-*"))
    assert training.end() == (
        f"otel-dflash: no agent is serving this run (see {training.recording / 'agent.log'}): its records stay in "
        "memory until the next `otel-dflash` command takes them\n"
    )
    recorded = 2 * counts["steps"] if pid_namespace() == FIRST_PID_NAMESPACE else 1000
    assert records(training.summary()) == recorded
