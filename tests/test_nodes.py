"""Runs of several nodes and ranks: a recording per node, one session for the ranks of a node, and nobody
writes to another's."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from otel_dflash import session as session_module
from otel_dflash.new_recording import RecordingExistsError
from otel_dflash.otlp.resources import Resources
from otel_dflash.recording.directory import list_recordings
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import read_info
from otel_dflash.session import (
    create_session,
    living_processes,
    open_session,
)
from otel_dflash.session_list import abandoned_sessions, running_sessions
from otel_dflash.trainer import telemetry as telemetry_module
from tests.running import DEADLINE_S, poll

# One step, then a line, then to the end of stdin: so all are alive at once.
TRAINER = """
import json, os, sys
import otel_dflash
telemetry = otel_dflash.start()
rank = int(os.environ.get("LOCAL_RANK", 0))
worker = telemetry.worker("target", rank)
with worker.step() as step, worker.forward:
    pass
print(json.dumps([telemetry.run_id, os.environ.get("OTEL_DFLASH_SESSION", "")]), flush=True)
sys.stdin.read()
"""
AWAIT_TWO = """
import select
from pathlib import Path
while len(list(Path(os.environ["OTEL_DFLASH_SHM"]).glob("otel-dflash-*/*/ring-*"))) < 2:
    select.select([], [], [], 0.01)
"""
STEP = """
import otel_dflash
worker = otel_dflash.start().worker("target", 0)
with worker.step():
    pass
