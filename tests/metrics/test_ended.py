"""Workers that have ended: their totals are kept, at a cost that does not grow with them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from otel_dflash.metrics.ended import RETIRED_NS
from otel_dflash.metrics.families import families
from otel_dflash.metrics.fold import Fold
from otel_dflash.otlp.metric_data import MetricWriter
from otel_dflash.recording.catalog import Catalog
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.run_info import RunInfo
from tests.metrics.life import Life
from tests.metrics.planted import PlantedRing, agent_frames

S = 1_000_000_000
INFO = RunInfo("run-1", "node-a", anchor_wall_ns=1_000 * S, anchor_mono_ns=0, created_ns=0, version="1")


def made_again(seed: int, count: int, index: int = 0) -> list[tuple[list[Frame], int]]:
    """Return the frames of each life of a worker, and when it ended."""
    lives, now = [], (1 + seed) * S
    for number in range(count):
        ring = PlantedRing(1 + 100 * seed + number, "drafter", index, created_ns=now, gpu=1)
        life = Life(random.Random(1000 * seed + number), ring, 0.02, now=now)
        for name in random.Random(number).sample(["a", "b", "c", "d"], 3):  # other ids in each ring
            ring.name(3, f"busy {name}")
        ring.phase(f"extra_{number % 3}", now, now + 10, "lock_wait", "OSError" if number % 2 else None)
        ring.step(now, now + 10, tokens=number, loss_tokens=1)
        frames = life.live(4, 1)
        ring.consumed(life.now, 1)
        counters = ring.counters(ring.serial, 7 * number, 0, 0, 3)
        now = life.now + 5_000
        lives.append(([ring.names_frame(), *frames, ring.flush(now), counters, ring.closed(now)], now))
    return lives


def values(fold: Fold, time_ns: int) -> Any:
    """Return all points but exemplars, as a receiver sees them."""
    data = json.loads(MetricWriter(INFO).data(fold.points(INFO, time_ns)).to_json())
    text = json.dumps(data, sort_keys=True)
    assert "exemplars" in text
    for resource in data["resource_metrics"]:
        for metric in resource["scope_metrics"][0]["metrics"]:
            for point in metric["data"]["data_points"]:
                point["exemplars"] = []
    return data


def named(frames: list[Frame], catalog: Catalog) -> list[Frame]:
    for frame in frames:
        if frame.kind == FrameKind.NAMES:
            catalog.apply(frame)
    return frames


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_made_again_has_the_same_points_whether_its_rings_are_merged_or_not(seed: int) -> None:
    plain, merging = (Fold(Catalog(), families(0)) for _ in range(2))
    for frames, ended_ns in made_again(seed, 6):
        for fold in (plain, merging):
            fold.add_all(named([*frames, *agent_frames(5, cost=100.0)], fold.catalog))
        assert values(merging, ended_ns + S) == values(plain, ended_ns + S)
        merging.merge_ended(ended_ns + S)
        snapshot = json.loads(json.dumps(merging.to_dict()))
        merging = Fold(Catalog(), families(0))
        assert merging.restore(snapshot) == {}
        assert values(merging, ended_ns + S) == values(plain, ended_ns + S)
        assert len(merging.rings) == len(merging.catalog) == 1


def test_after_five_minutes_its_series_end_and_its_role_remembers_it() -> None:
    fold = Fold(Catalog(), families(0))
    stays = PlantedRing(7, "drafter", 9, created_ns=0)
    stays.step(0, S, tokens=1000, loss_tokens=10)
    fold.add_all(named([stays.names_frame(), stays.flush()], fold.catalog))
    ((frames, ended_ns),) = made_again(0, 1)
    fold.add_all(named(frames, fold.catalog))

    def shown(time_ns: int) -> dict[str, list[tuple[str, float]]]:
        found: dict[str, list[tuple[str, float]]] = {}
        for metric in fold.points(INFO, time_ns):
            for point in metric.points:
                who = point.attributes.get(
                    "dflash.worker.id", point.attributes.get("dflash.worker.state", "")
                )
                found.setdefault(metric.definition[0], []).append((str(who), getattr(point, "value", 0.0)))
        return found

    fold.merge_ended(ended_ns + RETIRED_NS - 1)
    before = shown(ended_ns + RETIRED_NS - 1)
    assert before["dflash.worker.count"] == [("running", 1), ("ended", 1)]
    assert before["dflash.worker.tokens"] == [("0", 0), ("9", 1000)]
    fold.merge_ended(ended_ns + RETIRED_NS)
    after = shown(ended_ns + RETIRED_NS)
    assert after["dflash.worker.tokens"] == [("9", 1000)]
    for of_role in ("dflash.worker.count", "dflash.training.tokens"):
        assert after[of_role] == before[of_role]
    again = PlantedRing(8, "drafter", 0, created_ns=ended_ns + 2 * RETIRED_NS)
    again.step(again_ns := ended_ns + 2 * RETIRED_NS, again_ns + S, tokens=4)
    fold.add_all(named([again.names_frame(), again.flush(again_ns + S)], fold.catalog))
    points = {metric.definition[0]: metric.points for metric in fold.points(INFO, again_ns + S)}
    (back, _) = points["dflash.worker.tokens"]
    assert (back.attributes["dflash.worker.id"], back.value) == ("0", 4)  # type: ignore[union-attr]
    assert back.start_ns == INFO.wall_ns(again_ns)
    assert [point.value for point in points["dflash.worker.count"]] == [2, 1]  # type: ignore[union-attr]


def test_what_a_fold_keeps_does_not_grow_with_the_workers_that_have_ended() -> None:
    fold = Fold(Catalog(), families(1))
    sizes = []
    for number in range(800):
        now = number * S
        ring = PlantedRing(1 + number, "target", number % 1000, created_ns=now)
        ring.phase("forward", now, now + 5)
        ring.step(now, now + 10)
        frames = [ring.names_frame(), ring.flush(now + 10), ring.counters(1, 0), ring.closed(now + 20)]
        fold.add_all(named(frames, fold.catalog))
        fold.begin_interval()
        fold.merge_ended(now + S)
        if number in (400, 799):
            sizes.append((len(fold.rings), len(fold.catalog), len(json.dumps(fold.to_dict())) // 20_000))
    assert sizes[0] == sizes[1]
    assert sizes[0][:2] == (301, 301)  # those of five minutes, and their role
    counts = {
        metric.definition[0]: [point.value for point in metric.points]  # type: ignore[union-attr]
        for metric in fold.points(INFO, 800 * S)
        if metric.definition[0] == "dflash.worker.count"
    }
    assert counts == {"dflash.worker.count": [0, 800]}


def test_with_the_last_worker_of_a_process_its_series_end() -> None:
    fold = Fold(Catalog(), families(1))
    ((frames, ended_ns),) = made_again(0, 1)
    fold.add_all(named(frames, fold.catalog))
    fold.merge_ended(ended_ns)
    assert fold.points(INFO, ended_ns)
    fold.merge_ended(ended_ns + RETIRED_NS)
    assert (fold.points(INFO, ended_ns + RETIRED_NS), fold.rings, dict(fold.catalog)) == ([], {}, {})
