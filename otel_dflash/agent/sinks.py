"""Sinks: each reads the recording from a cursor of its own and hands it to one SDK exporter.

The cursor moves when an export has succeeded, and is saved by rename. Replay and fold are deterministic, so a sink that is killed
between the two sends the same bytes again: at most the batch in flight. A sink that is slow, down or broken delays itself alone.

What a receiver refuses for good, because of what it is, is found by halving the request, and left out: counted, said, and still in the
recording. What it refuses for who we are or where we send to waits, like all that it does not answer.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult

from otel_dflash.agent.fold import Fold
from otel_dflash.agent.frames import Frame
from otel_dflash.agent.metrics import Part, apart, metrics_data, together
from otel_dflash.agent.noise import describe
from otel_dflash.agent.recording import RecordingReader, RecordingWriter, write_atomically
from otel_dflash.agent.sampling import Sampling
from otel_dflash.config import METRIC_AGE_VARIABLE, AgentConfig

FLUSH_INTERVAL_S: Final = 1.0  # live spans wait at most so long for others to share a request
BACKOFF_S: Final = (0.2, 5.0)
EXEMPLARS_TO_CHOOSE_FROM: Final = 8  # longest of a series, when not every trace is sent
AHEAD_NS_MAX: Final = 300_000_000_000  # Prometheus refuses what lies more than 10 min ahead of its clock

_NUMBER_MAX: Final = 1 << 63  # of a frame or a ns in a cursor that is believed

_Item = TypeVar("_Item")
# How a reason begins (noise.py) when it is what was sent that cannot be taken. 401, 403 and 404 are about us.
_REFUSED: Final = re.compile(r"(400|413|422|INVALID_ARGUMENT|Failed to encode)\b|RESOURCE_EXHAUSTED: .* larger than max")


class Sink(threading.Thread):
    """One exporter's way through the recording. `finish` once nothing more is appended; `done` is set when all is delivered."""

    what: str
    """What it sends, for people."""

    def __init__(self, name: str, directory: Path, live: RecordingWriter | None, keep_cursor: bool, reasons: dict[str, str]) -> None:
        """Go on where the cursor file says, or from the start. `reasons`: by thread, why the SDK says an export failed (noise.py)."""
        super().__init__(name=f"sink {name}", daemon=True)
        self._cursor_path = directory / f"cursor-{name}.json" if keep_cursor else None
        self._cursor: dict[str, Any] = read_cursor(self._cursor_path) if self._cursor_path else {}
        self.done = threading.Event()
        self.delivered = 0  # spans or points
        self.failures = 0  # exports that raised or were not taken
        self.refused = 0  # items that the receiver refused for good
        self.position = int(self._cursor.get("position", 0))  # all frames before it are delivered
        self.newest_ns: int | None = None  # monotonic time of the newest record delivered
        self._failure: str | None = None
        self._refusal = ""
        self._has_taken = False
        self._reasons = reasons
        self._finishing = threading.Event()
        self._live = live
        self._said: set[str] = set()
        self.reader = RecordingReader(directory, self.position, live)

    @property
    def reason(self) -> str | None:
        """Return why the newest export failed, one line; None when it didn't, or nobody said."""
        return self._reasons.get(self.name) or self._failure

    @property
    def unusable_records(self) -> int:
        """Return how many records this sink can show in no way."""
        return 0

    @property
    def sampled(self) -> dict[str, Any] | None:
        """Return what was left out because it was to be, None when nothing was."""
        return None

    @property
    def losses(self) -> list[str]:
        """Return what was left out although all else is delivered, one line each: how much, why, what to do."""
        if not self.refused or not self._has_taken:
            return []
        return [f"{self.what} that the receiver refused for good: {self.refused} ({self._refusal}); all is recorded, its log says more"]

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
        """Keep the cursor."""
        if self._cursor_path:
            self.write(self._cursor_path, json.dumps(cursor).encode())

    def write(self, path: Path, data: bytes) -> bool:
        """Write what an agent started again goes on from; return whether it was. A full disk costs only what is sent again then."""
        try:
            write_atomically(path, data)
        except OSError as error:
            self._say("cursor", f"{path.name} cannot be saved ({error.strerror}): an agent started again sends more twice")
            return False
        return True

    def start_over(self, error: Exception) -> None:
        """Take up the recording from its start: the cursor is of another version, or somebody changed it."""
        self._say("cursor", f"{self.name}: its cursor cannot be used ({error}); all is sent from the start, with the same ids")
        self._cursor = {}
        self.position = 0
        self.reader.close()
        self.reader = RecordingReader(self.reader.directory, 0, self._live)

    def send(self, items: Sequence[_Item], export: Callable[[Sequence[_Item]], bool], may_skip: bool = False) -> int:
        """Export items until all are taken or refused for good; return how many were taken.

        Between tries are growing pauses; the exporter's own retries and timeout are inside each. A plugin that raises has failed like
        one that says so. A receiver that has taken nothing at all so far may refuse all for a mistake of ours, such as http:// to a port
        that speaks TLS: then refused items wait, unless they `may_skip`.
        """
        parts = [items]  # the last one is next
        taken = 0
        pause, longest = BACKOFF_S
        while parts:
            part = parts.pop()
            if self._try(part, export):
                self._has_taken = True
                taken += len(part)
                pause = BACKOFF_S[0]
                continue
            if refusal := _REFUSED.match(self._reasons.get(self.name, "")):
                if len(part) > 1:
                    middle = len(part) // 2
                    parts += [part[middle:], part[:middle]]
                    continue
                if self._has_taken or may_skip:
                    self._leave_out(refusal.string)
                    continue
            self.failures += 1
            parts.insert(0 if refusal else len(parts), part)
            if self._finishing.is_set():
                time.sleep(BACKOFF_S[0])
            elif self._finishing.wait(pause):  # the last chance is now
                continue
            pause = min(2 * pause, longest)
        return taken

    def _try(self, part: Sequence[_Item], export: Callable[[Sequence[_Item]], bool]) -> bool:
        self._failure = self.reason  # to be told while this try lasts
        self._reasons.pop(self.name, None)
        try:
            if export(part):
                self._failure = None
                self._reasons.pop(self.name, None)
                return True
        except Exception as error:  # noqa: BLE001  a plugin may raise anything
            self._failure = describe(error)
            self._say(type(error).__name__, f"{self.name}: export raised {self._failure}; it is tried again")
        return False

    def _leave_out(self, refusal: str) -> None:
        self.refused += 1
        self._refusal = refusal
        self._failure = None
        self._reasons.pop(self.name, None)
        self._say("refused", f"{self.name}: the receiver refuses some {self.what} for good ({refusal}); they are left out and counted")

    def _say(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            with contextlib.suppress(OSError):  # the log may lie on a full disk
                print(f"otel-dflash: {text}", file=sys.stderr, flush=True)


class MetricSink(Sink):
    """Cumulative points at fixed recorded times: late data come with the times they are of.

    Points that a receiver would refuse for their age, and all others of the request with them, are not sent: a newer one says all that
    they do.
    """

    what = "metric points"

    def __init__(
        self,
        name: str,
        exporter: MetricExporter,
        directory: Path,
        config: AgentConfig,
        live: RecordingWriter | None = None,
        keep_cursor: bool = True,
        reasons: dict[str, str] | None = None,
        sampling: Sampling | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """See Sink.

        Args:
            name: Tells the cursors of several exporters apart.
            exporter: Where the points go.
            directory: The recording.
            config: Says the interval of the points, and how old one may be.
            live: The recording's writer, while it goes on.
            keep_cursor: Whether to go on where the cursor file says, and to write it.
            reasons: See Sink.
            sampling: Which traces are sent (None: all): only to such do exemplars lead.
            clock: Wall time in ns.
        """
        super().__init__(f"metrics-{name}", directory, live, keep_cursor, {} if reasons is None else reasons)
        self._exporter = exporter
        self._interval_ns = config.metric_interval_ns
        self._age_ns_max = config.metric_age_ns_max
        self._sends = sampling.sends if sampling else lambda trace_id: True
        self._exemplars = 1 if sampling is None or sampling.sends_all else EXEMPLARS_TO_CHOOSE_FROM
        self._clock = clock
        self.too_old = 0  # points of each series that were not sent
        self.ahead = 0
        try:
            self._fold = self._resumed_fold()
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self.start_over(error)
            self._fold = self._resumed_fold()

    @property
    def losses(self) -> list[str]:
        """Return what was left out: Sink."""
        found = super().losses
        if self.too_old:
            newer = "; a newer one holds their totals" if self.delivered else ""  # else the whole recording is too old
            found.append(
                f"points of each metric that are over {self._age_ns_max / 86_400e9:g} days old and were not sent: {self.too_old}{newer}. "
                f"To send them too, widen the receiver's out-of-order window and {METRIC_AGE_VARIABLE}, and replay"
            )
        if self.ahead:
            found.append(
                f"points of each metric that are over {AHEAD_NS_MAX // 60_000_000_000} min ahead of this host's clock and were not sent: "
                f"{self.ahead}; it was set back after the session began, or is wrong here: set it, or wait, and replay"
            )
        return found

    def _resumed_fold(self) -> Fold:
        catalog = self.reader.catalog
        if "totals" in self._cursor:
            return Fold.from_dict(self._cursor["totals"], catalog, self._exemplars)
        return Fold(catalog, self._exemplars)

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
            self._send(newest_ns, self.reader.position, newest_ns, is_last=True)

    def _boundary_after(self, time_ns: int) -> int:
        start_ns = self.reader.info.anchor_mono_ns
        return start_ns + ((time_ns - start_ns) // self._interval_ns + 1) * self._interval_ns

    def _send(self, time_ns: int, position: int, newest_ns: int, is_last: bool = False) -> None:
        """Send all series. Refused points may be skipped for later ones; the cursor waits until the receiver has taken any."""
        taken = 0
        if self._is_timely(time_ns):
            parts = apart(metrics_data(self._fold, self.reader.info, time_ns, self._sends))
            taken = self.send(parts, lambda some: self._export(some) or not self._is_timely(time_ns), not is_last)
        if self._is_timely(time_ns):
            self.delivered += bool(taken)
        elif self.reader.info.wall_ns(time_ns) > self._clock():
            self.ahead += 1
        else:
            self.too_old += 1
        self._fold.forget_longest()
        if self.refused and not self._has_taken:
            return
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

    def _export(self, parts: Sequence[Part]) -> bool:
        return self._exporter.export(together(parts)) is MetricExportResult.SUCCESS

    def _is_timely(self, time_ns: int) -> bool:
        """Return whether a receiver may take points of that monotonic time. They may grow too old while they wait for it."""
        age_ns = self._clock() - self.reader.info.wall_ns(time_ns)
        return -AHEAD_NS_MAX <= age_ns <= self._age_ns_max


def read_cursor(path: Path) -> dict[str, Any]:
    """Return a saved cursor, {} when there is none that can be read: the sink then starts from the beginning."""
    try:
        cursor = json.loads(path.read_bytes())
        numbers = [cursor["position"], *(cursor.get(name, 0) for name in ("delivered", "boundary", "newest_ns"))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return cursor if all(type(number) is int and 0 <= number <= _NUMBER_MAX for number in numbers) else {}