"""
CREATE = "from otel_dflash.session import create_session; print(create_session('night-7').recording.name)"

Trainer = subprocess.Popen[str]


def environment(**variables: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OTEL_DFLASH_DRAIN_MS": "20",
        **variables,
    }


def run_on(node: str) -> tuple[int, str]:
    """Record a step of the run night-7 as that node; return the exit code and what was said."""
    command = [
        sys.executable,
        "-m",
        "otel_dflash",
        "run",
        "--quiet",
        "--run-id",
        "night-7",
        "--",
        sys.executable,
        "-c",
        STEP,
    ]
    result = subprocess.run(
        command,
        env=environment(OTEL_DFLASH_NODE=node),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return result.returncode, result.stderr


@pytest.fixture
def runs(places: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the recordings; no launcher started this process."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "OTEL_DFLASH_NODE"):
        monkeypatch.delenv(name, raising=False)
    return Path(os.environ["OTEL_DFLASH_DIR"])


def test_each_node_of_a_run_has_a_recording_and_a_node_only_one(runs: Path) -> None:
    assert [run_on("node-a"), run_on("node-b")] == [(0, ""), (0, "")]
    infos = {path.name: read_info(path) for path in list_recordings(runs)}
    assert {name: (info.run, info.host) for name, info in infos.items()} == {
        "night-7": ("night-7", "node-a"),
        "night-7@node-b": ("night-7", "node-b"),
    }
    resources = [Resources(info).for_role("target", 7).attributes for info in infos.values()]
    assert [
        [resource[key] for key in ("host.name", "dflash.run.id", "service.instance.id")]
        for resource in resources
    ] == [
        ["node-a", "night-7", "night-7-node-a-7"],
        ["node-b", "night-7", "night-7-node-b-7"],
    ]
    refused = "otel-dflash: recording {} exists; choose another run id, or remove it\n"
    assert run_on("node-a") == (2, refused.format(runs / "night-7"))
    assert run_on("node-b") == (2, refused.format(runs / "night-7@node-b"))
    assert sorted(path.name for path in runs.iterdir()) == ["night-7", "night-7@node-b"]


def test_rings_of_two_nodes_never_share_an_id(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = set()
    for node in ("node-a", "node-b", "node-a"):  # all else the same: run, pid, start, number
        monkeypatch.setenv("OTEL_DFLASH_NODE", node)
        monkeypatch.setattr(telemetry_module, "_ring_numbers", itertools.count(7))
        telemetry = telemetry_module.Telemetry(create_session("night-7", runs / str(len(ids))))
        with telemetry.worker("target", 0).step() as step:
            ids.add(step.id)
        telemetry.close()
    assert len(ids) == 2


def test_commands_name_the_recording_of_a_node(runs: Path) -> None:
    run_on("node-a")
    run_on("node-b")

    def say(*arguments: str) -> str:
        command = [sys.executable, "-m", "otel_dflash", *arguments]
        return subprocess.run(
            command,
            env=environment(COLUMNS="200"),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        ).stdout

    assert [line.split()[0] for line in say("runs").splitlines() if line.strip().startswith("night")] == [
        "night-7@node-b",
        "night-7",
    ]
    assert "night-7 on node-a" in say("summary", "night-7")
    assert "night-7 on node-b" in say("summary", "night-7@node-b")
    assert "night-7 on node-a" in say("summary", "night-7@node-a"), "the first node's is found by both names"


def test_nodes_that_start_at_once_on_a_shared_disk_part(runs: Path) -> None:
    def create(node: str) -> str:
        command = [sys.executable, "-c", CREATE]
        result = subprocess.run(
            command,
            env=environment(OTEL_DFLASH_NODE=node),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return result.stdout.strip() or result.stderr.strip().rpartition("\n")[2]

    nodes = [f"node-{number}" for number in range(6)]
    with ThreadPoolExecutor(len(nodes)) as pool:
        names = list(pool.map(create, nodes))
    assert names.count("night-7") == 1
    assert all(name in ("night-7", f"night-7@{node}") for node, name in zip(nodes, names, strict=True))
    assert sorted(path.name for path in runs.iterdir()) == sorted(names)


def test_a_node_with_an_odd_name_has_a_directory_all_the_same(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_session("night-7")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "über/node", "", "", "")))
    session = create_session("night-7")
    assert (session.recording.name, session.node) == ("night-7@-ber-node", "über/node")


def test_a_wrong_node_name_is_said_with_the_remedy(runs: Path) -> None:
    code, said = run_on("node/a")
    assert code == 2
    assert said == (
        "otel-dflash: OTEL_DFLASH_NODE is 1 to 64 letters, digits, '.', '_' or '-', got 'node/a'; "
        "unset it for the host's name\n"
    )


@pytest.fixture
def trainers(runs: Path) -> Iterator[Trainers]:
    trainers = Trainers()
    yield trainers
    trainers.end()


class Trainers:
    """Trainer processes, all started by this one as a launcher starts its ranks."""

    def __init__(self) -> None:
        self._started: list[Trainer] = []

    def start(self, program: str = TRAINER, **variables: str) -> Trainer:
        command = [sys.executable, "-c", program]
        process = subprocess.Popen(
            command,
            env=environment(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def end(self) -> list[str]:
        """Let all end, their agents too; return what they said."""
        said = [
            process.communicate(timeout=DEADLINE_S)[1]
            for process in self._started
            if process.returncode is None
        ]
        self._started.clear()
        poll(
            lambda: (
                not running_sessions()
                and not list(Path(os.environ["OTEL_DFLASH_SHM"]).glob("otel-dflash-*/*"))
            )
        )
        assert abandoned_sessions() == []
        return said


def answer(trainer: Trainer) -> Any:
    assert trainer.stdout
    return json.loads(trainer.stdout.readline())


def workers(recording: Path) -> list[tuple[str, int]]:
    with closing(RecordingReader(recording)) as reader:
        while reader.read():
            pass
    found = [reader.catalog[ring].worker for ring in reader.catalog]
    return sorted((worker.role, worker.index) for worker in found)


@pytest.mark.parametrize("given", [{}, {"OTEL_DFLASH_RUN_ID": "night-7"}])
def test_ranks_that_a_launcher_starts_share_a_session(
    runs: Path, trainers: Trainers, given: Mapping[str, str]
) -> None:
    ranks = [trainers.start(LOCAL_RANK=str(rank), **given) for rank in range(3)]
    names = {answer(rank)[0] for rank in ranks}
    assert trainers.end() == ["", "", ""]
    assert {path.name for path in runs.iterdir()} == names
    (name,) = names
    assert name == given.get("OTEL_DFLASH_RUN_ID", name)
    assert workers(runs / name) == [("target", 0), ("target", 1), ("target", 2)]


def test_ranks_that_are_started_again_are_another_run(runs: Path, trainers: Trainers) -> None:
    first = answer(trainers.start(LOCAL_RANK="0", TORCHELASTIC_RESTART_COUNT="0"))
    again = answer(trainers.start(LOCAL_RANK="0", TORCHELASTIC_RESTART_COUNT="1"))
    assert trainers.end() == ["", ""]
    assert first[0] != again[0]
    assert sorted(path.name for path in runs.iterdir()) == sorted([first[0], again[0]])


def test_a_rank_joins_no_session_whose_processes_were_all_killed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would take its records: the agent was killed with them."""
    monkeypatch.setattr(session_module, "RANK_WAIT_S", 0.2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    left = create_session("night-7")
    (left.path / "process-4194305-1").touch()
    with pytest.raises(RecordingExistsError, match="night-7 exists; choose another run id"):
        session_module.create_or_join("night-7")
    member = session_module.register_process(left)
    assert session_module.create_or_join("night-7") == (left, False)
    member.unlink()


def test_each_command_of_a_batch_script_is_a_run_of_its_own(runs: Path, trainers: Trainers) -> None:
    """Slurm tells the script of a job the variables of a rank, and all its commands have one parent."""
    names = []
    for _ in range(3):
        names.append(answer(trainers.start(SLURM_LOCALID="0"))[0])
        assert trainers.end() == [""]
    assert sorted(path.name for path in runs.iterdir()) == sorted(set(names))
    assert [workers(runs / name) for name in names] == [[("target", 0)]] * 3


def test_a_rank_may_outlive_the_one_that_made_the_session_and_hands_it_on(
    runs: Path, trainers: Trainers
) -> None:
    joins = "import otel_dflash; otel_dflash.start(); print(flush=True); sys.stdin.readline()\n"
    first = trainers.start(LOCAL_RANK="0")
    name, session = answer(first)
    second = trainers.start("import sys; " + joins + TRAINER, LOCAL_RANK="1")
    assert second.stdout
    assert second.stdin
    assert second.stdout.readline() == "\n"
    first.communicate(timeout=DEADLINE_S)
    assert living_processes(open_session(Path(session))) == [second.pid]
    second.stdin.write("\n")
    second.stdin.flush()
    assert answer(second) == [name, session]
    assert trainers.end() == [""]
    assert workers(runs / name) == [("target", 0), ("target", 1)]


def test_two_trainers_that_are_no_ranks_never_share_a_run(runs: Path, trainers: Trainers) -> None:
    answer(trainers.start(OTEL_DFLASH_RUN_ID="night-7"))
    assert answer(trainers.start(OTEL_DFLASH_RUN_ID="night-7")) == ["", ""]
    refused = f"recording {runs / 'night-7'} exists; choose another run id, or remove it"
    assert trainers.end() == ["", f"otel-dflash: telemetry is off: {refused}; training goes on\n"]
    assert workers(runs / "night-7") == [("target", 0)]


def test_torchrun_alone_gives_one_recording(runs: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER.replace("sys.stdin.read()", AWAIT_TWO))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        str(script),
    ]
    result = subprocess.run(
        command,
        env=environment(),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    poll(
        lambda: (
            not running_sessions() and not list(Path(os.environ["OTEL_DFLASH_SHM"]).glob("otel-dflash-*/*"))
        )
    )
    (recording,) = list_recordings(runs)
    assert workers(recording) == [("target", 0), ("target", 1)]


def test_ranks_that_are_each_under_run_share_the_first_ones_agent(runs: Path) -> None:
    """As `srun otel-dflash run -- python train.py` starts them."""
    trainer = TRAINER.replace("sys.stdin.read()", AWAIT_TWO) + "sys.exit(3 + rank)"
    command = [
        sys.executable,
        "-m",
        "otel_dflash",
        "run",
        "--quiet",
        "--run-id",
        "night-7",
        "--",
        sys.executable,
        "-c",
        trainer,
    ]
    ranks = [
        subprocess.Popen(
            command,
            env=environment(LOCAL_RANK=f"{rank}"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ends = [(rank.communicate(timeout=DEADLINE_S)[1], rank.returncode) for rank in ranks]
    assert ends == [("", 3), ("", 4)]
    assert [path.name for path in runs.iterdir()] == ["night-7"]
    assert workers(runs / "night-7") == [("target", 0), ("target", 1)]
