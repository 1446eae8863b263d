from __future__ import annotations

import json
import random
from collections import Counter as Tally
from dataclasses import dataclass, field

import pytest

from otel_dflash.agent.catalog import Catalog
from otel_dflash.agent.coverage import PENDING_MAX
from otel_dflash.agent.fold import Fold, RingTotals
from otel_dflash.agent.frames import Frame, FrameKind
from otel_dflash.agent.histogram import Histogram
from otel_dflash.records import Kind, State
from tests.planted import SLOT, PlantedRing, agent_frame, catalog_of, json_frame

CREATED = 1_000_000_000


def fold_of(frames: list[Frame], *rings: PlantedRing) -> Fold:
    fold = Fold(catalog_of(*rings))
    for frame in frames:
        fold.add(frame)
    return fold


def states(fold: Fold, ring: PlantedRing, settled: bool = False) -> dict[str, int]:
    spent = fold.rings[ring.ring].state_ns(fold.catalog[ring.ring], settled)
    return {state.name: spent_ns for state, spent_ns in spent.items() if spent_ns}


def histogram_of(*durations: int) -> Histogram:
    histogram = Histogram()
    histogram.add(durations)
    return histogram


@dataclass
class Life:
    """A worker's life, lived on a clock of its own. Every ns is planted in `truth` as it is spent, the gaps too."""

    random: random.Random
    ring: PlantedRing
    now: int = CREATED
    truth: Tally[str] = field(default_factory=Tally)
    durations: dict[tuple[str, str | None], list[int]] = field(default_factory=dict)

    def spend(self, state: str) -> None:
        spent = self.random.choice([0, 1, 17, 1_000, 250_000, 3_000_000])
        self.truth[state.upper()] += spent
        self.now += spent

    def phase(self, depth: int) -> None:
        state = self.random.choice(["busy", "starved", "backpressured", "lock_wait"])
        name = self.random.choice(["forward", "queue_get", "lock"])
        error = self.random.choice([None, None, None, "ValueError"])
        start = self.now
        self.spend(state)
        while depth and self.random.random() < 0.4:
            self.phase(depth - 1)
            self.spend(state)
        self.durations.setdefault((f"{state} {name}", error), []).append(self.now - start)
        self.ring.phase(name, start, self.now, state, error)

    def step(self, depth: int) -> None:
        start = self.now
        for _ in range(self.random.randrange(5)):
            self.spend("other")
            self.phase(depth)
        self.spend("other")
        self.durations.setdefault(("step", None), []).append(self.now - start)
        self.ring.step(start, self.now)

    def live(self, actions: int, depth: int) -> list[Frame]:
        frames = []
        for _ in range(actions):
            self.spend("other")
            self.step(depth) if self.random.random() < 0.7 else self.phase(depth)
            if self.random.random() < 0.3:
                slots, cut = self.ring.slots, self.random.randrange(len(self.ring.slots) + 1)
                self.ring.slots = slots[:cut]  # a parent may come in a later frame than its child
                frames.append(self.ring.flush())
                self.ring.slots = slots[cut:]
        frames.append(self.ring.flush())
        return frames


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_states_equal_what_was_planted_and_sum_to_the_wall_after_every_frame(seed: int, depth: int) -> None:
    ring = PlantedRing(1, "target", 0, created_ns=CREATED)
    life = Life(random.Random(seed), ring)
    frames = life.live(200, depth)
    fold = Fold(catalog_of(ring))
    reported = Tally[str]()
    for frame in frames:
        fold.add(frame)
        totals = fold.rings[ring.ring]
        assert sum(totals.state_ns(fold.catalog[ring.ring]).values()) == totals.wall_ns
        settled = Tally(states(fold, ring, settled=True))
        assert reported <= settled <= Tally(states(fold, ring))  # no cumulative series ever falls
        reported = settled
    assert states(fold, ring) == +life.truth
    assert totals.wall_ns == life.now - CREATED

    life.spend("other")
    fold.add(ring.closed(life.now))
    assert states(fold, ring) == states(fold, ring, settled=True) == +life.truth

    names = fold.catalog[ring.ring]
    folded = {("step", None): next(totals.histograms(Kind.STEP))[2]}
    for name_id, error_id, histogram in totals.histograms(Kind.PHASE):
        folded[names.entries[name_id][1], names.text(error_id) if error_id else None] = histogram
    assert folded == {key: histogram_of(*durations) for key, durations in life.durations.items()}


