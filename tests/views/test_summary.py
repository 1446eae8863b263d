from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from otel_dflash.recording.frames import Frame
from otel_dflash.recording.run_info import RecordingError, RunInfo, create_recording
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.records import NameKind, State
from otel_dflash.views import units
from otel_dflash.views.analysis.answer import Verdict
from otel_dflash.views.analysis.verdict import Kind
from otel_dflash.views.render import render
from otel_dflash.views.summary import OpenPhase, PhaseRow, Place, Summary, WorkerRow, summarise
from tests.metrics.planted import PlantedRing, agent_frames

MS = 1_000_000
S = 1_000_000_000
STARTED = 1_767_268_800 * S  # 2026-01-01 12:00:00 UTC


def record(directory: Path, rings: list[PlantedRing], frames: list[Frame], started: int = STARTED) -> Path:
    create_recording(directory, RunInfo(directory.name, "node-a", started, 0, started, "0.1"))
    writer = RecordingWriter(directory, 1 << 30)
    for frame in [*(ring.names_frame() for ring in rings), *frames]:
        writer.append(frame.kind, frame.ring, frame.first, frame.count, frame.payload, frame.time_ns)
    writer.close()
    return directory


def two_workers(directory: Path) -> Path:
    drafter = PlantedRing(2, "drafter", 0, created_ns=0, gpu=5)
    for start in (0, 500 * MS):
        drafter.consumed(start + 300 * MS, producer=1)
        drafter.phase("queue_get", start, start + 300 * MS, "starved")
        drafter.phase("forward", start + 300 * MS, start + 500 * MS, error="ValueError" if start else None)
        drafter.step(start, start + 500 * MS, tokens=1000)
    target = PlantedRing(1, "target", 0, created_ns=0, gpu=0)
    target.phase("lock", 700 * MS, 750 * MS, "lock_wait")
    target.phase("pack_hidden", 100 * MS, 900 * MS)
    target.step(0, 950 * MS, tokens=2000)
    frames = [
        drafter.flush(),
        target.flush(),
        target.counters(1, 2000, 0, 0, 3),
        *agent_frames(10 * MS, cost=1300.0),
    ]
    frames.append(
        target.closed(
            1000 * MS, True, [("busy", "model_forward", 960 * MS), ("busy", "pack_hidden", 970 * MS)]
        )
    )
    frames.append(drafter.closed(1000 * MS))
    return record(directory, [drafter, target], frames)


def plain(summary: Summary, width: int = 80) -> str:
    file = io.StringIO()
    render(summary, Console(file=file, width=width, force_terminal=False))
    return file.getvalue()


