"""The sink for spans. It saves a cursor, and the state of the replay at an earlier frame.

The cursor is written after each batch, the state once the recording has grown by STATE_SHARE times its size.
Replay is deterministic, so a restarted agent reads from the state to the cursor without sending, then sends
the same spans that would have followed.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_dflash.agent.sinks.sink import FLUSH_INTERVAL_S, Sink, SinkSetup
from otel_dflash.otlp.batches import batches
from otel_dflash.otlp.exporters import span_exporters
from otel_dflash.otlp.span_data import SpanData
from otel_dflash.recording.delivery import SampledSpans
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.lookback import Lookback
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.spans.replay import SpanReplay
from otel_dflash.spans.sampling import Sampling
from otel_dflash.spans.span import Span

FLUSH_RECORDS: Final = 2000
STATE_SHARE: Final = 8  # bytes of recording per byte of state written

_POSITION: Final = struct.Struct("<Q")


class SpanSink(Sink):
    """Sends spans in the order of the recording."""

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
        """See Sink. `name` tells the cursors of several exporters apart; `sampling` selects the traces sent
        (None: all)."""
        super().__init__(f"spans-{name}", directory, live, keep_cursor, {} if reasons is None else reasons)
        self._exporter = exporter
        self._sampling = sampling
        self._state_path = self._cursor_path.with_suffix(".state") if self._cursor_path else None
        self._state_bytes = 0  # of the newest state that was written
        self._grown_bytes = 0  # of the recording since then
        self._span_data = SpanData(self.reader.info)
        self._replay = self._new_replay()
        try:
            self._restore()
        except (ValueError, struct.error) as error:
            self.start_over(error)
            self._replay = self._new_replay()
        # spans after the position that were sent, according to the cursor
        self._skip: int = self._cursor.get("delivered", 0)

    @property
    def unusable_records(self) -> int:
        """Return how many records no span can show.

        They are malformed, of a step that was sent before, or beyond the limits of a step.
        """
        return self._replay.unusable_records

    @property
    def sampled(self) -> SampledSpans | None:
        """Return what the sampler left out and kept."""
        return None if self._replay.sampler is None else self._replay.sampler.report()

    def deliver(self) -> None:
        """Gather frames until they fill a request or have waited long enough; send them, move the cursor."""
        ahead = self._catch_up()
        position = self.position
        while True:
            lost = self._lost_traces
            spans, newest_ns, at_end = self._gather()
            spans, ahead = ahead + spans, []
            # the frames may have been there before the restart: better some spans twice than one never
            if self._lost_traces != lost:
                self._skip = 0
            sent = min(self._skip, len(spans))
            self._skip -= sent
            for batch in batches(spans[sent:], lambda span: span.otlp_bytes):
                self.delivered += self.send([self._span_data.readable_spans(batch)], self._export)
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

    def _gather(self) -> tuple[list[Span], int, bool]:
        spans: list[Span] = []
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

    def _add(self, frame: Frame) -> list[Span]:
        self._grown_bytes += len(frame.payload)
        spans = self._replay.add(frame)
        if frame.kind == FrameKind.CLOSED:
            self._replay.forget(frame.ring)
        return spans

    def _export(self, batch: Sequence[ReadableSpan]) -> bool:
        return self._exporter.export(batch) is SpanExportResult.SUCCESS

    def _new_replay(self) -> SpanReplay:
        reader = self.reader
        return SpanReplay(
            reader.info,
            reader.catalog,
            self._sampling,
            Lookback(reader.directory, self._live, reader.catalog),
        )

    def _restore(self) -> None:
        """Restore the saved state; the reader continues from its frame.

        Raises:
            ValueError: The state cannot be used, or is missing and the cursor is beyond the start.
            struct.error: The state is truncated.
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
        if position > self.position:  # killed between the two writes: all before it was sent
            self._cursor = {}
            self.position = position
        self.reader.close()
        self.reader = RecordingReader(self.reader.directory, position, self._live)
        self._replay = self._new_replay()
        self._replay.restore(data[_POSITION.size :])
        self._state_bytes = len(data)

    def _catch_up(self) -> list[Span]:
        """Read from the state to the cursor; return the spans of a frame beyond it.

        Such a frame is read early if frames are missing.
        """
        while self.reader.position < self.position and (frames := self.reader.read(1)):
            spans = self._add(frames[0])
            if frames[0].number >= self.position:
                return spans
        return []

    def _save_state(self) -> None:
        """Write the state if the recording has grown enough since the last one."""
        if self._state_path and self._grown_bytes >= STATE_SHARE * self._state_bytes:
            data = _POSITION.pack(self.position) + self._replay.state()
            if self.write(self._state_path, data):
                self._state_bytes, self._grown_bytes = len(data), 0


def make(setup: SinkSetup) -> list[Sink]:
    """Return a sink for each span exporter that the environment names.

    Raises:
        ConfigError: An exporter cannot be created.
    """
    return [
        SpanSink(
            name, exporter, setup.directory, setup.live, setup.keep_cursor, setup.reasons, setup.sampling
        )
        for name, exporter in span_exporters().items()
    ]
