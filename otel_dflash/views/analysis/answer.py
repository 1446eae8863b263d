"""The verdict in words: one sentence with its numbers, what to do, and what that would gain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from otel_dflash.recording.tables import OpenPhase
from otel_dflash.records import State
from otel_dflash.views.analysis.analyse import Analysis
from otel_dflash.views.analysis.capacity import Account, Role
from otel_dflash.views.analysis.counterfactual import Change, changes
from otel_dflash.views.analysis.simulation import gain_of_queue
from otel_dflash.views.analysis.verdict import UNNAMED, Kind, parts, state_of
from otel_dflash.views.analysis.window import End, Fate
from otel_dflash.views.units import duration

REMEDIES: Final = {
    Kind.ROLE_BOUND: "make that phase faster, or give the role one more worker",
    Kind.SKEWED_WORKER: "look at what this worker has that its peers have not: its GPU, its host, its data",
    Kind.SLOW_QUEUE_OPERATION: "look at what the put or get does besides waiting: a copy, unpickling, a lock",
    Kind.QUEUE_TOO_SMALL: "give the queue more room",
    Kind.LOCK: "hold the lock for less time, or give each worker its own",
    Kind.UNNAMED_TIME: "name that time: with worker.phase(...)",
    Kind.START_UP: "wait until every worker has done a few turns",
    Kind.WORKER_ENDED: "fix the exception first; there is nothing to tune until the worker runs",
    Kind.WORKER_DIED: "bring the worker back first; there is nothing to tune until it runs",
    Kind.BALANCED: "no single change helps much: make every role faster",
    Kind.INCOMPLETE: "",
}
WAIT_TOLD_MIN: Final = 0.1  # share of a role's time in waits for queues from which on it is mentioned
TURNS_SURE: Final = 100  # turns of the rarest role from which on the confidence does not fall


@dataclass(frozen=True)
class Verdict:
    """What limits the throughput of a run."""

    kind: Kind
    role: str  # "" if none is meant
    workers: tuple[str, ...]
    phase: str | None  # None for time in no phase, or if none is meant
    queue: str | None
    numbers: dict[str, float]
    confidence: float  # 0..1
    remedy: str
    counterfactual: tuple[Change, ...]
    text: str


def verdict_of(analysis: Analysis) -> Verdict:
    """Return what limits the throughput, in words."""
    cause, texts = analysis.cause, analysis.flow.texts
    phase = None if cause.phase in (None, UNNAMED) else texts[cause.phase or 0]
    found = () if cause.kind in _WITHOUT_TUNING else tuple(_changes(analysis))
    sentence = _SENTENCES[cause.kind](_Speaker(analysis))
    without = _WITHOUT[cause.kind](phase) if cause.kind in _WITHOUT else ""
    gains = "; ".join(filter(None, (_gain_text(change, without) for change in found)))
    return Verdict(
        cause.kind,
        cause.role,
        tuple(account.worker.name for account in cause.accounts),
        phase,
        None if cause.queue is None else analysis.flow.queues[cause.queue].name,
        cause.numbers,
        _confidence(analysis),
        cause.remedy or REMEDIES[cause.kind],
        found,
        f"{sentence}.{f' {gains[0].upper()}{gains[1:]}.' if gains else ''}",
    )


_WITHOUT: Final[dict[Kind, Callable[[str | None], str]]] = {
    Kind.ROLE_BOUND: lambda phase: f"without {phase}",
    Kind.SLOW_QUEUE_OPERATION: lambda phase: f"if {phase} only waited",
    Kind.LOCK: lambda phase: "without the lock",
    Kind.UNNAMED_TIME: lambda phase: "without that time",
}
_WITHOUT_TUNING: Final = (Kind.WORKER_ENDED, Kind.WORKER_DIED, Kind.START_UP, Kind.INCOMPLETE)


def _confidence(analysis: Analysis) -> float:
    """Return the product of: how many turns there were, and how far the limit is from the next role."""
    roles = sorted(analysis.roles.values(), key=lambda role: -role.utilisation)
    turns = min((role.turns for role in roles), default=0)
    enough = min(1.0, turns / TURNS_SURE)
    if analysis.cause.kind in (*_WITHOUT_TUNING, Kind.BALANCED, Kind.QUEUE_TOO_SMALL) or len(roles) < 2:
        return round(0.5 + 0.5 * enough, 2)
    apart = min(1.0, 2 * (1 - roles[1].utilisation / max(roles[0].utilisation, 1e-9)))
    return round((0.5 + 0.5 * enough) * (0.5 + 0.5 * apart), 2)


def _changes(analysis: Analysis) -> list[Change]:
    flow, waits, window = analysis.flow, analysis.waits, analysis.window
    return changes(
        analysis.cause,
        analysis.roles,
        lambda queue, factor: gain_of_queue(flow, waits, window, queue, factor),
        flow.queues,
    )


def _gain_text(change: Change, without: str) -> str:
    if change.gain is None:
        return ""
    what = {
        "one_more_worker": f"one more {change.target} worker",
        "at_its_peers_speed": "at its peers' speed",
        "without_the_phase": without,
        "twice_the_queue": f"twice the queue {change.target}",
    }.get(change.change, f"room for {change.change.rpartition('_')[2]} items in {change.target}")
    return f"{what}: {100 * change.gain:+.0f} % throughput"


def label(accounts: Sequence[Account]) -> str:
    """Return "target 0, 3..5" for workers of one role."""
    indices = sorted({account.worker.key[3] for account in accounts})
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    found = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{accounts[0].worker.role} {', '.join(found)}"


class _Speaker:
    """The words of a cause."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.cause = analysis.cause
        self.accounts = analysis.cause.accounts

    @property
    def who(self) -> str:
        return label(self.accounts)

    def verb(self, one: str, several: str) -> str:
        return _verb(self.accounts, one, several)

    @property
    def limits(self) -> str:
        """Return "drafter 0 limits the throughput"."""
        return f"{self.who} {self.verb('limits', 'limit')} the throughput"

    @property
    def phase(self) -> str:
        phase = self.cause.phase
        return "no phase" if phase is None or phase == UNNAMED else self.analysis.flow.texts[phase]

    @property
    def part(self) -> float:
        """The share of their time in the phase."""
        length_ns = sum(account.length_ns for account in self.accounts)
        return parts(self.accounts).get(self.cause.phase or 0, 0) / length_ns if length_ns else 0.0

    def part_of_turn(self, accounts: Sequence[Account]) -> int:
        turns = sum(account.turns for account in accounts)
        return round(parts(accounts).get(self.cause.phase or 0, 0) / turns) if turns else 0

    @property
    def idle(self) -> str:
        """Return which other roles wait for queues, most first."""
        roles = self.analysis.roles
        if not any(role.length_ns for role in roles.values()):
            roles = self.analysis.whole_run()
        others = [role for role in roles.values() if role.name != self.cause.role]
        waiting = sorted(((role.waiting, role) for role in others), key=lambda found: -found[0])
        told = [
            f"{label(role.accounts)} {_verb(role.accounts, 'waits', 'wait')} {_percent(share)} of the time"
            for share, role in waiting
            if share >= WAIT_TOLD_MIN
        ]
        return f"; {', '.join(told)}" if told else ""

    @property
    def fate(self) -> Fate:
        return next(fate for fate in self.analysis.fates if fate.worker is self.accounts[0].worker)

    @property
    def after(self) -> str:
        """Return which roles have waited since."""
        flow, since_ns = self.analysis.flow, self.fate.last_ns
        told = {}
        for name, role in self.analysis.roles.items():
            ns = sum(
                int(waits.within(since_ns, flow.end_ns).sum())
                for worker, waits in zip(flow.workers, self.analysis.waits, strict=True)
                if worker.role == name
            )
            told[name] = ns / max(len(role.accounts) * (flow.end_ns - since_ns), 1)
        texts = [f"{name} waits {_percent(share)}" for name, share in told.items() if share >= WAIT_TOLD_MIN]
        return f"; since then {', '.join(texts)} of the time" if texts else ""

    @property
    def role(self) -> Role:
        return self.analysis.roles[self.cause.role]


