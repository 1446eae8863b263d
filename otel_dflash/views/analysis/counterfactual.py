"""What a change would do to the throughput, in closed form: the smallest capacity after the change decides.

With visits per final item unchanged, role `r` leaves room for `1 / U_r` times the throughput (capacity.py).
A change multiplies the capacity of its role; the new throughput over today's is then the smallest of these,
times how much of the smallest the run uses today (the rest is lost between small queues). This is the
asymptotic bound of operational analysis (Lazowska et al., Quantitative System Performance, 1984, section
5.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from otel_dflash.views.analysis.capacity import Account, Role
from otel_dflash.views.analysis.verdict import UNNAMED, Cause, Kind
from otel_dflash.views.analysis.workers import Queue

QUEUE_FACTORS: Final = (2, 4, 8, 16, 32)
QUEUE_GAIN_SHARE: Final = 0.9  # of what the largest queue tried would gain


@dataclass(frozen=True)
class Change:
    """What a change would do to the throughput."""

    change: str  # one_more_worker, at_its_peers_speed, without_the_phase, twice_the_queue, queue_of_<items>
    target: str  # the role, or the queue
    gain: float | None  # new throughput / throughput - 1; None if that cannot be told
    reason: str = ""  # why it cannot be told


def changes(
    cause: Cause,
    roles: dict[str, Role],
    queue_gain: Callable[[int, int], float | None],
    queues: Sequence[Queue],
) -> list[Change]:
    """Return what would follow from the changes that remove a cause.

    `queue_gain` takes the position of a queue and a factor of its size (simulation.py).
    """
    if cause.kind is Kind.BALANCED:
        found = [
            Change("one_more_worker", name, _gain(roles, name, _one_more(role)))
            for name, role in roles.items()
        ]
        return found + [_twice(place, queues, queue_gain) for place in range(len(queues))]
    if cause.kind is Kind.QUEUE_TOO_SMALL and cause.queue is not None:
        return _larger_queues(cause.queue, queues, queue_gain)
    role = roles.get(cause.role)
    if role is None:
        return []
    if cause.kind is Kind.SKEWED_WORKER:
        peers = [account for account in role.accounts if account not in cause.accounts]
        like_peers = sum(account.capacity for account in peers) * len(role.accounts) / len(peers)
        return [Change("at_its_peers_speed", role.name, _gain(roles, role.name, like_peers))]
    found = []
    if cause.phase is not None:
        without = sum(_without(account, cause.phase) for account in role.accounts)
        found.append(Change("without_the_phase", role.name, _gain(roles, role.name, without)))
    return [*found, Change("one_more_worker", role.name, _gain(roles, role.name, _one_more(role)))]


def _twice(queue: int, queues: Sequence[Queue], queue_gain: Callable[[int, int], float | None]) -> Change:
    gain = queue_gain(queue, 2)
    reason = "the roles are no chain of queues of known capacity" if gain is None else ""
    return Change("twice_the_queue", queues[queue].name, gain, reason)


def _larger_queues(
    queue: int, queues: Sequence[Queue], queue_gain: Callable[[int, int], float | None]
) -> list[Change]:
    """Return what twice the queue would gain, and the smallest that gains nearly all there is to gain."""
    twice = _twice(queue, queues, queue_gain)
    if twice.gain is None:
        return [twice]
    gains = {factor: queue_gain(queue, factor) or 0.0 for factor in QUEUE_FACTORS}
    enough = next(
        factor for factor in QUEUE_FACTORS if gains[factor] >= QUEUE_GAIN_SHARE * max(gains.values())
    )
    size = enough * (queues[queue].capacity or 0)
    return [twice] + ([Change(f"queue_of_{size}", queues[queue].name, gains[enough])] if enough > 2 else [])


def _one_more(role: Role) -> float:
    return role.capacity * (len(role.accounts) + 1) / len(role.accounts)


def _without(account: Account, phase: int) -> float:
    """Return a worker's capacity if a phase took no time."""
    part_ns = account.unnamed_ns if phase == UNNAMED else account.own_ns.get(phase, 0)
    left_ns = account.service_ns - part_ns
    return account.turns / left_ns if left_ns > 0 else float("inf") if account.turns else 0.0


def _gain(roles: dict[str, Role], changed: str, capacity: float) -> float:
    used = {name: role.utilisation for name, role in roles.items()}
    largest = max(used.values())
    used[changed] = roles[changed].utilisation_with(capacity)
    return round(largest / max(used.values()) - 1, 4) if max(used.values()) else 0.0