def test_a_recording_is_summed_up(tmp_path: Path) -> None:
    summary = summarise(two_workers(tmp_path / "run-1"))
    assert summary == Summary(
        verdict=Verdict(
            kind=Kind.START_UP,
            role="target",
            workers=("target 0",),
            phase=None,
            queue=None,
            numbers={"share_of_run": 0.9525},
            confidence=0.5,
            remedy="wait until every worker has done a few turns",
            counterfactual=(),
            text="Start-up took 95 % of the run: only then had target 0 ended its first turn.",
        ),
        run="run-1",
        host="node-a",
        directory=tmp_path / "run-1",
        size_bytes=summary.size_bytes,
        started_wall_ns=STARTED,
        duration_ns=1000 * MS,
        records=11,
        workers=[
            WorkerRow(
                name="target 0",
                role="target",
                index=0,
                gpu=0,
                pid=100,
                wall_ns=1000 * MS,
                states={
                    State.BUSY: 790 * MS,
                    State.STARVED: 0,
                    State.BACKPRESSURED: 0,
                    State.LOCK_WAIT: 50 * MS,
                    State.OTHER: 160 * MS,
                    State.UNCAPTURED: 0,
                },
                batches=1,
                tokens=2000,
                step=PhaseRow("step", State.OTHER, 1, 0, 950 * MS, 0, 950 * MS, 950 * MS, 950 * MS),
                phases=[
                    PhaseRow(
                        "pack_hidden", State.BUSY, 1, 0, 800 * MS, 780 * MS, 800 * MS, 800 * MS, 800 * MS
                    ),
                    PhaseRow("lock", State.LOCK_WAIT, 1, 0, 50 * MS, 50 * MS, 50 * MS, 50 * MS, 50 * MS),
                    PhaseRow("model_forward", State.BUSY, 0, 0, 0, 10 * MS, 0, 0, 0),
                ],
                dropped={"ring_full": 3},
                evicted=0,
                filled=[],
                refused=[],
                overflowed=[],
                times_made=1,
                finished=True,
                killed=True,
                unseen=False,
                place=Place(
                    "", "", 0, [OpenPhase("model_forward", 40 * MS), OpenPhase("pack_hidden", 30 * MS)]
                ),
            ),
            WorkerRow(
                name="drafter 0",
                role="drafter",
                index=0,
                gpu=5,
                pid=100,
                wall_ns=1000 * MS,
                states={
                    State.BUSY: 400 * MS,
                    State.STARVED: 600 * MS,
                    State.BACKPRESSURED: 0,
                    State.LOCK_WAIT: 0,
                    State.OTHER: 0,
                    State.UNCAPTURED: 0,
                },
                batches=2,
                tokens=2000,
                step=PhaseRow("step", State.OTHER, 2, 0, 1000 * MS, 0, 500 * MS, 500 * MS, 500 * MS),
                phases=[
                    PhaseRow(
                        "queue_get", State.STARVED, 2, 0, 600 * MS, 600 * MS, 300 * MS, 300 * MS, 300 * MS
                    ),
                    PhaseRow("forward", State.BUSY, 2, 1, 400 * MS, 400 * MS, 200 * MS, 200 * MS, 200 * MS),
                ],
                dropped={},
                evicted=0,
                filled=[],
                refused=[],
                overflowed=[],
                times_made=1,
                finished=True,
                killed=False,
                unseen=False,
                place=None,
            ),
        ],
        missing_frames=0,
        malformed=0,
        agent_cpu_ns=10 * MS,
        cost_ns=1300.0,
        undelivered={},
        left_out=[],
    )
    assert summary.size_bytes == sum(path.stat().st_size for path in (tmp_path / "run-1").iterdir())


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_pipe_gets_plain_text_whatever_the_width(tmp_path: Path, width: int) -> None:
    summary = summarise(two_workers(tmp_path / "run[b]1"))
    assert (
        plain(summary, width).replace(str(tmp_path), "BASE").replace(units.size(summary.size_bytes), "SIZE")
        == """\
Start-up took 95 % of the run: only then had target 0 ended its first turn.
Wait until every worker has done a few turns.

run         run[b]1 on node-a, 2026-01-01 12:00:00 UTC, 1.00 s
recording   BASE/run[b]1, SIZE, 11 records
workers     2 in 1 process
throughput  target 2 000 tokens/s, drafter 2 000 tokens/s, over the whole run

worker and phase    count    total      p50      p99      max  of wall
──────────────────────────────────────────────────────────────────────
target 0 step           1   950 ms   950 ms   950 ms   950 ms
  pack_hidden           1   800 ms   800 ms   800 ms   800 ms   78.0 %
  lock                  1  50.0 ms  50.0 ms  50.0 ms  50.0 ms    5.0 %
  model_forward         0        -        -        -        -    1.0 %
drafter 0 step          2   1.00 s   500 ms   500 ms   500 ms
  queue_get             2   600 ms   300 ms   300 ms   300 ms   60.0 %
  forward, 1 error      2   400 ms   200 ms   200 ms   200 ms   40.0 %

                                back-
worker       busy  starved  pressured  lock_wait   other     wall
─────────────────────────────────────────────────────────────────
target 0   79.0 %        -          -      5.0 %  16.0 %  100.0 %
           790 ms                        50.0 ms  160 ms   1.00 s
drafter 0  40.0 %   60.0 %          -          -       -  100.0 %
           400 ms   600 ms                                 1.00 s

worker     batches  tokens  tokens/s
────────────────────────────────────
target 0         1   2 000     2 000
drafter 0        2   2 000     2 000

killed    target 0 in model_forward (40.0 ms) > pack_hidden (30.0 ms)
of wall   a phase without the phases inside it; the shares of a worker and of other sum to 100 %
losses    ring_full 3 (target 0: 3)
            the agent was stopped or too slow; OTEL_DFLASH_RING_BYTES makes rings larger
          the time of lost phases counts as other
own cost  trainer 0.00072 % of its workers' time, estimated (11 records x 1.30 us), agent 10.0 ms CPU (1 % of one core)
"""
    )