def everything() -> tuple[list[Frame], Catalog]:
    """Return frames with all that can be in a recording."""
    frames = []
    rings = [PlantedRing(number, role, 0, created_ns=CREATED) for number, role in ((1, "target"), (2, "drafter"))]
    for number, ring in enumerate(rings):
        life = Life(random.Random(number), ring)
        frames += life.live(25, 2)
        ring.consumed(life.now, producer=1)
        ring.resumed(life.now, producer=1)
        ring.step(life.now, life.now + 9, tokens=77, error="OSError")
        ring.slot(9, 0, None)
        frames += [ring.flush(), ring.counters(500, 900, 0, 0, 3), agent_frame(5_000 * (2 - number), -7, {1: 0.5})]
        frames.append(ring.closed(life.now + 50, True, [("busy", "forward", life.now + 20), ("starved", "queue_get", life.now + 30)]))
    catalog = catalog_of(*rings)
    return [ring.names_frame() for ring in rings] + frames, catalog


def test_a_snapshot_after_any_frame_goes_on_to_the_same_totals() -> None:
    frames, catalog = everything()
    whole = Fold(catalog, exemplars=3)
    for frame in frames:
        whole.add(frame)
    for k in range(len(frames) + 1):
        before = Fold(catalog, exemplars=3)
        for frame in frames[:k]:
            before.add(frame)
        later = Catalog()  # as after a restart: a later segment does not name the rings that closed before it
        after = Fold.from_dict(json.loads(json.dumps(before.to_dict())), later, exemplars=3)
        assert set(later) == set(before.rings)
        later.update(catalog)
        for frame in frames[k:]:
            after.add(frame)
        assert (after.rings, after.agent, after.malformed, after.time_ns) == (whole.rings, whole.agent, whole.malformed, whole.time_ns)
        assert json.loads(json.dumps(after.to_dict())) == json.loads(json.dumps(whole.to_dict()))


@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_folding_many_frames_together_gives_the_same_totals(batch: int) -> None:
    frames, catalog = everything()
    frames = [*frames[:20], *frames[15:]]  # some twice
    one_by_one, together = Fold(catalog, exemplars=3), Fold(catalog, exemplars=3)
    for frame in frames:
        one_by_one.add(frame)
    for start in range(0, len(frames), batch):
        together.add_all(frames[start : start + batch])
    assert together.to_dict() == one_by_one.to_dict()


def test_a_snapshot_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="has version 0, need 2; fold the recording from its start"):
        Fold.from_dict({"version": 0}, Catalog())


def test_totals_of_a_small_ring() -> None:
    ring = PlantedRing(3, "drafter", 2, created_ns=100)
    ring.consumed(110, producer=1)
    ring.phase("queue_get", 105, 115, "starved")
    ring.phase("forward", 120, 150)
    ring.step(105, 160, tokens=32)
    ring.consumed(170, producer=1)
    ring.consumed(171, producer=2)
    ring.phase("forward", 175, 185, error="ValueError")
    ring.step(165, 190, error="ValueError")
    get, forward = ring.name(3, "starved queue_get"), ring.name(3, "busy forward")
    failed = ring.name(2, "ValueError")
    fold = fold_of([ring.flush(time=200), ring.counters(2, 32, 0, 3, 4, 0, 1)], ring)
    totals = fold.rings[3 << 28]
    assert totals == RingTotals(
        ring=3 << 28,
        created_ns=100,
        coverage=totals.coverage,
        last_ns=190,
        longest=totals.longest,
        next_sequence=8,
        records=8,
        steps=2,
        tokens=32,
        counters=[2, 32, 0, 3, 4, 0, 1, 0, 0, 0, 0],
        durations={
            1 << 32 | get << 16: histogram_of(10),
            1 << 32 | forward << 16: histogram_of(30),
            1 << 32 | forward << 16 | failed: histogram_of(10),
            2 << 32: histogram_of(55),
            2 << 32 | failed: histogram_of(25),
        },
        self_ns={get: 10, forward: 40},
        sources={1 << 28: 2, 2 << 28: 1},
    )
    assert totals.state_ns(fold.catalog[3 << 28]) == {
        State.BUSY: 40,
        State.STARVED: 10,
        State.BACKPRESSURED: 0,
        State.LOCK_WAIT: 0,
        State.OTHER: 40,
    }
    assert totals.dropped() == {
        "ring_full": 4,
        "wrong_thread": 0,
        "stale": 1,
        "unsupported_value": 0,
        "name_limit": 0,
        "unmatched_item": 0,
        "malformed": 0,
        "not_recorded": 0,
    }


