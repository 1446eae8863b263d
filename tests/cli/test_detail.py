"""`otel-dflash detail`: what is captured changes while the run goes on."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import otel_dflash
from otel_dflash.records import Kind
from otel_dflash.session import Session, register_process
from tests.trainer.ring_reader import open_ring


def detail(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "otel_dflash", "detail", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def test_capture_follows_the_command_from_the_next_step_on(
    telemetry: otel_dflash.Telemetry, session: Session
) -> None:
    worker = telemetry.worker("target", 0)

    def turn() -> None:
        with worker.step(), worker.forward:
            pass

    turn()
    assert detail("steps") == (0, "run-1: steps\n", "")
    turn()
    assert detail("off", "--run", "run") == (0, "run-1: off\n", "")
    turn()
    assert detail("phases") == (0, "run-1: phases\n", "")
    turn()
    ring = open_ring(next(session.path.glob("ring-*")))
    assert Counter(record.kind for record in ring.take()) == {Kind.STEP.name: 3, Kind.PHASE.name: 2}


def test_a_run_that_does_not_go_on_is_said(session: Session) -> None:
    assert detail("steps") == (
        1,
        "",
        "otel-dflash: no run is active; start one: otel-dflash run -- python train.py\n",
    )
    register_process(session)
    assert detail("steps", "--run", "x") == (1, "", "otel-dflash: run 'x' is not active\n")


@pytest.mark.parametrize("level", ["all", ""])
def test_a_level_that_is_none_is_said(places: Path, level: str) -> None:
    code, out, err = detail(level)
    assert (code, out) == (2, "")
    assert "'off', 'steps', 'phases'" in err