def in_terminal(summary: Summary, width: int) -> str:
    """Return what a terminal shows, without the spaces where a sentence wraps."""
    file = io.StringIO()
    render(summary, Console(file=file, width=width, force_terminal=True, color_system=None))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def test_a_terminal_of_60_columns_gets_a_folded_summary(tmp_path: Path) -> None:
    summary = summarise(two_workers(tmp_path / "run-1"))
    assert (
        in_terminal(replace(summary, directory=Path("runs/run-1"), size_bytes=2500), 60)
        == """\
Start-up took 95 % of the run: only then had target 0 ended
its first turn.
Wait until every worker has done a few turns.

run         run-1 on node-a, 2026-01-01 12:00:00 UTC, 1.00 s
recording   runs/run-1, 2.50 kB, 11 records
workers     2 in 1 process
throughput  target 2 000 tokens/s, drafter 2 000 tokens/s,
            over the whole run

worker and phase
  count    total      p50      p99      max  of wall
────────────────────────────────────────────────────
target 0 step
      1   950 ms   950 ms   950 ms   950 ms
  pack_hidden
      1   800 ms   800 ms   800 ms   800 ms   78.0 %
  lock
      1  50.0 ms  50.0 ms  50.0 ms  50.0 ms    5.0 %
  model_forward
      0        -        -        -        -    1.0 %
drafter 0 step
      2   1.00 s   500 ms   500 ms   500 ms
  queue_get
      2   600 ms   300 ms   300 ms   300 ms   60.0 %
  forward, 1 error
      2   400 ms   200 ms   200 ms   200 ms   40.0 %

worker
                       back-
    busy  starved  pressured  lock_wait   other     wall
────────────────────────────────────────────────────────
target 0
  79.0 %        -          -      5.0 %  16.0 %  100.0 %
  790 ms                        50.0 ms  160 ms   1.00 s
drafter 0
  40.0 %   60.0 %          -          -       -  100.0 %
  400 ms   600 ms                                 1.00 s

worker     batches  tokens  tokens/s
────────────────────────────────────
target 0         1   2 000     2 000
drafter 0        2   2 000     2 000

killed    target 0 in model_forward (40.0 ms) > pack_hidden
          (30.0 ms)
of wall   a phase without the phases inside it; the shares
          of a worker and of other sum to 100 %
losses    ring_full 3 (target 0: 3)
            the agent was stopped or too slow;
          OTEL_DFLASH_RING_BYTES makes rings larger
          the time of lost phases counts as other
own cost  trainer 0.00072 % of its workers' time, estimated
          (11 records x 1.30 us), agent 10.0 ms CPU (1 % of
          one core)
"""
    )


def test_a_terminal_is_never_given_a_cut_name(tmp_path: Path) -> None:
    ring = PlantedRing(1, "a_role_with_quite_a_long_name", 12)
    ring.phase("a_phase_with_a_name_that_is_longer_than_the_terminal_is_wide", 0, S)
    text = in_terminal(summarise(record(tmp_path / "run-1", [ring], [ring.flush()])), 40)
    assert (
        "a_role_with_quite_a_long_name 12\n"
        "  a_phase_with_a_name_that_is_longer_tha\n"
        "n_the_terminal_is_wide\n"
        "      1  1.00 s  1.00 s  1.00 s  1.00 s\n"
        "  100.0 %\n"
    ) in text
    assert max(map(len, text.splitlines())) == 40


