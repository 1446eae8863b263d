"""What the telemetry costs and loses, by worker and for the agent itself.

The agent is instance ``<run>-<host>-agent``: its CPU time continues over restarts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from otel_dflash import semconv
from otel_dflash.metrics.decoding import Records, Ring
from otel_dflash.metrics.ended import Names
from otel_dflash.metrics.family import Family, Member, Moment, by_process
from otel_dflash.metrics.histogram import NS_PER_S
from otel_dflash.metrics.points import Instrument, Metric, NumberPoint
from otel_dflash.metrics.typed import check
from otel_dflash.recording.payloads import (
    AGENT,
    AGENT_CPU,
    RECORD_COST,
    RING_FILL,
    UNRECORDED_STEPS,
    WALL_OFFSET,
    Closed,
    Sample,
    lag_sink,
)
from otel_dflash.records import DROP_REASONS, Counter


@dataclass(slots=True)
class RingFigures:
    """Of one ring."""

    records: int = 0
    malformed: int = 0
    not_recorded: int = 0  # sequence numbers that the recording lacks
    fill: float = 0.0  # at the newest drain; a closed ring holds nothing
    counters: list[int] = field(default_factory=lambda: [0] * len(Counter))

    @property
    def evicted(self) -> int:
        """Return how many items left a queue by no get."""
        return self.counters[Counter.EVICTED]

    def dropped(self) -> dict[str, int]:
        """Return lost records by reason, every reason present."""
        lost = {reason: self.counters[counter] for counter, reason in DROP_REASONS.items()}
        return {
            **lost,
            semconv.DROP_MALFORMED: self.malformed,
            semconv.DROP_NOT_RECORDED: self.not_recorded,
        }


@dataclass(slots=True)
class AgentFigures:
    """What the agent measured about itself. A restarted agent counts CPU time from 0; the sum continues."""

    cpu_ns: float = 0
    cpu_last_ns: float = 0
    wall_offset_ns: float | None = None
    cost_ns: float | None = None  # per record, in the trainer, as calibrated
    unrecorded_steps: float = 0  # of workers without a ring
    # sink -> age of the newest record it has delivered
    lags_s: dict[str, float] = field(default_factory=dict)

    def take(self, samples: Sequence[Sample]) -> None:
        """Take all figures of a moment."""
        values = {sample.series: sample.value for sample in samples}
        if (cpu_ns := values.get(AGENT_CPU)) is not None:
            self.cpu_ns += cpu_ns - self.cpu_last_ns if cpu_ns >= self.cpu_last_ns else cpu_ns
            self.cpu_last_ns = cpu_ns
        self.wall_offset_ns = values.get(WALL_OFFSET, self.wall_offset_ns)
        self.cost_ns = values.get(RECORD_COST, self.cost_ns)
        self.unrecorded_steps = values.get(UNRECORDED_STEPS, self.unrecorded_steps)
        self.lags_s = {
            sink: value for series, value in values.items() if (sink := lag_sink(series)) is not None
        }


class TelemetryFigures(Family[RingFigures]):
    """Records, losses, ring fill, overhead; the agent's CPU time, lags and clock offset."""

    name = "telemetry"
    version = 1
    sources = frozenset({AGENT})

    def __init__(self) -> None:
        super().__init__()
        self.agent = AgentFigures()

    def open(self, ring: Ring) -> RingFigures:
        """Return the totals of a new ring."""
        return RingFigures()

    def take_records(self, ring: Ring, records: Records) -> None:
        """Count records."""
        totals = self.of(ring)
        totals.records += records.count
        totals.malformed += records.malformed
        totals.not_recorded += records.missing

    def take_counters(self, ring: Ring, counters: Sequence[int]) -> None:
        """Take what the ring lost."""
        self.of(ring).counters[: len(counters)] = counters

    def take_closed(self, ring: Ring, closed: Closed, was_captured: bool) -> None:
        """Take the end of a ring."""
        self.of(ring).fill = 0.0

    def take_samples(self, ring: Ring | None, samples: Sequence[Sample]) -> None:
        """Take the agent's figures."""
        if ring is None:
            self.agent.take(samples)
        elif ring.closed is None:
            for sample in samples:
                if sample.series == RING_FILL:
                    self.of(ring).fill = sample.value

    def merge(self, past: RingFigures, totals: RingFigures, names: Names) -> None:
        """Add what was counted; a closed ring holds nothing."""
        past.records += totals.records
        past.malformed += totals.malformed
        past.not_recorded += totals.not_recorded
        past.counters = [sum(pair) for pair in zip(past.counters, totals.counters, strict=True)]

    def points(self, moment: Moment) -> Iterator[Metric]:
        """Yield the metrics of each process, then the agent's own."""
        for pid, members in by_process(self.members(moment)):
            events = [member.point(member.sum(lambda totals: totals.records)) for member in members]
            yield Metric(semconv.TELEMETRY_EVENTS, Instrument.COUNTER, pid, events)
            dropped = [point for member in members for point in _dropped_points(member)]
            yield Metric(semconv.TELEMETRY_EVENTS_DROPPED, Instrument.COUNTER, pid, dropped)
            fills = [member.point(max(totals.fill for _, totals in member.rings)) for member in members]
            yield Metric(semconv.TELEMETRY_RING_UTILIZATION, Instrument.GAUGE, pid, fills)
            if (cost_ns := self.agent.cost_ns) is not None:
                costs = [member.point(self._overhead(member, cost_ns)) for member in members]
                yield Metric(semconv.TELEMETRY_OVERHEAD, Instrument.GAUGE, pid, costs)
        yield from self._agent_metrics(moment)

    def dump(self, totals: RingFigures) -> Any:
        """Return totals ready for JSON."""
        return asdict(totals)

    def load(self, ring: int, data: Any) -> RingFigures:
        """Return what `dump` was given."""
        if len(data["counters"]) != len(Counter):
            raise ValueError(f"{len(data['counters'])} counters")
        return RingFigures(**data)

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot: Family."""
        return {**super().to_dict(), "agent": asdict(self.agent)}

    def restore(self, data: dict[str, Any]) -> None:
        """Restore a snapshot: Family."""
        agent = AgentFigures(**data["agent"]) if data["version"] == self.version else self.agent
        check(agent, AgentFigures)
        super().restore(data)
        self.agent = agent

    def _overhead(self, member: Member[RingFigures], cost_ns: float) -> float:
        wall_ns = sum(max(ring.last_ns - self.start_of(ring) - ring.gap_ns, 0) for ring, _ in member.rings)
        return cost_ns * member.sum(lambda totals: totals.records) / wall_ns if wall_ns else 0.0

    def _agent_metrics(self, moment: Moment) -> Iterator[Metric]:
        start_ns = moment.info.created_ns
        if self.since_ns:
            start_ns = max(start_ns, moment.info.wall_ns(self.since_ns))

        agent = self.agent
        if agent.wall_offset_ns is not None:
            cpu = NumberPoint(
                {semconv.COMPONENT: semconv.COMPONENT_AGENT},
                start_ns,
                moment.time_ns,
                agent.cpu_ns / NS_PER_S,
            )
            yield Metric(semconv.TELEMETRY_CPU_TIME, Instrument.COUNTER, None, [cpu])
            offset = NumberPoint({}, start_ns, moment.time_ns, agent.wall_offset_ns / NS_PER_S)
            yield Metric(semconv.TELEMETRY_CLOCK_OFFSET, Instrument.GAUGE, None, [offset])
            unrecorded = NumberPoint(
                {semconv.DROP_REASON: semconv.DROP_NO_RING},
                moment.info.created_ns,  # the session itself counts these
                moment.time_ns,
                round(agent.unrecorded_steps),
            )
            yield Metric(semconv.TELEMETRY_EVENTS_DROPPED, Instrument.COUNTER, None, [unrecorded])
        lags = [
            NumberPoint({semconv.SINK: sink}, start_ns, moment.time_ns, lag_s)
            for sink, lag_s in sorted(agent.lags_s.items())
        ]
        yield Metric(semconv.TELEMETRY_LAG, Instrument.GAUGE, None, lags)


def _dropped_points(member: Member[RingFigures]) -> Iterator[NumberPoint]:
    lost: dict[str, int] = {}
    for _, totals in member.rings:
        for reason, count in totals.dropped().items():
            lost[reason] = lost.get(reason, 0) + count
    for reason, count in lost.items():  # a ring counts from its creation, whatever is left of the recording
        yield member.point(count, {semconv.DROP_REASON: reason}, member.created_ns)
