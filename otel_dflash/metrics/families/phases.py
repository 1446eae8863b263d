"""Durations of phases and steps: histograms, each point with the longest since the last one as exemplar."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from otel_dflash import semconv
from otel_dflash.metrics.decoding import Records, Ring
from otel_dflash.metrics.ended import Names
from otel_dflash.metrics.exemplars import Found, Longest
from otel_dflash.metrics.family import Family, Member, Moment, by_process
from otel_dflash.metrics.histogram import NS_PER_S, Histogram
from otel_dflash.metrics.points import Exemplar, HistogramPoint, Instrument, Metric
from otel_dflash.recording.catalog import RingNames
from otel_dflash.records import ERROR_MASK, KIND_SHIFT, NAME_MASK, NAME_SHIFT, Kind


@dataclass(slots=True)
class Durations:
    """Of one ring; histograms by kind, name and error as in word 0 of a slot."""

    longest: Longest  # since the interval began
    histograms: dict[int, Histogram] = field(default_factory=dict)

    def of_kind(self, kind: Kind) -> Iterator[tuple[int, int, Histogram]]:
        """Yield (name id, error name id, histogram) of the PHASE or STEP records; a step has name id 0."""
        for key, histogram in self.histograms.items():
            if key >> KIND_SHIFT == kind:
                yield key >> NAME_SHIFT & NAME_MASK, key & ERROR_MASK, histogram

    def longest_of(self, kind: Kind, name_id: int, error_id: int) -> list[Found]:
        """Return the kept entries of one series whose spans are known, longest first."""
        return self.longest.settled(kind << KIND_SHIFT | name_id << NAME_SHIFT | error_id)


class Phases(Family[Durations]):
    """Durations of phases and of steps."""

    name = "phases"
    version = 1

    def __init__(self, exemplars: int = 0) -> None:
        """Keep the `exemplars` longest of each series (exemplars.py)."""
        super().__init__()
        self._exemplars = exemplars

    def open(self, ring: Ring) -> Durations:
        """Return the totals of a new ring."""
        return Durations(Longest(ring.id, self._exemplars))

    def take_records(self, ring: Ring, records: Records) -> None:
        """Count durations."""
        totals = self.of(ring)
        found = records.timed.durations
        for key, histogram in found.items():
            totals.histograms.setdefault(key, Histogram()).merge(histogram)
        totals.longest.look_at(found, records.rows, records.sequences, records.kinds)

    def merge(self, past: Durations, totals: Durations, names: Names) -> None:
        """Add durations. The longest were sent."""
        for key, histogram in totals.histograms.items():
            name_id, error_id = key >> NAME_SHIFT & NAME_MASK, key & ERROR_MASK
            kind = key >> KIND_SHIFT
            if kind == Kind.PHASE:
                name_id = names(name_id)
            merged = kind << KIND_SHIFT | name_id << NAME_SHIFT | names(error_id)
            past.histograms.setdefault(merged, Histogram()).merge(histogram)

    def begin_interval(self) -> None:
        """Forget the longest whose spans are known."""
        for totals in self.rings.values():
            totals.longest.forget_settled()

    def points(self, moment: Moment) -> Iterator[Metric]:
        """Yield both histograms of each process."""
        for pid, members in by_process(self.members(moment)):
            for definition, kind in (
                (semconv.PHASE_DURATION, Kind.PHASE),
                (semconv.STEP_DURATION, Kind.STEP),
            ):
                points = [point for member in members for point in _histograms(moment, member, kind)]
                yield Metric(definition, Instrument.HISTOGRAM, pid, points)

    def dump(self, totals: Durations) -> Any:
        """Return totals ready for JSON."""
        histograms = {str(key): histogram.to_dict() for key, histogram in totals.histograms.items()}
        return {"histograms": histograms, "longest": totals.longest.to_dict()}

    def load(self, ring: int, data: Any) -> Durations:
        """Return what `dump` was given."""
        histograms = {int(key): Histogram.from_dict(value) for key, value in data["histograms"].items()}
        return Durations(Longest.from_dict(ring, data["longest"]), histograms)


def _histograms(moment: Moment, member: Member[Durations], kind: Kind) -> Iterator[HistogramPoint]:
    series: dict[tuple[str, str], tuple[Histogram, list[tuple[Found, int]]]] = {}
    for ring, totals in member.rings:  # two name ids may carry one text: another state, another ring
        names = moment.catalog[ring.id]
        for name_id, error_id, histogram in totals.of_kind(kind):
            whole, longest = series.setdefault(_texts(names, kind, name_id, error_id), (Histogram(), []))
            whole.merge(histogram)
            longest += [(found, ring.id) for found in totals.longest_of(kind, name_id, error_id)]
    for (phase, error), (whole, longest) in sorted(series.items(), key=lambda item: item[0]):
        attributes = dict(member.worker.attributes)
        if phase:
            attributes[semconv.PHASE] = phase
        if error:
            attributes[semconv.ERROR_TYPE] = error
        yield HistogramPoint(attributes, member.start_ns, member.time_ns, whole, _exemplars(moment, longest))


def _texts(names: RingNames, kind: Kind, name_id: int, error_id: int) -> tuple[str, str]:
    """Return the name of a phase, "" for a step, and its error, "" for none."""
    return names.phase(name_id)[1] if kind == Kind.PHASE else "", names.text(error_id) if error_id else ""


def _exemplars(moment: Moment, longest: list[tuple[Found, int]]) -> tuple[Exemplar, ...]:
    """Return an exemplar for the longest whose trace is sent, if any; each is given with its ring."""
    for found, ring in sorted(longest, key=lambda item: (-item[0].duration_ns, item[0].end_ns)):
        trace_id, span_id = found.span_of(ring)
        if moment.sends(trace_id):
            end_ns = moment.info.wall_ns(found.end_ns)
            return (Exemplar(found.duration_ns / NS_PER_S, end_ns, trace_id, span_id),)
    return ()
