"""The sink for metric points."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult

from otel_dflash.agent.sinks.sink import FLUSH_INTERVAL_S, Sink, SinkSetup
from otel_dflash.config import METRIC_AGE_VARIABLE, AgentConfig
from otel_dflash.metrics.families import families
from otel_dflash.metrics.family import Family
from otel_dflash.metrics.fold import Fold
from otel_dflash.metrics.intervals import Intervals
from otel_dflash.metrics.points import Metric
from otel_dflash.otlp.exporters import metric_exporters
from otel_dflash.otlp.metric_data import MetricWriter
from otel_dflash.recording.frames import Frame
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.spans.sampling import Sampling

EXEMPLARS_TO_CHOOSE_FROM: Final = 8  # longest of a series, if not every trace is sent
_FRAMES_MAX: Final = 64  # read at once: 16 MiB if all are of the largest
AHEAD_NS_MAX: Final = 300_000_000_000  # Prometheus refuses points more than 10 min ahead of its clock


class MetricSink(Sink):
    """Sends cumulative points at fixed recorded times: late data keep the times at which they were recorded.

    Points too old for a receiver, which would refuse the whole request, are not sent: a newer one holds their
    totals.
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
            config: Gives the interval of the points and their largest age.
            live: The recording's writer, while the run is running.
            keep_cursor: Whether to continue at the cursor file's position, and to write the file.
            reasons: See Sink.
            sampling: Which traces are sent (None: all). Exemplars lead only to these.
            clock: Wall time in ns.
        """
        super().__init__(f"metrics-{name}", directory, live, keep_cursor, {} if reasons is None else reasons)
        self._exporter = exporter
        self._interval_ns = config.metric_interval_ns
        self._age_ns_max = config.metric_age_ns_max
        self._sends = sampling.sends if sampling else lambda trace_id: True
        self._exemplars = 1 if sampling is None or sampling.sends_all else EXEMPLARS_TO_CHOOSE_FROM
        self._clock = clock
        self._writer = MetricWriter(self.reader.info)
        self._to_catch_up: dict[Family[Any], Exception] = {}
        self.too_old = 0  # points that were not sent, of each series
        self.ahead = 0
        try:
            self._fold = self._resume()
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self.start_over(error)
            self._fold = self._resume()

    @property
    def losses(self) -> list[str]:
        """Return what was left out: Sink."""
        found = super().losses
        if self.too_old:
            # else the whole recording is too old
            newer = "; a newer one holds their totals" if self.delivered else ""
            found.append(
                f"points of each metric that are over {self._age_ns_max / 86_400e9:g} days old and were "
                f"not sent: {self.too_old}{newer}. "
                f"To send them too, widen the receiver's out-of-order window and {METRIC_AGE_VARIABLE}, "
                "and replay"
            )
        if self.ahead:
            found.append(
                f"points of each metric that are over {AHEAD_NS_MAX // 60_000_000_000} min ahead of "
                "this host's clock and were not sent: "
                f"{self.ahead}; it was set back after the session began, or is wrong here: set it, or "
                "wait, and replay"
            )
        return found

    def _resume(self) -> Fold:
        """Return the fold as saved in the cursor, or a new one at the start of the recording."""
        fold = Fold(self.reader.catalog, families(self._exemplars))
        self._to_catch_up = {}
        if self._cursor:
            self._to_catch_up = fold.restore(self._cursor["totals"])
        return fold

    def _catch_up(self) -> None:
        """Fold everything before the cursor again, for the families whose totals could not be used.

        The other families continue from their totals.
        """
        reader = RecordingReader(self.reader.directory, 0, self._live)
        fold = Fold(reader.catalog, list(self._to_catch_up), self._fold.past_names)
        intervals = Intervals(reader.info, self._interval_ns)
        newest_ns = 0
        try:
            while reader.position < self.position and (frames := reader.read(_FRAMES_MAX)):
                before = [frame for frame in frames if frame.number < self.position]
                if not intervals.end_ns:
                    fold.begin_at(frames[0])
                for part, is_end in intervals.cut(before):
                    fold.add_all(part)
                    newest_ns = part[-1].time_ns
                    if is_end:
                        fold.begin_interval()
                        fold.merge_ended(newest_ns)
        finally:
            reader.close()
        fold.begin_interval()  # the points before the cursor were sent
        fold.merge_ended(newest_ns)

    def deliver(self) -> None:
        """Fold frames; at each boundary of the interval send all series."""
        for family, error in self._to_catch_up.items():
            self._report_once(
                family.name,
                f"{self.name}: the totals of {family.name} cannot be used ({error}); they are folded again",
            )
        if self._to_catch_up:
            self._catch_up()
        intervals = Intervals(self.reader.info, self._interval_ns, self._cursor.get("interval_end_ns", 0))
        newest: Frame | None = None  # folded and not sent
        while (frames := self.more(_FRAMES_MAX, FLUSH_INTERVAL_S)) is not None:
            if frames and not intervals.end_ns:
                self._fold.begin_at(frames[0])
            for part, is_end in intervals.cut(frames):
                self._fold.add_all(part)
                newest = part[-1]
                if is_end:
                    self._send(newest, intervals.end_ns)
                    newest = None
        if newest:
            self._send(newest, intervals.end_ns, is_last=True)

    def _send(self, newest: Frame, interval_end_ns: int, is_last: bool = False) -> None:
        """Send all series at the time of the newest frame folded.

        Refused points may be skipped for later ones, but the cursor stays until any were accepted.
        """
        time_ns = newest.time_ns
        taken = 0
        if self._is_timely(time_ns):
            taken = self.send(
                list(self._writer.requests(self._fold.points(self.reader.info, time_ns, self._sends))),
                lambda some: self._export(some) or not self._is_timely(time_ns),
                not is_last,
            )
        if self._is_timely(time_ns):
            self.delivered += bool(taken)
        elif self.reader.info.wall_ns(time_ns) > self._clock():
            self.ahead += 1
        else:
            self.too_old += 1
        self._fold.begin_interval()
        self._fold.merge_ended(time_ns)
        if self.refused and not self._has_taken:
            return
        self.newest_ns = time_ns
        self.position = newest.number + 1
        self.save(
            {
                "position": self.position,
                "totals": self._fold.to_dict(),
                "interval_end_ns": interval_end_ns,
            }
        )

    def count(self, item: Metric) -> int:
        """Return how many points an item of `send` holds."""
        return len(item.points)

    def _export(self, metrics: Sequence[Metric]) -> bool:
        return self._exporter.export(self._writer.data(metrics)) is MetricExportResult.SUCCESS

    def _is_timely(self, time_ns: int) -> bool:
        """Return whether a receiver may accept points of that monotonic time.

        Points may become too old while they wait.
        """
        age_ns = self._clock() - self.reader.info.wall_ns(time_ns)
        return -AHEAD_NS_MAX <= age_ns <= self._age_ns_max


def make(setup: SinkSetup) -> list[Sink]:
    """Return a sink for each metric exporter that the environment names.

    Raises:
        ConfigError: An exporter cannot be created.
    """
    return [
        MetricSink(
            name,
            exporter,
            setup.directory,
            setup.config,
            setup.live,
            setup.keep_cursor,
            setup.reasons,
            setup.sampling,
        )
        for name, exporter in metric_exporters().items()
    ]
