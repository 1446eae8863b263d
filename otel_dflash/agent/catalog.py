"""The names of every ring: what the ids in a record mean. Built from NAMES frames alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final

from otel_dflash.agent.frames import Frame, FrameKind
from otel_dflash.records import DESCRIPTOR_BYTES_MAX, OTHER_NAME, NameKind, State

_ENTRY: Final = struct.Struct("<HB")
_LOST: Final = (0, OTHER_NAME)  # a name whose frame was damaged; a later segment repeats it


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
    """Name table of one ring; ids as in its records. What is unknown or makes no sense reads as OTHER_NAME: a recording may be torn."""

    ring: int
    entries: list[tuple[int, str]] = field(default_factory=list)

    @cached_property
    def worker(self) -> WorkerInfo:
        """Return who owns the ring.

        Raises:
            ValueError: The ring does not say; the drain takes no such ring.
        """
        worker = _fields(self.entries[0][1])
        info = WorkerInfo(*(worker.get(name) for name in ("role", "index", "gpu", "pid", "created_ns")))  # type: ignore[arg-type]
        numbers = (info.index, info.pid, info.created_ns, 0 if info.gpu is None else info.gpu)
        if not isinstance(info.role, str) or not all(isinstance(number, int) for number in numbers):
            raise ValueError(f"ring {self.ring:#x} has no worker: {self.entries[0][1][:100]!r}")
        return info

    def text(self, name_id: int) -> str:
        """Return a bucket, key, string value or error type."""
        kind, text = self._entry(name_id)
        return text if kind in (NameKind.TEXT, NameKind.VALUE) else OTHER_NAME

    def phase(self, name_id: int) -> tuple[State, str]:
        """Return the state and the name of a phase."""
        kind, text = self._entry(name_id)
        if kind != NameKind.PHASE:
            return State.BUSY, OTHER_NAME
        state, _, name = text.partition(" ")
        return State.__members__.get(state.upper(), State.BUSY), name

    def thread(self, name_id: int) -> tuple[int, str] | None:
        """Return the native id and the name of a thread, None when unknown."""
        kind, text = self._entry(name_id)
        if kind != NameKind.THREAD:
            return None
        native_id, name = (_fields(text).get(key) for key in ("id", "name"))
        return (native_id, name) if isinstance(native_id, int) and isinstance(name, str) else None

    def queue(self, name_id: int) -> QueueInfo | None:
        """Return what the user said of a queue, None when unknown."""
        kind, text = self._entry(name_id)
        if kind != NameKind.QUEUE:
            return None
        queue = _fields(text)
        name = queue.get("name")
        return QueueInfo(name, queue.get("capacity"), queue.get("min_ready")) if isinstance(name, str) else None

    def refused(self, first: int = 0) -> list[str]:
        """Return, from that id on, which values of step.set() were not read: "grad_norm (torch.Tensor)"."""
        return [f"{' ('.join(text.split(' ', 1))})" for kind, text in self.entries[first:] if kind == NameKind.REFUSED]

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
        entries = names.entries
        for name_id, entry in enumerate(_entries(frame.payload, frame.count), frame.first):
            if not entries and name_id:  # who owns the ring is lost: nothing can be told of it
                return
            while name_id > len(entries):
                entries.append(_LOST)
            if name_id == len(entries):
                entries.append(entry)
            elif entries[name_id] == _LOST:
                entries[name_id] = entry


def names_bytes(region: bytes | memoryview, skip: int, count: int) -> tuple[bytes, int]:
    """Return the raw entries skip..count of a ring's name region, and how many they are.

    Raises:
        ValueError: The region does not hold so many.
    """
    offset = 0
    start = 0
    for name_id in range(count):
        if name_id == skip:
            start = offset
        offset = _entry_end(region, offset)
    return bytes(region[start:offset]) if count > skip else b"", max(0, count - skip)


def _entry_end(data: bytes | memoryview, offset: int) -> int:
    if offset + _ENTRY.size <= len(data):
        length, _ = _ENTRY.unpack_from(data, offset)
        end: int = offset + _ENTRY.size + length
        if length <= DESCRIPTOR_BYTES_MAX and end <= len(data):
            return end
    raise ValueError(f"no name at byte {offset} of {len(data)}")


def _entries(data: bytes, count: int) -> Iterator[tuple[int, str]]:
    """Yield (kind, text) of raw entries, as far as they make sense."""
    offset = 0
    for _ in range(count):
        try:
            end = _entry_end(data, offset)
        except ValueError:
            return
        yield data[offset + 2], data[offset + _ENTRY.size : end].decode("utf-8", "replace")
        offset = end


@lru_cache(maxsize=1024)  # a thread's descriptor is asked for once per step
def _fields(text: str) -> dict[str, Any]:
    """Return a descriptor's JSON object, {} when it is none; not to be changed."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
