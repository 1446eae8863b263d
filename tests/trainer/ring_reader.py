"""Reads rings as records.py draws them, without the agent; and workers over memory of this process. Standard
library only."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from otel_dflash.ring import Ring
from otel_dflash.trainer.worker import Worker
from otel_dflash.trainer.writer.protocol import Writer
from otel_dflash.trainer.writer.python import bind

KINDS = ("", "PHASE", "STEP", "ATTRIBUTE", "CONSUMED", "RESUMED", "CANCELLED")
COUNTERS = [
    "steps",
    "tokens",
    "puts",
    "gets",
    "ring_full",
    "wrong_thread",
    "stale",
    "value",
    "name",
    "unmatched",
    "outside_step",
    "evicted",
]
SLOTS = 65536
TAIL = 8


class Record(NamedTuple):
    """One slot: its names resolved, its step id less the ring's id."""

    kind: str
    name: str
    error: str
    step: int
    words: tuple[int, ...]


class HoleError(AssertionError):
    """A slot is published and the one before is not: a reader would wait there for ever."""


class RingReader:
    """A ring's reader: takes what is published, and gives the memory back."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.slots = (len(memory) - SLOTS) // 64

    def word(self, index: int) -> int:
        word: int = struct.unpack_from("<Q", self.memory, 8 * index)[0]
        return word

    def names(self) -> list[tuple[int, str]]:
        """Return (kind, text) of every published name."""
        offset, names = 16896, []
        for _ in range(self.word(7)):
            length, kind = struct.unpack_from("<HB", self.memory, offset)
            names.append((kind, self.memory[offset + 3 : offset + 3 + length].decode()))
            offset += 3 + length
        return names

    def counters(self) -> dict[str, int]:
        """Return the counters that are not 0."""
        values = {name: self.word(16 + k) for k, name in enumerate(COUNTERS)}
        return {name: value for name, value in values.items() if value}

    def take(self) -> list[Record]:
        """Return the records from the tail on, and free their slots."""
        records = self.published()
        struct.pack_into("<Q", self.memory, 8 * TAIL, self.word(TAIL) + len(records))
        return records

    def published(self) -> list[Record]:
        """Return the records from the tail on."""
        tail = self.word(TAIL)
        records = []
        for sequence in range(tail, tail + self.slots):
            slot: tuple[int, ...] = struct.unpack_from(
                "<8Q", self.memory, SLOTS + 64 * (sequence % self.slots)
            )
            if slot[0] >> 40 != 1 + sequence // self.slots % ((1 << 24) - 1):
                break
            names = self.names()
            kind, name, error = slot[0] >> 32 & 0xFF, slot[0] >> 16 & 0xFFFF, slot[0] & 0xFFFF
            texts = [names[name][1] if name else "" for name in (name, error)]
            records.append(Record(KINDS[kind], texts[0], texts[1], slot[3] - self.word(1), slot))
        return records

    def assert_no_hole(self) -> None:
        """Call it when nobody writes and all is taken: no slot beyond the tail may be published.

        Raises:
            HoleError: One is.
        """
        tail = self.word(TAIL)
        for sequence in range(tail, tail + self.slots):
            (word,) = struct.unpack_from("<Q", self.memory, SLOTS + 64 * (sequence % self.slots))
            if word >> 40 == 1 + sequence // self.slots % ((1 << 24) - 1):
                raise HoleError(f"slot {sequence % self.slots} is published, slot {tail % self.slots} is not")


class MemoryWorker:
    """A worker over memory of this process, and the reader of its ring."""

    def __init__(
        self,
        slots: int = 64,
        index: int = 0,
        current: dict[int, Writer | None] | None = None,
        wall_offset_ns: int = 0,
    ) -> None:
        self.memory = mmap.mmap(-1, SLOTS + 64 * slots)
        self.ring = Ring(self.memory, index, "target", index, None, "run-1")
        self.reader = RingReader(self.memory)
        self.control = memoryview(bytearray(8)).cast("Q")
        self.current: dict[int, Writer | None] = {} if current is None else current
        self.worker = Worker(
            "target",
            index,
            None,
            lambda step: bind(lambda: self.ring, self.control, wall_offset_ns, step, self.current, {}),
        )

    def take(self) -> list[Record]:
        return self.reader.take()

    def shapes(self) -> list[tuple[str, str, str, int]]:
        """Take the records; return them without what differs from run to run: kind, name, error, serial of
        the step."""
        return [
            (kind, "" if kind == "STEP" else name, error, step) for kind, name, error, step, _ in self.take()
        ]

    def counters(self) -> dict[str, int]:
        return self.reader.counters()


def open_ring(path: Path) -> RingReader:
    """Open a ring file, or a link to one, as the agent does."""
    with open(path, "r+b") as file:
        return RingReader(mmap.mmap(file.fileno(), 0))


def cells(function: Any) -> dict[str, Any]:
    """Return the cells of a closure by name, and those of the closures it can reach."""
    found: dict[str, Any] = {}
    waiting = [function]
    while waiting:
        closure = waiting.pop()
        for name, cell in zip(closure.__code__.co_freevars, closure.__closure__ or (), strict=True):
            if name not in found:
                found[name] = cell
                if hasattr(cell.cell_contents, "__closure__"):
                    waiting.append(cell.cell_contents)
    return found