def _role_bound(say: _Speaker) -> str:
    return f"{say.limits}, {_percent(say.part)} of {say.verb('its', 'their')} time in {say.phase}{say.idle}"


def _skewed(say: _Speaker) -> str:
    peers = [account for account in say.role.accounts if account not in say.accounts]
    ratio = say.cause.numbers["turn_over_peers"]
    return (
        f"{say.who} {say.verb('is', 'are')} slow: a turn takes {ratio:.1f} x as long as that of "
        f"{label(peers)}, mostly in {say.phase} ({duration(say.part_of_turn(say.accounts))} against "
        f"{duration(say.part_of_turn(peers))}){say.idle}"
    )


def _slow_queue_operation(say: _Speaker) -> str:
    state = state_of(say.accounts, say.cause.phase or 0)
    what, queue = ("get", "there are items") if state == State.STARVED else ("put", "there is room")
    taken = duration(say.part_of_turn(say.accounts))
    slow = f"{say.phase} takes {taken} a turn although {queue}, so the {what} itself is slow"
    return f"{say.limits}: {slow}{say.idle}"


def _queue_too_small(say: _Speaker) -> str:
    queue = say.analysis.flow.queues[say.cause.queue or 0]
    size = f" (capacity {queue.capacity})" if queue.capacity else ""
    waits = [
        f"{role.name} waits {_percent(role.waiting)} of the time" for role in say.analysis.roles.values()
    ]
    return f"The queue {queue.name}{size} is too small: both sides wait for each other; {', '.join(waits)}"