def test_open_phases_of_a_killed_worker_count_as_time_but_not_as_durations() -> None:
    ring = PlantedRing(1, "target", 0)
    ring.phase("lock", 130, 140, "lock_wait")  # inside both open phases
    closed = ring.closed(1_000, True, [("busy", "forward", 110), ("starved", "queue_get", 120)], step=105)
    fold = fold_of([ring.flush(), closed, closed], ring)
    assert states(fold, ring) == {"BUSY": 10, "STARVED": 870, "LOCK_WAIT": 10, "OTHER": 110}
    assert states(fold, ring, settled=True) == states(fold, ring)
    totals = fold.rings[ring.ring]
    assert [histogram for _, _, histogram in totals.histograms(Kind.PHASE)] == [histogram_of(10)]
    assert totals.closed == {"end_ns": 1_000, "killed": True, "open": closed.json()["open"], "step": [ring.ring + 1, 105]}


def test_a_phase_that_encloses_earlier_frames_counts_only_its_own_time() -> None:
    ring = PlantedRing(1, "target", 0)
    ring.phase("lock", 20, 30, "lock_wait")
    frames = [ring.flush()]
    ring.phase("lock", 40, 50, "lock_wait")
    frames.append(ring.flush())
    ring.phase("forward", 10, 60)
    frames.append(ring.flush())
    assert states(fold_of(frames[:2], ring), ring) == {"LOCK_WAIT": 20, "OTHER": 30}
    assert states(fold_of(frames[:2], ring), ring, settled=True) == {"LOCK_WAIT": 20}
    assert states(fold_of(frames, ring), ring) == {"LOCK_WAIT": 20, "BUSY": 30, "OTHER": 10}


def test_a_signal_handlers_phase_recorded_before_the_phase_it_interrupted_is_not_counted_twice() -> None:
    ring = PlantedRing(1, "target", 0)
    ring.phase("checkpoint", 101, 103, "lock_wait")
    ring.phase("forward", 0, 100)
    ring.phase("forward", 110, 120)
    ring.step(0, 120)
    fold = fold_of([ring.flush()], ring)
    assert states(fold, ring) == states(fold, ring, settled=True) == {"BUSY": 110, "LOCK_WAIT": 2, "OTHER": 8}
    for start in (120, 140):  # the same at the end of a step, without and with a nested phase
        ring.phase("checkpoint", start + 11, start + 14, "lock_wait")
        ring.step(start, start + 10)
        fold.add(ring.flush())
        ring.phase("checkpoint", start + 21, start + 22, "lock_wait")
        ring.phase("forward", start + 20, start + 22)
    assert states(fold, ring) == states(fold, ring, settled=True) == {"BUSY": 111, "LOCK_WAIT": 9, "OTHER": 34}


def test_time_is_never_counted_twice_whatever_the_records_say() -> None:
    dice = random.Random(5)
    for _ in range(300):
        ring = PlantedRing(1, "target", 0, created_ns=50)
        covered = set()
        for _ in range(12):
            start, end = sorted((dice.randrange(100), dice.randrange(100)))
            ring.phase("forward", start, end)
            covered.update(range(max(start, 50), end))
        fold = fold_of([ring.flush()], ring)
        totals = fold.rings[ring.ring]
        assert states(fold, ring).get("BUSY", 0) == len(covered)
        assert sum(states(fold, ring).values()) == totals.wall_ns >= len(covered)


@pytest.mark.parametrize("nested", [False, True])
def test_a_worker_without_steps_stays_bounded(nested: bool) -> None:
    ring = PlantedRing(1, "main", 0)
    fold = Fold(catalog_of(ring))
    frames: list[Frame] = []
    count = 5 * PENDING_MAX
    ring.name(3, "busy tick")
    for at in range(0, count * 10, 10):
        if nested:
            ring.phase("inner", at + 1, at + 2, "lock_wait")
        ring.phase("tick", at, at + 4)
        if at % 700 == 0:
            fold.catalog.apply(ring.names_frame())
            frames.append(ring.flush())
            fold.add(frames[-1])
            assert len(fold.rings[ring.ring].coverage.pending) <= PENDING_MAX
    frames.append(ring.flush())
    fold.add(frames[-1])
    whole = Fold(fold.catalog)
    whole.add_all(frames)
    assert whole.rings == fold.rings
    inner = count if nested else 0
    expected = {"BUSY": 4 * count - inner, "LOCK_WAIT": inner, "OTHER": 6 * (count - 1)}
    assert states(fold, ring) == {state: spent for state, spent in expected.items() if spent}
    assert states(fold, ring, settled=True)["OTHER"] == 6 * (count - PENDING_MAX - 1)


