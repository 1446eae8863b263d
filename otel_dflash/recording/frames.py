"""One frame of the recording: a numbered piece of the log with a CRC.

Byte layout (little endian), 56 bytes before the payload::

    4  magic "ODF1"     1  kind      3  zero      4  payload bytes     4  count
    8  number           8  ring id   8  first     8  time, monotonic ns
    4  CRC-32 of the 48 bytes before it and the payload                4  zero
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

FRAME_MAGIC: Final = b"ODF1"
_HEAD: Final = struct.Struct("<4sB3xIIQQQQ")
_CHECK: Final = struct.Struct("<I4x")
FRAME_HEAD_BYTES: Final = _HEAD.size + _CHECK.size
PAYLOAD_BYTES_MAX: Final = 1 << 27  # twice the largest ring


class FrameKind(IntEnum):
    """What a frame's payload is."""

    UNKNOWN = 0  # of a later version: readers skip it
    NAMES = 1  # count name entries as in the ring file, from id `first`
    RECORDS = 2  # count raw slots, from sequence `first`
    COUNTERS = 3  # count words in the order of records.Counter
    CLOSED = 4  # JSON: payloads.Closed
    SERIES = 5  # JSON: count payloads.Series by id
    SEGMENT = 6  # JSON: next {ring id: sequence}, closed [ring id], overview; the first of every segment
    SAMPLES = 7  # count payloads.Sample, of a ring or of none (ring 0)
    OPEN = 8  # what was open in count rings at the frame's time: payloads.encode_open


_KINDS: Final = frozenset(FrameKind)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame; `number` is its position in the log, from 0."""

    number: int
    kind: FrameKind
    ring: int
    first: int
    count: int
    time_ns: int
    payload: bytes

    def encode(self) -> bytes:
        """Return the frame's bytes in a segment."""
        head = _HEAD.pack(
            FRAME_MAGIC,
            self.kind,
            len(self.payload),
            self.count,
            self.number,
            self.ring,
            self.first,
            self.time_ns,
        )
        return head + _CHECK.pack(zlib.crc32(self.payload, zlib.crc32(head))) + self.payload

    def json(self) -> Any:
        """Return the payload of a JSON frame."""
        return json.loads(self.payload)


def payload_bytes(head: bytes) -> int | None:
    """Return the payload size that a frame head states, None if it is not a frame head."""
    if len(head) < FRAME_HEAD_BYTES or head[:4] != FRAME_MAGIC:
        return None
    size: int = _HEAD.unpack_from(head)[2]
    return size if size <= PAYLOAD_BYTES_MAX else None


def decode(head: bytes, payload: bytes) -> Frame | None:
    """Return the frame, None if it is torn or damaged."""
    magic, kind, size, count, number, ring, first, time_ns = _HEAD.unpack_from(head)
    (crc,) = _CHECK.unpack_from(head, _HEAD.size)
    if (
        magic != FRAME_MAGIC
        or size != len(payload)
        or crc != zlib.crc32(payload, zlib.crc32(head[: _HEAD.size]))
    ):
        return None
    known = FrameKind(kind) if kind in _KINDS else FrameKind.UNKNOWN
    return Frame(number, known, ring, first, count, time_ns, payload)


def undecoded(head: bytes) -> Frame:
    """Return a frame from its head alone: the payload is empty, the CRC is not checked."""
    _, kind, _, count, number, ring, first, time_ns = _HEAD.unpack_from(head)
    return Frame(number, FrameKind(kind), ring, first, count, time_ns, b"")
