"""One sentence on why GPUs are idle, saying only what the recording shows.

The rule, with shares of wall time:

1. Look at the roles that have a GPU; when none has, at target and drafter; when there are none, or nobody waits there, at all. The
   subject is the role with the largest share in one waiting state, starved, backpressured or lock_wait, if that is 10 % or more; else a
   single worker with 25 % or more. Workers of the role that wait half as much again as the whole are named instead of the role.
2. A starved subject waits for the role that made most of the items it consumed, or for one that had about as many of them in hand on
   their way (an asynchronous copy), whichever is busier; a backpressured one for the role that took most of its items. Both are known
   from the items that arrived. While that role is itself more in the same state than busy, go on from there; a role that only passes
   items on leads to those who take what was passed.
3. The role found is *the bottleneck* if it is busy for more than half of its time; else only its busy share is said.
4. Its largest busy phase is named when it takes 25 % or more: of one worker, if that spends a quarter more than the median of its role.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from otel_dflash.records import State

TRAINING_ROLES: Final = ("target", "drafter")
WAIT_SHARE_MIN: Final = 0.10
WORKER_SHARE_MIN: Final = 0.25
PHASE_SHARE_MIN: Final = 0.25
OUTLIER_OF_ROLE: Final = 1.5
OUTLIER_OF_MEDIAN: Final = 1.25
PASSED_ON_SHARE_MIN: Final = 0.9
UNNAMED_SHARE_MIN: Final = 0.5
_WAITS: Final = {State.STARVED: "starved", State.BACKPRESSURED: "backpressured", State.LOCK_WAIT: "waiting for locks"}


@dataclass(frozen=True)
class Account:
    """What the rule needs to know of one worker."""

    role: str
    index: int
    has_gpu: bool
    wall_ns: int
    states: dict[State, int]
    busy_phases: dict[str, int]  # name -> self time
    sources: dict[str, int]  # role -> items of its making that this worker consumed


def share(workers: Sequence[Account], state: State) -> float:
    """Return the share of the workers' time in a state, 0..1."""
    wall_ns = sum(worker.wall_ns for worker in workers)
    return sum(worker.states[state] for worker in workers) / wall_ns if wall_ns else 0.0


def label(workers: Sequence[Account]) -> str:
    """Return "target 0, 3..5" for workers of one role."""
    indices = sorted({worker.index for worker in workers})
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    parts = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{workers[0].role} {', '.join(parts)}"


def verdict(workers: Sequence[Account]) -> str:
    """Return the sentence; `workers` in the order in which roles are to be named."""
    roles: dict[str, list[Account]] = {}
    for worker in workers:
        roles.setdefault(worker.role, []).append(worker)
    if not any(worker.wall_ns - worker.states[State.OTHER] for worker in workers):
        return "No worker recorded a phase: put `with worker.step():` around a turn of its loop, and phases inside."
    with_gpu = [role for role, members in roles.items() if any(worker.has_gpu for worker in members)]
    looked_at = with_gpu or [role for role in TRAINING_ROLES if role in roles] or list(roles)
    found = _subject([roles[role] for role in looked_at]) or _subject(list(roles.values()))
    if found is None:
        return _nobody_waits([roles[role] for role in looked_at])
    subject, state = found
    text = f"{label(subject)} {_WAITS[state]} {_percent(share(subject, state))} of {'their' if len(subject) > 1 else 'its'} time"
    cause = _cause(roles, subject, state)
    return f"{text}{_blame(cause)}." if cause else f"{text}."


def _subject(roles: list[list[Account]]) -> tuple[list[Account], State] | None:
    waits = [(share(members, state), members, state) for members in roles for state in _WAITS]
    largest, members, state = max(waits, key=lambda item: item[0])
    if largest >= WAIT_SHARE_MIN:
        outliers = [worker for worker in members if share([worker], state) >= OUTLIER_OF_ROLE * largest]
        return outliers or members, state
    alone = [(share([worker], state), worker, state) for members in roles for worker in members for state in _WAITS]
    largest, worker, state = max(alone, key=lambda item: item[0])
    return ([worker], state) if largest >= WORKER_SHARE_MIN else None


