"""An object that holds a worker, phase, step or telemetry: copied, pickled, and handed to another process."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import otel_dflash
from otel_dflash.session import Session
from tests.trainer.ring_reader import open_ring

ROOT = Path(__file__).parents[2]


class Holder:
    """What a trainer's own object looks like."""

    def __init__(self, telemetry: otel_dflash.Telemetry) -> None:
        self.telemetry = telemetry
        self.worker = telemetry.worker("target", 0, gpu=1)
        self.forward = self.worker.forward
        self.clip = self.worker.phase("clip_grad", state="lock_wait")
        self.step = self.worker.step

    def parts(self) -> list[Any]:
        return [self.telemetry, self.worker, self.forward, self.clip, self.step]


@pytest.fixture(params=["on", "off"])
def holder(request: pytest.FixtureRequest, places: Path, monkeypatch: pytest.MonkeyPatch) -> Holder:
    if request.param == "on":
        request.getfixturevalue("session")
        return Holder(request.getfixturevalue("telemetry"))
    monkeypatch.setenv("OTEL_DFLASH_DISABLED", "true")
    return Holder(otel_dflash.start())


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_a_copy_in_the_same_process_is_the_same(holder: Holder, copied: Callable[[Any], Any]) -> None:
    for part in holder.parts():
        assert copied(part) is part
    assert [a is b for a, b in zip(copied(holder).parts(), holder.parts(), strict=True)] == [True] * 5


def test_of_two_workers_of_one_name_a_copy_is_the_same_one(telemetry: otel_dflash.Telemetry) -> None:
    first, second = Holder(telemetry), Holder(telemetry)
    assert copy.deepcopy(first).worker is first.worker is not second.worker
    assert copy.deepcopy(first).step is first.step
    assert copy.deepcopy(first).clip is first.clip


SPAWNED = """
import multiprocessing, os, sys
import otel_dflash
from tests.trainer.test_pickle import Holder

def train(holder, start):
    before = os.listdir(os.environ["OTEL_DFLASH_SHM"])
    if start == "first":
        otel_dflash.start()
    same = holder.worker.forward is holder.forward and holder.telemetry is otel_dflash.start.__globals__["_own"]
    with holder.step, holder.forward:
        pass
    if start == "later":
        assert not holder.telemetry.enabled
        otel_dflash.start()
    with holder.step as step, holder.forward:
        step.set(tokens=3)
    with holder.clip:
        pass
    if start == "never":
        same = same and os.listdir(os.environ["OTEL_DFLASH_SHM"]) == before
    sys.exit(0 if same else 3)

if __name__ == "__main__":
    holder = Holder(otel_dflash.start())
    child = multiprocessing.get_context("spawn").Process(target=train, args=(holder, sys.argv[1]))
    child.start()
    child.join()
    with holder.worker.step():
        pass
    print(child.exitcode, holder.telemetry.enabled)
"""
ONE_STEP = [("PHASE", "busy forward"), ("STEP", "")]


@pytest.mark.parametrize(
    ("start", "recorded"),
    [
        ("first", [*ONE_STEP, *ONE_STEP, ("PHASE", "lock_wait clip_grad")]),
        ("later", [*ONE_STEP, ("PHASE", "lock_wait clip_grad")]),
        ("never", None),
    ],
)
@pytest.mark.parametrize("disabled", ["", "true"])
def test_in_a_spawned_process_it_is_that_processs_own_worker(
    session: Session, tmp_path: Path, start: str, recorded: Any, disabled: str
) -> None:
    path = tmp_path / "program.py"
    path.write_text(SPAWNED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OTEL_DFLASH_DISABLED": disabled}
    result = subprocess.run(
        [sys.executable, str(path), start],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (result.stderr, result.stdout) == ("", f"0 {not disabled}\n")
    rings: dict[int, list[tuple[str, str]]] = {}
    for ring in session.path.glob("ring-*"):
        reader = open_ring(ring)
        worker = json.loads(reader.names()[0][1])
        assert (worker["role"], worker["index"], worker["gpu"]) == ("target", 0, 1)
        rings[worker["pid"]] = [
            (record.kind, record.name if record.kind == "PHASE" else "") for record in reader.take()
        ]
    expected = [] if disabled else [[("STEP", "")], *([recorded] if recorded else [])]
    assert sorted(rings.values(), key=len) == expected


def test_unpickling_starts_no_session(places: Path, tmp_path: Path) -> None:
    holder = pickle.loads(pickle.dumps(Holder(otel_dflash.Telemetry())))
    with holder.step as step, holder.forward:
        step.set(tokens=1)
    assert holder.telemetry.enabled is False
    assert (list(places.iterdir()), list(tmp_path.iterdir())) == ([], [])


def test_a_closed_worker_that_was_unpickled_before_start_stays_closed(session: Session) -> None:
    holder = pickle.loads(pickle.dumps(Holder(otel_dflash.Telemetry())))
    holder.worker.close()
    telemetry = otel_dflash.start()
    with holder.step, holder.forward:
        pass
    telemetry.close()
    assert list(session.path.glob("ring-*")) == []
