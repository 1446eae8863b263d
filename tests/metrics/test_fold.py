from __future__ import annotations

import json
import random
from collections import Counter as Tally

import pytest

from otel_dflash.metrics.coverage import PENDING_MAX
from otel_dflash.metrics.decoding import Ring
from otel_dflash.metrics.families.telemetry import AgentFigures, RingFigures
from otel_dflash.metrics.families.tokens import TokenTotals
from otel_dflash.metrics.families.workers import Failure, WorkerTotals
from otel_dflash.recording.catalog import Catalog
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.payloads import (
    AGENT_CPU,
    RING_FILL,
    Closed,
    Open,
    Series,
    encode_series,
    lag_series,
)
from otel_dflash.records import Kind, State
from tests.metrics.folded import Folded, as_json, fold_of, histogram_of, states
from tests.metrics.life import CREATED, Life
from tests.metrics.planted import SLOT, PlantedRing, agent_frames, catalog_of, samples_frame


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_states_equal_what_was_planted_and_sum_to_the_wall_after_every_frame(seed: int, depth: int) -> None:
    ring = PlantedRing(1, "target", 0, created_ns=CREATED)
    life = Life(random.Random(seed), ring)
    frames = life.live(200, depth)
    fold = Folded(catalog_of(ring))
    reported = Tally[str]()
    for frame in frames:
        fold.add(frame)
        wall_ns = fold.rings[ring.ring].wall_ns
        assert sum(fold.state_ns(ring.ring).values()) == wall_ns
        settled = Tally(states(fold, ring, settled=True))
        assert reported <= settled <= Tally(states(fold, ring))  # no cumulative series ever falls
        reported = settled
    assert states(fold, ring) == +life.truth
    assert wall_ns == life.now - CREATED

    life.spend("other")
    fold.add(ring.closed(life.now))
    assert states(fold, ring) == states(fold, ring, settled=True) == +life.truth

    names = fold.catalog[ring.ring]
    durations = fold.phases.rings[ring.ring]
    folded = {("step", None): next(durations.of_kind(Kind.STEP))[2]}
    for name_id, error_id, histogram in durations.of_kind(Kind.PHASE):
        folded[names.entries[name_id][1], names.text(error_id) if error_id else None] = histogram
    assert folded == {key: histogram_of(*durations) for key, durations in life.durations.items()}


def everything() -> tuple[list[Frame], Catalog]:
    """Return frames with all that can be in a recording."""
    frames = []
    rings = [
        PlantedRing(number, role, 0, created_ns=CREATED) for number, role in ((1, "target"), (2, "drafter"))
    ]
    for number, ring in enumerate(rings):
        life = Life(random.Random(number), ring)
        frames += life.live(25, 2)
        ring.consumed(life.now, producer=1)
        ring.resumed(life.now, producer=1)
        ring.step(life.now, life.now + 9, tokens=77, error="OSError")
        ring.slot(9, 0, None)
        frames += [
            ring.flush(),
            ring.counters(500, 900, 0, 0, 3),
            *agent_frames(5_000 * (2 - number), -7, {1: 0.5}),
        ]
        frames.append(
            ring.closed(
                life.now + 50,
                True,
                [("busy", "forward", life.now + 20), ("starved", "queue_get", life.now + 30)],
            )
        )
    catalog = catalog_of(*rings)
    return [ring.names_frame() for ring in rings] + frames, catalog


def test_a_snapshot_after_any_frame_goes_on_to_the_same_totals() -> None:
    frames, catalog = everything()
    whole = Folded(catalog, exemplars=3)
    for frame in frames:
        whole.add(frame)
    for k in range(len(frames) + 1):
        before = Folded(catalog, exemplars=3)
        for frame in frames[:k]:
            before.add(frame)
        later = Catalog()  # as after a restart: a later segment does not name the rings that closed before it
        after = Folded(later, exemplars=3)
        assert after.restore(json.loads(json.dumps(before.to_dict()))) == {}
        assert set(later) == set(before.rings)
        later.update(catalog)
        later.series.update(catalog.series)
        for frame in frames[k:]:
            after.add(frame)
        assert as_json(after) == as_json(whole)


