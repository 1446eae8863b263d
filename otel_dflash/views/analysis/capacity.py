"""How many items each worker and role could pass on if no queue made it wait.

Of a window of length `W` in which worker `w` of role `r` did `n` turns of its loop and waited for queues
for `L`:

* service time `S = W - L`, capacity of the worker `n / S`, of the role the sum over its workers;
* utilisation of the role `U = (sum of n) / (W * capacity)`. It is its throughput over its capacity, so
  visits per final item cancel out. The role with the largest `U` limits the throughput.

This is the operational analysis of closed queueing networks (Denning and Buzen, 1978): utilisation law and
bottleneck analysis. A worker that is slower than its peers lowers its role's capacity by its own share only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dflash.records import State
from otel_dflash.views.analysis.waits import Waits, own_time
from otel_dflash.views.analysis.workers import Flow, Worker


@dataclass(frozen=True)
class Account:
    """One worker in a window. Times in ns."""

    worker: Worker
    length_ns: int  # of the window, without time in which phases were not captured
    turns: float
    waits_ns: dict[State, int]  # for queues: STARVED and BACKPRESSURED
    own_ns: dict[int, int]  # by phase (position in Flow.texts); with unnamed_ns they sum to service_ns
    states: dict[int, State]  # of those phases

    @property
    def service_ns(self) -> int:
        """Return the time that no queue made it wait."""
        return max(self.length_ns - sum(self.waits_ns.values()), 0)

    @property
    def unnamed_ns(self) -> int:
        """Return its time in no phase, without waits for queues there."""
        return max(self.service_ns - sum(self.own_ns.values()), 0)

    @property
    def capacity(self) -> float:
        """Return turns per ns of service time, 0 if it did nothing."""
        return self.turns / self.service_ns if self.service_ns else 0.0

    @property
    def turn_ns(self) -> float:
        """Return the service time of a turn, infinite if there was none."""
        return self.service_ns / self.turns if self.turns else float("inf")


@dataclass(frozen=True)
class Role:
    """All workers of a role in a window."""

    name: str
    accounts: Sequence[Account]
    length_ns: int

    @property
    def turns(self) -> float:
        """Return the turns of all workers."""
        return sum(account.turns for account in self.accounts)

    @property
    def capacity(self) -> float:
        """Return turns per ns if no queue made a worker wait."""
        return sum(account.capacity for account in self.accounts)

    @property
    def utilisation(self) -> float:
        """Return throughput over capacity, 0..1."""
        return self.utilisation_with(self.capacity)

    def utilisation_with(self, capacity: float) -> float:
        """Return the utilisation that the same throughput would be at another capacity."""
        return self.turns / (self.length_ns * capacity) if capacity and self.length_ns else 0.0

    @property
    def waiting(self) -> float:
        """Return the share of its workers' time that queues made them wait, 0..1."""
        length_ns = sum(account.length_ns for account in self.accounts)
        waits_ns = sum(sum(account.waits_ns.values()) for account in self.accounts)
        return waits_ns / length_ns if length_ns else 0.0


def accounts_of(flow: Flow, waits: Sequence[Waits], start_ns: int, end_ns: int) -> list[Account]:
    """Return the account of each worker between two times."""
    return [
        _account(flow, worker, of_worker, start_ns, end_ns)
        for worker, of_worker in zip(flow.workers, waits, strict=True)
    ]


def roles_of(accounts: Sequence[Account], length_ns: int) -> dict[str, Role]:
    """Return the roles in the order of their names."""
    names = sorted({account.worker.role for account in accounts})
    return {
        name: Role(name, [account for account in accounts if account.worker.role == name], length_ns)
        for name in names
    }


def _account(flow: Flow, worker: Worker, waits: Waits, start_ns: int, end_ns: int) -> Account:
    lengths = waits.within(start_ns, end_ns)
    uncaptured_ns = sum(max(0, min(until, end_ns) - max(since, start_ns)) for since, until in flow.uncaptured)
    own_ns = own_time(worker, waits, start_ns, end_ns)
    return Account(
        worker,
        end_ns - start_ns - uncaptured_ns,
        turns_of(worker, start_ns, end_ns),
        {state: int(lengths[waits.state == state].sum()) for state in (State.STARVED, State.BACKPRESSURED)},
        own_ns,
        {name: State(int(worker.segments.state[worker.segments.name == name][0])) for name in own_ns},
    )


def turns_of(worker: Worker, start_ns: int, end_ns: int) -> float:
    """Return how many steps ended; of a worker without steps, how many items it got, else put.

    A turn that lies partly in the window counts by that part of its time.
    """
    for times in (worker.step_ends, worker.gets.time_ns, worker.puts.time_ns):
        if len(times):
            ends = np.sort(times)
            usual_ns = float(np.median(np.diff(ends))) if len(ends) > 1 else 0.0
            ends = np.append(ends, max(ends[-1] + usual_ns, end_ns + 1))  # the turn that is open
            count = np.interp([start_ns, end_ns], ends, np.arange(1, len(ends) + 1), left=0.0)
            return float(count[1] - count[0])
    return 0.0
