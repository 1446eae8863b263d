"""Recordings that are damaged, of another version, or on a full disk."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from otel_dflash.recording.frames import FRAME_HEAD_BYTES, Frame, FrameKind
from otel_dflash.recording.payloads import AGENT_CPU, Sample
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.recent import RECENT_BYTES_MAX
from otel_dflash.recording.run_info import RecordingError, create_recording
from otel_dflash.recording.segments import segments
from otel_dflash.recording.writer import RecordingWriter
from tests.recording.logbook import INFO, RECORD, RING, fill, names, read_all, sequences, start

S = 1_000_000_000
Reading = Callable[..., RecordingReader]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    create_recording(tmp_path / "run-1", INFO)
    return tmp_path / "run-1"


@pytest.fixture
def reading() -> Iterator[Callable[..., RecordingReader]]:
    """Open readers that are closed at the end."""
    with ExitStack() as stack:

        def opened(*arguments: Any) -> RecordingReader:
            reader = RecordingReader(*arguments)
            stack.callback(reader.close)
            return reader

        yield opened


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow: each write fails with EFBIG, as with ENOSPC on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- damage


def frame_offsets(path: Path) -> list[int]:
    data = path.read_bytes()
    offsets, offset = [], 0
    while offset < len(data):
        offsets.append(offset)
        offset += FRAME_HEAD_BYTES + struct.unpack_from("<I", data, offset + 8)[0]
    return offsets


@pytest.mark.parametrize("byte", [0, 4, 8, 16, 24, 48, 70])  # magic, kind, size, number, ring, CRC, payload
def test_a_damaged_frame_costs_itself_alone_and_is_counted(byte: int, directory: Path) -> None:
    writer = start(directory)
    fill(writer, 10)
    writer.close()
    path = segments(directory)[0][1]
    data = bytearray(path.read_bytes())
    data[frame_offsets(path)[5] + byte] ^= 0x55  # of frames SEGMENT, NAMES, RECORDS ...: the fourth record
    path.write_bytes(data)
    frames, reader = read_all(directory)
    assert sequences(frames) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert reader.missing_frames == 1
    again = start(directory)
    assert (again.next_sequence(RING), again.next_number, path.stat().st_size) == (10, 12, len(data))


def test_names_lost_in_one_segment_are_learned_from_the_next(directory: Path, reading: Reading) -> None:
    writer = start(directory, segment_bytes=1000)
    writer.append(FrameKind.NAMES, RING, 2, 1, names("lost"), 0)
    writer.append(FrameKind.NAMES, RING, 3, 1, names("kept"), 0)
    fill(writer, 20)
    writer.close()
    path = segments(directory)[0][1]
    data = bytearray(path.read_bytes())
    data[frame_offsets(path)[2] + 60] ^= 1
    path.write_bytes(data)
    reader = reading(directory)
    reader.read(3)
    assert [reader.catalog[RING].text(name) for name in range(4)] == ["worker", "_OTHER", "_OTHER", "kept"]
    while reader.read():
        pass
    assert [reader.catalog[RING].text(name) for name in range(4)] == ["worker", "_OTHER", "lost", "kept"]


def test_frames_of_an_unknown_kind_are_passed_over(directory: Path) -> None:
    writer = start(directory)
    fill(writer, 1)
    writer.close()
    later = bytearray(
        Frame(writer.next_number, FrameKind.SAMPLES, 0, 0, 0, 0, b"of a later version").encode()
    )
    later[4] = 200
    struct.pack_into("<I", later, 48, zlib.crc32(later[FRAME_HEAD_BYTES:], zlib.crc32(later[:48])))
    with segments(directory)[0][1].open("ab") as file:
        file.write(later)
    again = start(directory)
    fill(again, 1, first=1)
    again.close()
    frames, reader = read_all(directory)
    assert sequences(frames) == [0, 1]
    assert reader.missing_frames == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "it has no run.json"),
        ("", "cannot be read"),
        ("[1]", "cannot be read"),
        ("{}", "it lacks 'format'"),
        ('{"format": 3, "run": "r"}', "it lacks 'host'"),
        (json.dumps({**INFO.__dict__, "anchor_wall_ns": 1.5}), "anchor_wall_ns: wrong type or out of range"),
        (
            json.dumps({**INFO.__dict__, "anchor_mono_ns": -(10**20)}),
            "anchor_mono_ns: wrong type or out of range",
        ),
        (
            '{"format": 4, "of": "a later version"}',
            "has format 4, this version reads format 3; install a newer otel-dflash",
        ),
        ('{"format": 1}', "has format 1, this version reads format 3; record the run again"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(
    text: str | None, message: str, directory: Path
) -> None:
    (directory / "run.json").unlink()
    if text is not None:
        (directory / "run.json").write_text(text)
    with pytest.raises(RecordingError, match=message):
        RecordingReader(directory)


def test_a_later_minor_version_may_say_more(directory: Path, reading: Reading) -> None:
    (directory / "run.json").write_text(json.dumps({**INFO.__dict__, "new": 1}))
    assert reading(directory).info == INFO


def test_bit_flips_and_truncations_never_raise_or_hang(directory: Path) -> None:
    writer = start(directory, segment_bytes=3000)
    fill(writer, 60)
    writer.append_samples([Sample(AGENT_CPU, 18, 1.0)], 18)
    writer.close()
    files = [directory / "run.json", *(path for _, path in segments(directory))]
    whole = {path: path.read_bytes() for path in files}
    chance = random.Random(3)
    for _ in range(400):
        for path, data in whole.items():
            damaged = bytearray(data)
            for _ in range(chance.choice((0, 0, 1, 3, 30))):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            cut = chance.choice((len(damaged), len(damaged), chance.randrange(len(damaged))))
            path.write_bytes(damaged[:cut])
        try:
            frames, reader = read_all(directory, chance.choice((0, 0, 10, 70)))
        except RecordingError:
            continue
        assert sequences(frames) == sorted(set(sequences(frames)))
        assert all(frame.payload == RECORD for frame in frames if frame.kind == FrameKind.RECORDS)
        assert reader.position <= writer.next_number + 70
        again = RecordingWriter(directory, 1 << 30)
        assert again.next_sequence(RING) in (0, *(first + 1 for first in range(60)))
        again.close()
        for path in directory.glob("segment-*"):
            path.unlink()


# --- a full disk


def test_a_full_disk_loses_the_recording_not_what_live_readers_get(directory: Path, reading: Reading) -> None:
    writer = start(directory)
    reader = reading(directory, 0, writer)
    fill(writer, 2)
    with full_disk():
        assert not writer.append(FrameKind.NAMES, RING, 2, 1, names("on no disk"), 5 * S)
        fill(writer, 3, first=2, time_ns=5 * S + 1)
        assert writer.lost_frames == 4
        assert sequences(reader.read()) == [0, 1, 2, 3, 4]
    fill(writer, 2, first=5, time_ns=5 * S + 2)  # too soon to try again
    fill(writer, 2, first=7, time_ns=7 * S)
    writer.close()
    assert writer.lost_frames == 6
    assert sequences(reader.read()) == [5, 6, 7, 8]
    assert reader.missing_frames == 0
    frames, later = read_all(directory)
    assert sequences(frames) == [0, 1, 7, 8]
    assert later.missing_frames == 6
    assert later.catalog[RING].text(2) == "on no disk"  # a record's names are in the log before it


def test_a_file_that_cannot_even_be_cut_ends_its_segment_and_no_more(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = start(directory)
    fill(writer, 2)
    with monkeypatch.context() as stale, full_disk():

        def gone(*_: object) -> None:
            raise OSError(errno.ESTALE, "Stale file handle")

        for name in ("ftruncate", "close"):
            stale.setattr(os, name, gone)
        fill(writer, 1, first=2, time_ns=5 * S)
    fill(writer, 2, first=3, time_ns=7 * S)
    writer.close()
    assert (writer.lost_frames, sequences(read_all(directory)[0])) == (1, [0, 1, 3, 4])


def test_a_disk_that_stays_full_leaves_no_files_behind_and_fills_no_memory(directory: Path) -> None:
    writer = start(directory)
    before = sorted(path.name for path in directory.iterdir())
    with full_disk():
        fill(writer, 50, time_ns=S)
        for second in range(2, 12):
            fill(writer, 1, first=50 + second, time_ns=second * S)
    assert sorted(path.name for path in directory.iterdir()) == before
    assert writer.lost_frames == 60
    assert writer.next_number == 62  # no segment's first frames among them


def test_a_live_reader_behind_memory_and_disk_skips_what_nobody_has(
    directory: Path, reading: Reading
) -> None:
    writer = start(directory)
    reader = reading(directory, 0, writer)
    count = 2 * RECENT_BYTES_MAX // (64 * 4000)
    with full_disk():
        fill(writer, count, records=4000, time_ns=S)
    found: list[int] = []
    while frames := reader.read():
        found += sequences(frames)
    assert found == [number * 4000 for number in range(count - len(found), count)]
    assert 0 < len(found) < count
    assert reader.missing_frames == count - len(found)


def test_numbers_go_on_beyond_what_sinks_have_read_from_memory(directory: Path) -> None:
    writer = start(directory)
    with full_disk():
        fill(writer, 10, time_ns=S)
    read = writer.next_number
    writer.close()
    again = start(directory, first_number=read)
    fill(again, 1, first=10)
    again.close()
    frames, reader = read_all(directory, read)
    assert sequences(frames) == [10]
    assert reader.missing_frames == 0


def test_a_directory_that_was_removed_counts_as_full(directory: Path) -> None:
    writer = start(directory, segment_bytes=500)
    fill(writer, 2)
    for path in sorted(directory.iterdir()):
        path.unlink()
    directory.rmdir()
    fill(writer, 20, first=2, time_ns=S)
    assert writer.lost_frames == 0  # the open segment goes on, without a name
    writer.close()