def test_losses_and_what_is_not_known_are_said(tmp_path: Path) -> None:
    target = PlantedRing(1, "target", 0)
    target.slot(9, 0, None)
    target.phase("forward", 0, 10)
    again = PlantedRing(3, "target", 0, pid=101)
    stranger = PlantedRing(7, "drafter", 0)
    stranger.step(0, 1)
    frames = [
        target.flush(),
        target.counters(0, 0, 0, 0, 1200, 0, 2),
        again.counters(0, 0, 0, 0, 1),
        stranger.flush(),
    ]
    summary = summarise(record(tmp_path / "run-1", [target, again], frames))
    assert plain(summary).partition("\nlosses")[2] == (
        "    ring_full 1 201 (target 0 (pid 100): 1 200, target 0 (pid 101): 1)\n"
        "            the agent was stopped or too slow; OTEL_DFLASH_RING_BYTES makes rings larger\n"
        "          stale 2 (target 0 (pid 100): 2)\n"
        "            left open by an interrupt, or by a step inside another step of the same worker\n"
        "          malformed 1 (target 0 (pid 100): 1)\n"
        "          the time of lost phases counts as other\n"
        "          1 record of an unknown worker, or unreadable\n"
        "own cost  not known yet\n"
    )
    assert "workers    2 in 2 processes, 2 not finished" in plain(summary)


def test_values_that_were_not_read_are_named(tmp_path: Path) -> None:
    ring = PlantedRing(1, "drafter", 0)
    ring.phase("forward", 0, S)
    for text in ("grad_norm torch.Tensor", "tokens bool", "context float", "context str"):
        ring.name(NameKind.REFUSED, text)
    frames = [ring.names_frame(), ring.flush(), ring.counters(0, 0, 0, 0, 0, 0, 0, 9)]
    assert (
        plain(summarise(record(tmp_path / "run-1", [ring], frames)))
        .partition("\nlosses")[2]
        .startswith(
            "    unsupported_value 9 (drafter 0: 9)\n"
            "          step.consumed() or worker.resume() did not read context (float), context (str): give it what step.produced() returned\n"
            "          step.set() did not read grad_norm (torch.Tensor): give it an int, float, str or bool in range\n"
            "          step.set() did not read tokens (bool): give it an int of 0 or more\n"
        )
    )


def test_attributes_with_too_many_strings_are_named(tmp_path: Path) -> None:
    rings = [PlantedRing(number, "drafter", number) for number in (1, 2)]
    for ring, key in zip(rings, ("batch_id", "shard"), strict=True):
        ring.phase("forward", 0, S)
        ring.name(NameKind.OVERFLOWED, key)
        ring.name(NameKind.FILLED, "value")
    frames = [*(ring.flush() for ring in rings), rings[0].counters(*[0] * 8, 21)]
    assert (
        plain(summarise(record(tmp_path / "run-1", rings, frames)))
        .partition("\nlosses")[2]
        .startswith(
            "    name_limit 21 (drafter 1: 21)\n"
            "          step.set() got too many different strings for batch_id, shard: give it one of few, or a number\n"
        )
    )


def test_nothing_that_controls_a_terminal_is_printed(tmp_path: Path) -> None:
    evil = "\x1b[2J\n\x07\x9b\u202e"
    shown = r"\x1b[2J\n\x07\x9b\u202e"
    ring = PlantedRing(1, f"role{evil}", 0)
    ring.phase(f"phase{evil}", 0, S, error=f"error{evil}")
    ring.name(NameKind.REFUSED, f"key{evil} type{evil}")
    ring.name(NameKind.OVERFLOWED, f"strings{evil}")
    frames = [ring.flush(), ring.counters(*[0] * 7, 1), ring.closed(S, True, [("busy", f"open{evil}", 0)])]
    output = io.StringIO()
    render(summarise(record(tmp_path / "run-1", [ring], frames)), Console(file=output, width=200))
    printed = output.getvalue()
    assert [char for char in printed if not char.isprintable() and char != "\n"] == []
    for name in ("role", "phase", "key", "type", "strings", "open"):
        assert f"{name}{shown}" in printed, name


