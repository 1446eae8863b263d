"""What limits the throughput: kinds, rules and thresholds, in the order in which they are tried.

The rules compare capacities (capacity.py), so a slow worker among fast ones and a slow get are seen, which
the largest share of time does not show. docs/answer.md says each in words.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from otel_dflash.records import State
from otel_dflash.views.analysis.capacity import Account, Role

SKEW_MIN: Final = 1.25  # a turn of a slow worker over the median of its peers
LIFT_MIN: Final = 0.05  # what a role gains if its slow worker were like its peers
COUPLED_BELOW: Final = 0.93  # no role is used more than that: the queues between them are too small
COUPLED_WAIT_MIN: Final = 0.05  # and both sides of one wait for at least this share
LOCK_SHARE_MIN: Final = 0.2  # of a role's service time
BALANCED_RATIO: Final = 1.15  # the second smallest capacity over the smallest
UNNAMED: Final = -2  # in place of a phase: time in no phase


class Kind(str, Enum):
    """What limits the throughput."""

    ROLE_BOUND = "role_bound"
    SKEWED_WORKER = "skewed_worker"
    SLOW_QUEUE_OPERATION = "slow_queue_operation"
    QUEUE_TOO_SMALL = "queue_too_small"
    LOCK = "lock"
    UNNAMED_TIME = "unnamed_time"
    START_UP = "start_up"
    WORKER_ENDED = "worker_ended"
    WORKER_DIED = "worker_died"
    BALANCED = "balanced"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True)
class Cause:
    """What a rule found. Of it verdicts are made (answer.py)."""

    kind: Kind
    role: str = ""
    accounts: Sequence[Account] = ()
    phase: int | None = None  # position in Flow.texts; UNNAMED for time in no phase; None if none is meant
    queue: int | None = None  # position in Flow.queues
    numbers: dict[str, float] = field(default_factory=dict)
    reason: str = ""  # of INCOMPLETE: what is missing to tell more
    remedy: str = ""  # in place of that of the kind


def find_cause(roles: dict[str, Role], coupled: int | None) -> Cause:
    """Return what limits the throughput of roles that are all at work.

    `coupled` is the queue at which both sides wait most, None if there is none.
    """
    ranked = sorted(roles.values(), key=lambda role: -role.utilisation)
    limit = ranked[0]
    numbers = {f"utilisation.{role.name}": round(role.utilisation, 4) for role in ranked}
    if found := _skewed(limit, numbers):
        return found
    if limit.utilisation < COUPLED_BELOW and coupled is not None:
        return Cause(Kind.QUEUE_TOO_SMALL, queue=coupled, numbers=numbers)
    if found := _locked(limit, numbers):
        return found
    if len(ranked) > 1 and limit.utilisation < BALANCED_RATIO * ranked[1].utilisation:
        return Cause(Kind.BALANCED, numbers=numbers)
    phase = largest_part(limit.accounts)
    kind = Kind.ROLE_BOUND
    if phase == UNNAMED:
        kind = Kind.UNNAMED_TIME
    elif state_of(limit.accounts, phase) in (State.STARVED, State.BACKPRESSURED):
        kind = Kind.SLOW_QUEUE_OPERATION
    return Cause(kind, limit.name, limit.accounts, phase, numbers=numbers)


def parts(accounts: Sequence[Account]) -> dict[int, int]:
    """Return the own ns of workers by phase, and UNNAMED."""
    found: dict[int, int] = {UNNAMED: 0}
    for account in accounts:
        found[UNNAMED] += account.unnamed_ns
        for phase, own_ns in account.own_ns.items():
            found[phase] = found.get(phase, 0) + own_ns
    return found


def largest_part(accounts: Sequence[Account]) -> int:
    """Return where workers spend most of their service time: a phase, or UNNAMED."""
    found = parts(accounts)
    return max(found, key=lambda phase: found[phase])


def state_of(accounts: Sequence[Account], phase: int) -> State:
    """Return the state of a phase."""
    for account in accounts:
        if phase in account.states:
            return account.states[phase]
    return State.OTHER


def _skewed(role: Role, numbers: dict[str, float]) -> Cause | None:
    """Return the workers that are slower than their peers, if that explains a loss."""
    count = len(role.accounts)
    slow = []
    for account in role.accounts:
        others = [other.turn_ns for other in role.accounts if other is not account]
        if others and account.turn_ns > SKEW_MIN * statistics.median(others):
            slow.append(account)
    if not slow or (count > 2 and 2 * len(slow) >= count):
        return None
    peers = [account for account in role.accounts if account not in slow]
    lifted = sum(account.capacity for account in peers) * count / len(peers)
    lift = lifted / role.capacity - 1 if role.capacity else 0.0
    if lift < LIFT_MIN:
        return None
    phase = _largest_excess(slow, peers)
    ratio = statistics.median(account.turn_ns for account in slow) / statistics.median(
        account.turn_ns for account in peers
    )
    found = {**numbers, "turn_over_peers": round(ratio, 3), "role_gains": round(lift, 4)}
    return Cause(Kind.SKEWED_WORKER, role.name, slow, phase, numbers=found)


def _largest_excess(slow: Sequence[Account], peers: Sequence[Account]) -> int:
    """Return the phase, or UNNAMED, of which a turn of the slow workers has most more than their peers'."""

    def of_turn(accounts: Sequence[Account], phase: int) -> float:
        return statistics.median(
            parts([account]).get(phase, 0) / account.turns if account.turns else 0.0 for account in accounts
        )

    phases = parts([*slow, *peers])
    return max(phases, key=lambda phase: of_turn(slow, phase) - of_turn(peers, phase))


def _locked(role: Role, numbers: dict[str, float]) -> Cause | None:
    service_ns = sum(account.service_ns for account in role.accounts)
    locks = {
        phase: own_ns
        for phase, own_ns in parts(role.accounts).items()
        if state_of(role.accounts, phase) == State.LOCK_WAIT
    }
    if not locks or sum(locks.values()) < LOCK_SHARE_MIN * service_ns:
        return None
    phase = max(locks, key=lambda phase: locks[phase])
    found = {**numbers, "lock_share": round(sum(locks.values()) / service_ns, 4)}
    return Cause(Kind.LOCK, role.name, role.accounts, phase, numbers=found)
