"""Where the time of a run went: `summarise` reads a recording into data; render.py prints it.

Shares are of a worker's wall time, which runs from its ring's creation to its end. While a run is running, it
runs to the newest OPEN frame, about a second ago, and open phases count until then. A phase's share is that
of its self time, so the shares of a worker's phases and of *other* sum to 100 %.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from otel_dflash.metrics.decoding import Ring
from otel_dflash.metrics.families.phases import Phases
from otel_dflash.metrics.families.telemetry import TelemetryFigures
from otel_dflash.metrics.families.workers import Workers, WorkerTotals
from otel_dflash.metrics.family import Worker
from otel_dflash.metrics.fold import Fold
from otel_dflash.metrics.histogram import Histogram
from otel_dflash.recording.catalog import Catalog, RingNames
from otel_dflash.recording.delivery import read_delivery
from otel_dflash.recording.directory import recording_bytes
from otel_dflash.recording.payloads import OpenWork
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import RunInfo
from otel_dflash.recording.tables import TableBuilder
from otel_dflash.records import SERIAL_MASK, Kind, State
from otel_dflash.records import Counter as Dropped
from otel_dflash.session import Session, map_control, unrecorded_steps
from otel_dflash.session_list import dropped_records, find_session
from otel_dflash.views.analysis.analyse import analyse_tables
from otel_dflash.views.analysis.answer import Verdict, verdict_of
from otel_dflash.views.service import unserved

ROLE_ORDER: Final = ("target", "drafter")  # then the others by name
_READ_FRAMES: Final = 4096  # short frames of a ring are folded together


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
    """A phase that had not ended when its worker did, or is open while the run is running."""

    name: str
    age_ns: int


@dataclass(frozen=True)
class Place:
    """Where in its work a worker is, or ended."""

    step: str  # "step 7", by the user's number if known, else as counted; "" outside steps
    error: str  # type of the exception that ended it, "" if none
    age_ns: int  # since then, 0 if it is still there
    open_phases: list[OpenPhase]  # outermost first


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
    evicted: int  # items that left a queue by no get
    refused: list[str]  # values of step.set() that were not read
    overflowed: list[str]  # keys of step.set() with too many different strings
    filled: list[str]  # kinds of names that had no more room
    times_made: int  # rings: their times add up
    finished: bool
    killed: bool
    unseen: bool  # killed while no agent was running
    place: Place | None  # None if it ended in good order, or nothing is known


@dataclass(frozen=True)
class Summary:
    """A recording in numbers. Times in ns; wall times are anchored."""

    verdict: Verdict
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
    undelivered: dict[str, str]  # signal -> why an exporter did not get all of it while the run was running
    left_out: list[str]  # what a receiver refused, one line each
    unserved: str | None = None  # that no agent serves it, although it has not ended
    unrecorded_steps: int = 0  # of workers that got no ring
    uncounted_drops: int = 0  # records that its rings have dropped since the newest counters here

    @property
    def processes(self) -> int:
        """Return how many processes made workers."""
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
        """Return the trainer's estimated cost as a share of its workers' time, None if it is not known."""
        wall_ns = sum(worker.wall_ns for worker in self.workers)
        return self.records * self.cost_ns / wall_ns if self.cost_ns is not None and wall_ns else None


def summarise(directory: Path) -> Summary:
    """Read the recording of a run that has ended or is running.

    Raises:
        RecordingError: There is no recording, or it cannot be read.
    """
    reader = RecordingReader(directory)
    try:
        families = _Families(Workers(), Phases(), TelemetryFigures())
        fold = Fold(reader.catalog, families)
        builder = TableBuilder(reader.info, reader.catalog)
        while frames := reader.read(_READ_FRAMES):
            fold.add_all(frames)
            for frame in frames:
                builder.add(frame)
        verdict = verdict_of(analyse_tables([builder.tables()]))
        return _summary(fold, families, reader.info, directory, reader.missing_frames, verdict)
    finally:
        reader.close()


class _Families(NamedTuple):
    """What a summary is made from."""

    workers: Workers
    phases: Phases
    telemetry: TelemetryFigures


def _summary(
    fold: Fold,
    families: _Families,
    info: RunInfo,
    directory: Path,
    missing_frames: int,
    verdict: Verdict,
) -> Summary:
    workers = _workers(fold, families)
    rings = fold.rings.values()
    agent = families.telemetry.agent
    first_ns = min((ring.created_ns for ring in rings), default=info.anchor_mono_ns)
    last_ns = max((ring.last_ns for ring in rings), default=first_ns)
    report = read_delivery(directory)
    session = find_session(directory)
    return Summary(
        verdict=verdict,
        run=info.run,
        host=info.host,
        directory=directory,
        size_bytes=recording_bytes(directory),
        started_wall_ns=info.wall_ns(first_ns),
        duration_ns=last_ns - first_ns,
        records=sum(figures.records for figures in families.telemetry.rings.values()),
        workers=workers,
        missing_frames=missing_frames,
        malformed=fold.malformed,
        agent_cpu_ns=round(agent.cpu_ns) if agent.wall_offset_ns is not None else None,
        cost_ns=agent.cost_ns,
        undelivered=report.undelivered,
        left_out=[line for signal in report.signals.values() for line in signal.losses],
        unserved=unserved(session) if session else None,
        unrecorded_steps=max(
            round(agent.unrecorded_steps), unrecorded_steps(map_control(session)) if session else 0
        ),
        uncounted_drops=_uncounted_drops(session, families) if session else 0,
    )


def _uncounted_drops(session: Session, families: _Families) -> int:
    known = {
        ring: figures.counters[Dropped.DROPPED_RING_FULL]
        for ring, figures in families.telemetry.rings.items()
    }
    return sum(max(0, count - known.get(ring, 0)) for ring, count in dropped_records(session).items())


def _workers(fold: Fold, families: _Families) -> list[WorkerRow]:
    found = fold.workers()
    pids: dict[tuple[str, int], set[int]] = {}
    for worker in found:
        pids.setdefault((worker.role, worker.index), set()).add(worker.pid)
    rows = []
    for worker in found:
        name = f"{worker.role} {worker.index}"
        if len(pids[worker.role, worker.index]) > 1:
            name += f" (pid {worker.pid})"
        rows.append(_worker(name, worker, fold.catalog, families))
    order = {role: place for place, role in enumerate(ROLE_ORDER)}
    return sorted(rows, key=lambda row: (order.get(row.role, len(order)), row.role, row.index, row.pid))


def _worker(name: str, worker: Worker, catalog: Catalog, families: _Families) -> WorkerRow:
    states = Counter(dict.fromkeys(State, 0))
    dropped: Counter[str] = Counter()
    totals = [families.workers.rings[ring.id] for ring in worker.rings]
    for ring, accounts in zip(worker.rings, totals, strict=True):
        states.update(accounts.state_ns(ring, catalog[ring.id]))
        dropped.update(families.telemetry.rings[ring.id].dropped())
    return WorkerRow(
        name=name,
        role=worker.role,
        index=worker.index,
        gpu=catalog[worker.rings[-1].id].worker.gpu,
        pid=worker.pid,
        wall_ns=sum(ring.wall_ns for ring in worker.rings),
        states=dict(states),
        batches=sum(accounts.batches for accounts in totals),
        tokens=sum(accounts.batch_tokens for accounts in totals),
        step=_step_row(worker, families),
        phases=_phase_rows(worker, catalog, families),
        dropped={reason: count for reason, count in dropped.items() if count},
        evicted=sum(families.telemetry.rings[ring.id].evicted for ring in worker.rings),
        refused=[value for ring in worker.rings for value in catalog[ring.id].refused()],
        overflowed=[key for ring in worker.rings for key in catalog[ring.id].overflowed()],
        filled=[kind for ring in worker.rings for kind in catalog[ring.id].filled()],
        times_made=len(worker.rings),
        finished=all(ring.closed is not None for ring in worker.rings),
        killed=any(ring.closed.killed for ring in worker.rings if ring.closed),
        unseen=any(ring.closed.unseen for ring in worker.rings if ring.closed),
        place=_place(worker.rings[-1], totals[-1], catalog[worker.rings[-1].id]),
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


def _step_row(worker: Worker, families: _Families) -> PhaseRow | None:
    steps = _PhaseTotals()
    for ring in worker.rings:
        for _, error_id, histogram in families.phases.rings[ring.id].of_kind(Kind.STEP):
            steps.add(histogram, error_id)
    return steps.row("step", State.OTHER) if steps.histogram.count else None


def _phase_rows(worker: Worker, catalog: Catalog, families: _Families) -> list[PhaseRow]:
    phases: dict[tuple[str, State], _PhaseTotals] = {}
    for ring in worker.rings:
        names = catalog[ring.id]
        for name_id, error_id, histogram in families.phases.rings[ring.id].of_kind(Kind.PHASE):
            state, name = names.phase(name_id)
            phases.setdefault((name, state), _PhaseTotals()).add(histogram, error_id)
        for name_id, own_ns in families.workers.rings[
            ring.id
        ].self_ns.items():  # also of phases that never ended
            state, name = names.phase(name_id)
            phases.setdefault((name, state), _PhaseTotals()).self_ns += own_ns
    rows = [found.row(name, state) for (name, state), found in phases.items()]
    return sorted(rows, key=lambda row: (-row.self_ns, row.name, row.state))


def _place(ring: Ring, totals: WorkerTotals, names: RingNames) -> Place | None:
    """Return where a worker is, or ended: in open phases, or where an exception left it."""
    closed, work, failure = ring.closed, totals.open, totals.failure
    step, phases = (closed.step, closed.open) if closed else (work or OpenWork(None, ()))
    if step or phases:
        found = [
            OpenPhase(names.phase(name_id)[1], ring.last_ns - start_ns)
            for name_id, start_ns in sorted(phases, key=lambda phase: phase.start_ns)
        ]
        return Place(_step_text(step.id) if step else "", "", 0, found)
    if failure and (closed or work):
        text = f"step {failure.number}" if failure.number is not None else _step_text(failure.step)
        return Place(text, names.text(failure.error), ring.last_ns - failure.end_ns, [])
    return None


def _step_text(step: int) -> str:
    serial = step & SERIAL_MASK
    return f"its step {serial}" if serial else ""
