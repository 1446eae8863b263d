"""What a list shows of a recording: the same as all of its frames say, without reading them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.overview import OVERVIEW_FILE, QUIET_S, Overview, WorkerOverview, read_overview
from otel_dflash.recording.payloads import OpenWork
from otel_dflash.recording.run_info import create_recording
from otel_dflash.recording.segments import segments
from otel_dflash.recording.writer import RecordingWriter
from tests.metrics.planted import PlantedRing, open_frame
from tests.recording.logbook import INFO
from tests.recording.test_recording_losses import full_disk

S = 1_000_000_000


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    create_recording(tmp_path / "run-1", INFO)
    return tmp_path / "run-1"


def writing(directory: Path, segment_bytes: int = 1 << 20) -> RecordingWriter:
    return RecordingWriter(directory, 1 << 30, segment_bytes=segment_bytes)


def append(writer: RecordingWriter, *frames: Frame) -> None:
    for frame in frames:
        writer.append(frame.kind, frame.ring, frame.first, frame.count, frame.payload, frame.time_ns)


def work(ring: PlantedRing, start_s: int, steps: int) -> list[Frame]:
    """Return a frame for each step of a second that a worker does."""
    frames = []
    for second in range(start_s, start_s + steps):
        ring.phase("forward", second * S, (second + 1) * S)
        ring.step(second * S, (second + 1) * S)
        frames.append(ring.flush((second + 1) * S))
    return frames


def make_old(directory: Path) -> None:
    """Let the newest segment be as old as one that nobody appends to."""
    then = time.time() - QUIET_S - 1
    os.utime(segments(directory)[-1][1], (then, then))


def make_unreadable(directory: Path) -> None:
    """Keep the names and sizes of the segments, but no frame."""
    for _, path in segments(directory):
        path.write_bytes(bytes(path.stat().st_size))


def two_workers(writer: RecordingWriter) -> None:
    """Record a worker that was made twice and closed, and one that was killed."""
    target, again = (PlantedRing(ring, "target", 0, created_ns=ring * S) for ring in (1, 2))
    drafter = PlantedRing(3, "drafter", 5, pid=101, created_ns=2 * S)
    frames = [*work(target, 2, 20), target.closed(22 * S)]
    frames += [*work(again, 22, 3), *work(drafter, 22, 4), again.closed(25 * S)]
    frames += [drafter.closed(27 * S, killed=True)]
    append(writer, *(ring.names_frame() for ring in (target, again, drafter)), *frames)


TWO_WORKERS = Overview(
    records=54,
    first_ns=1 * S,
    last_ns=27 * S,
    workers={
        (100, "target", 0): WorkerOverview(100, "target", 0),
        (101, "drafter", 5): WorkerOverview(101, "drafter", 5, killed=True),
    },
)


@pytest.mark.parametrize("segment_bytes", [1 << 20, 400])
def test_the_overview_of_a_closed_recording_is_kept(segment_bytes: int, directory: Path) -> None:
    writer = writing(directory, segment_bytes)
    two_workers(writer)
    writer.close()
    make_unreadable(directory)
    overview = read_overview(directory)
    assert overview == TWO_WORKERS
    assert (overview.unfinished, overview.killed) == (0, 1)


@pytest.mark.parametrize("segment_bytes", [1 << 20, 400])
def test_a_killed_writer_leaves_what_the_newest_segment_tells(segment_bytes: int, directory: Path) -> None:
    two_workers(writing(directory, segment_bytes))  # never closed
    newest = segments(directory)[-1][1]
    for _, path in segments(directory)[:-1]:
        path.write_bytes(bytes(path.stat().st_size))
    assert newest.stat().st_size > 0
    assert read_overview(directory) == TWO_WORKERS


@pytest.mark.parametrize("segment_bytes", [1 << 20, 400])
def test_a_writer_that_goes_on_after_a_kill_counts_on(segment_bytes: int, directory: Path) -> None:
    ring = PlantedRing(1, "target", 0, created_ns=S)
    first, later = work(ring, 1, 10), work(ring, 11, 10)
    append(writing(directory, segment_bytes), ring.names_frame(), *first)  # never closed
    again = writing(directory, segment_bytes)
    append(again, *later, ring.closed(22 * S))
    again.close()
    make_unreadable(directory)
    assert read_overview(directory) == Overview(
        40, S, 22 * S, {(100, "target", 0): WorkerOverview(100, "target", 0)}
    )


def test_a_running_run_is_counted_anew_and_not_kept(directory: Path) -> None:
    ring = PlantedRing(1, "target", 0, created_ns=S)
    first, later = work(ring, 1, 3), work(ring, 4, 2)
    writer = writing(directory)
    append(writer, ring.names_frame(), *first)
    assert (read_overview(directory).records, read_overview(directory).last_ns) == (6, 4 * S)
    append(writer, *later)
    overview = read_overview(directory)
    assert (overview.records, overview.last_ns, overview.unfinished) == (10, 6 * S, 1)
    assert not (directory / OVERVIEW_FILE).exists()


def test_a_run_in_which_all_wait_lasts_to_the_newest_open_frame(directory: Path) -> None:
    writer = writing(directory)
    ring = PlantedRing(1, "target", 0, created_ns=1 * S)
    append(writer, ring.names_frame(), *work(ring, 1, 2), open_frame(9 * S, {ring.ring: OpenWork(None, ())}))
    assert read_overview(directory).last_ns == 9 * S
    append(writer, ring.closed(10 * S), open_frame(20 * S, {}))
    assert read_overview(directory).last_ns == 10 * S
    writer.close()


def test_an_overview_that_was_counted_is_kept_once_nothing_is_appended(directory: Path) -> None:
    two_workers(writing(directory))  # never closed
    make_old(directory)
    assert read_overview(directory) == TWO_WORKERS
    make_unreadable(directory)
    assert read_overview(directory) == TWO_WORKERS


def test_a_stale_overview_is_counted_again(directory: Path) -> None:
    writer = writing(directory)
    two_workers(writer)
    writer.close()
    ring = PlantedRing(9, "main", 0, created_ns=30 * S)
    frames = work(ring, 30, 1)
    append(writing(directory), ring.names_frame(), *frames)
    overview = read_overview(directory)
    assert (overview.records, overview.last_ns, len(overview.workers)) == (56, 31 * S, 3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: b"",
        lambda kept: json.dumps(kept).encode()[:-20],
        lambda kept: b"[" * 100_000,
        lambda kept: b"[]",
        lambda kept: json.dumps({**kept, "overview": {}}).encode(),
        lambda kept: json.dumps({**kept, "overview": {**kept["overview"], "records": "54"}}).encode(),
        lambda kept: json.dumps({**kept, "overview": {**kept["overview"], "first_ns": 10**30}}).encode(),
        lambda kept: json.dumps({**kept, "overview": {**kept["overview"], "records": -1}}).encode(),
        lambda kept: json.dumps({**kept, "overview": {**kept["overview"], "workers": [[]]}}).encode(),
        lambda kept: json.dumps(kept).replace("true", '"yes"').encode(),
    ],
)
def test_a_damaged_overview_is_counted_again(damage, directory: Path) -> None:  # type: ignore[no-untyped-def]
    writer = writing(directory)
    two_workers(writer)
    writer.close()
    kept = directory / OVERVIEW_FILE
    kept.write_bytes(damage(json.loads(kept.read_bytes())))
    assert read_overview(directory) == TWO_WORKERS


def test_a_segment_that_does_not_tell_what_came_before_it_is_counted_with_those_before(
    directory: Path,
) -> None:
    two_workers(writing(directory, 400))
    found = segments(directory)
    for _, path in found[2:]:
        data = bytearray(path.read_bytes())
        data[60] ^= 1  # in the first frame
        path.write_bytes(data)
    assert read_overview(directory) == TWO_WORKERS


def test_frames_that_are_on_no_disk_are_not_counted(directory: Path) -> None:
    ring = PlantedRing(1, "target", 0, created_ns=S)
    first, lost, later = work(ring, 1, 3), work(ring, 4, 5), work(ring, 20, 2)
    writer = writing(directory)
    append(writer, ring.names_frame(), *first)
    with full_disk():
        append(writer, *lost)
    append(writer, *later)
    writer.close()
    assert read_overview(directory).records == 10


def test_malformed_frames_are_left_out(directory: Path) -> None:
    ring = PlantedRing(1, "target", 0, created_ns=S)
    stranger = PlantedRing(2, "drafter", 0)
    stranger.step(0, 1)
    torn = Frame(0, FrameKind.CLOSED, ring.ring, 0, 0, 0, b"{")
    frames = [stranger.flush(), stranger.closed(2), Frame(0, FrameKind.NAMES, 3 << 28, 0, 1, 0, b"\x01\0\2x")]
    steps = work(ring, 1, 1)
    writer = writing(directory)
    append(
        writer,
        *frames,
        ring.names_frame(),
        torn,
        *steps,
        Frame(0, FrameKind.RECORDS, ring.ring, 2, 0, 0, b""),
    )
    writer.close()
    assert read_overview(directory) == Overview(
        2,
        S,
        2 * S,
        {(100, "target", 0): WorkerOverview(100, "target", 0, open_rings=[ring.ring])},
    )


def test_a_worker_that_says_an_impossible_time_is_left_out(directory: Path) -> None:
    writer = writing(directory)
    append(writer, PlantedRing(1, "target", 0, created_ns=10**30).names_frame())
    writer.close()
    assert read_overview(directory) == Overview()


def test_a_recording_without_segments_has_an_empty_overview(directory: Path) -> None:
    assert read_overview(directory) == Overview()