def _nobody_waits(roles: list[list[Account]]) -> str:
    parts = []
    for members in roles:
        other = share(members, State.OTHER)
        unnamed = f" and {_percent(other)} in no phase" if other >= WAIT_SHARE_MIN else ""
        unnamed += " (name it: worker.phase)" if other >= UNNAMED_SHARE_MIN else ""
        parts.append(f"{label(members)} busy {_percent(share(members, State.BUSY))}{unnamed}")
    return f"No role waits for more than {_percent(WAIT_SHARE_MIN)} of its time: {'; '.join(parts)}."


def _cause(roles: dict[str, list[Account]], subject: list[Account], state: State) -> list[Account] | None:
    """Follow the items, upstream of a starved role or downstream of a backpressured one."""
    visited = [subject[0].role]
    waiting, cause = subject, None
    while True:
        role = _upstream(roles, waiting, visited) if state == State.STARVED else _downstream(roles, visited)
        if role is None or state == State.LOCK_WAIT:
            return cause
        visited.append(role)
        waiting = cause = roles[role]
        if share(cause, state) <= share(cause, State.BUSY):
            return cause


def _upstream(roles: dict[str, list[Account]], waiting: list[Account], visited: list[str]) -> str | None:
    """Return who keeps the waiting workers' items: their maker, or a role that works on them on their way."""
    known = {role: _items(waiting, [role]) for role in roles if role not in visited}
    maker = max(known, key=lambda role: known[role], default=None)
    if maker is None or not known[maker]:
        return None
    passing = [role for role in known if role != maker and _items(roles[role], [maker]) >= PASSED_ON_SHARE_MIN * known[maker]]
    return max([maker, *passing], key=lambda role: share(roles[role], State.BUSY))


def _downstream(roles: dict[str, list[Account]], visited: list[str]) -> str | None:
    """Return who took most of the items that the roles on the way here made."""
    makers = set(visited)
    for passing in visited:
        if not any(_items(members, [passing]) for members in roles.values()):  # what it hands on was made by others
            makers |= {maker for worker in roles[passing] for maker in worker.sources}
    known = {role: _items(members, sorted(makers)) for role, members in roles.items() if role not in visited}
    role = max(known, key=lambda role: known[role], default=None)
    return role if role is not None and known[role] else None


def _items(workers: Sequence[Account], makers: Sequence[str]) -> int:
    """Return how many items of those makers the workers had in hand."""
    return sum(worker.sources.get(maker, 0) for worker in workers for maker in makers)


def _blame(cause: list[Account]) -> str:
    busy = share(cause, State.BUSY)
    several = len(cause) > 1
    if busy > 0.5:
        text = f": {label(cause)} {'are' if several else 'is'} the bottleneck (busy {_percent(busy)})"
    else:
        text = f", waiting for {label(cause)} (busy {_percent(busy)})"
    phases: dict[str, int] = {}
    for worker in cause:
        for name, own_ns in worker.busy_phases.items():
            phases[name] = phases.get(name, 0) + own_ns
    wall_ns = sum(worker.wall_ns for worker in cause)
    if not phases or not wall_ns:
        return text
    shares = [(_phase_share(worker, name), worker, name) for worker in cause for name in phases]
    largest, slowest, name = max(shares, key=lambda item: item[0])
    others = [_phase_share(worker, name) for worker in cause if worker is not slowest]
    if others and largest >= PHASE_SHARE_MIN and largest >= OUTLIER_OF_MEDIAN * statistics.median(others):
        return f"{text}; {label([slowest])} spends {_percent(largest)} in {name}"
    name = max(phases, key=lambda name: phases[name])
    if phases[name] / wall_ns >= PHASE_SHARE_MIN:
        return f"{text}; {'they spend' if several else 'it spends'} {_percent(phases[name] / wall_ns)} in {name}"
    return text


def _phase_share(worker: Account, name: str) -> float:
    return worker.busy_phases.get(name, 0) / worker.wall_ns if worker.wall_ns else 0.0


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
