"""Prints a summary for people: on a terminal or piped, names are never cut."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Final

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from otel_dflash import semconv
from otel_dflash.records import DROP_REASONS, Counter, State
from otel_dflash.views.summary import PhaseRow, Summary, WorkerRow
from otel_dflash.views.units import duration, integer, percent, plural, size, small_percent

SHARE_OF_A_RUN_NS_MIN: Final = 1_000_000_000
REMEDIES: Final = {
    DROP_REASONS[Counter.DROPPED_RING_FULL]: "the agent was stopped or too slow; OTEL_DFLASH_RING_BYTES makes rings larger",
    DROP_REASONS[Counter.DROPPED_WRONG_THREAD]: "threads shared a worker inside a step; give each a worker of its own",
    DROP_REASONS[Counter.DROPPED_STALE]: "left open by an interrupt, or a step inside a step of the same worker",
    DROP_REASONS[Counter.DROPPED_NAME]: "too many different names or strings in step.set()",
    DROP_REASONS[
        Counter.UNMATCHED
    ]: "put before wrap_queue, in another process, or by other ways; step.produced() and consumed() are by hand",
    semconv.DROP_NOT_RECORDED: "the disk had no room for the recording",
}
# Reasons that lose phases, whose time is then in none.
TIME_LOST: Final = {
    *(DROP_REASONS[c] for c in (Counter.DROPPED_RING_FULL, Counter.DROPPED_WRONG_THREAD, Counter.DROPPED_STALE)),
    semconv.DROP_MALFORMED,
    semconv.DROP_NOT_RECORDED,
}


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
    again = [f"{worker.name}: {integer(worker.times_made)} times" for worker in summary.workers if worker.times_made > 1]
    if again:
        pairs.add_row("made again", Text(f"{', '.join(again)}; their times add up. Make a worker once, and close() it when it is done"))
    if any(row.self_ns < row.total_ns for worker in summary.workers for row in worker.phases):
        pairs.add_row("of wall", Text("a phase without the phases inside it, so that a worker's shares sum to 100 % with other"))
    pairs.add_row("losses", Text("\n".join(losses(summary)) or "no losses"))
    for signal, reason in summary.undelivered.items():
        pairs.add_row("not sent", Text(f"{signal}: {reason}; all is recorded: otel-dflash replay {summary.run} --endpoint URL"))
    pairs.add_row("own cost", Text(_own_cost(summary)))
    return pairs


def losses(summary: Summary) -> Iterator[str]:
    """Yield a line for each kind of loss, with its remedy; none when nothing was lost."""
    for reason, count in sorted(summary.dropped.items(), key=lambda item: -item[1]):
        hit = {worker.name: worker.dropped[reason] for worker in summary.workers if reason in worker.dropped}
        yield f"{reason} {integer(count)} ({', '.join(f'{name}: {integer(lost)}' for name, lost in hit.items())})"
        if reason in REMEDIES:
            yield f"  {REMEDIES[reason]}"
    refused = sorted({value for worker in summary.workers for value in worker.refused})
    if refused:
        yield f"step.set() did not read {', '.join(refused)}: give it an int, float, str or bool in range"
    if TIME_LOST & summary.dropped.keys() or summary.missing_frames:
        yield "the time of lost phases reads as other"
    if summary.missing_frames:
        yield f"{plural(summary.missing_frames, 'frame')} missing in the recording"
    if summary.malformed:
        yield f"{plural(summary.malformed, 'record')} of no known worker, or unreadable"
    yield from summary.left_out


def _own_cost(summary: Summary) -> str:
    parts = []
    if summary.overhead is not None and summary.cost_ns is not None:
        trainer = f"{plural(summary.records, 'record')} x {duration(round(summary.cost_ns))}"
        parts.append(f"trainer {small_percent(summary.overhead)} of its workers' time, estimated ({trainer})")
    if summary.agent_cpu_ns is not None:
        is_long = summary.duration_ns >= SHARE_OF_A_RUN_NS_MIN  # a shorter run says only what starting costs
        share = f" ({small_percent(summary.agent_cpu_ns / summary.duration_ns)} of one core)" if is_long else ""
        parts.append(f"agent {duration(summary.agent_cpu_ns)} CPU{share}")
    return ", ".join(parts) or "not known yet"
