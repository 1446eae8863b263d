"""The meaning of ids in records and samples: the names of every ring, and all series.

Built from NAMES and SERIES frames alone.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final

from otel_dflash.console import printable
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.payloads import PayloadError, Series, decode_series, is_word
from otel_dflash.records import DESCRIPTOR_BYTES_MAX, OTHER_NAME, NameKind, State

_ENTRY: Final = struct.Struct("<HB")
OF_ROLE: Final = -1  # index of what stands for all ended workers of a role
_LOST: Final = (0, OTHER_NAME)  # a name whose frame is damaged; a later segment repeats it

_NATURAL: Final = ("step.set()", "give it an int of 0 or more")
_ANY_VALUE: Final = ("step.set()", "give it an int, float, str or bool in range")
_CONTEXT: Final = "step.consumed() or worker.resume()"
_RULES: Final = {
    "tokens": _NATURAL,
    "loss_tokens": _NATURAL,
    "step": _NATURAL,
    "bucket": ("step.set()", "give it a str or an int"),
    "context": (_CONTEXT, "give it what step.produced() returned"),
    "put_time": (_CONTEXT, "give it all three words of what step.produced() returned, in order"),
}
"""By key: who refuses a value, and what it takes."""
_FILLED: Final = {
    "thread": "a worker ran in too many threads: later steps have no thread name; use a pool of threads",
    "phase": "a worker has too many different phases: name a phase by one of few words",
    "text": "step.set() got too many different keys, or a worker too many different types of errors: use few",
    "queue": "a worker took items from too many differently named queues: use few names",
    "value": "step.set() got too many different strings, or items came with too many different buckets",
}


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
    """The name table of one ring; ids as in its records.

    Unknown or malformed names read as OTHER_NAME: a recording may be torn.
    """

    ring: int
    entries: list[tuple[int, str]] = field(default_factory=list)

    @cached_property
    def worker(self) -> WorkerInfo:
        """Return the worker that owns the ring.

        Raises:
            ValueError: The ring does not name its worker; the drain ignores such a ring.
        """
        worker = _fields(self.entries[0][1])
        info = WorkerInfo(*(worker.get(name) for name in ("role", "index", "gpu", "pid", "created_ns")))  # type: ignore[arg-type]
        numbers = (info.index, info.pid, 0 if info.gpu is None else info.gpu)
        is_whole = is_word(info.created_ns) and all(isinstance(number, int) for number in numbers)
        if not isinstance(info.role, str) or not is_whole:
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
        """Return the native id and the name of a thread, None if unknown."""
        kind, text = self._entry(name_id)
        if kind != NameKind.THREAD:
            return None
        native_id, name = (_fields(text).get(key) for key in ("id", "name"))
        return (native_id, name) if isinstance(native_id, int) and isinstance(name, str) else None

    def queue(self, name_id: int) -> QueueInfo | None:
        """Return a queue as the user described it, None if unknown."""
        kind, text = self._entry(name_id)
        if kind != NameKind.QUEUE:
            return None
        queue = _fields(text)
        name = queue.get("name")
        return (
            QueueInfo(name, queue.get("capacity"), queue.get("min_ready")) if isinstance(name, str) else None
        )

    def refused(self, first: int = 0) -> list[str]:
        """Return the step.set() values that were not read, from id `first` on: "grad_norm (torch.Tensor)"."""
        return [
            f"{' ('.join(text.split(' ', 1))})"
            for kind, text in self.entries[first:]
            if kind == NameKind.REFUSED
        ]

    def overflowed(self, first: int = 0) -> list[str]:
        """Return the keys of step.set() that had more different strings than a ring's table holds, from id
        `first` on."""
        return [text for kind, text in self.entries[first:] if kind == NameKind.OVERFLOWED]

    def complaints(self, first: int) -> list[str]:
        """Return a line for each value that was refused and each key that overflowed, from id `first` on."""
        refused = [line for value in self.refused(first) for line in describe_refusals([value])]
        return refused + [describe_overflow([key]) for key in self.overflowed(first)]

    def filled(self) -> list[str]:
        """Return the kinds of names of which there were more than a ring's table holds."""
        return [text for kind, text in self.entries if kind == NameKind.FILLED]

    def encode(self) -> bytes:
        """Return the entries as stored in a ring file and in a NAMES frame."""
        parts = []
        for kind, text in self.entries:
            data = text.encode()
            parts.append(_ENTRY.pack(len(data), kind) + data)
        return b"".join(parts)

    def _entry(self, name_id: int) -> tuple[int, str]:
        if name_id < len(self.entries):
            return self.entries[name_id]
        return NameKind.TEXT, OTHER_NAME


def describe_refusals(values: Iterable[str]) -> list[str]:
    """Return a line for each rule that refused values broke, given as `RingNames.refused` returns them."""
    broken: dict[tuple[str, str], list[str]] = {}
    for value in values:
        broken.setdefault(_RULES.get(value.partition(" ")[0], _ANY_VALUE), []).append(value)
    return [
        f"{method} did not read {', '.join(map(printable, found))}: {remedy}"
        for (method, remedy), found in broken.items()
    ]


def describe_overflow(keys: Iterable[str]) -> str:
    """Return a line about keys of step.set() that had too many different strings."""
    named = ", ".join(map(printable, keys))
    return f"step.set() got too many different strings for {named}: give it one of few, or a number"


def describe_filled(kinds: Iterable[str]) -> list[str]:
    """Return a line for each kind of names that `RingNames.filled` returns."""
    return [_FILLED[kind] for kind in sorted(set(kinds)) if kind in _FILLED]


class Catalog(dict[int, RingNames]):
    """Ring id -> its names; and `series`, series id -> series."""

    def __init__(self) -> None:
        super().__init__()
        self.series: dict[int, Series] = {}

    def apply(self, frame: Frame) -> None:
        """Add the names of a NAMES or the series of a SERIES frame; a repeated frame changes nothing."""
        if frame.kind == FrameKind.NAMES:
            self._apply_names(frame)
        elif frame.kind == FrameKind.SERIES:
            # samples of an unknown series are counted where they are read
            with contextlib.suppress(PayloadError):
                self.series.update(decode_series(frame.payload))

    def _apply_names(self, frame: Frame) -> None:
        names = self.get(frame.ring)
        if names is None:
            names = self[frame.ring] = RingNames(frame.ring)
        entries = names.entries
        for name_id, entry in enumerate(_entries(frame.payload, frame.count), frame.first):
            if not entries and name_id:  # the name of its worker is lost: the ring is useless
                return
            while name_id > len(entries):
                entries.append(_LOST)
            if name_id == len(entries):
                entries.append(entry)
            elif entries[name_id] == _LOST:
                entries[name_id] = entry


def names_bytes(region: bytes | memoryview, skip: int, count: int) -> tuple[bytes, int]:
    """Return the raw entries skip..count of a ring's name region, and their number.

    Raises:
        ValueError: The region holds fewer than `count` entries.
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
    """Yield (kind, text) of raw entries, up to the first malformed one."""
    offset = 0
    for _ in range(count):
        try:
            end = _entry_end(data, offset)
        except ValueError:
            return
        yield data[offset + 2], data[offset + _ENTRY.size : end].decode("utf-8", "replace")
        offset = end


@lru_cache(maxsize=1024)  # a thread's descriptor is read once per step
def _fields(text: str) -> dict[str, Any]:
    """Return a descriptor's JSON object, {} if it is not one. Do not change it: it is cached."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
