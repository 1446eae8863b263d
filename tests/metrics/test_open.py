"""What OPEN frames mean for the totals: what is open counts, to the ns, and what was counted is final."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from otel_dflash.recording.catalog import Catalog
from otel_dflash.recording.payloads import Open, OpenWork
from otel_dflash.session import DETAIL_OFF, DETAIL_PHASES, DETAIL_STEPS
from tests.metrics.folded import Folded, as_json, fold_of, states
from tests.metrics.life import CREATED, Life
from tests.metrics.planted import PlantedRing, catalog_of, open_frame


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_at_every_open_frame_the_states_are_what_was_planted_to_the_ns(seed: int, depth: int) -> None:
    ring = PlantedRing(1, "target", 0, created_ns=CREATED)
    life = Life(random.Random(seed), ring, open_ratio=0.05)
    frames = life.live(100, depth)
    moments = {position: (time_ns, truth) for position, time_ns, truth in life.moments}
    assert len(moments) > 20
    fold = Folded(catalog_of(ring))
    reported, since_ns = Counter[str](), CREATED
    for position, frame in enumerate(frames):
        fold.add(frame)
        settled = Counter(states(fold, ring, settled=True))
        assert reported <= settled  # no cumulative series ever falls
        if position in moments:
            time_ns, truth = moments[position]
            assert states(fold, ring) == settled == truth
            assert sum(settled.values()) - sum(reported.values()) == time_ns - since_ns
            reported, since_ns = settled, time_ns
    assert states(fold, ring) == +life.truth


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_frames_folded_together_or_after_a_restart_give_the_same_totals(batch: int) -> None:
    rings = [PlantedRing(number, "target", number, created_ns=CREATED) for number in (1, 2)]
    lives = [Life(random.Random(number), ring, 0.05) for number, ring in enumerate(rings)]
    frames = [frame for pair in zip(*(life.live(30, 2) for life in lives), strict=False) for frame in pair]
    catalog = catalog_of(*rings)
    one_by_one, joined = Folded(catalog), Folded(catalog)
    for frame in frames:
        one_by_one.add(frame)
    for start in range(0, len(frames), batch):
        snapshot = json.loads(json.dumps(joined.to_dict()))
        joined = Folded(Catalog())
        assert joined.restore(snapshot) == {}
        joined.catalog.update(catalog)
        joined.add_all(frames[start : start + batch])
    assert as_json(joined) == as_json(one_by_one)


def test_a_later_record_adds_only_what_lies_after_the_open_frame() -> None:
    ring = PlantedRing(1, "drafter", 0)
    get = Open(ring.name(3, "starved queue_get"), 100)
    frames = [open_frame(time, {ring.ring: OpenWork(Open(ring.ring + 1, 90), (get,))}) for time in (150, 170)]
    ring.phase("queue_get", 100, 180, "starved")
    ring.phase("forward", 185, 195)
    ring.step(90, 200)
    frames.append(ring.flush())
    seen = [states(fold_of(frames[:count], ring), ring) for count in (1, 2, 3)]
    assert seen == [
        {"STARVED": 50, "OTHER": 100},
        {"STARVED": 70, "OTHER": 100},
        {"STARVED": 80, "BUSY": 10, "OTHER": 110},
    ]


def test_time_without_capture_is_a_state_of_its_own() -> None:
    ring = PlantedRing(1, "target", 0)
    forward = Open(ring.name(3, "busy forward"), 90)
    idle = OpenWork(None, ())
    in_forward = OpenWork(None, (forward,))
    ring.phase("forward", 10, 30)
    frames = [open_frame(5, {}), ring.flush(), open_frame(100, {ring.ring: in_forward}, DETAIL_STEPS)]
    ring.phase("forward", 90, 110)  # it had begun before
    frames += [ring.flush(), open_frame(150, {ring.ring: idle}, DETAIL_OFF)]
    frames.append(open_frame(200, {ring.ring: idle}, DETAIL_PHASES))
    ring.phase("forward", 220, 230)
    frames += [ring.flush(), open_frame(300, {ring.ring: idle}, DETAIL_OFF), ring.closed(350)]
    fold = fold_of(frames, ring)
    assert states(fold, ring) == {"BUSY": 50, "OTHER": 160, "UNCAPTURED": 40 + 50 + 50}
    assert states(fold, ring, settled=True) == states(fold, ring)


def test_a_worker_made_without_capture_was_never_captured() -> None:
    ring = PlantedRing(1, "target", 0, created_ns=50)
    frames = [open_frame(time, {ring.ring: OpenWork(None, ())} if time > 50 else {}, 2) for time in (40, 100)]
    fold = fold_of(frames, ring)
    assert states(fold, ring) == {"UNCAPTURED": 50}


def test_open_work_of_an_unknown_ring_or_a_damaged_frame_is_counted_and_the_rest_is_taken() -> None:
    ring = PlantedRing(1, "target", 0)
    frame = open_frame(100, {9 << 28: OpenWork(None, ()), ring.ring: OpenWork(None, ())})
    fold = fold_of([frame], ring)
    assert (fold.malformed, states(fold, ring)) == (1, {"OTHER": 100})
