"""Frames that a reader has passed are found again by number: in memory, in any segment, in any order, or not
at all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from otel_dflash.recording.catalog import Catalog
from otel_dflash.recording.frames import Frame
from otel_dflash.recording.lookback import Lookback
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import create_recording
from otel_dflash.recording.writer import RecordingWriter
from tests.spans.recorder import INFO, Log, Recorder


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a recording of three rings in several segments."""
    log = Log()
    recorders = [Recorder(log, number, "target", number) for number in (1, 2, 3)]
    for step in range(1, 1200):
        for recorder in recorders:
            for _ in range(5):
                recorder.phase("forward", step, step + 1, step=step)
            recorder.step(step, step, step + 2)
            recorder.drain()
    create_recording(tmp_path / "run-1", INFO)
    with_head = RecordingWriter(tmp_path / "run-1", 1 << 30, segment_bytes=1 << 18)
    for frame in log.frames:
        with_head.append(frame.kind, frame.ring, frame.first, frame.count, frame.payload, frame.time_ns)
    with_head.close()
    assert len(list((tmp_path / "run-1").glob("segment-*"))) > 4
    return tmp_path / "run-1"


def frames_of(directory: Path) -> list[Frame]:
    reader = RecordingReader(directory)
    frames = []
    while found := reader.read():
        frames += found
    reader.close()
    return frames


def test_any_range_is_found_in_any_order_and_names_are_learnt(directory: Path) -> None:
    frames = frames_of(directory)
    names: Catalog = Catalog()
    lookback = Lookback(directory, None, names)
    choose = random.Random(5)
    for _ in range(300):
        ring = choose.choice([1, 2, 3]) << 28
        mine = [frame for frame in frames if frame.ring == ring]
        first = choose.randrange(len(mine))
        wanted = mine[first : first + choose.randrange(1, 100)]
        assert lookback.frames(ring, wanted[0].number, wanted[-1].number) == wanted
    assert {names[ring].worker.index for ring in names} == {1, 2, 3}
    assert (lookback.knows(1 << 28), lookback.knows(9 << 28)) == (True, False)


def test_what_is_gone_or_cut_is_not_found(directory: Path) -> None:
    frames = frames_of(directory)
    lookback = Lookback(directory, None, Catalog())
    files = sorted(directory.glob("segment-*"))
    border = int(files[1].stem.split("-")[1])
    across = [frame.number for frame in frames if frame.ring == 1 << 28 and abs(frame.number - border) < 20]
    assert lookback.frames(1 << 28, across[0], across[-1])
    files[0].unlink()
    assert lookback.frames(1 << 28, across[0], across[-1]) is None
    assert lookback.frames(1 << 28, across[-2], across[-1])
    assert lookback.frames(1 << 28, frames[-1].number, frames[-1].number + 50) is None


def test_damage_is_stepped_over_and_its_frame_not_found(directory: Path) -> None:
    frames = [frame for frame in frames_of(directory) if frame.ring == 2 << 28]
    path = min(directory.glob("segment-*"))
    data = path.read_bytes()
    hit = frames[200]
    at = data.index(hit.encode())
    path.write_bytes(data[: at + 4] + b"\xff" * 60 + data[at + 64 :])
    lookback = Lookback(directory, None, Catalog())
    assert lookback.frames(2 << 28, hit.number, hit.number) is None
    assert lookback.frames(2 << 28, frames[199].number, frames[202].number) == [
        frames[199],
        frames[201],
        frames[202],
    ]


def test_the_newest_come_from_memory_where_no_disk_had_room(directory: Path) -> None:
    frames = [frame for frame in frames_of(directory) if frame.ring == 3 << 28]
    writer = RecordingWriter(directory, 1 << 30)
    lookback = Lookback(directory, writer, Catalog())
    writer.close()
    writer._retry_ns = 1 << 62  # a full disk is left alone for a while
    first, last = writer.next_number, writer.next_number + 2
    for frame in frames[-3:]:
        assert not writer.append(
            frame.kind, frame.ring, frame.first, frame.count, frame.payload, frame.time_ns
        )
    found = lookback.frames(3 << 28, first, last)
    assert found is not None
    assert [frame.payload for frame in found] == [frame.payload for frame in frames[-3:]]
    assert lookback.frames(3 << 28, frames[10].number, frames[12].number) == frames[10:13]
