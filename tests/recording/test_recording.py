"""The log: what is appended is read, segment by segment, live or later. Damage and full disks are in
test_recording_losses.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from otel_dflash.recording import reader as reader_module
from otel_dflash.recording.directory import list_recordings, recording_bytes
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.recent import RECENT_BYTES_MAX
from otel_dflash.recording.run_info import create_recording
from otel_dflash.recording.segments import segments
from otel_dflash.recording.writer import RecordingWriter
from tests.recording.logbook import INFO, RECORD, RING, fill, names, read_all, sequences, start

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


# --- what is written is read


def test_frames_come_back_as_they_were_appended(directory: Path) -> None:
    writer = start(directory)
    writer.append(FrameKind.RECORDS, RING, 5, 2, RECORD * 2, 17)
    writer.append(FrameKind.COUNTERS, RING, 0, 1, bytes(8), 18)
    writer.close()
    frames, reader = read_all(directory)
    assert frames == [
        Frame(1, FrameKind.NAMES, RING, 0, 2, 0, names("worker", "_OTHER")),
        Frame(2, FrameKind.RECORDS, RING, 5, 2, 17, RECORD * 2),
        Frame(3, FrameKind.COUNTERS, RING, 0, 1, 18, bytes(8)),
    ]
    assert (reader.position, reader.missing_frames, reader.catalog[RING].text(0)) == (4, 0, "worker")


def test_one_frame_at_a_time_reaches_the_end_over_segment_borders(directory: Path, reading: Reading) -> None:
    writer = start(directory, segment_bytes=500)
    fill(writer, 20)
    writer.close()
    reader = reading(directory)
    found = []
    while frames := reader.read(1):
        found += frames
    assert sequences(found) == list(range(20))


def test_a_reader_goes_on_at_its_position_with_all_names(directory: Path) -> None:
    writer = start(directory)
    fill(writer, 10)
    writer.append(FrameKind.NAMES, RING, 2, 1, names("late"), 0)
    fill(writer, 10, first=10)
    writer.close()
    frames, reader = read_all(directory, 14)
    assert sequences(frames) == list(range(11, 20))
    assert reader.catalog[RING].entries == [(2, "worker"), (2, "_OTHER"), (2, "late")]


def test_a_recording_is_read_while_it_is_written(directory: Path, reading: Reading) -> None:
    writer = start(directory, segment_bytes=2000)
    reader = reading(directory)
    total = 3000
    thread = threading.Thread(target=fill, args=(writer, total))
    thread.start()
    found: list[int] = []
    while thread.is_alive() or len(found) < total:
        found += sequences(reader.read(3))
    thread.join()
    assert found == list(range(total))
    assert reader.missing_frames == 0
    assert len(segments(directory)) > 50


def test_what_was_appended_before_the_next_segment_came_is_read_before_it(
    directory: Path, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = start(directory, segment_bytes=1000)
    fill(writer, 1)
    reader = reading(directory)
    assert sequences(reader.read(3)) == [0]
    turn = iter(range(2))

    def later(path: Path) -> list[tuple[int, Path]]:
        """The reader looks for segments: by now the writer has ended this one."""
        if next(turn, 0):
            fill(writer, 20, first=1)
        return segments(path)

    monkeypatch.setattr(reader_module, "segments", later)
    assert sequences(reader.read()) == list(range(1, 21))
    assert reader.missing_frames == 0


def test_a_live_reader_that_fell_behind_goes_from_the_files_to_memory(
    directory: Path, reading: Reading
) -> None:
    writer = start(directory, segment_bytes=1 << 20)
    reader = reading(directory, 0, writer)
    count = 3 * RECENT_BYTES_MAX // (64 * 1000)
    fill(writer, count, records=1000)
    assert writer.recent.read(0, 1) is None
    found: list[int] = []
    while frames := reader.read(50):
        found += sequences(frames)
    assert found == [number * 1000 for number in range(count)]
    assert reader.missing_frames == 0


def test_recordings_are_listed(directory: Path) -> None:
    (directory.parent / "no-recording").mkdir()
    assert list_recordings(directory.parent) == [directory]
    assert list_recordings(directory / "missing") == []


# --- segments


def test_a_segment_can_be_read_alone(directory: Path) -> None:
    writer = start(directory, segment_bytes=1000)
    fill(writer, 40)
    writer.close()
    found = segments(directory)
    for _, path in found[:-1]:
        path.unlink()
    frames, reader = read_all(directory)
    assert reader.catalog[RING].entries == [(2, "worker"), (2, "_OTHER")]
    assert sequences(frames) == list(range(40 - len(sequences(frames)), 40))
    assert reader.missing_frames == found[-1][0]


def test_the_oldest_segments_are_removed_at_the_size_cap_and_counted(directory: Path) -> None:
    writer = start(directory, limit_bytes=1 << 20)
    fill(writer, 30, records=1000)
    writer.close()
    size = sum(path.stat().st_size for _, path in segments(directory))
    frames, reader = read_all(directory)
    kept = sequences(frames)
    assert (1 << 19) < size <= 1 << 20
    assert writer.removed_segments > 0
    assert kept == [number * 1000 for number in range(30 - len(kept), 30)]
    assert reader.missing_frames == segments(directory)[0][0]
    assert reader.catalog[RING].text(0) == "worker"


def test_names_of_retired_rings_are_not_repeated(directory: Path, reading: Reading) -> None:
    writer = start(directory)
    writer.append(FrameKind.CLOSED, RING, 0, 0, b"{}", 0)
    writer.close()
    again = RecordingWriter(directory, 1 << 30, segment_bytes=1)
    again.append(FrameKind.COUNTERS, 0, 0, 0, b"", 0)
    again.close()
    for _, path in segments(directory)[:-1]:
        path.unlink()
    last = RecordingWriter(directory, 1 << 30)
    last.close()
    assert RING in last.closed
    assert reading(directory).catalog == {}


# --- starting again


def test_a_writer_goes_on_where_the_log_ends(directory: Path) -> None:
    writer = start(directory, segment_bytes=1000)
    fill(writer, 20)
    writer.close()
    again = start(directory, segment_bytes=1000)
    assert (again.next_sequence(RING), again.names(RING), again.next_number) == (20, 2, writer.next_number)
    fill(again, 20, first=20)
    again.close()
    frames, reader = read_all(directory)
    assert sequences(frames) == list(range(40))
    assert reader.missing_frames == 0


@pytest.mark.parametrize("keep", [1, 20, 56, 57, 100])
def test_a_torn_tail_is_cut(keep: int, directory: Path) -> None:
    writer = start(directory)
    fill(writer, 3)
    writer.close()
    path = segments(directory)[-1][1]
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(Frame(99, FrameKind.RECORDS, RING, 3, 1, 0, RECORD).encode()[:keep])
    assert sequences(read_all(directory)[0]) == [0, 1, 2]
    again = start(directory)
    assert path.stat().st_size == whole
    fill(again, 1, first=again.next_sequence(RING))
    again.close()
    frames, reader = read_all(directory)
    assert sequences(frames) == [0, 1, 2, 3]
    assert reader.missing_frames == 0


@pytest.mark.parametrize("left", [0, 30])
def test_a_segment_that_holds_no_frame_is_forgotten(left: int, directory: Path) -> None:
    writer = start(directory, segment_bytes=1000)
    fill(writer, 20)
    writer.close()
    (directory / f"segment-{writer.next_number:012d}.rec").write_bytes(bytes(left))
    again = start(directory, segment_bytes=1000)
    assert (again.next_sequence(RING), again.names(RING)) == (20, 2)
    fill(again, 1, first=20)
    again.close()
    assert sequences(read_all(directory)[0]) == list(range(21))


def test_a_file_that_is_gone_while_sizes_are_summed_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running agent saves its cursors by rename, several times a second."""
    (tmp_path / "segment-000000000000.rec").write_bytes(bytes(100))
    temporary = tmp_path / "cursor-spans-otlp.tmp"
    temporary.write_bytes(bytes(10))
    (tmp_path / "directory").mkdir()
    stat = Path.stat

    def seen_last(path: Path, **arguments: Any) -> Any:
        status = stat(path, **arguments)
        if path == temporary:
            path.unlink()
        return status

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", seen_last)
        size = recording_bytes(tmp_path)
    assert (size, temporary.exists()) == (110, False)
