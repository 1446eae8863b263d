"""Rings to recording: real rings and the shipped writer, drained in this process."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_dflash.agent.drain import FRAME_RECORDS_MAX
from otel_dflash.agent.ring_reader import RingReader
from otel_dflash.recording.catalog import WorkerInfo
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.records import NAMES_OFFSET, RECORDED_OFFSET, Counter, Header, State
from otel_dflash.ring import create_ring
from otel_dflash.session import Session
from otel_dflash.trainer.telemetry import Telemetry
from otel_dflash.trainer.worker import Worker
from tests.agent.draining import RING_BYTES, SLOTS, Agent, Draining, phases
from tests.running import poll

Frames = Callable[..., list[Frame]]


@pytest.fixture
def draining(tmp_path: Path) -> Iterator[Draining]:
    with Draining(tmp_path) as draining:
        yield draining


@pytest.fixture
def session(draining: Draining) -> Session:
    return draining.session


@pytest.fixture
def agent(draining: Draining) -> Agent:
    return draining.agent


@pytest.fixture
def worker(draining: Draining) -> Worker:
    return draining.worker()


@pytest.fixture
def frames(draining: Draining) -> Frames:
    return draining.frames


# --- taking


def test_names_come_before_the_records_that_use_them(worker: Worker, agent: Agent, frames: Frames) -> None:
    phases(worker, 2)
    assert agent.drain.poll() == 2
    with worker.phase("late"):
        pass
    assert agent.drain.poll() == 1
    assert agent.drain.poll() == 0
    kinds = [frame.kind for frame in frames(FrameKind.NAMES, FrameKind.RECORDS)]
    assert kinds == [FrameKind.NAMES, FrameKind.RECORDS, FrameKind.NAMES, FrameKind.RECORDS]


def test_a_name_made_while_the_drain_looks_is_in_the_log_before_its_record(
    worker: Worker, agent: Agent, frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = RingReader.word

    def look(ring: RingReader, index: int) -> int:
        value = word(ring, index)
        if index == Header.NAMES and ring.tail < 3:  # the records have been seen
            with worker.phase(f"made_{ring.tail}"):
                pass
        return value

    monkeypatch.setattr(RingReader, "word", look)
    for _ in range(3):
        agent.drain.poll()
    names = 0
    for frame in frames(FrameKind.NAMES, FrameKind.RECORDS):
        if frame.kind == FrameKind.NAMES:
            names = frame.first + frame.count
        else:
            used = [words[0] >> 16 & 0xFFFF for words in struct.iter_unpack("<8Q", frame.payload)]
            assert max(used) < names


def test_laps_wrap_and_records_follow_each_other(worker: Worker, agent: Agent, frames: Frames) -> None:
    total = 0
    for count in (SLOTS - 7, 20, SLOTS, 1, SLOTS // 2, SLOTS):
        phases(worker, count)
        assert agent.drain.poll() == count
        total += count
    found = frames(FrameKind.RECORDS)
    assert [frame.first for frame in found] == [
        sum(frame.count for frame in found[:number]) for number in range(len(found))
    ]
    starts = [words[1] for frame in found for words in struct.iter_unpack("<8Q", frame.payload)]
    assert starts == sorted(starts)
    assert len(starts) == total


def test_a_full_ring_drops_the_newest_and_counts_them(worker: Worker, agent: Agent, frames: Frames) -> None:
    phases(worker, SLOTS + 10)
    assert agent.drain.poll() == SLOTS
    phases(worker, 5)
    assert agent.drain.poll() == 5
    worker.close()
    agent.drain.poll()
    last = struct.unpack(f"<{len(Counter)}Q", frames(FrameKind.COUNTERS)[-1].payload)
    assert last[Counter.DROPPED_RING_FULL] == 10
    assert sum(frame.count for frame in frames(FrameKind.RECORDS)) == SLOTS + 5


def test_a_frame_holds_no_more_than_a_sink_can_take_at_once(
    session: Session, agent: Agent, frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_DFLASH_RING_BYTES", str(1 << 20))
    telemetry = Telemetry(session)
    phases(telemetry.worker("target", 0), 2 * FRAME_RECORDS_MAX + 5)
    assert agent.drain.poll() == 2 * FRAME_RECORDS_MAX + 5
    telemetry.close()
    assert [frame.count for frame in frames(FrameKind.RECORDS)] == [FRAME_RECORDS_MAX, FRAME_RECORDS_MAX, 5]


def test_a_worker_that_never_pauses_does_not_hold_the_drain(
    worker: Worker, agent: Agent, frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = RingReader.published

    def look(ring: RingReader, until_ns: int | None = None) -> Any:
        found = published(ring, until_ns)
        phases(worker, 3)
        return found

    assert agent.drain.poll() == 0
    phases(worker, 3)
    monkeypatch.setattr(RingReader, "published", look)
    assert [agent.drain.poll(), agent.drain.poll()] == [3, 6]
    assert len(frames(FrameKind.RECORDS)) == 2


def test_counters_are_recorded_when_they_change(worker: Worker, agent: Agent, frames: Frames) -> None:
    with worker.step() as step:
        step.set(tokens=5)
        step.produced()
    agent.drain.poll()
    agent.drain.poll()
    words = [struct.unpack(f"<{len(Counter)}Q", frame.payload) for frame in frames(FrameKind.COUNTERS)]
    assert [(word[Counter.STEPS], word[Counter.TOKENS], word[Counter.PUTS]) for word in words] == [(1, 5, 1)]


def test_what_a_killed_drain_wrote_is_not_written_again(
    draining: Draining, session: Session, worker: Worker, frames: Frames
) -> None:
    with worker.step():
        phases(worker, 9)
    draining.agent.drain.poll()
    ring = next(iter(session.path.glob("ring-*")))
    with ring.open("r+b") as file:  # as if it was killed before it moved the recorded words and the tail
        for offset, size in (
            (8 * Header.TAIL, 8),
            (8 * Header.RECORDED_STEP, 8),
            (RECORDED_OFFSET, NAMES_OFFSET - RECORDED_OFFSET),
        ):
            file.seek(offset)
            file.write(bytes(size))
    second = draining.next_agent()
    with worker.queue_get:
        pass
    assert second.drain.poll() == 1
    worker.close()
    second.drain.poll()
    assert [(frame.first, frame.count) for frame in frames(FrameKind.RECORDS)] == [(0, 10), (10, 1)]
    assert [(frame.json()["open"], frame.json()["step"]) for frame in frames(FrameKind.CLOSED)] == [
        ([], None)
    ]


# --- the end of a ring


def test_a_closed_worker_is_retired_and_its_memory_given_back(
    draining: Draining, session: Session, worker: Worker, agent: Agent, frames: Frames
) -> None:
    phases(worker, 4)
    worker.close()
    assert agent.drain.poll() == 4
    assert draining.ring_files() == []
    assert [
        (frame.json()["killed"], frame.json()["open"], frame.json()["step"])
        for frame in frames(FrameKind.CLOSED)
    ] == [(False, [], None)]
    assert frames(FrameKind.RECORDS, FrameKind.COUNTERS, FrameKind.CLOSED)[-1].kind == FrameKind.CLOSED


def test_a_worker_closed_inside_a_step_says_what_was_open(
    worker: Worker, agent: Agent, frames: Frames
) -> None:
    with worker.step(), worker.forward:
        worker.close()
    agent.drain.poll()
    closed = frames(FrameKind.CLOSED)[0].json()
    assert closed["killed"] is False
    assert closed["end_ns"] >= closed["open"][0][1] >= closed["step"][1]


@pytest.mark.parametrize("last", ["end", "cancel"])
@pytest.mark.parametrize("before", ["end", "cancel"])
def test_a_step_whose_end_found_no_slot_is_not_open(
    before: str, last: str, worker: Worker, agent: Agent, frames: Frames
) -> None:
    worker.step.begin()
    getattr(worker.step, before)()
    phases(worker, SLOTS)
    worker.step.begin()
    phases(worker, 1)
    getattr(worker.step, last)()
    worker.close()
    agent.drain.poll()
    closed = frames(FrameKind.CLOSED)[0].json()
    assert (closed["open"], closed["step"]) == ([], None)


def test_a_ring_retired_before_the_kill_is_removed_not_read_again(
    draining: Draining, session: Session, agent: Agent, frames: Frames
) -> None:
    ring = create_ring(session.path, 0, RING_BYTES, "target", 0, None, session.run_id)
    path = next(iter(session.path.glob("ring-*")))
    data = path.read_bytes()
    ring.close()
    agent.drain.poll()
    path.write_bytes(data)
    second = draining.next_agent()
    second.drain.poll()
    assert draining.ring_files() == []
    assert len(frames(FrameKind.CLOSED)) == 1


MAKER = """
import sys
from pathlib import Path
from otel_dflash.session import open_session, register_process
from otel_dflash.trainer.telemetry import Telemetry
telemetry = Telemetry(open_session(Path(sys.argv[1])))
worker = telemetry.worker("drafter", 1)
step = worker.step()
step.__enter__()
with worker.forward:
    pass
