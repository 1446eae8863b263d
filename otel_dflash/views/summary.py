"""Where the time of a run went: `summarise` reads a recording into data, `render` prints it.

Shares are of a worker's wall time, from its ring's creation to its last record, or to its end where that is known. A phase's share is
that of its self time, so the shares of a worker's phases and of *other* sum to 100 %.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from otel_dflash import semconv
from otel_dflash.agent.catalog import RingNames, WorkerInfo
from otel_dflash.agent.fold import Fold, RingTotals
from otel_dflash.agent.histogram import Histogram
from otel_dflash.agent.recording import RecordingReader, RunInfo
from otel_dflash.records import Kind, State
from otel_dflash.views.units import duration, integer, percent, plural, size, small_percent
from otel_dflash.views.verdict import Account, verdict

ROLE_ORDER = ("target", "drafter")  # then the others by name
TIME_LOST = {"ring_full", "wrong_thread", "stale", semconv.DROP_MALFORMED, semconv.DROP_NOT_RECORDED}  # reasons that lose phases
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


def _summary(fold: Fold, info: RunInfo, directory: Path, missing_frames: int) -> Summary:
    workers = _workers(fold)
    rings = fold.rings.values()
    first_ns = min((totals.created_ns for totals in rings), default=info.anchor_mono_ns)
    last_ns = max((totals.last_ns for totals in rings), default=first_ns)
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
    )


def _account(worker: WorkerRow) -> Account:
    busy = {phase.name: phase.self_ns for phase in worker.phases if phase.state == State.BUSY}
    has_gpu = worker.gpu is not None
    return Account(worker.role, worker.index, has_gpu, worker.wall_ns, worker.states, busy, worker.sources)


def _workers(fold: Fold) -> list[WorkerRow]:
    found: dict[tuple[int, str, int], list[tuple[RingTotals, RingNames]]] = {}
    for ring, totals in fold.rings.items():
        worker = fold.catalog[ring].worker
        found.setdefault((worker.pid, worker.role, worker.index), []).append((totals, fold.catalog[ring]))
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


def render(summary: Summary, console: Console) -> None:
    """Print it; whatever the width, nothing is cut: a pipe gets plain text, a terminal wraps only the sentences."""
    console.print(Text(summary.verdict, style="bold"), soft_wrap=not console.is_terminal)
    console.print()
    print_uncut(console, _header(summary), may_wrap=True)
    if summary.workers:
        for table in (_phase_table(summary.workers), _state_table(summary.workers), _work_table(summary.workers)):
            console.print()
            print_uncut(console, table)
    console.print()
    print_uncut(console, _footer(summary), may_wrap=True)


def print_uncut(console: Console, table: Table, may_wrap: bool = False) -> None:
    """Print a table as wide as it is, without the spaces that rich puts at the ends of lines."""
    options = console.options.update(max_width=10_000)
    width = Measurement.get(console, options, table).maximum
    if may_wrap and console.is_terminal:
        width = min(width, console.width)
    for line in console.render_lines(table, options.update(width=width), pad=False):
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        text.rstrip()
        console.print(text, soft_wrap=True)


def new_table(*columns: str) -> Table:
    """Return a table of right-aligned columns; "<" before a name aligns it left."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name.lstrip("<"), justify="left" if name.startswith("<") else "right", vertical="bottom", no_wrap=True)
    return table


def _pairs() -> Table:
    pairs = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    pairs.add_column(style="dim", no_wrap=True)
    pairs.add_column(overflow="fold")
    return pairs


def _header(summary: Summary) -> Table:
    """User's names go into Text: rich would read markup in a string."""
    started = datetime.fromtimestamp(summary.started_wall_ns / 1e9, tz=timezone.utc)
    pairs = _pairs()
    pairs.add_row("run", Text(f"{summary.run} on {summary.host}, {started:%Y-%m-%d %H:%M:%S} UTC, {duration(summary.duration_ns)}"))
    pairs.add_row("recording", Text(f"{summary.directory}, {size(summary.size_bytes)}, {plural(summary.records, 'record')}"))
    going_on = sum(not worker.finished for worker in summary.workers)
    live = f", {integer(going_on)} not finished" if going_on else ""
    pairs.add_row("workers", Text(f"{integer(len(summary.workers))} in {plural(summary.processes, 'process')}{live}"))
    rates = []
    for role in dict.fromkeys(worker.role for worker in summary.workers):
        tokens = sum(worker.tokens for worker in summary.workers if worker.role == role)
        if tokens:
            rates.append(f"{role} {_rate(tokens, summary.duration_ns)} tokens/s")
    if rates:
        pairs.add_row("throughput", Text(", ".join(rates)))
    return pairs


