"""Pipelines with a planted cause, drawn from a seed: what the verdict must say about them.

A pipeline of two or three roles is made balanced first, with 1 to 6 workers a role; the cause is added to it, large
enough to matter and drawn from a range.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.views.analysis.virtual import Link, Part, Run, Stage

ROLES = ("prefetch", "target", "drafter")
PARTS = {
    "prefetch": ("read", "tokenize"),
    "target": ("model_forward", "pack_hidden", "d2h"),
    "drafter": ("forward", "backward", "optimizer"),
}
GAIN_MAX = 0.05  # of a balanced pipeline, by any one change


@dataclass(frozen=True)
class Case:
    """One pipeline, and the right answers."""

    seed: int
    kind: str
    stages: list[Stage]
    links: list[Link]
    role: str = ""
    workers: tuple[str, ...] = ()
    phase: str | None = None

    def run(self, seconds: float = 12.0) -> Run:
        """Run it in virtual time."""
        return Run(self.stages, self.links, seconds, self.seed)


def draw(seed: int, kind: str) -> Case:
    """Return the pipeline of a seed with a cause of that kind."""
    chance = random.Random(f"{kind} {seed}")
    stages, links = _pipeline(
        chance, 1.0 if kind in ("balanced", "queue_too_small") else chance.uniform(0.3, 0.6)
    )
    return _PLANTS[kind](chance, seed, stages, links)


def _pipeline(chance: random.Random, others: float) -> tuple[list[Stage], list[Link]]:
    """Return stages of which one is used fully and the others for the share `others`."""
    names = ROLES[1:] if chance.random() < 0.6 else ROLES
    each_ms = chance.uniform(4.0, 25.0)  # between two items
    limit = chance.randrange(len(names))
    stages = []
    for place, name in enumerate(names):
        workers = chance.randint(1, 6)
        turn_ms = each_ms * workers * (1.0 if place == limit else others * chance.uniform(0.96, 1.04))
        cuts = sorted(chance.uniform(0.1, 0.9) for _ in PARTS[name][1:])
        shares = [b - a for a, b in zip([0.0, *cuts], [*cuts, 1.0], strict=True)]
        parts = tuple(Part(part, turn_ms * share) for part, share in zip(PARTS[name], shares, strict=True))
        stages.append(Stage(name, parts, workers, jitter=chance.uniform(0.0, 0.1)))
    links = [
        Link(f"queue_{place}", chance.randint(8, 64), chance.choice((1, 1, 4)))
        for place in range(len(names) - 1)
    ]
    return stages, links


def _limit(stages: list[Stage]) -> int:
    used = [sum(part.ms for part in stage.parts) / stage.workers for stage in stages]
    return used.index(max(used))


def _changed(stages: list[Stage], place: int, stage: Stage) -> list[Stage]:
    return [stage if at == place else old for at, old in enumerate(stages)]


def _turn_ms(stage: Stage) -> float:
    return sum(part.ms for part in stage.parts)


def _all(stage: Stage) -> tuple[str, ...]:
    return tuple(f"{stage.role} {index}" for index in range(stage.workers))


def _role_bound(chance: random.Random, seed: int, stages: list[Stage], links: list[Link]) -> Case:
    stage = stages[_limit(stages)]
    largest = max(stage.parts, key=lambda part: part.ms)
    parts = tuple(replace(part, ms=part.ms * (1.3 if part is largest else 1)) for part in stage.parts)
    stages = _changed(stages, _limit(stages), replace(stage, parts=parts))
    return Case(seed, "role_bound", stages, links, stage.role, _all(stage), largest.name)


def _skewed_worker(chance: random.Random, seed: int, stages: list[Stage], links: list[Link]) -> Case:
    place = _limit(stages)
    stage = stages[place]
    workers = max(stage.workers, 2)
    parts = tuple(replace(part, ms=part.ms * workers / stage.workers) for part in stage.parts)
    stage = replace(stage, workers=workers, parts=parts)
    which, part = chance.randrange(workers), chance.choice(stage.parts)
    more = _turn_ms(stage) * chance.uniform(0.8, 8.0)
    stage = replace(stage, slow={which: {part.name: more}})
    return Case(
        seed,
        "skewed_worker",
        _changed(stages, place, stage),
        links,
        stage.role,
        (f"{stage.role} {which}",),
        part.name,
    )


def _slow_queue_operation(chance: random.Random, seed: int, stages: list[Stage], links: list[Link]) -> Case:
    place = _limit(stages)
    stage = stages[place]
    more = _turn_ms(stage) * chance.uniform(1.2, 3.0)
    if place == 0 or (place < len(stages) - 1 and chance.random() < 0.5):
        changed, phase = replace(stage, put_ms=more), "queue_put"
    else:
        changed, phase = replace(stage, get_ms=more), "queue_get"
    return Case(
        seed, "slow_queue_operation", _changed(stages, place, changed), links, stage.role, _all(stage), phase
    )


def _unnamed_time(chance: random.Random, seed: int, stages: list[Stage], links: list[Link]) -> Case:
    place = _limit(stages)
    stage = replace(stages[place], unnamed_ms=_turn_ms(stages[place]) * chance.uniform(1.2, 4.0))
    return Case(seed, "unnamed_time", _changed(stages, place, stage), links, stage.role, _all(stage))


def _lock(chance: random.Random, seed: int, stages: list[Stage], links: list[Link]) -> Case:
    place = _limit(stages)
    stage = stages[place]
    wait = Part("all_gather_lock", _turn_ms(stage) * chance.uniform(0.5, 2.0), "lock_wait")
    changed = replace(stage, parts=(*stage.parts, wait))
    return Case(seed, "lock", _changed(stages, place, changed), links, stage.role, _all(stage), wait.name)


def _queue_too_small(chance: random.Random, seed: int, stages: list[Stage], links: list[Link]) -> Case:
    """Both sides pause now and then, and the queue between them holds next to nothing."""
    stages, links = stages[-2:], [Link("queue_0", 1)]
    bursty = []
    for stage in stages:
        turns = chance.randint(5, 12)
        bursty.append(
            replace(stage, workers=1, burst=(turns, turns * _turn_ms(stage) * chance.uniform(0.8, 1.5)))
        )
    first, second = (_turn_ms(stage) + stage.burst[1] / stage.burst[0] for stage in bursty if stage.burst)
    scaled = tuple(replace(part, ms=part.ms * first / second) for part in bursty[1].parts)
    turns, pause_ms = bursty[1].burst or (1, 0.0)
    bursty[1] = replace(bursty[1], parts=scaled, burst=(turns, pause_ms * first / second))
    return Case(seed, "queue_too_small", bursty, links)


def _balanced(chance: random.Random, seed: int, stages: list[Stage], links: list[Link]) -> Case:
    return Case(seed, "balanced", stages, links)


def _worker_ended(chance: random.Random, seed: int, stages: list[Stage], links: list[Link]) -> Case:
    return _stopped(chance, seed, stages, links, "worker_ended", "raise")


def _worker_died(chance: random.Random, seed: int, stages: list[Stage], links: list[Link]) -> Case:
    return _stopped(chance, seed, stages, links, "worker_died", chance.choice(("kill", "hang")))


def _stopped(
    chance: random.Random, seed: int, stages: list[Stage], links: list[Link], kind: str, how: str
) -> Case:
    place = chance.randrange(len(stages))
    stage = stages[place]
    which = chance.randrange(stage.workers)
    changed = replace(stage, ends={which: (chance.uniform(2000, 9000), how)})
    phase = None if how == "raise" else stage.parts[0].name
    return Case(
        seed, kind, _changed(stages, place, changed), links, stage.role, (f"{stage.role} {which}",), phase
    )


def _start_up(chance: random.Random, seed: int, stages: list[Stage], links: list[Link]) -> Case:
    place = chance.randrange(len(stages))
    changed = replace(stages[place], start_ms=chance.uniform(7000, 11000), workers=1)
    return Case(seed, "start_up", _changed(stages, place, changed), links, changed.role, _all(changed))


_PLANTS = {
    "role_bound": _role_bound,
    "skewed_worker": _skewed_worker,
    "slow_queue_operation": _slow_queue_operation,
    "queue_too_small": _queue_too_small,
    "lock": _lock,
    "unnamed_time": _unnamed_time,
    "start_up": _start_up,
    "worker_ended": _worker_ended,
    "worker_died": _worker_died,
    "balanced": _balanced,
}
KINDS = tuple(_PLANTS)


def changes(case: Case) -> list[Case]:
    """Return the case with one more worker of each role, and with twice each queue."""
    found = []
    for place, stage in enumerate(case.stages):
        found.append(
            replace(case, stages=_changed(case.stages, place, replace(stage, workers=stage.workers + 1)))
        )
    for place, link in enumerate(case.links):
        links = [replace(old, capacity=2 * old.capacity) if old is link else old for old in case.links]
        found.append(replace(case, links=links))
        del place
    return found


def is_balanced(case: Case) -> bool:
    """Return whether no one change gains 5 % in a rerun."""
    rate = case.run().rate
    return all(changed.run().rate < rate * (1 + GAIN_MAX) for changed in changes(case))
