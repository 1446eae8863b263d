"""Prints the summary of a run for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from rich.console import Console

from otel_dflash import semconv
from otel_dflash.recording.catalog import describe_filled, describe_overflow, describe_refusals
from otel_dflash.records import DROP_REASONS, Counter, NameKind, State
from otel_dflash.views.summary import PhaseRow, Summary, WorkerRow, summarise
from otel_dflash.views.table import Table, styled
from otel_dflash.views.units import duration, integer, percent, plural, size, small_percent

# The agent's CPU time is a share of runs at least so long; of a shorter one it is mostly that of its start.
SHARE_OF_A_RUN_NS_MIN: Final = 1_000_000_000
OPEN_SHOWN_NS_MIN: Final = 1_000_000_000
_STATE_COLUMNS: Final = {  # of every table; UNCAPTURED has one where there is such time
    State.BUSY: "busy",
    State.STARVED: "starved",
    State.BACKPRESSURED: "back-\npressured",
    State.LOCK_WAIT: "lock_wait",
    State.OTHER: "other",
}
REMEDIES: Final = {
    DROP_REASONS[Counter.DROPPED_RING_FULL]: (
        "the agent was stopped or too slow; OTEL_DFLASH_RING_BYTES makes rings larger"
    ),
    DROP_REASONS[Counter.DROPPED_WRONG_THREAD]: (
        "several threads used one worker inside a step; give each thread its own worker"
    ),
    DROP_REASONS[Counter.DROPPED_STALE]: (
        "left open by an interrupt, or by a step inside another step of the same worker"
    ),
    DROP_REASONS[Counter.UNMATCHED]: (
        "put before wrap_queue, in another process, or by a method that is not wrapped; or steps of several "
        "workers are open in one thread, and not just one of them is in a phase that waits. There, use "
        "step.produced() and consumed()"
    ),
    semconv.DROP_NO_RING: (
        "the tmpfs and the memory were full (df -h /dev/shm), or the agent was stopped or far behind "
        "(agent.log); create a worker once, not for each step"
    ),
    semconv.DROP_NOT_RECORDED: "the disk had no room for the recording",
}
# With these records phases are lost, and their time is in no phase.
TIME_LOST: Final = {
    DROP_REASONS[Counter.DROPPED_RING_FULL],
    DROP_REASONS[Counter.DROPPED_WRONG_THREAD],
    DROP_REASONS[Counter.DROPPED_STALE],
    semconv.DROP_MALFORMED,
    semconv.DROP_NOT_RECORDED,
}


def show(paths: Sequence[Path], console: Console) -> int:
    """Show where the time of RUN went, per worker and phase. The run may still be running.

    RUN is a run id, the beginning of one, the path of a recording, or `latest`: the newest that has records.

    \b
    Examples:
      otel-dflash summary
      otel-dflash summary night-7
      otel-dflash summary /mnt/runs/night-7
    """
    render(summarise(paths[0]), console)
    return 0


def render(summary: Summary, console: Console) -> None:
    """Print a summary: in a terminal folded to its width, else at full width."""
    verdict = summary.verdict
    console.print(styled(verdict.text, style="bold"), soft_wrap=not console.is_terminal)
    if verdict.remedy:
        console.print(
            styled(f"{verdict.remedy[0].upper()}{verdict.remedy[1:]}."), soft_wrap=not console.is_terminal
        )
    tables = [_header(summary), _footer(summary)]
    if summary.workers:
        tables[1:1] = [
            _phase_table(summary.workers),
            _state_table(summary.workers),
            _work_table(summary),
        ]
    for table in tables:
        console.print()
        table.print(console)


def losses(summary: Summary) -> Iterator[str]:
    """Yield a line for each kind of loss, with its remedy; none if nothing was lost."""
    if summary.unserved:
        yield summary.unserved
    if summary.uncounted_drops:
        yield f"{plural(summary.uncounted_drops, 'more record')} dropped since the agent last counted them"
    if summary.unrecorded_steps:
        yield f"{semconv.DROP_NO_RING} {plural(summary.unrecorded_steps, 'step')} of workers that got no ring"
        yield f"  {REMEDIES[semconv.DROP_NO_RING]}"
    for reason, count in sorted(summary.dropped.items(), key=lambda item: -item[1]):
        lost = [
            f"{worker.name}: {integer(worker.dropped[reason])}"
            for worker in summary.workers
            if reason in worker.dropped
        ]
        yield f"{reason} {integer(count)} ({', '.join(lost)})"
        if reason in REMEDIES:
            yield f"  {REMEDIES[reason]}"
    refused = sorted({value for worker in summary.workers for value in worker.refused})
    yield from describe_refusals(refused)
    overflowed = sorted({key for worker in summary.workers for key in worker.overflowed})
    if overflowed:
        yield describe_overflow(overflowed)
    filled = {kind for worker in summary.workers for kind in worker.filled}
    yield from describe_filled(filled - ({NameKind.VALUE.name.lower()} if overflowed else set()))
    if TIME_LOST & summary.dropped.keys() or summary.missing_frames:
        yield "the time of lost phases counts as other"
    if summary.missing_frames:
        yield f"{plural(summary.missing_frames, 'frame')} missing in the recording"
    if summary.malformed:
        yield f"{plural(summary.malformed, 'record')} of an unknown worker, or unreadable"
    yield from summary.left_out


def _pairs() -> Table:
    """Return a table without a header: what it is, and the text."""
    return Table("<", "<")


def _add_pair(pairs: Table, name: str, text: str | Sequence[str]) -> None:
    pairs.add_row(styled(name, style="dim"), text)


def _header(summary: Summary) -> Table:
    started = datetime.fromtimestamp(summary.started_wall_ns / 1e9, tz=timezone.utc)
    unfinished = sum(not worker.finished for worker in summary.workers)
    live = f", {integer(unfinished)} not finished" if unfinished else ""
    pairs = _pairs()
    _add_pair(
        pairs,
        "run",
        f"{summary.run} on {summary.host}, {started:%Y-%m-%d %H:%M:%S} UTC, {duration(summary.duration_ns)}",
    )
    _add_pair(
        pairs,
        "recording",
        f"{summary.directory}, {size(summary.size_bytes)}, {plural(summary.records, 'record')}",
    )
    _add_pair(
        pairs, "workers", f"{integer(len(summary.workers))} in {plural(summary.processes, 'process')}{live}"
    )
    rates = []
    for role in dict.fromkeys(worker.role for worker in summary.workers):
        tokens = sum(worker.tokens for worker in summary.workers if worker.role == role)
        if tokens:
            rates.append(f"{role} {_rate(tokens, summary.duration_ns)} tokens/s")
    if rates:
        _add_pair(pairs, "throughput", f"{', '.join(rates)}, over the whole run")
    return pairs


def _phase_table(workers: list[WorkerRow]) -> Table:
    table = Table("<worker and phase", "count", "total", "p50", "p99", "max", "of wall")
    for worker in workers:
        name = f"{worker.name} {_labelled(worker.step)}" if worker.step else worker.name
        cells = _cells(worker.step) if worker.step else [""] * 5
        table.add_row(styled(name, style="bold"), *cells, "")
        for row in worker.phases:
            share = row.self_ns / worker.wall_ns if worker.wall_ns else 0
            table.add_row(f"  {_labelled(row)}", *_cells(row), percent(share))
    return table


def _labelled(row: PhaseRow) -> str:
    return f"{row.name}, {plural(row.errors, 'error')}" if row.errors else row.name


def _cells(row: PhaseRow) -> list[str]:
    if not row.count:  # never ended
        return ["0", "-", "-", "-", "-"]
    return [integer(row.count), *(duration(ns) for ns in (row.total_ns, row.p50_ns, row.p99_ns, row.max_ns))]


def _state_table(workers: list[WorkerRow]) -> Table:
    spent = {state for worker in workers for state, state_ns in worker.states.items() if state_ns}
    states = [state for state in State if state in {*_STATE_COLUMNS, *spent}]
    heads = [_STATE_COLUMNS.get(state, state.name.lower()) for state in states]
    table = Table("<worker", *heads, "wall")
    for worker in workers:
        cells = [_state_cell(worker.states[state], worker.wall_ns) for state in states]
        table.add_row(styled(worker.name, style="bold"), *cells, [percent(1), duration(worker.wall_ns)])
    return table


def _state_cell(state_ns: int, wall_ns: int) -> list[str]:
    return [percent(state_ns / wall_ns), duration(state_ns)] if state_ns and wall_ns else ["-"]


def _work_table(summary: Summary) -> Table:
    table = Table("<worker", "batches", "tokens", "tokens/s")
    for worker in summary.workers:
        tokens = integer(worker.tokens) if worker.tokens else "-"
        rate = _rate(worker.tokens, summary.duration_ns) if worker.tokens else "-"
        table.add_row(styled(worker.name, style="bold"), integer(worker.batches), tokens, rate)
    return table


def _rate(count: int, ns: int) -> str:
    return integer(round(count * 1e9 / ns)) if ns else "-"


def _footer(summary: Summary) -> Table:
    pairs = _pairs()
    for worker in summary.workers:
        if found := _end(worker):
            _add_pair(pairs, *found)
    if any(worker.unseen for worker in summary.workers):
        _add_pair(
            pairs,
            "",
            "no agent was running when they were killed: their times end at the last sign of life",
        )
    again = [
        f"{worker.name}: {integer(worker.times_made)} times"
        for worker in summary.workers
        if worker.times_made > 1
    ]
    if again:
        _add_pair(
            pairs,
            "made again",
            f"{', '.join(again)}; their times add up. Make a worker once, and close() it when it is done",
        )
    evicted = [f"{worker.name}: {integer(worker.evicted)}" for worker in summary.workers if worker.evicted]
    if evicted:
        _add_pair(pairs, "evicted", f"items that a queue dropped when one was put ({', '.join(evicted)})")
    if any(row.self_ns < row.total_ns for worker in summary.workers for row in worker.phases):
        _add_pair(
            pairs,
            "of wall",
            "a phase without the phases inside it; the shares of a worker and of other sum to 100 %",
        )
    _add_pair(pairs, "losses", list(losses(summary)) or "no losses")
    for signal, reason in summary.undelivered.items():
        again_command = f"otel-dflash replay {summary.run} --endpoint URL"
        _add_pair(pairs, "not sent", f"{signal}: {reason}; everything is recorded: {again_command}")
    _add_pair(pairs, "own cost", _own_cost(summary))
    return pairs


def _end(worker: WorkerRow) -> tuple[str, str] | None:
    """Return what became of a worker, in a word, and where; None if there is nothing to report."""
    place = worker.place
    if place is None:
        return ("killed", worker.name) if worker.killed else None
    phases = [f"{phase.name} ({duration(phase.age_ns)})" for phase in place.open_phases]
    where = " > ".join(filter(None, [place.step, *phases]))
    text = f"{worker.name} in {where}" if where else worker.name
    if worker.killed:
        return "killed", text
    if place.error:
        ago = "" if worker.finished else f", {duration(place.age_ns)} ago"
        return "failed", f"{text}: {place.error}{ago}"
    if worker.finished:
        return "cut off", text
    if any(phase.age_ns >= OPEN_SHOWN_NS_MIN for phase in place.open_phases):
        return "open", text
    return None


def _own_cost(summary: Summary) -> str:
    parts = []
    if summary.overhead is not None and summary.cost_ns is not None:
        records = f"{plural(summary.records, 'record')} x {duration(round(summary.cost_ns))}"
        parts.append(f"trainer {small_percent(summary.overhead)} of its workers' time, estimated ({records})")
    if summary.agent_cpu_ns is not None:
        share = ""
        if summary.duration_ns >= SHARE_OF_A_RUN_NS_MIN:
            share = f" ({small_percent(summary.agent_cpu_ns / summary.duration_ns)} of one core)"
        parts.append(f"agent {duration(summary.agent_cpu_ns)} CPU{share}")
    return ", ".join(parts) or "not known yet"