@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_folding_many_frames_together_gives_the_same_totals(batch: int) -> None:
    frames, catalog = everything()
    frames = [*frames[:20], *frames[15:]]  # some twice
    one_by_one, joined = Folded(catalog, exemplars=3), Folded(catalog, exemplars=3)
    for frame in frames:
        one_by_one.add(frame)
    for start in range(0, len(frames), batch):
        joined.add_all(frames[start : start + batch])
    assert joined.to_dict() == one_by_one.to_dict()


def test_a_snapshot_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="has version 0, need 4"):
        Folded(Catalog()).restore({"version": 0})


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
    ring_id = 3 << 28
    figures = RingFigures(records=8, counters=[2, 32, 0, 3, 4, 0, 1, 0, 0, 0, 0, 0])
    coverage = fold.accounts.rings[ring_id].coverage
    assert fold.rings == {ring_id: Ring(ring_id, created_ns=100, last_ns=190, next_sequence=8)}
    assert fold.phases.rings[ring_id].histograms == {
        1 << 32 | get << 16: histogram_of(10),
        1 << 32 | forward << 16: histogram_of(30),
        1 << 32 | forward << 16 | failed: histogram_of(10),
        2 << 32: histogram_of(55),
        2 << 32 | failed: histogram_of(25),
    }
    assert fold.accounts.rings == {
        ring_id: WorkerTotals(
            100,
            coverage,
            {get: 10, forward: 40},
            2,
            32,
            counted_steps=2,
            counted_tokens=32,
            failure=Failure(failed, ring_id + 2, None, 190),
        )
    }
    assert fold.tokens.rings == {ring_id: TokenTotals()}
    assert fold.telemetry.rings == {ring_id: figures}
    assert fold.state_ns(ring_id) == {
        State.BUSY: 40,
        State.STARVED: 10,
        State.BACKPRESSURED: 0,
        State.LOCK_WAIT: 0,
        State.OTHER: 40,
        State.UNCAPTURED: 0,
    }
    assert figures.dropped() == {
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
    assert list(fold.phases.rings[ring.ring].histograms.values()) == [histogram_of(10)]
    phases = Open(ring.name(3, "busy forward"), 110), Open(ring.name(3, "starved queue_get"), 120)
    assert fold.rings[ring.ring].closed == Closed(1_000, True, phases, Open(ring.ring + 1, 105))


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
    assert (
        states(fold, ring) == states(fold, ring, settled=True) == {"BUSY": 111, "LOCK_WAIT": 9, "OTHER": 34}
    )


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
        assert states(fold, ring).get("BUSY", 0) == len(covered)
        assert sum(states(fold, ring).values()) == fold.rings[ring.ring].wall_ns >= len(covered)


@pytest.mark.parametrize("nested", [False, True])
def test_a_worker_without_steps_stays_bounded(nested: bool) -> None:
    ring = PlantedRing(1, "main", 0)
    fold = Folded(catalog_of(ring))
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
            assert len(fold.accounts.rings[ring.ring].coverage.pending) <= PENDING_MAX
    frames.append(ring.flush())
    fold.add(frames[-1])
    whole = Folded(fold.catalog)
    whole.add_all(frames)
    assert as_json(whole) == as_json(fold)
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
    assert fold.telemetry.rings == {ring.ring: RingFigures(records=9, malformed=8)}
    assert (fold.rings[ring.ring].last_ns, fold.accounts.rings[ring.ring].steps) == (20, 0)
    assert states(fold, ring) == {"BUSY": 10, "OTHER": 10}


def test_frames_that_make_no_sense_are_counted() -> None:
    ring = PlantedRing(1, "target", 0)
    stranger = PlantedRing(2, "target", 1)
    stranger.phase("forward", 1, 2)
    stranger.phase("forward", 3, 4)
    torn = Frame(0, FrameKind.CLOSED, ring.ring, 0, 0, 0, b"{")
    cut_counters = Frame(0, FrameKind.COUNTERS, ring.ring, 0, 1, 0, bytes(8))
    cut_sample = Frame(0, FrameKind.SAMPLES, 0, 0, 1, 0, samples_frame({AGENT_CPU: 1.0}).payload[:-1])
    of_stranger = samples_frame({RING_FILL: 1.0}, stranger.ring)
    fold = fold_of([ring.names_frame(), stranger.flush(), torn, cut_counters, cut_sample, of_stranger], ring)
    assert (fold.malformed, list(fold.rings)) == (6, [ring.ring])
    ring.phase("forward", 1, 2)
    cut = ring.flush()
    fold.add(Frame(0, FrameKind.RECORDS, ring.ring, 0, 1, 0, cut.payload[:-1]))
    assert fold.telemetry.rings[ring.ring].records == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_sample_that_is_not_a_number_is_counted_and_the_others_of_its_frame_are_taken(value: float) -> None:
    fold = fold_of([samples_frame({AGENT_CPU: 5.0, lag_series("spans"): value})])
    assert (fold.malformed, fold.telemetry.agent) == (1, AgentFigures(cpu_ns=5.0, cpu_last_ns=5.0))


def test_samples_of_an_unknown_source_are_passed_over_and_those_of_an_unknown_series_counted() -> None:
    frame = samples_frame({AGENT_CPU: 5.0, lag_series("spans"): 1.0})
    fold = Folded(Catalog())
    described = {0: Series("nvml", "power_w", (("gpu", "0"),))}
    fold.catalog.apply(Frame(0, FrameKind.SERIES, 0, 0, 1, 0, encode_series(described)))
    fold.add(frame)
    assert (fold.malformed, fold.telemetry.agent) == (1, AgentFigures())


def test_records_seen_before_are_skipped_and_those_missing_counted() -> None:
    ring = PlantedRing(1, "target", 0)
    for start in range(0, 100, 10):
        ring.phase("forward", start, start + 5)
    whole = ring.flush().payload

    def part(first: int, last: int) -> Frame:
        return Frame(
            0,
            FrameKind.RECORDS,
            ring.ring,
            first,
            last - first,
            10**9,
            whole[first * SLOT.size : last * SLOT.size],
        )

    ordered = fold_of([part(0, 6), part(6, 10)], ring)
    repeated = fold_of([part(0, 6), part(0, 6), part(2, 10), part(9, 10)], ring)
    assert as_json(repeated) == as_json(ordered)
    with_gap = fold_of([part(2, 4), part(7, 10)], ring).telemetry.rings[ring.ring]
    assert (with_gap.records, with_gap.not_recorded, with_gap.dropped()["not_recorded"]) == (5, 5, 5)


def test_counters_know_what_records_do_not() -> None:
    ring = PlantedRing(1, "target", 0)
    ring.step(0, 10, tokens=100)
    ring.step(10, 20, tokens=(1 << 64) - 5)
    ring.step(20, 30)
    before = fold_of([ring.flush()], ring).accounts.rings[ring.ring]
    assert (before.batches, before.batch_tokens) == (3, 100)
    after = fold_of([ring.counters(9, 800)], ring).accounts.rings[ring.ring]
    assert (after.batches, after.batch_tokens) == (9, 800)


def test_agent_cpu_goes_on_over_a_restart() -> None:
    ring = PlantedRing(1, "target", 0)
    frames = [ring.names_frame()]
    for cpu, fill, cost in ((10, 0.2, 0.0), (30, 0.9, 250.0), (5, 0.1, 0.0), (6, 0.3, 0.0)):
        frames += agent_frames(cpu, 4, {1: fill}, cost)
    fold = fold_of(frames, ring)
    assert fold.telemetry.agent == AgentFigures(36.0, 6.0, 4.0, 250.0)
    assert (fold.telemetry.rings[ring.ring].fill, fold.rings[ring.ring].wall_ns) == (0.3, 0)


def test_a_closed_ring_holds_nothing_whenever_its_fill_was_read() -> None:
    ring = PlantedRing(1, "target", 0)
    full = samples_frame({RING_FILL: 0.9}, ring.ring)
    fold = fold_of([full, ring.closed(10), full], ring)
    assert fold.telemetry.rings[ring.ring].fill == 0.0


def test_a_sink_that_has_delivered_nothing_since_a_restart_has_no_lag() -> None:
    fold = fold_of([*agent_frames(1, lags={"spans": 3.0}), *agent_frames(2, lags={"metrics": 0.5})])
    assert fold.telemetry.agent.lags_s == {"metrics": 0.5}