def _lock(say: _Speaker) -> str:
    share = _percent(say.cause.numbers["lock_share"])
    whose = say.verb("its", "their")
    return f"{say.limits}, and waits for a lock for {share} of {whose} working time, in {say.phase}{say.idle}"


def _unnamed(say: _Speaker) -> str:
    return (
        f"{say.limits}, and {_percent(say.part)} of {say.verb('its', 'their')} time is in no phase{say.idle}"
    )


def _start_up(say: _Speaker) -> str:
    share = say.cause.numbers["share_of_run"]
    return f"Start-up took {_percent(share)} of the run: only then had {say.who} ended its first turn"


def _ended(say: _Speaker) -> str:
    worker = say.accounts[0].worker
    after_ns = say.analysis.flow.end_ns - say.fate.last_ns
    step = f" in {worker.failed_step}" if worker.failed_step else ""
    when = f"{duration(after_ns)} before the end of the run"
    return f"{worker.name} ended with {worker.failed}{step}, {when}{say.after}"


def _died(say: _Speaker) -> str:
    worker, fate = say.accounts[0].worker, say.fate
    after = duration(say.analysis.flow.end_ns - fate.last_ns)
    where = _where(worker.open_phases)
    if fate.end is End.KILLED:
        return f"{worker.name} was killed{where}, {after} before the end of the run{say.after}"
    return f"{worker.name} is stuck{where or ' in no phase'}: it has done nothing for {after}{say.after}"


def _where(phases: Sequence[OpenPhase]) -> str:
    return f" in {' > '.join(phase.name for phase in phases)}" if phases else ""


def _balanced(say: _Speaker) -> str:
    roles = sorted(say.analysis.roles.values(), key=lambda role: -role.utilisation)
    used = ", ".join(f"{role.name} works {_percent(role.utilisation)}" for role in roles)
    return f"The roles are balanced: {used} of the time"


def _incomplete(say: _Speaker) -> str:
    return f"{say.cause.reason}{say.idle}"


_SENTENCES: Final[dict[Kind, Callable[[_Speaker], str]]] = {
    Kind.ROLE_BOUND: _role_bound,
    Kind.SKEWED_WORKER: _skewed,
    Kind.SLOW_QUEUE_OPERATION: _slow_queue_operation,
    Kind.QUEUE_TOO_SMALL: _queue_too_small,
    Kind.LOCK: _lock,
    Kind.UNNAMED_TIME: _unnamed,
    Kind.START_UP: _start_up,
    Kind.WORKER_ENDED: _ended,
    Kind.WORKER_DIED: _died,
    Kind.BALANCED: _balanced,
    Kind.INCOMPLETE: _incomplete,
}


def _verb(accounts: Sequence[Account], one: str, several: str) -> str:
    return several if len(accounts) > 1 else one


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
