"""From recordings to the analysis that every view shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from otel_dflash.recording.tables import Tables, read_tables
from otel_dflash.records import Counter, State
from otel_dflash.views.analysis.capacity import Account, Role, accounts_of, roles_of
from otel_dflash.views.analysis.verdict import (
    BALANCED_RATIO,
    COUPLED_WAIT_MIN,
    Cause,
    Kind,
    find_cause,
    parts,
    state_of,
)
from otel_dflash.views.analysis.waits import Waits, find_waits
from otel_dflash.views.analysis.window import End, Fate, Window, fates, first_turn_ns, lost, steady_window
from otel_dflash.views.analysis.workers import Flow, Worker, read_flow
from otel_dflash.views.units import plural

START_UP_SHARE: Final = 0.5  # of a run before every worker has ended its first turn
WINDOW_NS_MIN: Final = 1_000_000_000
TURNS_MIN: Final = 20  # of each role
LOST_CONTEXTS_MAX: Final = 0.05
UNFED_SHARE_MIN: Final = 0.1  # of a role's service time in starved phases without any item


@dataclass(frozen=True)
class Analysis:
    """What a run did, and what limits it."""

    flow: Flow
    waits: Sequence[Waits]
    fates: Sequence[Fate]
    window: Window
    roles: dict[str, Role]
    cause: Cause

    def whole_run(self) -> dict[str, Role]:
        """Return the roles in the whole run, in place of the window."""
        start_ns, end_ns = self.flow.start_ns, self.flow.end_ns
        return roles_of(accounts_of(self.flow, self.waits, start_ns, end_ns), end_ns - start_ns)


def analyse(directories: Sequence[Path]) -> Analysis:
    """Analyse the recordings of the nodes of one run, which has ended or is running.

    Raises:
        RecordingError: There is no recording, or it cannot be read.
    """
    return analyse_tables([read_tables(directory) for directory in directories])


def analyse_tables(recordings: Sequence[Tables]) -> Analysis:
    """Analyse recordings that were read already, of which there is at least one."""
    return analyse_flow(read_flow(recordings))


def analyse_flow(flow: Flow, window: Window | None = None) -> Analysis:
    """Analyse what the workers did, in a window or in the steady part of the run."""
    waits = find_waits(flow)
    found = fates(flow, waits)
    window = window or steady_window(flow, found)
    accounts = accounts_of(flow, waits, window.start_ns, window.end_ns)
    alive = [account for account in accounts if account.worker.end_ns > window.start_ns]
    roles = roles_of(alive, window.length_ns)
    cause = (
        _stopped(flow, waits, found, accounts)
        or _too_early(flow, waits, window, roles, accounts)
        or _limit(flow, waits, window, roles)
    )
    return Analysis(flow, waits, found, window, roles, cause)


def _stopped(
    flow: Flow, waits: Sequence[Waits], found: Sequence[Fate], accounts: Sequence[Account]
) -> Cause | None:
    fate = lost(flow, waits, found)
    if fate is None:
        return None
    kind = Kind.WORKER_ENDED if fate.end is End.ENDED else Kind.WORKER_DIED
    mine = [account for account in accounts if account.worker is fate.worker]
    phase = list(flow.texts).index(fate.phase) if fate.phase else None
    after = (flow.end_ns - fate.last_ns) / max(flow.end_ns - flow.start_ns, 1)
    return Cause(kind, fate.worker.role, mine, phase, numbers={"share_of_run_after": round(after, 4)})


def _set_up_ns(worker: Worker, waits: Waits) -> int:
    """Return how long a worker took to end its first turn, without waits for queues."""
    first_ns = first_turn_ns(worker)
    if first_ns is None:
        return 0
    return first_ns - worker.created_ns - int(waits.within(worker.created_ns, first_ns).sum())


def _too_early(
    flow: Flow, waits: Sequence[Waits], window: Window, roles: dict[str, Role], accounts: Sequence[Account]
) -> Cause | None:
    """Return that the run has only begun, or is too short or too incomplete to tell."""
    if not any(len(worker.phases.start_ns) for worker in flow.workers):
        reason = "No worker recorded a phase"
        remedy = (
            "put `with worker.step():` around a turn of its loop, and phases inside. A spawned process "
            "records once it calls otel_dflash.start()"
        )
        return Cause(Kind.INCOMPLETE, numbers={"phases": 0}, reason=reason, remedy=remedy)
    run_ns = max(flow.end_ns - flow.start_ns, 1)
    if window.start_ns - flow.start_ns > START_UP_SHARE * run_ns:
        latest = max(zip(flow.workers, waits, strict=True), key=lambda pair: _set_up_ns(*pair))[0]
        mine = [account for account in accounts if account.worker is latest]
        numbers = {"share_of_run": round((window.start_ns - flow.start_ns) / run_ns, 4)}
        return Cause(Kind.START_UP, latest.role, mine, numbers=numbers)
    turns = min((role.turns for role in roles.values()), default=0)
    if window.length_ns < WINDOW_NS_MIN or turns < TURNS_MIN:
        rarest = min(roles.values(), key=lambda role: role.turns)
        reason = (
            f"There is not enough data: {window.length_ns / 1e9:.1f} s in which all workers ran, and "
            f"{plural(round(turns), 'turn')} of {rarest.name}"
        )
        numbers = {"window_s": round(window.length_ns / 1e9, 3), "turns": round(turns)}
        return Cause(Kind.INCOMPLETE, numbers=numbers, reason=reason, remedy="record a longer run")
    counters = np.array([ring.counters for worker in flow.workers for ring in worker.rings])
    lost_records = int(counters[:, Counter.DROPPED_RING_FULL].sum()) if len(counters) else 0
    gets, unmatched = (int(counters[:, which].sum()) for which in (Counter.GETS, Counter.UNMATCHED))
    if lost_records or unmatched > LOST_CONTEXTS_MAX * max(gets + unmatched, 1):
        numbers = {"lost_records": lost_records, "unmatched": unmatched, "gets": gets}
        reason = (
            f"Too much was lost to tell: {lost_records} records, and the contexts of {unmatched} of "
            f"{gets + unmatched} items"
        )
        return Cause(Kind.INCOMPLETE, numbers=numbers, reason=reason, remedy="see the losses below")
    return None


def _limit(flow: Flow, waits: Sequence[Waits], window: Window, roles: dict[str, Role]) -> Cause:
    largest = max(role.utilisation for role in roles.values())
    for role in roles.values():
        if role.utilisation * BALANCED_RATIO > largest and (phase := _unfed(role)) is not None:
            return _without_contexts(flow, role, phase)
    return find_cause(roles, _coupled(flow, waits, window))


def _unfed(role: Role) -> int | None:
    """Return the phase in which a role waits for items that have no contexts, None if there is none."""
    if any(len(account.worker.gets.time_ns) for account in role.accounts):
        return None
    service_ns = sum(account.service_ns for account in role.accounts)
    waits = {
        phase: own_ns
        for phase, own_ns in parts(role.accounts).items()
        if state_of(role.accounts, phase) == State.STARVED and own_ns >= UNFED_SHARE_MIN * service_ns
    }
    return max(waits, key=lambda phase: waits[phase]) if waits else None


def _without_contexts(flow: Flow, role: Role, phase: int) -> Cause:
    name = flow.texts[phase]
    share = parts(role.accounts)[phase] / sum(account.length_ns for account in role.accounts)
    reason = (
        f"{role.name} waits {100 * share:.0f} % of the time in {name}, and for what is not known: none of "
        "its items has a context"
    )
    remedy = "wrap the queue it gets from, and give a worker to each thread that puts into it"
    numbers = {"unfed_share": round(share, 4)}
    return Cause(Kind.INCOMPLETE, role.name, role.accounts, phase, None, numbers, reason, remedy)


def _coupled(flow: Flow, waits: Sequence[Waits], window: Window) -> int | None:
    """Return the queue at which those who put and those who get both wait, most first."""
    found: list[tuple[float, int]] = []
    for place in range(len(flow.queues)):
        shares = []
        for state in (State.STARVED, State.BACKPRESSURED):
            mine = [one for one in waits if bool(np.any((one.queue == place) & (one.state == state)))]
            waited = sum(
                int(
                    one.within(window.start_ns, window.end_ns)[
                        (one.queue == place) & (one.state == state)
                    ].sum()
                )
                for one in mine
            )
            shares.append(waited / (len(mine) * window.length_ns) if mine and window.length_ns else 0.0)
        if min(shares) >= COUPLED_WAIT_MIN:
            found.append((min(shares), place))
    return max(found)[1] if found else None
