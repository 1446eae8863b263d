"""A metric family is one file and one line in the registry: here is the file, as somebody else would write it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from otel_dflash.metrics.decoding import Records, Ring
from otel_dflash.metrics.ended import Names
from otel_dflash.metrics.families import families
from otel_dflash.metrics.family import Family, Moment, by_process
from otel_dflash.metrics.fold import Fold
from otel_dflash.metrics.points import Instrument, Metric, NumberPoint
from otel_dflash.otlp.metric_data import MetricWriter
from otel_dflash.recording.catalog import Catalog
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.payloads import Sample, Series, encode_samples, encode_series
from otel_dflash.recording.run_info import RunInfo
from otel_dflash.records import ERROR_MASK
from tests.metrics.planted import PlantedRing, catalog_of

WALL = 1_700_000_000_000_000_000
INFO = RunInfo("run-1", "node-a", anchor_wall_ns=WALL, anchor_mono_ns=0, created_ns=WALL, version="1.2.3")
ERRORS = ("test.errors", "{error}", "Phases and steps that raised.")
POWER = ("test.power", "W", "Newest reading.")


class Errors(Family[list[int]]):
    """Errors of each worker, and the power of each GPU as somebody read it."""

    name = "errors"
    version = 1
    sources = frozenset({"meter"})

    def __init__(self) -> None:
        super().__init__()
        self.power_w: dict[str, float] = {}

    def open(self, ring: Ring) -> list[int]:
        return [0]

    def take_records(self, ring: Ring, records: Records) -> None:
        self.of(ring)[0] += sum(
            histogram.count for key, histogram in records.timed.durations.items() if key & ERROR_MASK
        )

    def merge(self, past: list[int], totals: list[int], names: Names) -> None:
        past[0] += totals[0]

    def take_samples(self, ring: Ring | None, samples: Sequence[Sample]) -> None:
        self.power_w |= {dict(sample.series.attributes)["gpu"]: sample.value for sample in samples}

    def points(self, moment: Moment) -> Iterator[Metric]:
        for pid, members in by_process(self.members(moment)):
            points = [member.point(member.sum(lambda totals: totals[0])) for member in members]
            yield Metric(ERRORS, Instrument.COUNTER, pid, points)
        readings = [
            NumberPoint({"gpu": gpu}, moment.info.created_ns, moment.time_ns, value)
            for gpu, value in self.power_w.items()
        ]
        yield Metric(POWER, Instrument.GAUGE, None, readings)

    def dump(self, totals: list[int]) -> Any:
        return totals

    def load(self, ring: int, data: Any) -> list[int]:
        return [int(count) for count in data]

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "power_w": self.power_w}

    def restore(self, data: dict[str, Any]) -> None:
        super().restore(data)
        self.power_w = data["power_w"]


def recorded() -> tuple[Catalog, list[Frame]]:
    ring = PlantedRing(1, "target", 0, created_ns=100)
    ring.phase("forward", 100, 200, error="OSError")
    ring.step(100, 250, error="OSError")
    ring.phase("forward", 300, 310)
    catalog = catalog_of(ring)
    series = Series("meter", "power_w", (("gpu", "0"),))
    described = Frame(0, FrameKind.SERIES, 0, 0, 1, 0, encode_series({77: series}))
    catalog.apply(described)
    read = Frame(0, FrameKind.SAMPLES, 0, 0, 1, 0, encode_samples([Sample(series, 300, 612.5)], {series: 77}))
    return catalog, [ring.names_frame(), described, ring.flush(), read]


def values(fold: Fold) -> dict[str, list[Any]]:
    data = json.loads(MetricWriter(INFO).data(fold.points(INFO, 1_000)).to_json())
    return {
        metric["name"]: [(point["attributes"], point["value"]) for point in metric["data"]["data_points"]]
        for resource in data["resource_metrics"]
        for metric in resource["scope_metrics"][0]["metrics"]
        if metric["name"].startswith("test.")
    }


EXPECTED = {
    "test.errors": [({"dflash.worker.role": "target", "dflash.worker.id": "0"}, 2)],
    "test.power": [({"gpu": "0"}, 612.5)],
}


def test_a_new_family_gets_its_frames_and_its_points_go_out_with_the_others() -> None:
    catalog, frames = recorded()
    fold = Fold(catalog, [*families(1), Errors()])
    fold.add_all(frames)
    assert values(fold) == EXPECTED


def test_a_family_that_a_snapshot_lacks_is_the_only_one_to_fold_again() -> None:
    catalog, frames = recorded()
    before = Fold(catalog, families(1))
    before.add_all(frames)
    new = Errors()
    after = Fold(catalog, [*families(1), new])
    unusable = after.restore(json.loads(json.dumps(before.to_dict())))
    assert {family.name: type(error).__name__ for family, error in unusable.items()} == {"errors": "KeyError"}
    Fold(catalog, [new]).add_all(frames)
    assert values(after) == EXPECTED
    again = Fold(catalog, [*families(1), Errors()])
    assert again.restore(json.loads(json.dumps(after.to_dict()))) == {}
    assert values(again) == EXPECTED
