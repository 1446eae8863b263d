"""OPEN frames of the shipped drain, from real rings: which rings they list, and what they say is open."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_dflash.agent import open_frames
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.payloads import OpenWork, decode_open
from otel_dflash.records import SERIAL_MASK
from otel_dflash.session import DETAIL_OFF, DETAIL_PHASES, map_control
from otel_dflash.trainer.worker import Worker
from tests.agent.draining import SLOTS, Draining, phases
from tests.processes import poll


@pytest.fixture
def draining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Draining]:
    """Every poll may append a frame, and a phase is long at once."""
    monkeypatch.setattr(open_frames, "INTERVAL_NS", 0)
    monkeypatch.setattr(open_frames, "LONG_NS", 0)
    with Draining(tmp_path) as draining:
        draining.agent.drain.poll()
        yield draining


def said(draining: Draining) -> list[tuple[Frame, dict[int, OpenWork]]]:
    return [(frame, decode_open(frame.payload)[1]) for frame in draining.frames(FrameKind.OPEN)]


def newest(draining: Draining) -> tuple[int, list[str]]:
    """Drain; return the serial of the open step and the names of the open phases of the only ring."""
    draining.agent.drain.poll()
    (work,) = said(draining)[-1][1].values()
    names = draining.names()
    step = work.step.id & SERIAL_MASK if work.step else 0
    return step, [names.phase(name_id)[1] for name_id, _ in work.phases]


def test_what_is_open_is_said_inside_a_step_and_outside(draining: Draining) -> None:
    worker = draining.worker()
    seen = []
    with worker.queue_get:
        seen.append(newest(draining))
    with worker.step():
        seen.append(newest(draining))
        with worker.forward, worker.phase("all_gather", state="lock_wait"):
            seen.append(newest(draining))
        seen.append(newest(draining))
    seen.append(newest(draining))
    assert seen == [
        (0, ["queue_get"]),
        (1, []),
        (1, ["forward", "all_gather"]),
        (1, []),
        (0, []),
    ]


def test_records_that_ended_later_come_later(draining: Draining) -> None:
    worker = draining.worker()
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            with worker.step(), worker.forward:
                pass

    def has_said_enough() -> bool:
        draining.agent.drain.poll()
        return len(draining.frames(FrameKind.OPEN)) > 20

    thread = threading.Thread(target=work)
    thread.start()
    try:
        poll(has_said_enough)
    finally:
        is_over.set()
        thread.join()
    ends = [
        frame.time_ns
        if frame.kind == FrameKind.OPEN
        else [words[2] for words in struct.iter_unpack("<8Q", frame.payload)]
        for frame in draining.frames(FrameKind.RECORDS, FrameKind.OPEN)
    ]
    moments = [position for position, entry in enumerate(ends) if isinstance(entry, int)]
    for position in moments:
        before = [end for entry in ends[:position] if isinstance(entry, list) for end in entry]
        after = [end for entry in ends[position:] if isinstance(entry, list) for end in entry]
        assert all(end <= ends[position] for end in before)
        # the thread may be stopped between reading the clock and publishing the record
        assert sum(end <= ends[position] for end in after) <= 1


def test_open_frames_sum_to_the_wall_with_what_was_recorded(draining: Draining) -> None:
    """As a reader sees it: at each frame, the phase that is open or was recorded fills the time."""
    worker = draining.worker()
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            with worker.queue_get:
                time.sleep(0.0005)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(60):
            draining.agent.drain.poll()
    finally:
        is_over.set()
        thread.join()
    starts = []
    ended: dict[int, int] = {}
    for frame in draining.frames(FrameKind.RECORDS):
        ended |= {words[1]: words[2] for words in struct.iter_unpack("<8Q", frame.payload)}
    for frame, rings in said(draining):
        for work_then in rings.values():
            starts += [(phase.start_ns, frame.time_ns) for phase in work_then.phases]
    assert starts
    assert [pair for pair in starts if not pair[0] <= pair[1] <= ended.get(pair[0], pair[1])] == []


def test_only_a_phase_whose_record_was_dropped_is_not_open(draining: Draining) -> None:
    """Whether it began before the drop or after it, inside a step or outside."""
    worker = draining.worker()
    phases(worker, SLOTS)
    with worker.queue_get:
        pass
    seen = [newest(draining)]
    with worker.queue_get:
        seen.append(newest(draining))
        phases(worker, SLOTS + 1)
        seen.append(newest(draining))
    with worker.step():
        with worker.queue_put:
            phases(worker, SLOTS)
            with pytest.raises(ValueError, match="of the step"), worker.optimizer:
                raise ValueError("of the step")
            with worker.queue_get:
                seen.append(newest(draining))
        seen.append(newest(draining))
    seen.append(newest(draining))
    assert seen == [
        (0, []),
        (0, ["queue_get"]),
        (0, ["queue_get"]),
        (1, ["queue_put", "queue_get"]),
        (1, []),
        (0, []),
    ]


def test_a_phase_left_open_in_a_step_ends_with_it(draining: Draining) -> None:
    worker = draining.worker()
    with worker.step():
        worker.forward.begin()
        assert newest(draining) == (1, ["forward"])
    assert newest(draining) == (0, [])


def test_a_cancelled_step_is_not_open(draining: Draining) -> None:
    worker = draining.worker()
    with worker.step() as step:
        assert newest(draining) == (1, [])
        step.cancel()
        assert newest(draining) == (0, [])


def test_only_rings_where_time_stands_are_listed_but_all_after_a_change_of_detail(
    draining: Draining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_frames, "LONG_NS", 3_600_000_000_000)
    worker: Worker = draining.worker()
    phases(worker, 1)
    draining.agent.drain.poll()
    listed = [len(rings) for _, rings in said(draining)]
    assert listed[1:] == []
    control = map_control(draining.session)
    details = []
    for detail in (DETAIL_OFF, DETAIL_OFF, DETAIL_PHASES):
        control[0] = detail
        draining.agent.drain.poll()
        details = [decode_open(frame.payload)[0] for frame in draining.frames(FrameKind.OPEN)]
    control.release()
    assert [len(rings) for _, rings in said(draining)][1:] == [1, 1]
    assert details[1:] == [DETAIL_OFF, DETAIL_PHASES]
