"""The sink for spans: its place is the cursor, and the state of the replay at a frame before it.

The state is written once the recording has grown by some times its size, the cursor after each batch. Replay is deterministic, so an
agent started again reads from the state to the cursor, sends nothing of that, and goes on with the very spans that would have followed.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_dflash.agent.frames import Frame, FrameKind
from otel_dflash.agent.lookback import Lookback
from otel_dflash.agent.recording import RecordingReader, RecordingWriter
from otel_dflash.agent.replay import ReplayedSpan, SpanReplay, batches
from otel_dflash.agent.sampling import Sampling
from otel_dflash.agent.sinks import FLUSH_INTERVAL_S, Sink

FLUSH_RECORDS: Final = 2000
STATE_SHARE: Final = 8  # bytes of the recording for each byte of state that is written

_POSITION: Final = struct.Struct("<Q")


class SpanSink(Sink):
    """Spans, in the order of the recording."""

    what = "spans"

    def __init__(
        self,
        name: str,
        exporter: SpanExporter,
        directory: Path,
        live: RecordingWriter | None = None,
        keep_cursor: bool = True,
        reasons: dict[str, str] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        """See Sink; the name tells the cursors of several exporters apart, `sampling` says which traces are sent (None: all)."""
        super().__init__(f"spans-{name}", directory, live, keep_cursor, {} if reasons is None else reasons)
        self._exporter = exporter
        self._sampling = sampling
        self._state_path = self._cursor_path.with_suffix(".state") if self._cursor_path else None
        self._state_bytes = 0  # of the newest state that was written
        self._grown_bytes = 0  # of the recording since
        self._replay = self._new_replay()
        try:
            self._restore()
        except (ValueError, struct.error) as error:
            self.start_over(error)
            self._replay = self._new_replay()
        self._skip: int = self._cursor.get("delivered", 0)  # spans from the position on that the cursor says were sent

    @property
    def unusable_records(self) -> int:
        """Return how many records no span can show: malformed, of a step that went out before, or beyond what is held of one."""
        return self._replay.unusable_records

    @property
    def sampled(self) -> dict[str, Any] | None:
        """Return what the sampler left out and kept: Sink."""
        return None if self._replay.sampler is None else self._replay.sampler.report()

    def deliver(self) -> None:
        """Gather frames until they fill a request or waited long enough, send, move the cursor."""
        ahead = self._catch_up()
        position = self.position
        while True:
            lost = self._lost_traces
            spans, newest_ns, at_end = self._gather()
            spans, ahead = ahead + spans, []
            if self._lost_traces != lost:  # before the restart the frames may have been there: rather some spans twice than one never
                self._skip = 0
            sent = min(self._skip, len(spans))
            self._skip -= sent
            for batch in batches(spans[sent:]):
                self.delivered += self.send(batch, self._export)
                sent += len(batch)
                if sent < len(spans):
                    self.save({"position": position, "delivered": sent})
            if self.reader.position > position:
                self.position = position = self.reader.position
                self._save_state()
                self.save({"position": position, "delivered": self._skip})
                self.newest_ns = newest_ns
            if at_end:
                return

    def _gather(self) -> tuple[list[ReplayedSpan], int, bool]:
        spans: list[ReplayedSpan] = []
        records = newest_ns = 0
        deadline = time.monotonic() + FLUSH_INTERVAL_S
        while records < FLUSH_RECORDS and (wait_s := deadline - time.monotonic()) > 0:
            frames = self.more(1, wait_s)
            if frames is None:
                return spans, newest_ns, True
            for frame in frames:
                spans += self._add(frame)
                newest_ns = frame.time_ns
                records += frame.count if frame.kind == FrameKind.RECORDS else 0
        return spans, newest_ns, False

    @property
    def _lost_traces(self) -> int:
        return 0 if self._replay.sampler is None else self._replay.sampler.lost_traces

    def _add(self, frame: Frame) -> list[ReplayedSpan]:
        self._grown_bytes += len(frame.payload)
        return self._replay.add(frame)

    def _export(self, batch: Sequence[ReplayedSpan]) -> bool:
        return self._exporter.export(batch) is SpanExportResult.SUCCESS

    def _new_replay(self) -> SpanReplay:
        reader = self.reader
        return SpanReplay(reader.info, reader.catalog, self._sampling, Lookback(reader.directory, self._live, reader.catalog))

    def _restore(self) -> None:
        """Take up the state, and read on from there.

        Raises:
            ValueError: It cannot be used, or there is none and the cursor is beyond the start.
            struct.error: It is cut short.
        """
        try:
            data = self._state_path.read_bytes() if self._state_path else b""
        except OSError:
            data = b""
        if not data:
            if self.position:
                raise ValueError("its state is missing")
            return
        (position,) = _POSITION.unpack_from(data)
        if position > self.position:  # killed between the two: all before it was sent
            self._cursor = {}
            self.position = position
        self.reader.close()
        self.reader = RecordingReader(self.reader.directory, position, self._live)
        self._replay = self._new_replay()
        self._replay.restore(data[_POSITION.size :])
        self._state_bytes = len(data)

    def _catch_up(self) -> list[ReplayedSpan]:
        """Read from the state to the cursor; return spans of a frame beyond, which comes early where frames are missing."""
        while self.reader.position < self.position and (frames := self.reader.read(1)):
            spans = self._add(frames[0])
            if frames[0].number >= self.position:
                return spans
        return []

    def _save_state(self) -> None:
        """Write the state when the recording has grown enough since the last one."""
        if self._state_path and self._grown_bytes >= STATE_SHARE * self._state_bytes:
            data = _POSITION.pack(self.position) + self._replay.state()
            if self.write(self._state_path, data):
                self._state_bytes, self._grown_bytes = len(data), 0
