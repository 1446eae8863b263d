"""What OPEN frames cost at 64 workers that wait: a poll of the drain with one beside a poll without, bytes, fold.

Run: python tests/bench/bench_open.py     (about ten seconds)
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from timing import machine, per_call_ns, table

from otel_dflash import Telemetry
from otel_dflash.agent import open_frames
from otel_dflash.agent.drain import Drain
from otel_dflash.console import log
from otel_dflash.metrics.families import families
from otel_dflash.metrics.fold import Fold
from otel_dflash.recording.frames import FRAME_HEAD_BYTES, FrameKind
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import RunInfo, create_recording
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.session import Session, create_session, remove_session

WORKERS = 64
POLLS = 50
NEVER_NS = 1 << 60


def bench(session: Session) -> None:
    """Print the table."""
    anchors = session.anchor_wall_ns, session.anchor_mono_ns
    create_recording(session.recording, RunInfo(session.run_id, "bench", *anchors, anchors[0], "bench"))
    telemetry = Telemetry(session)
    workers = [telemetry.worker("drafter", index) for index in range(WORKERS)]
    for worker in workers:
        worker.step.begin()
        worker.queue_get.begin()
    open_frames.LONG_NS = 0  # type: ignore[misc]
    writer = RecordingWriter(session.recording, 1 << 30)
    drains = {}
    for name, interval_ns in (("poll", NEVER_NS), ("poll with an OPEN frame", 0)):
        open_frames.INTERVAL_NS = interval_ns  # type: ignore[misc]
        drains[name] = Drain(session, writer, log, NEVER_NS)
        drains[name].poll()

    def polls(drain: Drain) -> int:
        for _ in range(POLLS):
            drain.poll()
        return POLLS

    samples = per_call_ns({name: partial(polls, drain) for name, drain in drains.items()})
    reader = RecordingReader(session.recording)
    frames = []
    while found := reader.read():
        frames += found
    fold = Fold(reader.catalog, families(0))
    opened = [frame for frame in frames if frame.kind == FrameKind.OPEN]
    fold.add_all([frame for frame in frames if frame.kind != FrameKind.OPEN])
    t0 = time.process_time_ns()
    fold.add_all(opened)
    fold_ns = (time.process_time_ns() - t0) / len(opened)
    table(f"One poll of the drain, {WORKERS} workers inside a step and a phase", samples, "poll", {})
    size = FRAME_HEAD_BYTES + len(opened[-1].payload)
    print(f"\none OPEN frame: {size} bytes, {size * 3600 / 1e6:.1f} MB an hour at one a second")
    print(f"to fold one: {fold_ns / 1e3:.0f} us of CPU")
    reader.close()
    writer.close()
    telemetry.close()


def main() -> None:
    """Run the bench in a session of its own."""
    print(machine())
    with TemporaryDirectory() as directory:
        os.environ["OTEL_DFLASH_RING_BYTES"] = str(1 << 17)
        session = create_session("bench", Path(directory))
        try:
            bench(session)
        finally:
            remove_session(session)


if __name__ == "__main__":
    main()
