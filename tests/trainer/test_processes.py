"""Forks, children of multiprocessing and threads that come and go: each has a ring of its own, and none
touches another's."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import otel_dflash
from otel_dflash.session import Session, create_session, living_processes
from tests.trainer.ring_reader import RingReader, open_ring

ROOT = Path(__file__).parents[2]


def run(program: str, *arguments: str) -> Any:
    """Run a program file's text in a process of its own, joined to the session; return the JSON that it
    printed."""
    path = Path(os.environ["OTEL_DFLASH_DIR"]) / "program.py"
    path.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OTEL_DFLASH_RING_BYTES": "131072"}
    command = [sys.executable, str(path), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


def rings(session: Session) -> dict[str, tuple[bool, list[tuple[str, str, int]]]]:
    """Return what lies in each ring: worker -> (whether it is closed, its records)."""
    found = {}
    for path in session.path.glob("ring-*"):
        reader = open_ring(path)
        worker = json.loads(reader.names()[0][1])
        assert path.name.startswith(f"ring-{worker['pid']}-")
        assert reader.word(2) == worker["pid"]
        records = [(kind, name if kind != "STEP" else "", step) for kind, name, _, step, _ in reader.take()]
        reader.assert_no_hole()
        key = f"{worker['role']} {worker['index']}"
        assert key not in found
        found[key] = (reader.word(6) > 0, records)
    return found


FORK = """
import json, os, sys
import otel_dflash
from tests.trainer.ring_reader import RingReader

telemetry = otel_dflash.start()
worker = telemetry.worker("target", 0)
forward = worker.forward
def step(tokens):
    with worker.step() as step, forward:
        step.set(tokens=tokens, bucket="long")
def in_child(work):
    before = worker._writer.ring().memory[:]
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        worker.index = "in the child"
        work()
    status = os.waitpid(pid, 0)[1]
    return [status, worker._writer.ring().memory[:] == before]
def leave(work):
    def child():
        work()
        os._exit(0)
    return child

def says_where():
    # the child's ring is its own: at the same worker, with the same names under the same ids
    step(2)
    with forward:
        pass
    reader = RingReader(worker._writer.ring().memory)
    records = reader.take()
    same = reader.word(2) == os.getpid() and [(r.name if r.kind == "PHASE" else "", r.step) for r in records] == [
        ("busy forward", 1), ("", 1), ("busy forward", 0)]
    os._exit(0 if same else 1)

def in_a_step_of_the_parent():
    with worker.step() as open_step:
        with worker.backward:
            def child():
                with forward:
                    open_step.set(tokens=3)
                open_step.produced()
            return in_child(leave(child))

step(1)
results = {
    "nothing": in_child(leave(lambda: None)),
    "exits": in_child(lambda: sys.exit(0)),
    "closes": in_child(leave(worker.close)),
    "closes all": in_child(leave(telemetry.close)),
    "counts": in_child(leave(lambda: worker.resume("no context"))),
    "works": in_child(says_where),
    "inside a step": in_a_step_of_the_parent(),
}
step(1)
results["tokens"] = RingReader(worker._writer.ring().memory).counters()
print(json.dumps(results))
"""


def test_a_forked_child_leaves_its_parents_ring_alone(session: Session) -> None:
    untouched = [0, True]
    assert run(FORK) == {
        **dict.fromkeys(
            ("nothing", "exits", "closes", "closes all", "counts", "works", "inside a step"), untouched
        ),
        "tokens": {"steps": 3, "tokens": 2},
    }
    files = sorted(path.name.partition("-")[0] for path in session.path.iterdir())
    assert files.count("ring") == 3  # the parent's, and those of the two children that recorded
    assert files.count("process") == 3


MULTIPROCESSING = """
import json, multiprocessing, os, sys
import otel_dflash

def work(worker):
    for _ in range(2):
        with worker.step(), worker.forward:
            pass

def child(index):
    work(otel_dflash.start().worker("drafter", index))

def bystander():
    pass

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    telemetry = otel_dflash.start()
    worker = telemetry.worker("target", 0)
    work(worker)
    children = [context.Process(target=child, args=(index,)) for index in range(2)] + [context.Process(target=bystander)]
    for process in children:
        process.start()
    for process in children:
        process.join()
    work(worker)
    print(json.dumps([process.exitcode for process in children]))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_join_the_session_and_close_their_rings(
    session: Session, method: str
) -> None:
    assert run(MULTIPROCESSING, method) == [0, 0, 0]
    four = [record for n in range(1, 5) for record in (("PHASE", "busy forward", n), ("STEP", "", n))]
    two = four[:4]
    assert rings(session) == {"target 0": (True, four), "drafter 0": (True, two), "drafter 1": (True, two)}
    assert len(list(session.path.glob("process-*"))) == 3
    assert living_processes(session) == []


DATA_LOADER = """
import json, os
from pathlib import Path
import torch
import otel_dflash

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, n):
        return n * n

session = Path(os.environ["OTEL_DFLASH_SESSION"])
telemetry = otel_dflash.start()
worker = telemetry.worker("target", 0)
loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2)
before = sorted(path.name for path in session.iterdir())
total = 0
batches = iter(loader)
for _ in range(4):
    with worker.step() as step:
        with worker.queue_get:
            batch = next(batches)
        total += int(batch.sum())
during = sorted(path.name for path in session.iterdir())
print(json.dumps([total, during == before]))
"""


def test_a_data_loader_that_never_touches_telemetry_costs_nothing(session: Session) -> None:
    assert run(DATA_LOADER) == [140, True]
    closed, records = rings(session)["target 0"]
    assert (closed, len(records)) == (True, 8)


def test_threads_come_and_go_with_workers_of_their_own(
    session: Session, telemetry: otel_dflash.Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[RingReader] = []

    def work(index: int) -> None:
        worker = telemetry.worker("drafter", index)
        readers.append(RingReader(worker._writer.ring().memory))  # type: ignore[union-attr]
        with worker.step(), worker.forward:
            pass

    for start in range(0, 32, 8):
        threads = [threading.Thread(target=work, args=(start + k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    gc.collect()
    assert [reader.word(6) > 0 for reader in readers] == [True] * 32
    assert len({reader.word(1) for reader in readers}) == 32
    assert [[record.kind for record in reader.take()] for reader in readers] == [["PHASE", "STEP"]] * 32
    assert len(list(session.path.glob("ring-*"))) == 32


LEFT_ALONE = """
import gc, json, os, sys
import otel_dflash
telemetry = otel_dflash.start()
before = len(os.listdir("/proc/self/fd"))
for n in range(5):
    worker = telemetry.worker("target", n)
    with worker.step():
        pass
    worker._writer.ring().words[9] = int(sys.argv[1])
    del worker
    gc.collect()
print(json.dumps(len(os.listdir("/proc/self/fd")) - before))
"""


@pytest.mark.parametrize(("attached", "kept"), [("1", 0), ("0", 5)])
def test_a_memfd_is_kept_for_a_reader_that_has_not_come_yet(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attached: str, kept: int
) -> None:
    """Rings are memfds where the session lies on no tmpfs."""
    on_tmpfs = (
        subprocess.run(
            ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True
        ).stdout
        == "tmpfs\n"
    )
    monkeypatch.setenv("OTEL_DFLASH_SHM", str(tmp_path))
    session = create_session("run-1")
    monkeypatch.setenv("OTEL_DFLASH_SESSION", str(session.path))
    assert run(LEFT_ALONE, attached) == (0 if on_tmpfs else kept)
