"""A pipeline replayed with other queues: what closed forms cannot tell, because it depends on how the times
vary.

Each worker takes the recorded service times of its turns, in their order, so pauses stay as long as they
were. Item `j` passes stage `k` at the worker that is free first; it leaves when the next stage has got item
`j - C`, with `C` the capacity of the queue between them (blocking after service; Perros, Queueing Networks
with Blocking, 1994). Workers of a stage do not overtake each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Final

import numpy as np

from otel_dflash.views.analysis.waits import Waits
from otel_dflash.views.analysis.window import Window
from otel_dflash.views.analysis.workers import NO_QUEUE, Flow, Ints, Worker

ITEMS: Final = 4000
HEAD: Final = 400  # items until it runs steadily


@dataclass(frozen=True)
class SimulatedStage:
    """A role: the service times of the turns of each worker, and the capacity of the queue after it."""

    services: Sequence[Ints]
    capacity: int


def throughput(stages: Sequence[SimulatedStage], items: int = ITEMS) -> float:
    """Return items per ns of a chain of stages."""
    turns = [[cycle(services.tolist()) for services in stage.services] for stage in stages]
    free = [[(0, worker) for worker in range(len(stage.services))] for stage in stages]
    got: list[list[int]] = [[] for _ in stages]  # when each stage got each item
    begun = 0
    for number in range(items):
        at = 0
        for place, stage in enumerate(stages):
            free_ns, worker = heapq.heappop(free[place])
            got[place].append(max(at, free_ns))
            at = got[place][-1] + next(turns[place][worker])
            if place + 1 < len(stages) and number >= stage.capacity:
                at = max(at, got[place + 1][number - stage.capacity])
            heapq.heappush(free[place], (at, worker))
        if number == HEAD:
            begun = at
    return (items - 1 - HEAD) / (at - begun) if at > begun else 0.0


def gain_of_queue(
    flow: Flow, waits: Sequence[Waits], window: Window, queue: int, factor: int
) -> float | None:
    """Return what the throughput gains if a queue holds `factor` times as many items; None if the roles are
    no chain with one queue between two of them."""
    chain = _chain(flow)
    if chain is None:
        return None
    roles, queues = chain
    before, after = [], []
    for place, role in enumerate(roles):
        services = [
            found
            for worker, of_worker in zip(flow.workers, waits, strict=True)
            if worker.role == role and len(found := _services(worker, of_worker, window))
        ]
        if not services:
            return None
        capacity = 0
        if place < len(queues):
            capacity = flow.queues[queues[place]].capacity or 0
            if not capacity:
                return None
        more = factor if place < len(queues) and queues[place] == queue else 1
        before.append(SimulatedStage(services, capacity))
        after.append(SimulatedStage(services, capacity * more))
    rate = throughput(before)
    return round(throughput(after) / rate - 1, 4) if rate else None


def _services(worker: Worker, waits: Waits, window: Window) -> Ints:
    """Return the time of each turn without waits for queues, in order."""
    ends = np.sort(worker.step_ends)
    ends = ends[(ends >= window.start_ns) & (ends <= window.end_ns)]
    if len(ends) < 2:
        return np.empty(0, np.int64)
    waited = np.concatenate([[0], np.cumsum(waits.end_ns - waits.start_ns)])
    until = waited[np.searchsorted(waits.end_ns, ends, side="right")]
    services: Ints = np.maximum(np.diff(ends) - np.diff(until), 1)
    return services


def _chain(flow: Flow) -> tuple[list[str], list[int]] | None:
    """Return the roles from source to sink, and the queues between them; None if they are no chain."""
    items, after = flow.items, {}
    for queue in np.unique(items.queue[items.queue != NO_QUEUE]).tolist():
        mine = (items.queue == queue) & (items.producer >= 0)
        pairs = {
            (flow.workers[producer].role, flow.workers[consumer].role)
            for producer, consumer in zip(
                items.producer[mine].tolist(), items.consumer[mine].tolist(), strict=True
            )
        }
        if len(pairs) != 1 or (pair := pairs.pop())[0] in after:
            return None
        after[pair[0]] = pair[1], queue
    ends = {role for role, _ in after.values()}
    first = [role for role in after if role not in ends]
    if len(first) != 1:
        return None
    roles, queues = first, []
    while roles[-1] in after:
        role, queue = after[roles[-1]]
        if role in roles:
            return None
        roles.append(role)
        queues.append(queue)
    return (roles, queues) if len(roles) == len({worker.role for worker in flow.workers}) else None
