"""Sinks: each reads the recording from a cursor of its own and hands it to one SDK exporter.

The cursor moves when an export has succeeded, and is saved by rename. Replay and fold are deterministic, so a sink that is killed
between the two sends the same bytes again: at most the batch in flight. A sink that is slow, down or broken delays itself alone.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_dflash.agent.fold import Fold
from otel_dflash.agent.frames import Frame, FrameKind
from otel_dflash.agent.metrics import metrics_data
from otel_dflash.agent.noise import describe
from otel_dflash.agent.recording import RecordingReader, RecordingWriter, write_atomically
from otel_dflash.agent.replay import ReplayedSpan, SpanReplay, batches

FLUSH_INTERVAL_S: Final = 1.0  # live spans wait at most so long for others to share a request
FLUSH_RECORDS: Final = 2000
BACKOFF_S: Final = (0.2, 5.0)


class Sink(threading.Thread):
    """One exporter's way through the recording. `finish` once nothing more is appended; `done` is set when all is delivered."""

    def __init__(self, name: str, directory: Path, live: RecordingWriter | None, keep_cursor: bool, reasons: dict[str, str]) -> None:
        """Go on where the cursor file says, or from the start. `reasons`: by thread, why the SDK says an export failed (noise.py)."""
        super().__init__(name=f"sink {name}", daemon=True)
        self._cursor_path = directory / f"cursor-{name}.json" if keep_cursor else None
        self._cursor: dict[str, Any] = read_cursor(self._cursor_path) if self._cursor_path else {}
        self.done = threading.Event()
        self.delivered = 0  # spans or points
        self.failures = 0  # exports that raised or were not taken
        self.position = int(self._cursor.get("position", 0))  # all frames before it are delivered
        self.newest_ns: int | None = None  # monotonic time of the newest record delivered
        self._failure: str | None = None
        self._reasons = reasons
        self._finishing = threading.Event()
        self._live = live
        self._said: set[str] = set()
        self.reader = RecordingReader(directory, self.position, live)

    @property
    def reason(self) -> str | None:
        """Return why the newest export failed, one line; None when it didn't, or nobody said."""
        return self._failure or self._reasons.get(self.name)

    @property
    def unusable_records(self) -> int:
        """Return how many records this sink can show in no way."""
        return 0

    def finish(self) -> None:
        """Say that the recording is complete."""
        self._finishing.set()
        if self._live:
            self._live.recent.wake()

    def run(self) -> None:
        """Deliver until finished. The one error boundary of the sink: a bug stops this sink alone."""
        try:
            self.deliver()
            self.done.set()
        except Exception as error:  # noqa: BLE001  said with its traceback, told in delivery.json; other sinks go on
            self._failure = describe(error)
            traceback.print_exc(file=sys.stderr)

    def deliver(self) -> None:
        """Go through the recording to its end."""
        raise NotImplementedError

    def more(self, limit: int, timeout_s: float) -> list[Frame] | None:
        """Return the next frames, [] when none came within `timeout_s`, None at the end of a finished recording."""
        over = self._finishing.is_set()
        frames = self.reader.read(limit)
        if frames:
            return frames
        if over or self._live is None:
            return None
        self._live.recent.wait(self.reader.position, timeout_s)
        return []

    def save(self, cursor: dict[str, Any]) -> None:
        """Keep the cursor; a full disk costs only what is sent again after a restart."""
        if self._cursor_path:
            try:
                write_atomically(self._cursor_path, json.dumps(cursor).encode())
            except OSError as error:
                self._say("cursor", f"{self._cursor_path.name} cannot be saved ({error.strerror}): an agent started again sends more twice")

    def start_over(self, error: Exception) -> None:
        """Take up the recording from its start: the cursor is of another version, or somebody changed it."""
        self._say("cursor", f"{self.name}: its cursor cannot be used ({error}); all is sent from the start, with the same ids")
        self._cursor = {}
        self.position = 0
        self.reader.close()
        self.reader = RecordingReader(self.reader.directory, 0, self._live)

    def until_it_succeeds(self, export: Callable[[], bool]) -> None:
        """Call `export` until it returns True, with growing pauses; the exporter's own retries and timeout are inside each call.

        A plugin that raises has failed like one that says so.
        """
        pause, longest = BACKOFF_S
        while True:
            try:
                if export():
                    self._failure = None
                    self._reasons.pop(self.name, None)
                    return
            except Exception as error:  # noqa: BLE001  a plugin may raise anything
                self._failure = describe(error)
                self._say(type(error).__name__, f"{self.name}: export raised {self._failure}; it is tried again")
            self.failures += 1
            if self._finishing.is_set():
                time.sleep(BACKOFF_S[0])
            elif self._finishing.wait(pause):  # the last chance is now
                continue
            pause = min(2 * pause, longest)

    def _say(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            with contextlib.suppress(OSError):  # the log may lie on a full disk
                print(f"otel-dflash: {text}", file=sys.stderr, flush=True)


class SpanSink(Sink):
    """Spans, in the order of the recording."""

    def __init__(
        self,
        name: str,
        exporter: SpanExporter,
        directory: Path,
        live: RecordingWriter | None = None,
        keep_cursor: bool = True,
        reasons: dict[str, str] | None = None,
    ) -> None:
        """See Sink; the name tells the cursors of several exporters apart."""
        super().__init__(f"spans-{name}", directory, live, keep_cursor, {} if reasons is None else reasons)
        self._exporter = exporter
        try:
            self._replay = self._resumed_replay()
        except (ValueError, TypeError) as error:
            self.start_over(error)
            self._replay = self._resumed_replay()
        self._skip: int = self._cursor.get("delivered", 0)  # spans from the position on that the cursor says were sent

    @property
    def unusable_records(self) -> int:
        """Return how many records no span can show: malformed, of a step that went out before, or beyond what is held of one."""
        return self._replay.unusable_records

    def _resumed_replay(self) -> SpanReplay:
        replay = SpanReplay(self.reader.info, self.reader.catalog)
        if "held" in self._cursor:
            replay.restore(base64.b64decode(self._cursor["held"]))
        return replay

    def deliver(self) -> None:
        """Gather frames until they fill a request or waited long enough, send, move the cursor."""
        held = self._replay.held()
        position = self.reader.position
        while True:
            spans, newest_ns, at_end = self._gather()
            sent = min(self._skip, len(spans))
            self._skip -= sent
            for batch in batches(spans[sent:]):
                self.until_it_succeeds(lambda batch=batch: self._export(batch))  # type: ignore[misc]
                sent += len(batch)
                self.delivered += len(batch)
                if sent < len(spans):
                    self.save({"position": position, "held": _text(held), "delivered": sent})
            if self.reader.position > position:
                self.position = position = self.reader.position
                held = self._replay.held()
                self.save({"position": position, "held": _text(held), "delivered": self._skip})
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
                spans += self._replay.add(frame)
                newest_ns = frame.time_ns
                records += frame.count if frame.kind == FrameKind.RECORDS else 0
        return spans, newest_ns, False

    def _export(self, batch: list[ReplayedSpan]) -> bool:
        return self._exporter.export(batch) is SpanExportResult.SUCCESS


class MetricSink(Sink):
    """Cumulative points at fixed recorded times: late data come with the times they are of."""

    def __init__(
        self,
        name: str,
        exporter: MetricExporter,
        directory: Path,
        interval_ns: int,
        live: RecordingWriter | None = None,
        keep_cursor: bool = True,
        lags: Callable[[], Mapping[str, float]] = dict,
        reasons: dict[str, str] | None = None,
    ) -> None:
        """See Sink; `interval_ns` is the recorded time between two points, `lags` the age of what each sink delivered last."""
        super().__init__(f"metrics-{name}", directory, live, keep_cursor, {} if reasons is None else reasons)
        self._exporter = exporter
        self._interval_ns = interval_ns
        self._lags = lags
        try:
            self._fold = self._resumed_fold()
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self.start_over(error)
            self._fold = self._resumed_fold()

    def _resumed_fold(self) -> Fold:
        catalog = self.reader.catalog
        return Fold.from_dict(self._cursor["totals"], catalog) if "totals" in self._cursor else Fold(catalog)

    def deliver(self) -> None:
        """Fold frame by frame; at each boundary of the interval send all series as they are."""
        boundary = self._cursor.get("boundary", 0)
        newest_ns = self._cursor.get("newest_ns", 0)
        unsent = False
        while (frames := self.more(64, FLUSH_INTERVAL_S)) is not None:
            for frame in frames:
                if boundary and frame.time_ns >= boundary and unsent:
                    self._send(boundary, frame.number, newest_ns)
                    unsent = False
                if frame.time_ns >= boundary:
                    boundary = self._boundary_after(frame.time_ns)
                self._fold.add(frame)
                newest_ns = frame.time_ns
                unsent = True
        if unsent:
            self._send(newest_ns, self.reader.position, newest_ns)

    def _boundary_after(self, time_ns: int) -> int:
        start_ns = self.reader.info.anchor_mono_ns
        return start_ns + ((time_ns - start_ns) // self._interval_ns + 1) * self._interval_ns

    def _send(self, time_ns: int, position: int, newest_ns: int) -> None:
        data = metrics_data(self._fold, self.reader.info, time_ns, self._lags())
        self.until_it_succeeds(lambda: self._exporter.export(data) is MetricExportResult.SUCCESS)
        self.delivered += 1
        self.newest_ns = newest_ns
        self.position = position
        self.save(
            {
                "position": position,
                "totals": self._fold.to_dict(),
                "boundary": self._boundary_after(time_ns),
                "newest_ns": newest_ns,
            }
        )


def read_cursor(path: Path) -> dict[str, Any]:
    """Return a saved cursor, {} when there is none that can be read: the sink then starts from the beginning."""
    try:
        cursor = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cursor if isinstance(cursor, dict) and isinstance(cursor.get("position"), int) else {}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
