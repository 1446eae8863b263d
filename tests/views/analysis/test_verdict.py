"""What the verdict says of pipelines whose limit is known, in virtual time; real ones are in tests/bench/."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from otel_dflash.views.analysis.analyse import analyse
from otel_dflash.views.analysis.answer import Verdict, verdict_of
from otel_dflash.views.analysis.counterfactual import Change
from otel_dflash.views.analysis.verdict import Kind
from tests.views.analysis.planted_causes import KINDS, Case, draw, is_balanced
from tests.views.analysis.virtual import Link, Part, Run, Stage

HIDDEN = [Link("hidden_states")]


def target(**changes: object) -> Stage:
    stage = Stage("target", (Part("model_forward", 40), Part("pack_hidden", 2)), workers=2, jitter=0)
    return replace(stage, **changes)  # type: ignore[arg-type]


def drafter(**changes: object) -> Stage:
    return replace(Stage("drafter", (Part("forward", 10), Part("backward", 24)), jitter=0), **changes)  # type: ignore[arg-type]


def verdict(
    directory: Path, stages: list[Stage], links: list[Link] = HIDDEN, seconds: float = 10.0
) -> Verdict:
    return verdict_of(analyse([Run(stages, links, seconds).record(directory / "run")]))


def test_the_role_that_limits_is_named_with_its_phase_and_what_a_change_gains(tmp_path: Path) -> None:
    found = verdict(tmp_path, [target(), drafter()])
    assert found == Verdict(
        kind=Kind.ROLE_BOUND,
        role="drafter",
        workers=("drafter 0",),
        phase="backward",
        queue=None,
        numbers={"utilisation.drafter": 1.0, "utilisation.target": 0.6317},
        confidence=0.87,
        remedy="make that phase faster, or give the role one more worker",
        counterfactual=(
            Change("without_the_phase", "drafter", 0.5831),
            Change("one_more_worker", "drafter", 0.5831),
        ),
        text=(
            "drafter 0 limits the throughput, 71 % of its time in backward; target 0, 1 wait 37 % of the time. "
            "Without backward: +58 % throughput; one more drafter worker: +58 % throughput."
        ),
    )


SAID = {
    "a slow worker among fast ones": (
        [target(workers=4, slow={3: {"model_forward": 560}}), drafter(workers=4)],
        "target 3 is slow: a turn takes 14.3 x as long as that of target 0..2, mostly in model_forward (600 "
        "ms against 40.0 ms); drafter 0..3 wait 38 % of the time. At its peers' speed: +30 % throughput.",
    ),
    "a get that is slow although there are items": (
        [target(), drafter(get_ms=50)],
        "drafter 0 limits the throughput: queue_get takes 50.1 ms a turn although there are items, so the "
        "get itself is slow; target 0, 1 wait 75 % of the time. If queue_get only waited: +148 % "
        "throughput; one more drafter worker: +100 % throughput.",
    ),
    "a put that is slow although there is room": (
        [target(workers=1, put_ms=80), drafter()],
        "target 0 limits the throughput: queue_put takes 80.0 ms a turn although there is room, so the put "
        "itself is slow; drafter 0 waits 72 % of the time. If queue_put only waited: +191 % throughput; one "
        "more target worker: +100 % throughput.",
    ),
    "time in no phase": (
        [target(), drafter(unnamed_ms=86)],
        "drafter 0 limits the throughput, and 72 % of its time is in no phase; target 0, 1 wait 83 % of the "
        "time. Without that time: +254 % throughput; one more drafter worker: +100 % throughput.",
    ),
    "a lock": (
        [target(), drafter(parts=(Part("forward", 20), Part("optimizer_lock", 30, "lock_wait")))],
        "drafter 0 limits the throughput, and waits for a lock for 60 % of its working time, in "
        "optimizer_lock; target 0, 1 wait 58 % of the time. Without the lock: +137 % throughput; one more "
        "drafter worker: +100 % throughput.",
    ),
    "a worker that imports for most of the run": (
        [target(), drafter(start_ms=8000)],
        "Start-up took 81 % of the run: only then had drafter 0 ended its first turn.",
    ),
    "a worker that ended by an exception": (
        [target(workers=1, ends={0: (2000, "raise")}), drafter()],
        "target 0 ended with ValueError in its step 49, 7.94 s before the end of the run; since then "
        "drafter waits 100 % of the time.",
    ),
    "a worker that was killed": (
        [target(ends={1: (2000, "kill")}), drafter()],
        "target 1 was killed in model_forward, 7.91 s before the end of the run; since then drafter waits "
        "12 % of the time.",
    ),
    "a worker that hangs": (
        [target(ends={1: (2000, "hang")}), drafter()],
        "target 1 is stuck in model_forward: it has done nothing for 7.95 s; since then drafter waits 12 % "
        "of the time.",
    ),
    "a worker that finished early": (
        [target(ends={1: (2000, "stop")}), drafter(parts=(Part("forward", 20),))],
        "target 0 limits the throughput, 95 % of its time in model_forward; drafter 0 waits 52 % of the "
        "time. Without model_forward: +109 % throughput; one more target worker: +100 % throughput.",
    ),
    "items without contexts": (
        [target(workers=1), drafter()],
        "drafter waits 19 % of the time in queue_get, and for what is not known: none of its items has a "
        "context.",
    ),
    "a run of a moment": (
        [target(), drafter()],
        "There is not enough data: 0.4 s in which all workers ran, and 12 turns of drafter.",
    ),
}
LINKS = {"items without contexts": [Link("hidden_states", wrapped=False)]}
SECONDS = {"a run of a moment": 0.5}


@pytest.mark.parametrize("name", SAID)
def test_each_cause_is_one_sentence(tmp_path: Path, name: str) -> None:
    stages, text = SAID[name]
    assert verdict(tmp_path, stages, LINKS.get(name, HIDDEN), SECONDS.get(name, 10.0)).text == text


def test_a_queue_that_holds_next_to_nothing_is_named_with_what_more_room_gains(tmp_path: Path) -> None:
    stages = [target(workers=1, burst=(10, 420)), drafter(parts=(Part("forward", 42),), burst=(7, 294))]
    found = verdict(tmp_path, stages, [Link("hidden_states", 1)], seconds=60)
    assert (found.kind, found.queue, found.text) == (
        Kind.QUEUE_TOO_SMALL,
        "hidden_states",
        "The queue hidden_states (capacity 1) is too small: both sides wait for each other; drafter waits 26 % of "
        "the time, target waits 26 % of the time. Twice the queue hidden_states: +8 % throughput; room for 8 items "
        "in hidden_states: +35 % throughput.",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_planted_causes_are_named(tmp_path: Path, kind: str) -> None:
    """Seeds that no threshold was chosen by."""
    wrong = []
    for seed in range(100, 112):
        case = draw(seed, kind)
        if kind == "balanced" and not is_balanced(case):
            continue
        found = verdict_of(analyse([case.run().record(tmp_path / f"run-{seed}")]))
        said = found.kind.value, found.role, found.workers, found.phase
        if said != (kind, case.role, case.workers, case.phase):
            wrong.append((seed, said))
    assert wrong == []


def rate_after(case: Case, change: Change) -> float:
    """Return the throughput of a rerun with the change made."""
    place = next(at for at, stage in enumerate(case.stages) if stage.role == change.target)
    stage = case.stages[place]
    changed = {
        "one_more_worker": replace(stage, workers=stage.workers + 1),
        "at_its_peers_speed": replace(stage, slow={}),
        "without_the_phase": replace(
            stage,
            parts=tuple(part for part in stage.parts if part.name != case.phase),
            unnamed_ms=0.0,
            get_ms=0.0,
            put_ms=0.0,
        ),
    }[change.change]
    stages = [changed if at == place else other for at, other in enumerate(case.stages)]
    return replace(case, stages=stages).run().rate


def test_what_a_change_is_said_to_gain_is_what_a_rerun_gains(tmp_path: Path) -> None:
    errors = []
    for kind in ("role_bound", "skewed_worker", "slow_queue_operation", "unnamed_time", "lock"):
        for seed in range(200, 206):
            case = draw(seed, kind)
            run = case.run()
            found = verdict_of(analyse([run.record(tmp_path / f"{kind}-{seed}")]))
            for change in found.counterfactual:
                assert change.gain is not None
                errors.append(abs((1 + change.gain) * run.rate / rate_after(case, change) - 1))
    assert (statistics.median(errors) < 0.01, sorted(errors)[round(0.9 * len(errors))] < 0.03) == (True, True)
