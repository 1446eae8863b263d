"""Sinks: each reads the recording from a cursor of its own and hands it to one SDK exporter.

The cursor moves after each successful export, and is saved by rename. Replay and fold are deterministic, so a
sink that is killed between the two sends the same bytes again: at most the batch in flight. A sink that is
slow, down or broken delays only itself.

Data that a receiver refuses for good because of its content is found by halving the request, and left out:
counted, reported, and still in the recording. Data refused because of our credentials or the endpoint waits,
as does data that gets no answer.
"""

from __future__ import annotations

import json
import re
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from otel_dflash.config import AgentConfig
from otel_dflash.console import report
from otel_dflash.otlp.failures import describe
from otel_dflash.recording.atomic_file import write_atomically
from otel_dflash.recording.cursor import read_cursor
from otel_dflash.recording.delivery import SampledSpans
from otel_dflash.recording.frames import Frame
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.spans.sampling import Sampling

FLUSH_INTERVAL_S: Final = 1.0  # the longest that live spans wait for others to share a request
BACKOFF_S: Final = (0.2, 5.0)

_Item = TypeVar("_Item")
# How a reason (otlp/failures.py) begins if the data itself was refused. 401, 403 and 404 are about us.
_REFUSED: Final = re.compile(
    r"(400|413|422|INVALID_ARGUMENT|Failed to encode)\b|RESOURCE_EXHAUSTED: .* larger than max"
)


class SinkSetup(NamedTuple):
    """What all sinks of one recording are created with; Sink describes the fields."""

    directory: Path
    config: AgentConfig
    reasons: dict[str, str]
    sampling: Sampling
    live: RecordingWriter | None = None
    keep_cursor: bool = True


class Sink(threading.Thread):
    """Delivers the recording to one exporter.

    Call `finish` once nothing more is appended; `done` is set when everything is delivered.
    """

    what: str
    """What it sends, in words."""

    def __init__(
        self,
        name: str,
        directory: Path,
        live: RecordingWriter | None,
        keep_cursor: bool,
        reasons: dict[str, str],
    ) -> None:
        """Continue at the cursor file's position, or at the start.

        `reasons` has by thread the SDK's reason for a failed export (otlp/failures.py).
        """
        super().__init__(name=f"sink {name}", daemon=True)
        self._cursor_path = directory / f"cursor-{name}.json" if keep_cursor else None
        self._cursor: dict[str, Any] = read_cursor(self._cursor_path) if self._cursor_path else {}
        self.done = threading.Event()
        self.delivered = 0  # spans or points
        self.failures = 0  # exports that raised or did not succeed
        self.refused = 0  # items that the receiver refused for good
        self.position = int(self._cursor.get("position", 0))  # all frames before it are delivered
        self.newest_ns: int | None = None  # monotonic time of the newest record delivered
        self._failure: str | None = None
        self._refusal = ""
        self._has_taken = False
        self._reasons = reasons
        self._finishing = threading.Event()
        self._live = live
        self._reported: set[str] = set()
        self.reader = RecordingReader(directory, self.position, live)

    @property
    def reason(self) -> str | None:
        """Return why the newest export failed, one line; None if it did not, or the reason is unknown."""
        return self._reasons.get(self.name) or self._failure

    @property
    def unusable_records(self) -> int:
        """Return how many records this sink cannot show at all."""
        return 0

    @property
    def sampled(self) -> SampledSpans | None:
        """Return what the sampler left out, None without sampling."""
        return None

    @property
    def losses(self) -> list[str]:
        """Return what was left out although all else is delivered, by line: how much, why, the remedy."""
        if not self.refused or not self._has_taken:
            return []
        return [
            (
                f"{self.what} that the receiver refused for good: {self.refused} ({self._refusal}); they are "
                "in the recording, the receiver's log says more"
            )
        ]

    def finish(self) -> None:
        """Tell the sink that the recording is complete."""
        self._finishing.set()
        if self._live:
            self._live.recent.wake()

    def run(self) -> None:
        """Deliver until finished. The one error boundary of the sink: a bug stops this sink alone."""
        try:
            self.deliver()
            self.done.set()
        except Exception as error:  # noqa: BLE001  logged, and reported in delivery.json; other sinks continue
            self._failure = describe(error)
            report(f"{self.name} has stopped\n{traceback.format_exc()}")

    def deliver(self) -> None:
        """Go through the recording to its end."""
        raise NotImplementedError

    def more(self, limit: int, timeout_s: float) -> list[Frame] | None:
        """Return the next frames, [] if none came within `timeout_s`, None at the end of a recording."""
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
        """Write a file that a restarted agent continues from; return whether it was written.

        A full disk costs nothing but data sent twice after a restart.
        """
        try:
            write_atomically(path, data)
        except OSError as error:
            self._report_once(
                "cursor",
                f"{path.name} cannot be saved ({error.strerror}): a restarted agent sends more data twice",
            )
            return False
        return True

    def start_over(self, error: Exception) -> None:
        """Start the recording over: the cursor is of another version, or somebody changed it."""
        self._report_once(
            "cursor",
            (
                f"{self.name}: its cursor cannot be used ({error}); all is sent again from the start, "
                "with the same ids"
            ),
        )
        self._cursor = {}
        self.position = 0
        self.reader.close()
        self.reader = RecordingReader(self.reader.directory, 0, self._live)

    def count(self, item: Any) -> int:
        """Return how many spans or points an item of `send` is."""
        return 1

    def send(
        self,
        requests: Sequence[Sequence[_Item]],
        export: Callable[[Sequence[_Item]], bool],
        may_skip: bool = False,
    ) -> int:
        """Export items until all are accepted or refused for good; return how many were accepted.

        An accepted request, or part of a refused one, is not sent again.
        The pauses between tries grow; the exporter's own retries and timeout are within each try. A plugin
        that raises counts as failed. A receiver that has accepted nothing so far may refuse everything for a
        mistake of ours, such as http:// to a port that speaks TLS: then refused items wait, unless they
        `may_skip`.
        """
        parts = list(reversed(requests))  # the last part is next
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
                    self._leave_out(self.count(part[0]), refusal.string)
                    continue
            self.failures += 1
            parts.insert(0 if refusal else len(parts), part)
            if self._finishing.is_set():
                time.sleep(BACKOFF_S[0])
            elif self._finishing.wait(pause):  # finishing: try once more at once
                continue
            pause = min(2 * pause, longest)
        return taken

    def _try(self, part: Sequence[_Item], export: Callable[[Sequence[_Item]], bool]) -> bool:
        self._failure = self.reason  # still reported while this try is running
        self._reasons.pop(self.name, None)
        try:
            if export(part):
                self._failure = None
                self._reasons.pop(self.name, None)
                return True
        except Exception as error:  # noqa: BLE001  a plugin may raise anything
            self._failure = describe(error)
            self._report_once(
                type(error).__name__, f"{self.name}: export raised {self._failure}; it is retried"
            )
        return False

    def _leave_out(self, count: int, refusal: str) -> None:
        self.refused += count
        self._refusal = refusal
        self._failure = None
        self._reasons.pop(self.name, None)
        self._report_once(
            "refused",
            (
                f"{self.name}: the receiver refuses some {self.what} for good ({refusal}); they are left "
                "out and counted"
            ),
        )

    def _report_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            report(text)
