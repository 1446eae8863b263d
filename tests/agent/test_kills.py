"""An agent that is killed at any moment and started again: no span is lost, and no total is wrong."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import pytest

from tests.agent import agent_killed_at
from tests.otlp_receiver import OtlpReceiver
from tests.running import (
    DEADLINE_S,
    Running,
    assert_exact,
    death,
    poll,
    received_by_name,
    repeated,
    totals_received,
)

pytestmark = pytest.mark.slow

BATCH = 512  # spans in flight at a kill
DRIVER = str(Path(agent_killed_at.__file__))
AT_THE_END = ("closed_written_ring_not_removed", "session_half_removed")


def feed_until_dead(running: Running, agent: subprocess.Popen[bytes], steps: int) -> None:
    """Let the trainer work until the agent has died."""

    def is_dead() -> bool:
        if agent.poll() is None and running.is_drained():
            running.ask(f"steps {steps}")
        return agent.poll() is not None

    poll(is_dead)


@pytest.mark.parametrize(
    ("point", "number"),
    [
        ("frame_half_written", 4),
        ("frame_head_half_written", 3),
        ("written_tail_not_moved", 5),
        ("recorded_words_half_moved", 2),
        ("segment_header_half_written", 2),
        ("segment_names_not_written", 2),
        ("segment_not_renamed", 2),
        ("segment_rolled_oldest_not_removed", 1),
        ("spans_sent_cursor_not_saved", 2),
        ("metrics_sent_cursor_not_saved", 2),
        ("span_cursor_not_renamed", 2),
        ("metric_cursor_not_renamed", 2),
        ("closed_written_ring_not_removed", 1),
        ("session_half_removed", 1),
        ("segment_just_rolled", 2),
        ("run_file_not_renamed", 1),
    ],
)
def test_a_kill_at_this_point_loses_nothing(
    point: str, number: int, tmp_path: Path, receiver: OtlpReceiver
) -> None:
    # a small one rolls soon, and removes what a busy machine has not sent by then
    recording_bytes = 1 << (20 if "segment" in point else 30)
    with Running(
        tmp_path, **receiver.environment("grpc"), OTEL_DFLASH_RECORDING_BYTES=str(recording_bytes)
    ) as running:
        running.start_trainer()
        agent = running.start_agent(DRIVER, point, str(number))
        counts = None
        if point in AT_THE_END:
            running.ask("steps 100")
            counts = running.end_trainer()
            assert death(agent) == -signal.SIGKILL
        else:
            feed_until_dead(running, agent, 200 if "segment" in point else 5)
            assert agent.returncode == -signal.SIGKILL
            running.ask("steps 100")
        running.environment["OTEL_DFLASH_RECORDING_BYTES"] = str(1 << 30)
        last = running.start_agent()
        if counts is None:
            running.ask("steps 100")
            counts = running.end_trainer()
        assert death(last) == 0, running.log.read_text()
        assert_exact(running, counts, receiver)
        assert repeated(receiver) <= BATCH
        assert not running.session.path.exists()


@pytest.mark.parametrize(
    "point", ["frame_half_written", "closed_written_ring_not_removed", "spans_sent_cursor_not_saved"]
)
def test_trainer_and_agent_killed_leave_what_was_open_truncated_once(
    point: str, tmp_path: Path, receiver: OtlpReceiver
) -> None:
    with Running(tmp_path, **receiver.environment("grpc")) as running:
        running.start_trainer()
        running.ask("steps 10")
        running.ask("hang")
        running.kill_trainer()
        assert death(running.start_agent(DRIVER, point, "1")) == -signal.SIGKILL
        assert death(running.start_agent()) == 0, running.log.read_text()
        cut = {
            span.span_id: span.name
            for span in receiver.spans()
            if span.attributes.get("dflash.span.truncated")
        }
        assert sorted(cut.values()) == ["target.inner", "target.outer", "target.step"]
        assert sum(received_by_name(receiver).values()) == 10 * 7 + 4
        assert totals_received(receiver)["target.step"] == 10


def test_twenty_kills_at_random_moments_lose_nothing(tmp_path: Path, receiver: OtlpReceiver) -> None:
    moments = random.Random(1)
    with Running(tmp_path, **receiver.environment("grpc")) as running:
        running.start_trainer()
        for turn in range(20):
            running.ask("steps 50")
            agent = running.start_agent()
            if turn % 2:  # while it sends
                before = len(receiver.spans())
                assert receiver.wait_for(
                    lambda receiver, before=before: len(receiver.spans()) > before, DEADLINE_S
                )
            for _ in range(3):
                try:
                    agent.wait(moments.uniform(0, 0.3))
                except subprocess.TimeoutExpired:
                    running.ask("steps 30")
            agent.kill()
            assert death(agent) == -signal.SIGKILL
        last = running.start_agent()
        running.ask("steps 50")
        counts = running.end_trainer()
        assert death(last) == 0, running.log.read_text()
        assert_exact(running, counts, receiver)
        assert repeated(receiver) <= 20 * BATCH
