"""start() and Telemetry: what a process opens, what turns it off, and that training goes on where it cannot
be had."""

from __future__ import annotations

import atexit
import json
import os
import queue
import stat
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import otel_dflash
from otel_dflash import ConfigError
from otel_dflash.recording.frames import FrameKind
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.session import Session, map_control, unrecorded_steps
from otel_dflash.trainer.context import NULL
from tests.trainer.queue_kinds import contexts_of
from tests.trainer.ring_reader import open_ring

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30

TRAIN = """
import otel_dflash
telemetry = otel_dflash.start()
again = otel_dflash.start()
worker = telemetry.worker("target", 0, gpu=1)
for n in range(3):
    with worker.step() as step, worker.forward:
        step.set(tokens=5, wrong=object())
    step.consumed(step.produced())
print(telemetry.enabled, again is telemetry)
"""
ON = "True True\n"
OFF = "False True\n"


def train(python: str = sys.executable, program: str = TRAIN, **environment: str) -> tuple[int, str, str]:
    """Run a training program; return its exit code, stdout and stderr."""
    result = subprocess.run(
        [python, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


def test_start_joins_the_session_once(session: Session) -> None:
    telemetry = otel_dflash.start()
    assert otel_dflash.start("another-run") is telemetry
    assert (telemetry.enabled, telemetry.run_id) == (True, "run-1")
    telemetry.worker("target", 0)
    telemetry.worker("target", 0)
    kinds = sorted(path.name.partition("-")[0] for path in session.path.iterdir())
    assert kinds == ["control", "process", "ring", "ring", "session.json"]
    atexit.unregister(telemetry.close)


def test_what_a_session_holds_is_private(telemetry: otel_dflash.Telemetry, session: Session) -> None:
    telemetry.worker("target", 0)
    assert {stat.filemode(path.stat().st_mode) for path in session.path.iterdir()} == {"-rw-------"}
    assert [stat.filemode(path.stat().st_mode) for path in (session.path, session.path.parent)] == [
        "drwx------"
    ] * 2


def test_a_worker_can_be_closed_with_its_telemetry_twice(
    telemetry: otel_dflash.Telemetry, session: Session
) -> None:
    worker = telemetry.worker("target", 0)
    (path,) = session.path.glob("ring-*")
    reader = open_ring(path)
    with worker.step():
        pass
    telemetry.close()
    telemetry.close()
    with worker.step():
        pass
    assert reader.word(6) > 0
    assert [record.kind for record in reader.take()] == ["STEP"]


def test_rings_are_closed_at_exit(session: Session) -> None:
    assert train() == (0, ON, "")
    (path,) = session.path.glob("ring-*")
    reader = open_ring(path)
    assert reader.word(6) > 0
    assert [record.kind for record in reader.take()] == ["PHASE", "STEP"] * 3
    assert reader.counters() == {"steps": 3, "tokens": 15, "value": 3, "outside_step": 3}


@pytest.mark.parametrize("variable", ["OTEL_DFLASH_DISABLED", "OTEL_SDK_DISABLED"])
def test_disabled_telemetry_touches_nothing(places: Path, tmp_path: Path, variable: str) -> None:
    bad = {"OTEL_DFLASH_SESSION": "/nowhere", "OTEL_DFLASH_RING_BYTES": "x", "OTEL_DFLASH_AGENT": "/nowhere"}
    assert train(**{variable: "True"}, **bad) == (0, OFF, "")
    assert (list(places.iterdir()), list(tmp_path.iterdir())) == ([], [])


def test_telemetry_that_is_off_is_used_as_any_other() -> None:
    telemetry = otel_dflash.Telemetry()
    worker = telemetry.worker("target", 0)
    items: list[int] = []
    assert telemetry.wrap_queue(items, "items", put="append", get="pop") is items
    with worker.step() as step, worker.forward as phase:
        step.set(tokens=object(), bucket=[], anything=None)
        step.consumed(step.produced())
    with worker.resume(5) as resumed, worker.phase("x", state="lock_wait"):
        pass
    worker.close()
    telemetry.close()
    assert (step is resumed, phase, step.id, step.produced(), telemetry.enabled, telemetry.run_id) == (
        True,
        None,
        0,
        NULL,
        False,
        "",
    )


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (
            {"OTEL_DFLASH_SESSION": "/nowhere/session"},
            "no session at /nowhere/session ([Errno 2] No such file or directory: '/nowhere/session'); "
            "unset OTEL_DFLASH_SESSION to start a new one",
        ),
        (
            {"OTEL_DFLASH_SHM": "/dev/null"},
            f"no session directory (/dev/null/otel-dflash-{os.getuid()}: Not a directory); "
            "set OTEL_DFLASH_SHM to a tmpfs that you can write",
        ),
        (
            {"OTEL_DFLASH_DIR": "/dev/null", "OTEL_DFLASH_RUN_ID": "run-2"},
            (
                "cannot create the recording /dev/null/run-2: Not a directory; set OTEL_DFLASH_DIR to a "
                "writable directory"
            ),
        ),
        (
            {"OTEL_DFLASH_AGENT": "/nowhere/otel-dflash --fast"},
            (
                "OTEL_DFLASH_AGENT is not a command that can be run: '/nowhere/otel-dflash --fast'; set it to a "
                "path such as /opt/venv/bin/otel-dflash"
            ),
        ),
        (
            {"OTEL_DFLASH_RUN_ID": "my run"},
            "a run id is 1 to 64 letters, digits, '.', '_' or '-', got 'my run'; try 'my-run'",
        ),
        (
            {"OTEL_DFLASH_RING_BYTES": "1MiB"},
            (
                "OTEL_DFLASH_RING_BYTES must be an integer from 131072 to 67108864, got '1MiB'; unset it "
                "for 1048576"
            ),
        ),
        (
            {"OTEL_DFLASH_RING_BYTES": "150000"},
            "OTEL_DFLASH_RING_BYTES must be a power of two, got 150000; try 262144",
        ),
        (
            {"OTEL_DFLASH_EXIT_MS": "0" * 5000},  # Python's int() takes 4300 digits
            f"OTEL_DFLASH_EXIT_MS must be an integer from 0 to 3600000, got '{'0' * 100}'; unset it for 1200",
        ),
        (
            {"OTEL_DFLASH_DRAIN_MS": "0"},
            "OTEL_DFLASH_DRAIN_MS must be an integer from 1 to 10000, got '0'; unset it for 100",
        ),
    ],
)
def test_where_telemetry_cannot_be_had_training_goes_on_with_one_warning(
    places: Path, tmp_path: Path, environment: dict[str, str], reason: str
) -> None:
    assert train(**environment) == (0, OFF, f"otel-dflash: telemetry is off: {reason}; training goes on\n")
    assert list(tmp_path.glob("runs/*")) == []
    assert list(places.glob("*/*")) == []


