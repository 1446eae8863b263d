"""Recordings made by hand, for tests: one ring, records that are all the same."""

from __future__ import annotations

import struct
from pathlib import Path

from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import RunInfo
from otel_dflash.recording.writer import RecordingWriter

INFO = RunInfo(
    "run-1", "node-1", 1_700_000_000_000_000_000, 5_000_000_000, 1_700_000_000_000_000_000, "0.1.0"
)
RING = 7 << 28
RECORD = bytes(range(64))


def names(*texts: str) -> bytes:
    return b"".join(struct.pack("<HB", len(text), 2) + text.encode() for text in texts)


def fill(writer: RecordingWriter, frames: int, records: int = 1, first: int = 0, time_ns: int = 0) -> None:
    for number in range(frames):
        writer.append(FrameKind.RECORDS, RING, first + number * records, records, RECORD * records, time_ns)


def start(directory: Path, **settings: int) -> RecordingWriter:
    writer = RecordingWriter(directory, **{"limit_bytes": 1 << 30, **settings})
    if not writer.names(RING):
        writer.append(FrameKind.NAMES, RING, 0, 2, names("worker", "_OTHER"), 0)
    return writer


def sequences(frames: list[Frame]) -> list[int]:
    return [frame.first for frame in frames if frame.kind == FrameKind.RECORDS]


def read_all(directory: Path, position: int = 0) -> tuple[list[Frame], RecordingReader]:
    reader = RecordingReader(directory, position)
    frames = []
    while found := reader.read(7):
        frames += found
    reader.close()
    return frames, reader