def _phase_table(workers: list[WorkerRow]) -> Table:
    table = new_table("<worker and phase", "count", "total", "p50", "p99", "max", "of wall")
    for worker in workers:
        if worker.step:
            table.add_row(Text(f"{worker.name} {_labelled(worker.step)}", style="bold"), *_cells(worker.step), "")
        else:
            table.add_row(Text(worker.name, style="bold"))
        for row in worker.phases:
            table.add_row(Text(f"  {_labelled(row)}"), *_cells(row), percent(row.self_ns / worker.wall_ns if worker.wall_ns else 0))
    return table


def _labelled(row: PhaseRow) -> str:
    return f"{row.name}, {plural(row.errors, 'error')}" if row.errors else row.name


def _cells(row: PhaseRow) -> list[str]:
    if not row.count:  # never ended
        return ["0", "-", "-", "-", "-"]
    return [integer(row.count), *(duration(ns) for ns in (row.total_ns, row.p50_ns, row.p99_ns, row.max_ns))]


def _state_table(workers: list[WorkerRow]) -> Table:
    table = new_table("<worker", "busy", "starved", "back-\npressured", "lock_wait", "other", "wall")
    for worker in workers:
        cells = [_state_cell(worker.states[state], worker.wall_ns) for state in State]
        table.add_row(Text(worker.name + "\n", style="bold"), *cells, f"{percent(1)}\n{duration(worker.wall_ns)}")
    return table


def _state_cell(state_ns: int, wall_ns: int) -> str:
    return f"{percent(state_ns / wall_ns)}\n{duration(state_ns)}" if state_ns and wall_ns else "-\n"


def _work_table(workers: list[WorkerRow]) -> Table:
    table = new_table("<worker", "batches", "tokens", "tokens/s")
    for worker in workers:
        tokens = [integer(worker.tokens), _rate(worker.tokens, worker.wall_ns)] if worker.tokens else ["-", "-"]
        table.add_row(Text(worker.name, style="bold"), integer(worker.batches), *tokens)
    return table


def _rate(count: int, ns: int) -> str:
    return integer(round(count * 1e9 / ns)) if ns else "-"


def _footer(summary: Summary) -> Table:
    pairs = _pairs()
    for worker in summary.workers:
        if worker.killed or worker.open_phases:
            inside = " > ".join(f"{phase.name} ({duration(phase.age_ns)})" for phase in worker.open_phases)
            pairs.add_row("killed" if worker.killed else "cut off", Text(f"{worker.name}{' in ' + inside if inside else ''}"))
    if any(row.self_ns < row.total_ns for worker in summary.workers for row in worker.phases):
        pairs.add_row("of wall", Text("a phase without the phases inside it, so that a worker's shares sum to 100 % with other"))
    pairs.add_row("losses", Text("\n".join(_losses(summary)) or "no losses"))
    pairs.add_row("own cost", Text(_own_cost(summary)))
    return pairs


def _losses(summary: Summary) -> Iterator[str]:
    for reason, count in sorted(summary.dropped.items(), key=lambda item: -item[1]):
        hit = {worker.name: worker.dropped[reason] for worker in summary.workers if reason in worker.dropped}
        yield f"{reason} {integer(count)} ({', '.join(f'{name}: {integer(lost)}' for name, lost in hit.items())})"
    refused = sorted({value for worker in summary.workers for value in worker.refused})
    if refused:
        yield f"step.set() did not read {', '.join(refused)}: give it an int, float, str or bool in range"
    if TIME_LOST & summary.dropped.keys() or summary.missing_frames:
        yield "the time of lost phases reads as other"
    if summary.missing_frames:
        yield f"{plural(summary.missing_frames, 'frame')} missing in the recording"
    if summary.malformed:
        yield f"{plural(summary.malformed, 'record')} of no known worker, or unreadable"


def _own_cost(summary: Summary) -> str:
    parts = []
    if summary.overhead is not None and summary.cost_ns is not None:
        trainer = f"{plural(summary.records, 'record')} x {duration(round(summary.cost_ns))}"
        parts.append(f"trainer {small_percent(summary.overhead)} of its workers' time, estimated ({trainer})")
    if summary.agent_cpu_ns is not None:
        share = f" ({small_percent(summary.agent_cpu_ns / summary.duration_ns)} of one core)" if summary.duration_ns else ""
        parts.append(f"agent {duration(summary.agent_cpu_ns)} CPU{share}")
    return ", ".join(parts) or "not known yet"
