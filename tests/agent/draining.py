"""A session whose rings are drained in the test's own process, by the shipped drain."""

from __future__ import annotations

import os
from pathlib import Path

from otel_dflash.agent.drain import Drain
from otel_dflash.recording.catalog import RingNames
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import RunInfo, create_recording
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.records import SLOTS_OFFSET
from otel_dflash.session import create_session, remove_session
from otel_dflash.trainer.telemetry import Telemetry
from otel_dflash.trainer.worker import Worker

RING_BYTES = 1 << 17
METRIC_INTERVAL_NS = 3_600_000_000_000
SLOTS = (RING_BYTES - SLOTS_OFFSET) // 64


class Agent:
    """A drain and its recording, without the process around it."""

    def __init__(self, recording: Path, session: Draining) -> None:
        self.said: list[str] = []
        self.recording = RecordingWriter(recording, 1 << 30)
        self.drain = Drain(session.session, self.recording, self.said.append, METRIC_INTERVAL_NS)


class Draining:
    """Context manager. Rings are small: 128 KiB."""

    def __init__(self, directory: Path) -> None:
        os.environ["OTEL_DFLASH_RING_BYTES"] = str(RING_BYTES)
        self.session = create_session(directory=directory)
        info = RunInfo(
            self.session.run_id, "node", self.session.anchor_wall_ns, self.session.anchor_mono_ns, 0, "0.1.0"
        )
        create_recording(self.session.recording, info)
        self.telemetry = Telemetry(self.session)
        self.agents = [Agent(self.session.recording, self)]

    def __enter__(self) -> Draining:
        return self

    def __exit__(self, *exception: object) -> None:
        self.telemetry.close()
        self.agents[-1].recording.close()
        remove_session(self.session)
        del os.environ["OTEL_DFLASH_RING_BYTES"]

    @property
    def agent(self) -> Agent:
        """The agent that serves the session now."""
        return self.agents[-1]

    def next_agent(self) -> Agent:
        """Start another one, as after a kill."""
        self.agent.recording.close()
        self.agents.append(Agent(self.session.recording, self))
        return self.agent

    def worker(self) -> Worker:
        return self.telemetry.worker("target", 0, gpu=3)

    def frames(self, *kinds: FrameKind) -> list[Frame]:
        """Return the frames of these kinds, or all, in the recording."""
        reader = RecordingReader(self.session.recording)
        found = []
        while some := reader.read():
            found += some
        reader.close()
        return [frame for frame in found if not kinds or frame.kind in kinds]

    def names(self) -> RingNames:
        """Return the names of the only ring."""
        reader = RecordingReader(self.session.recording)
        while reader.read():
            pass
        reader.close()
        (names,) = reader.catalog.values()
        return names

    def ring_files(self) -> list[str]:
        return sorted(path.name for path in self.session.path.glob("ring-*"))


def phases(worker: Worker, count: int) -> None:
    for _ in range(count):
        with worker.forward:
            pass
