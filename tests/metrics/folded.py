"""A fold of all families, each under its name, and what tests ask it."""

from __future__ import annotations

import json

from otel_dflash.metrics.families import families
from otel_dflash.metrics.families.phases import Phases
from otel_dflash.metrics.families.telemetry import TelemetryFigures
from otel_dflash.metrics.families.tokens import Tokens
from otel_dflash.metrics.families.workers import Workers
from otel_dflash.metrics.fold import Fold
from otel_dflash.metrics.histogram import Histogram
from otel_dflash.recording.catalog import Catalog
from otel_dflash.recording.frames import Frame
from otel_dflash.records import State
from tests.metrics.planted import PlantedRing, catalog_of


class Folded(Fold):
    """A fold of all families, each under its name."""

    def __init__(self, catalog: Catalog, exemplars: int = 0) -> None:
        found = families(exemplars)
        super().__init__(catalog, found)
        for kind, name in (
            (Phases, "phases"),
            (Workers, "accounts"),
            (Tokens, "tokens"),
            (TelemetryFigures, "telemetry"),
        ):
            setattr(self, name, next(family for family in found if isinstance(family, kind)))

    phases: Phases
    accounts: Workers
    tokens: Tokens
    telemetry: TelemetryFigures

    def state_ns(self, ring: int, settled: bool = False) -> dict[State, int]:
        return self.accounts.rings[ring].state_ns(self.rings[ring], self.catalog[ring], settled)


def fold_of(frames: list[Frame], *rings: PlantedRing) -> Folded:
    fold = Folded(catalog_of(*rings))
    for frame in frames:
        fold.add(frame)
    return fold


def states(fold: Folded, ring: PlantedRing, settled: bool = False) -> dict[str, int]:
    spent = fold.state_ns(ring.ring, settled)
    return {state.name: spent_ns for state, spent_ns in spent.items() if spent_ns}


def as_json(fold: Fold) -> object:
    return json.loads(json.dumps(fold.to_dict()))


def histogram_of(*durations: int) -> Histogram:
    histogram = Histogram()
    histogram.add(durations)
    return histogram