def test_a_loss_of_names_says_what_filled_the_table(tmp_path: Path) -> None:
    ring = PlantedRing(1, "drafter", 0)
    ring.phase("forward", 0, S)
    for kind in ("value", "thread", "text", "queue", "phase"):
        ring.name(NameKind.FILLED, kind)
    frames = [ring.names_frame(), ring.flush(), ring.counters(*[0] * 8, 21)]
    assert plain(summarise(record(tmp_path / "run-1", [ring], frames))).partition("\nlosses")[2] == (
        "    name_limit 21 (drafter 0: 21)\n"
        "          a worker has too many different phases: name a phase by one of few words\n"
        "          a worker took items from too many differently named queues: use few names\n"
        "          step.set() got too many different keys, or a worker too many different types of errors: use few\n"
        "          a worker ran in too many threads: later steps have no thread name; use a pool of threads\n"
        "          step.set() got too many different strings, or items came with too many different buckets\n"
        "own cost  not known yet\n"
    )


def test_items_that_a_queue_evicted_are_no_loss(tmp_path: Path) -> None:
    ring = PlantedRing(1, "target", 0)
    ring.phase("queue_put", 0, S)
    frames = [ring.names_frame(), ring.flush(), ring.counters(*[0] * 11, 1234)]
    footer = plain(summarise(record(tmp_path / "run-1", [ring], frames))).partition("\nevicted")[2]
    assert footer == (
        "   items that a queue dropped when one was put (target 0: 1 234)\n"
        "losses    no losses\n"
        "own cost  not known yet\n"
    )


def test_missing_frames_are_said(tmp_path: Path) -> None:
    ring = PlantedRing(1, "target", 0)
    directory = record(tmp_path / "run-1", [ring], [])
    first = next(directory.glob("segment-*"))
    first.rename(directory / "segment-000000000007.rec")
    writer = RecordingWriter(directory, 1 << 30, first_number=12)
    ring.phase("forward", 0, 10)
    for frame in (ring.names_frame(), ring.flush()):
        writer.append(frame.kind, frame.ring, frame.first, frame.count, frame.payload, frame.time_ns)
    writer.close()
    summary = summarise(directory)
    assert summary.missing_frames == 10
    assert "10 frames missing in the recording" in plain(summary)


NOTHING = (
    "No worker recorded a phase.\nPut `with worker.step():` around a turn of its loop, and phases inside. A spawned "
    "process records once it calls otel_dflash.start()."
)


def test_a_run_without_workers_is_said_plainly(tmp_path: Path) -> None:
    text = plain(summarise(record(tmp_path / "run-1", [], [])))
    assert text.startswith(f"{NOTHING}\n\nrun        run-1 on node-a, 2026-01-01 12:00:00 UTC, 0 ns\n")
    assert text.endswith("\n\nlosses    no losses\nown cost  not known yet\n")


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="is not a recording"):
        summarise(tmp_path)


def test_units_read_well() -> None:
    assert [
        units.duration(ns)
        for ns in (0, 999, 1_000, 1_500, 999_499, 999_600, 20 * MS, 999_700_000, 12 * S, 999 * S, 3_723 * S)
    ] == [
        "0 ns",
        "999 ns",
        "1.00 us",
        "1.50 us",
        "999 us",
        "1.00 ms",
        "20.0 ms",
        "1.00 s",
        "12.0 s",
        "999 s",
        "1 h 02 m",
    ]
    assert [units.size(count) for count in (0, 999, 1_000, 15_300_000, 2_147_483_648)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "15.3 MB",
        "2.15 GB",
    ]
    assert [units.plural(1, "record"), units.plural(2_000, "process")] == ["1 record", "2 000 processes"]
