"""A CPU that shows stores out of order: the drain reads memory in which each store of the shipped writer
appears when chance has it, before later or after earlier ones, but within a poll.

The writer has memory of its own. `Memory` copies what it stores, word by word, to the ring file that the
drain reads, and what the reader stores back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from otel_dflash.agent import ring_reader
from otel_dflash.agent.drain import FRAME_RECORDS_MAX, Drain
from otel_dflash.recording.catalog import names_bytes
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.records import (
    NAMES_OFFSET,
    RECORD_BYTES,
    RECORDED_OFFSET,
    SLOTS_OFFSET,
    WORD_BYTES,
    Header,
)
from tests.agent.draining import METRIC_INTERVAL_NS, Draining
from tests.trainer.ring_reader import MemoryWorker

SLOTS = 3 * FRAME_RECORDS_MAX
PHASES_MAX = 2 * FRAME_RECORDS_MAX


class Memory:
    """What a writer stored, and what another CPU sees of it."""

    def __init__(self, path: Path, seed: int) -> None:
        self.writer = MemoryWorker(SLOTS)
        path.write_bytes(self.writer.memory)
        self.stored = np.frombuffer(self.writer.memory, "<u8")
        self.seen = np.memmap(path, "<u8", "r+")
        self.chance = np.random.default_rng(seed)
        self.old = self.stored.copy()  # what was stored before the last poll: in the next it is seen
        self.shown = np.zeros(len(self.stored), bool)  # since then
        self.readers = np.zeros(len(self.stored), bool)
        self.readers[[Header.TAIL, Header.ATTACHED, Header.RECORDED_STEP, Header.RECORDED_END]] = True
        self.readers[RECORDED_OFFSET // WORD_BYTES : NAMES_OFFSET // WORD_BYTES] = True

    def show_some(self) -> None:
        """Show some stores, whatever their order, and the reader's to the writer."""
        self.stored[self.readers] = self.seen[self.readers]
        shown = ~self.readers & (self.chance.random(len(self.stored)) < self.chance.choice([0.1, 0.5, 0.999]))
        self.seen[shown] = self.stored[shown]
        self.shown |= shown

    def poll(self) -> None:
        """Show what was stored before the last poll, and some of the rest."""
        late = ~self.readers & ~self.shown
        self.seen[late] = self.old[late]
        self.shown[:] = False
        self.old = self.stored.copy()
        self.show_some()


class Trainer:
    """Phases, some of them new, in bursts of any size; keeps what it recorded."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.records = 0
        self.written: list[bytes] = []
        self.rounds = 0

    def work(self) -> None:
        self.rounds += 1
        phases = [self.memory.writer.worker.phase(f"phase_{self.rounds % 30}_{n}") for n in range(5)]
        room = SLOTS - (self.records - self.memory.writer.reader.word(Header.TAIL))
        for n in range(min(room, int(self.memory.chance.integers(PHASES_MAX)))):
            with phases[n % 5]:
                pass
            start = SLOTS_OFFSET + self.records % SLOTS * RECORD_BYTES
            self.written.append(self.memory.writer.memory[start : start + RECORD_BYTES])
            self.records += 1


class Busy(RecordingWriter):
    """While the drain writes a frame, the trainer continues and its stores appear."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def append(self, kind: FrameKind, ring: int, first: int, count: int, payload: bytes, now: int) -> bool:
        self.meanwhile()
        return super().append(kind, ring, first, count, payload, now)


@pytest.fixture
def draining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Draining]:
    monkeypatch.setattr(ring_reader, "STORES_IN_ORDER", False)
    with Draining(tmp_path) as draining:
        yield draining


@pytest.mark.parametrize("seed", range(5))
def test_no_record_is_torn_and_no_name_is_empty(seed: int, draining: Draining) -> None:
    memory = Memory(draining.session.path / f"ring-{os.getpid()}-1", seed)
    trainer = Trainer(memory)
    draining.agent.recording.close()
    recording = Busy(draining.session.recording, 1 << 30)
    drain = Drain(draining.session, recording, draining.agent.said.append, METRIC_INTERVAL_NS)

    def meanwhile() -> None:
        trainer.work()
        memory.show_some()

    recording.meanwhile = meanwhile
    for _ in range(24):
        trainer.work()
        memory.poll()
        drain.poll()
    recording.meanwhile = lambda: None
    trainer.work()
    memory.writer.worker.close()
    for _ in range(3):
        memory.poll()
        drain.poll()
    recording.close()

    frames = draining.frames(FrameKind.NAMES, FrameKind.RECORDS)
    records = [frame for frame in frames if frame.kind == FrameKind.RECORDS]
    region = bytes(memory.writer.memory[NAMES_OFFSET:SLOTS_OFFSET])
    names, _ = names_bytes(region, 0, memory.writer.reader.word(Header.NAMES))
    assert trainer.records > 4 * SLOTS
    assert max(frame.count for frame in records) == FRAME_RECORDS_MAX
    torn = sum(a != b for a, b in zip(split(records), trainer.written, strict=True))
    assert torn == 0
    assert b"".join(frame.payload for frame in frames if frame.kind == FrameKind.NAMES) == names
    assert list(named_late(frames)) == []
    assert (draining.ring_files(), draining.agent.said) == ([], [])


def split(records: list[Frame]) -> Iterator[bytes]:
    """Yield the records of RECORDS frames."""
    for frame in records:
        for start in range(0, len(frame.payload), RECORD_BYTES):
            yield frame.payload[start : start + RECORD_BYTES]


def named_late(frames: list[Frame]) -> Iterator[bytes]:
    """Yield the records that come before their names."""
    names = 0
    for frame in frames:
        if frame.kind == FrameKind.NAMES:
            names = frame.first + frame.count
        else:
            yield from (record for record in split([frame]) if record[2] + 256 * record[3] >= names)