def test_malformed_records_are_counted_and_the_rest_is_folded() -> None:
    ring = PlantedRing(1, "target", 0)
    forward = ring.name(3, "busy forward")
    ring.slot(0, forward, None, 1, 2)
    ring.slot(200, forward, None, 1, 2)
    ring.slot(1, forward, None, 30, 20)
    ring.slot(1, forward, None, 5, (1 << 64) - 1)
    ring.slot(1, forward, None, (1 << 64) - 1, 5)
    ring.slot(1, forward, None, 1 << 50, (1 << 50) + 1)
    ring.slot(2, 0, None, 1, 1 << 60)
    ring.slot(4, 0, None, 1 << 63)
    ring.phase("forward", 10, 20)
    frame = ring.flush(time=100)
    fold = fold_of([frame], ring)
    totals = fold.rings[ring.ring]
    assert (totals.records, totals.malformed, totals.last_ns, totals.steps) == (9, 8, 20, 0)
    assert states(fold, ring) == {"BUSY": 10, "OTHER": 10}


def test_frames_that_make_no_sense_are_counted() -> None:
    ring = PlantedRing(1, "target", 0)
    stranger = PlantedRing(2, "target", 1)
    stranger.phase("forward", 1, 2)
    stranger.phase("forward", 3, 4)
    torn = Frame(0, FrameKind.CLOSED, ring.ring, 0, 0, 0, b"{")
    hostile = [
        json_frame(FrameKind.AGENT, 0, {}),
        json_frame(FrameKind.AGENT, 0, {"cpu_ns": 1, "wall_offset_ns": 0, "cost_ns": 0, "fill": 3}),
    ]
    fold = fold_of([ring.names_frame(), stranger.flush(), torn, *hostile], ring)
    assert (fold.malformed, list(fold.rings)) == (5, [ring.ring])
    ring.phase("forward", 1, 2)
    cut = ring.flush()
    fold.add(Frame(0, FrameKind.RECORDS, ring.ring, 0, 1, 0, cut.payload[:-1]))
    assert fold.rings[ring.ring].records == 0


def test_records_seen_before_are_skipped_and_those_missing_counted() -> None:
    ring = PlantedRing(1, "target", 0)
    for start in range(0, 100, 10):
        ring.phase("forward", start, start + 5)
    whole = ring.flush().payload

    def part(first: int, last: int) -> Frame:
        return Frame(0, FrameKind.RECORDS, ring.ring, first, last - first, 10**9, whole[first * SLOT.size : last * SLOT.size])

    ordered = fold_of([part(0, 6), part(6, 10)], ring)
    repeated = fold_of([part(0, 6), part(0, 6), part(2, 10), part(9, 10)], ring)
    assert repeated.rings == ordered.rings
    with_gap = fold_of([part(2, 4), part(7, 10)], ring).rings[ring.ring]
    assert (with_gap.records, with_gap.not_recorded, with_gap.dropped()["not_recorded"]) == (5, 5, 5)


def test_counters_know_what_records_do_not() -> None:
    ring = PlantedRing(1, "target", 0)
    ring.step(0, 10, tokens=100)
    ring.step(10, 20, tokens=(1 << 64) - 5)
    ring.step(20, 30)
    before = fold_of([ring.flush()], ring).rings[ring.ring]
    assert (before.batches, before.batch_tokens) == (3, 100)
    after = fold_of([ring.counters(9, 800)], ring).rings[ring.ring]
    assert (after.batches, after.batch_tokens) == (9, 800)


def test_agent_cpu_goes_on_over_a_restart() -> None:
    ring = PlantedRing(1, "target", 0)
    frames = [
        ring.names_frame(),
        *(agent_frame(cpu, 4, {1: fill}, cost) for cpu, fill, cost in ((10, 0.2, 0.0), (30, 0.9, 250.0), (5, 0.1, 0.0), (6, 0.0, 0.0))),
    ]
    fold = fold_of(frames, ring)
    assert (fold.agent.cpu_ns, fold.agent.wall_offset_ns, fold.agent.cost_ns) == (36, 4, 250.0)
    totals = fold.rings[ring.ring]
    assert (totals.fill, totals.wall_ns) == (0.0, 0)
