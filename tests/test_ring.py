"""Ring files: what they hold, their names, and what happens where memory is short."""

from __future__ import annotations

import gc
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import otel_dflash
from otel_dflash.records import MAGIC, NAME_SHARES, NAMES_MAX, NAMES_OFFSET, SLOTS_OFFSET, NameKind
from otel_dflash.ring import Ring, create_ring
from otel_dflash.session import process_start
from otel_dflash.trainer.context import NULL
from tests.trainer.pythons import check, on_each_python
from tests.trainer.ring_reader import MemoryWorker, RingReader, open_ring

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.timeout(60, method="thread")  # the alarm is used by the tests themselves
TEXT, PHASE, THREAD = NameKind.TEXT, NameKind.PHASE, NameKind.THREAD


@pytest.fixture
def ring(places: Path) -> Ring:
    return create_ring(places, 7, 1 << 17, "drafter", 3, 1, "run-1")


def reader_of(ring: Ring) -> RingReader:
    return RingReader(ring.memory)


def test_a_ring_file_says_whose_it_is(ring: Ring, places: Path) -> None:
    pid = os.getpid()
    (path,) = places.iterdir()
    status = path.lstat()
    assert (path.name, stat.filemode(status.st_mode), status.st_size) == (
        f"ring-{pid}-7",
        "-rw-------",
        1 << 17,
    )
    assert status.st_blocks * 512 == 1 << 17  # reserved: no store can find the tmpfs full
    reader = open_ring(path)
    assert [reader.word(k) for k in (0, 1, 2, 3, 4)] == [MAGIC, ring.id, pid, process_start(pid), 1024]
    created = reader.word(5)
    worker = {"role": "drafter", "index": 3, "gpu": 1, "pid": pid, "created_ns": created}
    assert reader.names() == [(1, json.dumps(worker)), (2, "_OTHER")]
    assert [reader.word(k) for k in range(6, 27)] == [0, 2] + [0] * 19


def test_a_ring_id_comes_from_what_the_ring_is() -> None:
    ids = [MemoryWorker(index=index).ring.id for index in (0, 1, 0)]
    assert ids[0] == ids[2] != ids[1]
    assert [number % (1 << 28) for number in ids] == [0, 0, 0]


def test_names_are_published_once_and_cut(ring: Ring) -> None:
    assert [
        ring.intern(TEXT, "a"),
        ring.intern(PHASE, "busy a"),
        ring.intern(TEXT, "a"),
        ring.intern(2, "a"),
    ] == [2, 3, 2, 2]
    ring.intern(TEXT, "x" * 1000)
    ring.intern(TEXT, "é" * 100)
    ring.intern(TEXT, "\ud800")
    ring.intern(THREAD, "é" * 500)
    ring.intern(THREAD, "y" * 5000)
    assert reader_of(ring).names()[2:] == [
        *((2, "a"), (3, "busy a"), (2, "x" * 128), (2, "é" * 64), (2, "?"), (4, "é" * 500), (4, "y" * 1024)),
    ]
    assert reader_of(ring).counters() == {}


def test_the_shares_of_the_kinds_sum_to_the_table() -> None:
    names, size = (sum(share[part] for share in NAME_SHARES.values()) for part in (0, 1))
    assert set(NAME_SHARES) == set(NameKind)
    assert (names, size) == (NAMES_MAX, SLOTS_OFFSET - NAMES_OFFSET)


@pytest.mark.parametrize("filling", [kind for kind in NameKind if kind != NameKind.WORKER])
@pytest.mark.parametrize("length", [0, 1024])
def test_a_kind_of_which_there_are_too_many_leaves_all_others_their_room(
    filling: NameKind, length: int, ring: Ring
) -> None:
    ids = [ring.intern(filling, f"{n:<{length}}") for n in range(NAMES_MAX)]
    kept = sum(name_id > 1 for name_id in ids)
    assert ids == [*range(2, kept + 2), *[1] * (NAMES_MAX - kept)]
    assert ring.intern(filling, f"{0:<{length}}") == 2
    others = [kind for kind in NameKind if kind not in (filling, NameKind.WORKER, NameKind.FILLED)]
    assert 1 not in [ring.intern(kind, f"{n}") for kind in others for n in range(NAME_SHARES[kind][0] - 1)]

    reports = (NameKind.REFUSED, NameKind.OVERFLOWED, NameKind.FILLED)  # of what is counted already
    found = [text for kind, text in reader_of(ring).names() if kind == NameKind.FILLED]
    if filling in reports:
        assert reader_of(ring).counters() == {}
    else:
        assert (found, reader_of(ring).counters()) == ([filling.name.lower()], {"name": NAMES_MAX - kept})


