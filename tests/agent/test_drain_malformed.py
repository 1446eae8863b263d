"""Files in a session directory that are no rings, or go bad: left alone, said once, and no harm to the
others."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from otel_dflash.records import HEADER_BYTES, MAGIC, NAMES_OFFSET, SLOTS_OFFSET, Header
from otel_dflash.ring import create_ring
from otel_dflash.session import Session
from otel_dflash.trainer.worker import Worker
from tests.agent.draining import RING_BYTES, SLOTS, Agent, Draining, phases


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


def a_ring(session: Session, path: Path, change: Callable[[bytearray], object]) -> None:
    made = create_ring(session.path, 99, RING_BYTES, "target", 0, None, session.run_id)
    original = session.path / f"ring-{os.getpid()}-99"
    data = bytearray(original.read_bytes())
    original.unlink()
    del made
    change(data)
    path.write_bytes(data)


def put(offset: int, value: bytes) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        data[offset : offset + len(value)] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data.clear(), "0 bytes"),
        (lambda data: data.__delitem__(slice(100, None)), "100 bytes"),
        (
            lambda data: data.__delitem__(slice(SLOTS_OFFSET + 64 * 10, None)),
            f"{SLOTS} slots in {SLOTS_OFFSET + 640} bytes",
        ),
        (put(0, b"odflash2"), f"magic {MAGIC + (1 << 56):#x}"),
        (put(0, bytes(range(256)) * 512), "magic 0x706050403020100"),
        (put(8 * Header.SLOTS, bytes(8)), "0 slots"),
        (put(NAMES_OFFSET, bytes(4000)), "it does not name its worker"),
        (put(NAMES_OFFSET, b"\xff\xff"), "no name at byte 0"),
        (put(NAMES_OFFSET + 3, b"[" * 20), "it does not name its worker"),
    ],
)
def test_a_malformed_ring_is_left_alone_and_said_once(
    change: Callable[[bytearray], object], reason: str, session: Session, worker: Worker, agent: Agent
) -> None:
    path = session.path / "ring-1-1"
    a_ring(session, path, change)
    before = path.read_bytes()
    phases(worker, 3)
    assert agent.drain.poll() == 3
    assert agent.drain.poll() == 0
    assert path.read_bytes() == before
    assert len(agent.said) == 1
    assert agent.said[0].startswith("ring-1-1 is not a ring of this version (")
    assert reason in agent.said[0]


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)],
)
def test_what_is_no_file_does_not_hold_the_drain(
    make: Callable[[Path], object], session: Session, worker: Worker, agent: Agent
) -> None:
    make(session.path / "ring-1-1")
    phases(worker, 3)
    assert agent.drain.poll() == 3
    assert agent.drain.poll() == 0
    assert len(agent.said) == 1
    assert agent.said[0].startswith("ring-1-1 ")


def test_a_ring_that_goes_bad_is_dropped_and_the_others_go_on(
    session: Session, agent: Agent, worker: Worker
) -> None:
    ring = create_ring(session.path, 77, RING_BYTES, "target", 5, None, session.run_id)
    agent.drain.poll()
    ring.memory[NAMES_OFFSET : NAMES_OFFSET + 4000] = b"\xff" * 4000
    ring.words[Header.NAMES] = 50
    phases(worker, 3)
    assert agent.drain.poll() == 3
    phases(worker, 3)
    assert agent.drain.poll() == 3
    reason = f"MalformedRingError: no name at byte 0 of {SLOTS_OFFSET - NAMES_OFFSET}"
    assert agent.said == [f"ring-{os.getpid()}-77 cannot be drained ({reason}); it is ignored"]


def test_random_bytes_in_a_ring_never_stop_the_drain(
    session: Session, agent: Agent, worker: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(5)
    for number in range(60):
        ring = create_ring(session.path, 1000 + number, RING_BYTES, "target", number, None, session.run_id)
        for _ in range(chance.choice((1, 20, 200))):
            offset = chance.choice(
                (
                    chance.randrange(HEADER_BYTES, RING_BYTES),
                    chance.randrange(SLOTS_OFFSET, SLOTS_OFFSET + 1000),
                )
            )
            ring.memory[offset] = chance.randrange(256)
        ring.close()
    phases(worker, 3)
    agent.drain.poll()
    phases(worker, 3)
    assert agent.drain.poll() >= 3
    assert "Traceback" not in capfd.readouterr().err
