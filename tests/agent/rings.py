"""Reads what trainers wrote: ring files, following records.py alone, while no agent takes anything out of
them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from otel_dflash import Telemetry, Worker
from otel_dflash.records import (
    HEADER_BYTES,
    KIND_MASK,
    KIND_SHIFT,
    NAME_MASK,
    NAME_SHIFT,
    NAMES_OFFSET,
    SLOTS_OFFSET,
    Counter,
    Header,
    Kind,
)
from otel_dflash.session import Session, create_session, remove_session


@dataclass(frozen=True)
class Consumed:
    """A CONSUMED record. `put_ns` is monotonic here, as `get_ns` is."""

    step: int
    producer: int
    root: int
    queue: str
    bucket: str
    fixed_root: bool
    put_ns: int
    get_ns: int

    @property
    def link(self) -> tuple[int, int]:
        return self.step, self.producer


class RingFile:
    """One worker's ring as it lies in memory now."""

    def __init__(self, path: Path, wall_offset_ns: int) -> None:
        self._data = path.read_bytes()
        self._wall_offset_ns = wall_offset_ns
        self.header = struct.unpack_from(f"<{HEADER_BYTES // 8}Q", self._data)
        self.names: list[str] = []
        offset = NAMES_OFFSET
        for _ in range(self.header[Header.NAMES]):
            length, _kind = struct.unpack_from("<HB", self._data, offset)
            self.names.append(self._data[offset + 3 : offset + 3 + length].decode())
            offset += 3 + length
        worker = json.loads(self.names[0])
        self.worker: tuple[str, int] = worker["role"], worker["index"]

    def slots(self, kind: Kind) -> Iterator[tuple[int, ...]]:
        for words in struct.iter_unpack("<8Q", self._data[SLOTS_OFFSET:]):
            if not words[0]:
                return
            if words[0] >> KIND_SHIFT & KIND_MASK == kind:
                yield words

    def consumed(self) -> list[Consumed]:
        return [
            Consumed(
                step=words[3],
                producer=words[5],
                root=words[4],
                queue=json.loads(self.names[words[0] >> NAME_SHIFT & NAME_MASK])["name"]
                if words[0] >> NAME_SHIFT & NAME_MASK
                else "",
                bucket=self.names[words[6]] if words[6] else "",
                fixed_root=bool(words[0] & 0xFFFF),
                put_ns=words[2] - self._wall_offset_ns,
                get_ns=words[1],
            )
            for words in self.slots(Kind.CONSUMED)
        ]

    def counter(self, counter: Counter) -> int:
        return int(self.header[Header.COUNTERS + counter])


@dataclass(frozen=True)
class Rig:
    """Telemetry that records, and what it recorded so far."""

    session: Session
    telemetry: Telemetry

    def ring(self, worker: Worker) -> RingFile:
        offset = self.session.anchor_wall_ns - self.session.anchor_mono_ns
        rings = [RingFile(path, offset) for path in self.session.path.glob("ring-*")]
        (ring,) = [ring for ring in rings if ring.worker == (worker.role, worker.index)]
        return ring

    def consumed(self, worker: Worker) -> list[Consumed]:
        return self.ring(worker).consumed()

    def counted(self, *workers: Worker) -> dict[str, int]:
        """Return the counters that are not 0, summed over workers, but for those of ordinary work."""
        ordinary = (Counter.STEPS, Counter.TOKENS, Counter.PUTS, Counter.GETS, Counter.EVICTED)
        rings = [self.ring(worker) for worker in workers]
        sums = {
            counter.name: sum(ring.counter(counter) for ring in rings)
            for counter in Counter
            if counter not in ordinary
        }
        return {name: value for name, value in sums.items() if value}


@contextmanager
def recording(directory: Path) -> Iterator[Rig]:
    """Record into ring files that nobody reads but the test."""
    session = create_session("run-1", directory)
    telemetry = Telemetry(session)
    try:
        yield Rig(session, telemetry)
    finally:
        telemetry.close()
        remove_session(session)