@on_each_python
def test_threads_and_signal_handlers_publish_names_at_once(python: str) -> None:
    assert check(python, "naming") == {
        "all ids agree": True,
        "ids say the names": True,
        "twice": 0,
        "counters": {},
        "interrupted": True,
    }


def test_a_closed_worker_records_nothing(telemetry: otel_dflash.Telemetry) -> None:
    worker = telemetry.worker("target", 0)
    ring = worker._writer.ring()  # type: ignore[union-attr]
    reader = reader_of(ring)
    with worker.step() as step:
        assert reader.word(6) == 0
        worker.close()
        closed = reader.word(6)
        before = ring.memory[:]
        with worker.forward:
            step.set(tokens=1, a=1)
        assert step.produced() == NULL
    with worker.step() as step, worker.phase("new"):
        step.set(tokens=1)
    worker.close()
    assert closed > reader.word(5)
    assert (reader.take(), step.id) == ([], 0)
    assert ring.memory[65536:] == before[65536:]
    assert reader.word(6) == closed
    assert reader.counters() == {}


def test_a_worker_that_nobody_holds_closes_its_ring(telemetry: otel_dflash.Telemetry) -> None:
    worker = telemetry.worker("target", 0)
    with worker.step(), worker.forward:
        pass
    reader = reader_of(worker._writer.ring())  # type: ignore[union-attr]
    assert reader.word(6) == 0
    del worker
    gc.collect()
    assert reader.word(6) > 0
    assert [record.kind for record in reader.take()] == ["PHASE", "STEP"]


def test_a_ring_never_lies_on_a_disk(tmp_path: Path) -> None:
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True
    ).stdout.strip()
    ring = create_ring(tmp_path, 0, 1 << 17, "target", 0, None, "run-1")
    (path,) = tmp_path.iterdir()
    assert path.is_symlink() == (kind != "tmpfs")
    assert ring.must_wait_for_reader == (kind != "tmpfs")
    assert open_ring(path).word(1) == ring.id


FULL = """
import json, os, signal, subprocess, sys
from pathlib import Path
from otel_dflash.session import create_session
from tests.trainer.ring_reader import open_ring

mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", os.environ["OTEL_DFLASH_SHM"]], capture_output=True, text=True)
if mount.returncode:
    sys.exit(f"cannot mount: {mount.stderr.strip()}")
session = create_session("run-1")
os.environ["OTEL_DFLASH_SESSION"] = str(session.path)
filling = os.open(session.path / "filling", os.O_CREAT | os.O_WRONLY)
for size in (4096, 1):
    try:
        while True:
            os.write(filling, bytes(size))
    except OSError as error:
        assert error.errno == 28
writer = subprocess.Popen([sys.executable, "-c", '''
import otel_dflash, sys
telemetry = otel_dflash.start()
workers = [telemetry.worker("target", n) for n in range(2)]
for n in range(3):
    for worker in workers:
        with worker.step() as step, worker.forward:
            step.set(tokens=1)
with workers[0].step(), workers[0].backward:
    print("ready", flush=True)
    sys.stdin.readline()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert writer.stdout.readline() == "ready\\n"
paths = sorted(session.path.glob("ring-*"))
links = [os.readlink(path).rpartition("/")[0] == f"/proc/{writer.pid}/fd" for path in paths]
readers = [open_ring(path) for path in paths]
writer.kill()
status = writer.wait()
kinds = [[record.kind for record in reader.take()] for reader in readers]
under_way = readers[0].word(10) - readers[0].word(1)
print(json.dumps([status, links, kinds, under_way, sorted(path.name for path in session.path.glob(".*"))]))
"""


def test_where_the_tmpfs_is_full_a_ring_is_a_memfd_that_outlives_its_killed_writer(tmp_path: Path) -> None:
    mounted = tmp_path / "shm"
    mounted.mkdir()
    environment = {
        **os.environ,
        "OTEL_DFLASH_SHM": str(mounted),
        "OTEL_DFLASH_DIR": str(tmp_path / "runs"),
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("OTEL_DFLASH_SESSION", None)
    own_user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    command: list[Any] = ["unshare", *own_user, "--mount", sys.executable, "-c", FULL]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode and ("cannot mount" in result.stderr or result.stderr.startswith("unshare:")):
        pytest.skip(f"this machine allows no tmpfs of our own: {result.stderr.strip()}")
    assert result.stderr == ""
    assert json.loads(result.stdout) == [-9, [True, True], [["PHASE", "STEP"] * 3] * 2, 4, []]