NO_ROOM = """
import os, resource, otel_dflash
telemetry = otel_dflash.start()
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
for worker in (telemetry.worker("target", 0), telemetry.worker("target", 1)):
    with worker.step() as step, worker.forward:
        step.set(tokens=1)
    with worker.step() as step:
        step.cancel()
print(telemetry.enabled, step.id)
worker.step.begin()
worker.step.end()
worker.step.end()
worker.step(print)("counted too")
telemetry._control[0] = 2  # capture is off
with worker.step():
    telemetry._control[0] = 0
worker.close()
with worker.step():
    pass
"""


def test_a_worker_without_room_for_its_ring_records_nothing_but_counts_its_steps(session: Session) -> None:
    code, out, err = train(program=NO_ROOM)
    warning = (
        "otel-dflash: worker target 0 records nothing: no ring can be created ([Errno 27] File too large); "
        "training goes on\n"
    )
    assert (code, out, err) == (0, "True 0\ncounted too\n", warning)
    assert list(session.path.glob("*ring-*")) == []
    assert unrecorded_steps(map_control(session)) == 4


NO_ROOM_IN_CHILD = """
import os, resource, otel_dflash
worker = otel_dflash.start().worker("target", 0)
with worker.step():
    pass
child = os.fork()
if not child:
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    with worker.forward:
        pass
for _ in range(3):
    with worker.step():
        pass
if not child:
    worker.close()
    with worker.step():
        pass
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_child_without_room_for_its_ring_counts_its_steps(session: Session) -> None:
    warning = (
        "otel-dflash: worker target 0 records nothing: no ring can be created ([Errno 27] File too large); "
        "training goes on\n"
    )
    assert train(program=NO_ROOM_IN_CHILD) == (0, "", warning)
    assert unrecorded_steps(map_control(session)) == 3


BARE = "import os; os.environ['PATH'] = '/nowhere'\n" + TRAIN


def test_a_trainer_in_a_bare_environment_records_by_an_agent_of_another(places: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare/bin/python")
    no_agent = (
        "otel-dflash: telemetry is off: no agent can be started: this environment lacks its packages, and "
        "`otel-dflash` is not on the PATH; "
        "install all of it into any environment (`pip install .` in a clone of the project) and set "
        "OTEL_DFLASH_AGENT=/path/to/its/bin/otel-dflash; training goes on\n"
    )
    assert train(python, BARE) == (0, OFF, no_agent)
    assert train(
        python, BARE, OTEL_DFLASH_AGENT=f"{sys.executable} -m otel_dflash", OTEL_DFLASH_RUN_ID="run-1"
    ) == (0, ON, "")
    deadline = time.monotonic() + DEADLINE_S
    # the agent removes the session when it is done
    while any(places.glob("*/*")) and time.monotonic() < deadline:
        os.sched_yield()
    reader = RecordingReader(tmp_path / "runs/run-1")
    frames = reader.read()
    assert sum(frame.count for frame in frames if frame.kind == FrameKind.RECORDS) == 6
    reader.close()
    (names,) = reader.catalog.values()
    assert (names.worker.role, names.worker.index, names.worker.gpu) == ("target", 0, 1)
    assert (reader.info.run, list(places.glob("*/*"))) == ("run-1", [])


def test_repr_says_what_it_is_and_whether_it_records(session: Session) -> None:
    shown = []
    for telemetry in (otel_dflash.Telemetry(), otel_dflash.Telemetry(session)):
        worker = telemetry.worker("target", 3)
        shown += map(repr, (telemetry, worker, worker.step, worker.phase("clip")))
        worker.close()
        shown += map(repr, (worker, worker.step()))
    assert shown == [
        *("<Telemetry, off>", "<Worker target 3, off>", "<Step of target 3, off>"),
        *("<Phase clip of target 3, off>", "<Worker target 3, closed>", "<Step of target 3, closed>"),
        *("<Telemetry run-1, on>", "<Worker target 3, on>", "<Step of target 3, on>"),
        *("<Phase clip of target 3, on>", "<Worker target 3, closed>", "<Step of target 3, closed>"),
    ]
    assert (repr(otel_dflash.Phase()), repr(otel_dflash.Step())) == ("<Phase, off>", "<Step, off>")


def test_numpy_integers_are_ints(session: Session) -> None:
    for telemetry in (otel_dflash.Telemetry(), otel_dflash.Telemetry(session)):
        worker = telemetry.worker("target", np.int64(1), gpu=np.uint8(2))  # type: ignore[arg-type]
        assert (worker.index, type(worker.index), worker.gpu, type(worker.gpu)) == (1, int, 2, int)
        items = queue.Queue[int]()
        telemetry.wrap_queue(items, "items", capacity=np.int32(4), min_ready=np.int64(1))  # type: ignore[arg-type]
    assert json.loads(contexts_of(items).text) == {"name": "items", "capacity": 4, "min_ready": 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t: otel_dflash.start("a b"),
            "a run id is 1 to 64 letters, digits, '.', '_' or '-', got 'a b'; try 'a-b'",
        ),
        (
            lambda t: otel_dflash.start(""),
            "a run id is 1 to 64 letters, digits, '.', '_' or '-', got ''; try 'run-1'",
        ),
        (
            lambda t: otel_dflash.start("-" * 65),
            f"a run id is 1 to 64 letters, digits, '.', '_' or '-', got {'-' * 65!r}; try 'run-1'",
        ),
        (
            lambda t: otel_dflash.start(cast("Any", 7)),
            "a run id is 1 to 64 letters, digits, '.', '_' or '-', got 7; try '7'",
        ),
        (
            lambda t: t.worker("my role", 0),
            "a role is 1 to 64 letters, digits or '_', got 'my role'; try 'drafter'",
        ),
        (lambda t: t.worker("", 0), "a role is 1 to 64 letters, digits or '_', got ''; try 'drafter'"),
        (lambda t: t.worker(None, 0), "a role is 1 to 64 letters, digits or '_', got None; try 'drafter'"),
        (lambda t: t.worker("target", -1), "index of a worker must be an int >= 0, got -1"),
        (lambda t: t.worker("target", "0"), "index of a worker must be an int >= 0, got '0'"),
        (lambda t: t.worker("target", np.int8(-1)), "index of a worker must be an int >= 0, got -1"),
        (lambda t: t.worker("target", np.float64(0)), "index of a worker must be an int >= 0, got 0.0"),
        (lambda t: t.worker("target", np.bool_(True)), "index of a worker must be an int >= 0, got True"),
        (lambda t: t.worker("target", True), "index of a worker must be an int >= 0, got True"),
        (lambda t: t.worker("target", 0, gpu="cuda:1"), "gpu of a worker must be an int >= 0, got 'cuda:1'"),
    ],
)
def test_a_wrong_argument_is_said_at_once(session: Session, call: Callable[[Any], Any], message: str) -> None:
    for telemetry in (otel_dflash.Telemetry(), otel_dflash.Telemetry(session)):
        with pytest.raises(ConfigError) as caught:
            call(telemetry)
        assert str(caught.value) == message
    assert list(session.path.glob("ring-*")) == []
