"""The names of every ring: what the ids in a record mean. Built from NAMES frames alone."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from functools import cached_property

from otel_dflash.agent.frames import Frame, FrameKind
from otel_dflash.records import OTHER_NAME, NameKind, State

_ENTRY = struct.Struct("<HB")


@dataclass(frozen=True)
class WorkerInfo:
    """The worker that owns a ring."""

    role: str
    index: int
    gpu: int | None
    pid: int
    created_ns: int  # monotonic


@dataclass(frozen=True)
class QueueInfo:
    """A queue as the user named it."""

    name: str
    capacity: int | None
    min_ready: int | None


@dataclass
class RingNames:
    """Name table of one ring; ids as in its records. Unknown ids read as OTHER_NAME: a recording may be torn."""

    ring: int
    entries: list[tuple[int, str]] = field(default_factory=list)

    @cached_property
    def worker(self) -> WorkerInfo:
        """Return who owns the ring."""
        worker = json.loads(self.entries[0][1])
        return WorkerInfo(worker["role"], worker["index"], worker["gpu"], worker["pid"], worker["created_ns"])

    def text(self, name_id: int) -> str:
        """Return a bucket, key, string value or error type."""
        kind, text = self._entry(name_id)
        return text if kind == NameKind.TEXT else OTHER_NAME

    def phase(self, name_id: int) -> tuple[State, str]:
        """Return the state and the name of a phase."""
        kind, text = self._entry(name_id)
        if kind != NameKind.PHASE:
            return State.BUSY, OTHER_NAME
        state, _, name = text.partition(" ")
        return State[state.upper()], name

    def thread(self, name_id: int) -> tuple[int, str] | None:
        """Return the native id and the name of a thread, None when unknown."""
        kind, text = self._entry(name_id)
        if kind != NameKind.THREAD:
            return None
        thread = json.loads(text)
        return thread["id"], thread["name"]

    def queue(self, name_id: int) -> QueueInfo | None:
        """Return what the user said of a queue, None when unknown."""
        kind, text = self._entry(name_id)
        if kind != NameKind.QUEUE:
            return None
        queue = json.loads(text)
        return QueueInfo(queue["name"], queue["capacity"], queue["min_ready"])

    def encode(self) -> bytes:
        """Return the entries as they lie in a ring file and in a NAMES frame."""
        parts = []
        for kind, text in self.entries:
            data = text.encode()
            parts.append(_ENTRY.pack(len(data), kind) + data)
        return b"".join(parts)

    def _entry(self, name_id: int) -> tuple[int, str]:
        if name_id < len(self.entries):
            return self.entries[name_id]
        return NameKind.TEXT, OTHER_NAME


class Catalog(dict[int, RingNames]):
    """Ring id -> its names."""

    def apply(self, frame: Frame) -> None:
        """Take the names of a NAMES frame; a frame seen before changes nothing."""
        if frame.kind != FrameKind.NAMES:
            return
        names = self.get(frame.ring)
        if names is None:
            names = self[frame.ring] = RingNames(frame.ring)
        offset = 0
        for name_id in range(frame.first, frame.first + frame.count):
            length, kind = _ENTRY.unpack_from(frame.payload, offset)
            offset += _ENTRY.size
            text = frame.payload[offset : offset + length].decode("utf-8", "replace")
            offset += length
            if name_id == len(names.entries):
                names.entries.append((kind, text))


def names_bytes(region: bytes | memoryview, skip: int, count: int) -> tuple[bytes, int]:
    """Return the raw entries skip..count of a ring's name region, and how many they are."""
    offset = 0
    start = 0
    for name_id in range(count):
        if name_id == skip:
            start = offset
        length, _ = _ENTRY.unpack_from(region, offset)
        offset += _ENTRY.size + length
    return bytes(region[start:offset]) if count > skip else b"", max(0, count - skip)
