"""Where the time of a run went: `summarise` reads a recording into data; render.py prints it.

Shares are of a worker's wall time, from its ring's creation to its last record, or to its end where that is known. A phase's share is
that of its self time, so the shares of a worker's phases and of *other* sum to 100 %.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otel_dflash.agent.catalog import RingNames, WorkerInfo
from otel_dflash.agent.fold import Fold, RingTotals
from otel_dflash.agent.histogram import Histogram
from otel_dflash.agent.recording import RecordingReader, RunInfo
from otel_dflash.records import Kind, State
from otel_dflash.session import DELIVERY_FILE
from otel_dflash.views.verdict import Account, verdict

ROLE_ORDER = ("target", "drafter")  # then the others by name
_READ_FRAMES = 4096  # short frames of a ring are folded together


@dataclass(frozen=True)
class PhaseRow:
    """One phase of a worker, or its steps."""

    name: str
    state: State
    count: int
    errors: int
    total_ns: int
    self_ns: int  # without the phases inside it
    p50_ns: int
    p99_ns: int
    max_ns: int


@dataclass(frozen=True)
class OpenPhase:
    """A phase that had not ended when its worker did."""

    name: str
    age_ns: int


@dataclass(frozen=True)
class WorkerRow:
    """One worker: all rings of a role and index in one process."""

    name: str
    role: str
    index: int
    gpu: int | None
    pid: int
    wall_ns: int
    states: dict[State, int]  # sum to wall_ns
    batches: int
    tokens: int
    step: PhaseRow | None
    phases: list[PhaseRow]  # most time first
    dropped: dict[str, int]  # reason -> records, only those above 0
    refused: list[str]  # values of step.set() that were not read
    sources: dict[str, int]  # role -> items consumed
    times_made: int  # rings: their times add up
    finished: bool
    killed: bool
    open_phases: list[OpenPhase]


@dataclass(frozen=True)
class Summary:
    """A recording in numbers. Times in ns; wall times are anchored."""

    verdict: str
    run: str
    host: str
    directory: Path
    size_bytes: int
    started_wall_ns: int
    duration_ns: int
    records: int
    workers: list[WorkerRow]
    missing_frames: int
    malformed: int
    agent_cpu_ns: int | None
    cost_ns: float | None  # per record, in the trainer
    undelivered: dict[str, str]  # signal -> why an exporter did not get all of it while the run went on
    left_out: list[str]  # what a receiver would not take, one line each

    @property
    def processes(self) -> int:
        """Return how many processes had workers."""
        return len({worker.pid for worker in self.workers})

    @property
    def dropped(self) -> dict[str, int]:
        """Return lost records of all workers by reason."""
        lost: Counter[str] = Counter()
        for worker in self.workers:
            lost.update(worker.dropped)
        return dict(lost)

    @property
    def overhead(self) -> float | None:
        """Return the trainer's estimated cost as a share of its workers' time, None when it is not known."""
        wall_ns = sum(worker.wall_ns for worker in self.workers)
        return self.records * self.cost_ns / wall_ns if self.cost_ns is not None and wall_ns else None


def summarise(directory: Path) -> Summary:
    """Read a recording, of a run that has ended or one that goes on.

    Raises:
        RecordingError: Not a recording.
    """
    reader = RecordingReader(directory)
    try:
        fold = Fold(reader.catalog)
        while frames := reader.read(_READ_FRAMES):
            fold.add_all(frames)
        return _summary(fold, reader.info, directory, reader.missing_frames)
    finally:
        reader.close()


def recording_bytes(directory: Path) -> int:
    """Return the size of all files of a recording."""
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file())


def delivery(directory: Path) -> dict[str, dict[str, Any]]:
    """Return what the agent said at its end by signal, {} when it did not, or cannot be understood."""
    try:
        signals = json.loads((directory / DELIVERY_FILE).read_bytes())
        return {name: {"reason": None, **state} for name, state in signals.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _summary(fold: Fold, info: RunInfo, directory: Path, missing_frames: int) -> Summary:
    workers = _workers(fold)
    rings = fold.rings.values()
    first_ns = min((totals.created_ns for totals in rings), default=info.anchor_mono_ns)
    last_ns = max((totals.last_ns for totals in rings), default=first_ns)
    said = delivery(directory)
    return Summary(
        verdict=verdict([_account(worker) for worker in workers]),
        run=info.run,
        host=info.host,
        directory=directory,
        size_bytes=recording_bytes(directory),
        started_wall_ns=info.wall_ns(first_ns),
        duration_ns=last_ns - first_ns,
        records=sum(totals.records for totals in rings),
        workers=workers,
        missing_frames=missing_frames,
        malformed=fold.malformed,
        agent_cpu_ns=fold.agent.cpu_ns if fold.agent.wall_offset_ns is not None else None,
        cost_ns=fold.agent.cost_ns,
        undelivered={signal: f"{state['reason']}" for signal, state in said.items() if not state.get("delivered", True)},
        left_out=[line for state in said.values() for line in state.get("losses", [])],
    )


def _account(worker: WorkerRow) -> Account:
    busy = {phase.name: phase.self_ns for phase in worker.phases if phase.state == State.BUSY}
    has_gpu = worker.gpu is not None
    return Account(worker.role, worker.index, has_gpu, worker.wall_ns, worker.states, busy, worker.sources)


def _workers(fold: Fold) -> list[WorkerRow]:
    found = fold.workers()
    pids: dict[tuple[str, int], set[int]] = {}
    for pid, role, index in found:
        pids.setdefault((role, index), set()).add(pid)
    roles = {ring: names.worker.role for ring, names in fold.catalog.items() if names.entries}
    rows = []
    for (pid, role, index), rings in found.items():
        name = f"{role} {index}" if len(pids[role, index]) == 1 else f"{role} {index} (pid {pid})"
        rows.append(_worker(name, rings, roles))
    order = {role: place for place, role in enumerate(ROLE_ORDER)}
    return sorted(rows, key=lambda row: (order.get(row.role, len(order)), row.role, row.index, row.pid))


def _worker(name: str, rings: list[tuple[RingTotals, RingNames]], roles: dict[int, str]) -> WorkerRow:
    info: WorkerInfo = rings[-1][1].worker
    states = Counter(dict.fromkeys(State, 0))
    dropped: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    for totals, names in rings:
        states.update(totals.state_ns(names))
        dropped.update(totals.dropped())
        for ring, count in totals.sources.items():
            sources[roles.get(ring, "")] += count  # a ring of another node has no name here
    return WorkerRow(
        name=name,
        role=info.role,
        index=info.index,
        gpu=info.gpu,
        pid=info.pid,
        wall_ns=sum(totals.wall_ns for totals, _ in rings),
        states=dict(states),
        batches=sum(totals.batches for totals, _ in rings),
        tokens=sum(totals.batch_tokens for totals, _ in rings),
        step=_step_row(rings),
        phases=_phase_rows(rings),
        dropped={reason: count for reason, count in dropped.items() if count},
        refused=[value for _, names in rings for value in names.refused()],
        sources=dict(sources),
        times_made=len(rings),
        finished=all(totals.closed is not None for totals, _ in rings),
        killed=any(totals.closed["killed"] for totals, _ in rings if totals.closed),
        open_phases=[phase for totals, names in rings for phase in _open_phases(totals, names)],
    )


@dataclass
class _PhaseTotals:
    histogram: Histogram = field(default_factory=Histogram)
    errors: int = 0
    self_ns: int = 0

    def add(self, histogram: Histogram, error_id: int) -> None:
        self.histogram.merge(histogram)
        self.errors += histogram.count if error_id else 0

    def row(self, name: str, state: State) -> PhaseRow:
        values = self.histogram
        quantiles = values.quantile(0.5), values.quantile(0.99), values.max_ns
        return PhaseRow(name, state, values.count, self.errors, values.sum_ns, self.self_ns, *quantiles)


def _step_row(rings: list[tuple[RingTotals, RingNames]]) -> PhaseRow | None:
    steps = _PhaseTotals()
    for totals, _ in rings:
        for _, error_id, histogram in totals.histograms(Kind.STEP):
            steps.add(histogram, error_id)
    return steps.row("step", State.OTHER) if steps.histogram.count else None


def _phase_rows(rings: list[tuple[RingTotals, RingNames]]) -> list[PhaseRow]:
    phases: dict[tuple[str, State], _PhaseTotals] = {}
    for totals, names in rings:
        for name_id, error_id, histogram in totals.histograms(Kind.PHASE):
            state, name = names.phase(name_id)
            phases.setdefault((name, state), _PhaseTotals()).add(histogram, error_id)
        for name_id, own_ns in totals.self_ns.items():  # also of phases that never ended
            state, name = names.phase(name_id)
            phases.setdefault((name, state), _PhaseTotals()).self_ns += own_ns
    rows = [found.row(name, state) for (name, state), found in phases.items()]
    return sorted(rows, key=lambda row: (-row.self_ns, row.name, row.state))


def _open_phases(totals: RingTotals, names: RingNames) -> Iterator[OpenPhase]:
    if totals.closed:
        for name_id, start_ns in sorted(totals.closed["open"], key=lambda item: int(item[1])):
            yield OpenPhase(names.phase(name_id)[1], totals.closed["end_ns"] - start_ns)
