"""Trainer and agent killed together: the next command finishes their session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_dflash.config import ConfigError
from otel_dflash.recording.frames import FrameKind
from otel_dflash.session import SESSION_FILE, open_session
from tests.running import Running


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    shm = tempfile.mkdtemp(prefix="otel-dflash-test-", dir="/dev/shm")
    monkeypatch.setenv("OTEL_DFLASH_SHM", shm)
    with Running(tmp_path, OTEL_DFLASH_SHM=shm) as running:
        yield running
    shutil.rmtree(shm, ignore_errors=True)


def command(running: Running, *arguments: str) -> str:
    """Run an otel-dflash command of the same user; return what it printed."""
    line = [sys.executable, "-m", "otel_dflash", *arguments]
    return subprocess.run(
        line, env=running.environment, stdout=subprocess.PIPE, text=True, check=True, timeout=60
    ).stdout


def killed_together(running: Running, age_s: float) -> None:
    """Record, kill the agent and then the trainer, and make the session look so old."""
    agent = running.start_agent()
    running.start_trainer()
    running.ask("steps 5")
    agent.kill()
    agent.wait()
    running.ask("steps 20")
    running.kill_trainer()
    then = time.time() - age_s
    os.utime(running.session.path / SESSION_FILE, (then, then))


def test_the_next_command_takes_what_both_left_in_memory(running: Running) -> None:
    killed_together(running, age_s=61)
    text = command(running, "summary", str(running.recording))
    assert "target 0 step" in text
    assert not running.session.path.exists()
    steps = 25
    records = sum(frame.count for frame in running.frames() if frame.kind == FrameKind.RECORDS)
    assert records >= 4 * steps  # of each target step at least three phases and itself


def test_a_session_that_may_be_about_to_begin_is_left_alone(running: Running) -> None:
    killed_together(running, age_s=0)
    command(running, "runs")
    assert running.session.path.exists()


def test_a_session_that_others_could_have_made_is_left_alone(running: Running) -> None:
    killed_together(running, age_s=61)
    running.session.path.chmod(0o755)
    command(running, "runs")
    assert running.session.path.exists()
    with pytest.raises(ConfigError, match="belongs to another user or is open to others"):
        open_session(running.session.path)