worker.backward.__enter__()
print("ready", flush=True)
sys.stdin.read()
"""


def start_maker(session: Session, setup: str = "") -> subprocess.Popen[bytes]:
    program = [sys.executable, "-c", setup + MAKER, str(session.path)]
    maker = subprocess.Popen(
        program,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert maker.stdout
    assert maker.stdout.readline() == b"ready\n"
    return maker


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL


def test_a_ring_of_a_dead_process_is_read_to_its_end(
    draining: Draining, session: Session, agent: Agent, frames: Frames
) -> None:
    kill(start_maker(session))
    assert agent.drain.poll() == 1
    closed = frames(FrameKind.CLOSED)[0].json()
    reader = RecordingReader(session.recording)
    reader.read()
    names = reader.catalog[frames(FrameKind.CLOSED)[0].ring]
    reader.close()
    assert [names.phase(name) for name, _ in closed["open"]] == [(State.BUSY, "backward")]
    assert (closed["killed"], closed["step"][0] - names.ring) == (True, 1)
    assert closed["step"][1] <= closed["open"][0][1] <= closed["end_ns"]
    assert draining.ring_files() == []


NO_ROOM = (
    "from otel_dflash import ring\ndef no_room(*_): raise OSError(28, 'No space left on "
    "device')\nring._reserve_file = no_room\n"
)


def test_a_memfd_is_read_through_its_link_also_after_its_process_died(
    draining: Draining, session: Session, agent: Agent, frames: Frames
) -> None:
    maker = start_maker(session, NO_ROOM)
    assert [path.is_symlink() for path in session.path.glob("ring-*")] == [True]
    assert agent.drain.poll() == 1
    assert agent.drain.holds_living()
    kill(maker)
    assert not agent.drain.holds_living()
    agent.drain.poll()
    assert [frame.json()["killed"] for frame in frames(FrameKind.CLOSED)] == [True]
    assert draining.ring_files() == []


def test_a_memfd_that_died_before_it_was_opened_is_said_once(session: Session, agent: Agent) -> None:
    kill(start_maker(session, NO_ROOM))
    agent.drain.poll()
    agent.drain.poll()
    assert [line.partition(" ")[2] for line in agent.said] == [
        "cannot be opened (No such file or directory); a memfd dies with its process: its records are lost"
    ]


def test_the_catalog_knows_each_worker(session: Session, agent: Agent, worker: Worker) -> None:
    phases(worker, 1)
    agent.drain.poll()
    reader = RecordingReader(session.recording)
    poll(lambda: reader.read() or reader.catalog)
    reader.close()
    (names,) = reader.catalog.values()
    assert names.worker == WorkerInfo("target", 0, 3, os.getpid(), names.worker.created_ns)
    assert json.loads(names.entries[0][1])["pid"] == os.getpid()


def test_what_was_refused_or_overflowed_is_said_once_with_its_key(draining: Draining, agent: Agent) -> None:
    for _ in range(2):
        with draining.worker().step() as step:
            for n in range(600):
                step.set(**{"grad\x1b_norm": object(), "batch_id": f"shard-{n}"})
            step.set(bucket="long")
        agent.drain.poll()
    assert agent.said == [
        "step.set() did not read grad\\x1b_norm (object): give it an int, float, str or bool in range; what "
        "is lost is counted",
        "step.set() got too many different strings for batch_id: give it one of few, or a number; what is "
        "lost is counted",
        "step.set() got too many different strings for bucket: give it one of few, or a number; what is "
        "lost is counted",
    ]
