"""Runs the shipped agent, which kills itself with SIGKILL at the N-th time it comes to a named point: `POINT
N SESSION_DIR`.

They are reached by wrapping what the agent calls, in this process
alone.
"""

from __future__ import annotations

import os
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from otel_dflash.agent import loop, ring_reader
from otel_dflash.agent.sinks import sink as sinks
from otel_dflash.config import ConfigError
from otel_dflash.recording.frames import FRAME_MAGIC, FrameKind
from otel_dflash.recording.writer import RecordingWriter

reached = 0
wanted = 1


def is_time() -> bool:
    global reached
    reached += 1
    return reached == wanted


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def before(owner: Any, name: str, applies: Callable[..., bool]) -> None:
    """Die instead of the call."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if applies(*arguments, **named) and is_time():
            die()
        return original(*arguments, **named)

    setattr(owner, name, wrapped)


def cut_write(applies: Callable[[bytes], bool], length: Callable[[bytes], int]) -> None:
    """Write a part of the data, then die."""
    original = os.write

    def wrapped(fd: int, data: Any) -> int:
        whole = bytes(data)
        if applies(whole) and is_time():
            original(fd, whole[: length(whole)])
            die()
        return original(fd, data)

    os.write = wrapped


def is_frame(data: bytes) -> bool:
    return data[:4] == FRAME_MAGIC and data[4] == FrameKind.RECORDS


def is_segment_start(data: bytes) -> bool:
    return data[:4] == FRAME_MAGIC and data[4] == FrameKind.SEGMENT


def move_half_the_recorded_words() -> None:
    def at(recorded: Any, names: Any, starts: Any) -> None:
        if len(names) > 1 and is_time():
            half = len(names) // 2
            reader_numpy.maximum.at(recorded, names[:half], starts[:half])
            die()
        reader_numpy.maximum.at(recorded, names, starts)

    reader_numpy = ring_reader.np
    proxy = types.SimpleNamespace(
        **{name: getattr(reader_numpy, name) for name in dir(reader_numpy) if not name.startswith("_")}
    )
    proxy.maximum = types.SimpleNamespace(at=at)
    ring_reader.np = proxy  # type: ignore[attr-defined]


def is_path(part: str) -> Callable[..., bool]:
    return lambda path, *_, **__: part in Path(path).name


def is_saving(sink: str) -> Callable[..., bool]:
    return is_path(f"cursor-{sink}")


POINTS: dict[str, Callable[[], None]] = {
    "frame_half_written": lambda: cut_write(is_frame, lambda data: len(data) // 2),
    "frame_head_half_written": lambda: cut_write(is_frame, lambda data: 20),
    "written_tail_not_moved": lambda: before(ring_reader.RingReader, "advance", lambda *_: True),
    "recorded_words_half_moved": move_half_the_recorded_words,
    "segment_header_half_written": lambda: cut_write(is_segment_start, lambda data: 30),
    "segment_names_not_written": lambda: cut_write(is_segment_start, lambda data: len(data) - 200),
    "segment_not_renamed": lambda: before(Path, "replace", is_path("segment")),
    "segment_rolled_oldest_not_removed": lambda: before(Path, "unlink", is_path("segment-")),
    "spans_sent_cursor_not_saved": lambda: before(sinks, "write_atomically", is_saving("spans")),
    "metrics_sent_cursor_not_saved": lambda: before(sinks, "write_atomically", is_saving("metrics")),
    "span_cursor_not_renamed": lambda: before(Path, "replace", is_saving("spans")),
    "metric_cursor_not_renamed": lambda: before(Path, "replace", is_saving("metrics")),
    "closed_written_ring_not_removed": lambda: before(Path, "unlink", is_path("ring-")),
    "session_half_removed": lambda: before(Path, "unlink", is_path("control")),
    "segment_just_rolled": lambda: before(RecordingWriter, "_remove_oldest", lambda *_: True),
    "run_file_not_renamed": lambda: before(Path, "replace", is_path("run")),
}


def main() -> int:
    global wanted
    point, number, session = sys.argv[1:]
    wanted = int(number)
    POINTS[point]()
    try:
        return loop.main(Path(session))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
