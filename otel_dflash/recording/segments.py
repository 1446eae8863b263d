"""Segment files of a recording: list them, and read frames from one that may be torn or damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Final

from otel_dflash.recording.frames import (
    FRAME_HEAD_BYTES,
    FRAME_MAGIC,
    Frame,
    FrameKind,
    decode,
    payload_bytes,
    undecoded,
)

_SEARCH_BYTES: Final = 1 << 20


def segment_path(directory: Path, first: int) -> Path:
    """Return the path of the segment whose first frame has number `first`."""
    return directory / f"segment-{first:012d}.rec"


def segments(directory: Path) -> list[tuple[int, Path]]:
    """Return (first frame number, path) of each segment in order."""
    found = []
    for path in directory.glob("segment-*.rec"):
        digits = path.stem.removeprefix("segment-")
        if digits.isascii() and digits.isdigit():
            found.append((int(digits), path))
    return sorted(found)


def read_frame(file: BinaryIO, skip_payload_of: FrameKind | None = None) -> Frame | None:
    """Return the next whole frame; None, with the file position unchanged, if there is none yet.

    Damaged bytes are skipped: the frame numbers show how many frames are missing. The payload of kind
    `skip_payload_of` is not read, and the CRC of such a frame is not checked.
    """
    start = file.tell()
    size = os.fstat(file.fileno()).st_size
    at: int | None = start
    while at is not None:
        file.seek(at)
        frame = _frame_here(file, size, skip_payload_of)
        if frame is not None:
            return frame
        at = _next_magic(file, at + 1, size)
    file.seek(start)
    return None


def _frame_here(file: BinaryIO, file_bytes: int, skip_payload_of: FrameKind | None) -> Frame | None:
    start = file.tell()
    head = file.read(FRAME_HEAD_BYTES)
    size = payload_bytes(head)
    if size is None or start + FRAME_HEAD_BYTES + size > file_bytes:
        return None
    if skip_payload_of is not None and head[4] == skip_payload_of:
        file.seek(size, os.SEEK_CUR)
        return undecoded(head)
    return decode(head, file.read(size))


def _next_magic(file: BinaryIO, start: int, file_bytes: int) -> int | None:
    """Return the offset, from `start` on, at which the next frame may begin."""
    while start + FRAME_HEAD_BYTES <= file_bytes:
        file.seek(start)
        found = file.read(_SEARCH_BYTES).find(FRAME_MAGIC)
        if found >= 0:
            return start + found
        start += _SEARCH_BYTES - len(FRAME_MAGIC) + 1
    return None
