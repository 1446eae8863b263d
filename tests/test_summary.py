from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from otel_dflash.agent.frames import Frame
from otel_dflash.agent.recording import RecordingError, RecordingWriter, RunInfo, create_recording
from otel_dflash.records import NameKind, State
from otel_dflash.views import runs, units
from otel_dflash.views.render import render
from otel_dflash.views.summary import OpenPhase, PhaseRow, Summary, WorkerRow, summarise
from otel_dflash.views.verdict import Account, label, verdict
from tests.planted import PlantedRing, agent_frame

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
    frames = [drafter.flush(), target.flush(), target.counters(1, 2000, 0, 0, 3), agent_frame(10 * MS, cost=1300.0)]
    frames.append(target.closed(1000 * MS, True, [("busy", "model_forward", 960 * MS), ("busy", "pack_hidden", 970 * MS)]))
    frames.append(drafter.closed(1000 * MS))
    return record(directory, [drafter, target], frames)


def plain(summary: Summary, width: int = 80) -> str:
    file = io.StringIO()
    render(summary, Console(file=file, width=width, force_terminal=False))
    return file.getvalue()


def test_a_recording_is_summed_up(tmp_path: Path) -> None:
    summary = summarise(two_workers(tmp_path / "run-1"))
    assert summary == Summary(
        verdict="drafter 0 starved 60 % of its time: target 0 is the bottleneck (busy 79 %); it spends 78 % in pack_hidden.",
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
                states={State.BUSY: 790 * MS, State.STARVED: 0, State.BACKPRESSURED: 0, State.LOCK_WAIT: 50 * MS, State.OTHER: 160 * MS},
                batches=1,
                tokens=2000,
                step=PhaseRow("step", State.OTHER, 1, 0, 950 * MS, 0, 950 * MS, 950 * MS, 950 * MS),
                phases=[
                    PhaseRow("pack_hidden", State.BUSY, 1, 0, 800 * MS, 780 * MS, 800 * MS, 800 * MS, 800 * MS),
                    PhaseRow("lock", State.LOCK_WAIT, 1, 0, 50 * MS, 50 * MS, 50 * MS, 50 * MS, 50 * MS),
                    PhaseRow("model_forward", State.BUSY, 0, 0, 0, 10 * MS, 0, 0, 0),
                ],
                dropped={"ring_full": 3},
                refused=[],
                sources={},
                times_made=1,
                finished=True,
                killed=True,
                open_phases=[OpenPhase("model_forward", 40 * MS), OpenPhase("pack_hidden", 30 * MS)],
            ),
            WorkerRow(
                name="drafter 0",
                role="drafter",
                index=0,
                gpu=5,
                pid=100,
                wall_ns=1000 * MS,
                states={State.BUSY: 400 * MS, State.STARVED: 600 * MS, State.BACKPRESSURED: 0, State.LOCK_WAIT: 0, State.OTHER: 0},
                batches=2,
                tokens=2000,
                step=PhaseRow("step", State.OTHER, 2, 0, 1000 * MS, 0, 500 * MS, 500 * MS, 500 * MS),
                phases=[
                    PhaseRow("queue_get", State.STARVED, 2, 0, 600 * MS, 600 * MS, 300 * MS, 300 * MS, 300 * MS),
                    PhaseRow("forward", State.BUSY, 2, 1, 400 * MS, 400 * MS, 200 * MS, 200 * MS, 200 * MS),
                ],
                dropped={},
                refused=[],
                sources={"target": 2},
                times_made=1,
                finished=True,
                killed=False,
                open_phases=[],
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
drafter 0 starved 60 % of its time: target 0 is the bottleneck (busy 79 %); it spends 78 % in pack_hidden.

run         run[b]1 on node-a, 2026-01-01 12:00:00 UTC, 1.00 s
recording   BASE/run[b]1, SIZE, 11 records
workers     2 in 1 process
throughput  target 2 000 tokens/s, drafter 2 000 tokens/s

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
of wall   a phase without the phases inside it, so that a worker's shares sum to 100 % with other
losses    ring_full 3 (target 0: 3)
            the agent was stopped or too slow; OTEL_DFLASH_RING_BYTES makes rings larger
          the time of lost phases reads as other
own cost  trainer 0.00072 % of its workers' time, estimated (11 records x 1.30 us), agent 10.0 ms CPU (1 % of one core)
"""
    )


def test_a_terminal_is_never_given_a_cut_name(tmp_path: Path) -> None:
    ring = PlantedRing(1, "a_role_with_quite_a_long_name", 12)
    ring.phase("a_phase_with_a_name_that_is_longer_than_the_terminal_is_wide", 0, S)
    summary = summarise(record(tmp_path / "run-1", [ring], [ring.flush()]))
    file = io.StringIO()
    render(summary, Console(file=file, width=40, force_terminal=True, color_system=None))
    assert "  a_phase_with_a_name_that_is_longer_than_the_terminal_is_wide      1  1.00 s" in file.getvalue()
    assert "a_role_with_quite_a_long_name 12\n" in file.getvalue()


def test_losses_and_what_is_not_known_are_said(tmp_path: Path) -> None:
    target = PlantedRing(1, "target", 0)
    target.slot(9, 0, None)
    target.phase("forward", 0, 10)
    again = PlantedRing(3, "target", 0, pid=101)
    stranger = PlantedRing(7, "drafter", 0)
    stranger.step(0, 1)
    frames = [target.flush(), target.counters(0, 0, 0, 0, 1200, 0, 2), again.counters(0, 0, 0, 0, 1), stranger.flush()]
    summary = summarise(record(tmp_path / "run-1", [target, again], frames))
    assert plain(summary).partition("\nlosses")[2] == (
        "    ring_full 1 201 (target 0 (pid 100): 1 200, target 0 (pid 101): 1)\n"
        "            the agent was stopped or too slow; OTEL_DFLASH_RING_BYTES makes rings larger\n"
        "          stale 2 (target 0 (pid 100): 2)\n"
        "            left open by an interrupt, or a step inside a step of the same worker\n"
        "          malformed 1 (target 0 (pid 100): 1)\n"
        "          the time of lost phases reads as other\n"
        "          1 record of no known worker, or unreadable\n"
        "own cost  not known yet\n"
    )
    assert "workers    2 in 2 processes, 2 not finished" in plain(summary)


def test_values_that_were_not_read_are_named(tmp_path: Path) -> None:
    ring = PlantedRing(1, "drafter", 0)
    ring.phase("forward", 0, S)
    ring.name(NameKind.REFUSED, "grad_norm torch.Tensor")
    frames = [ring.names_frame(), ring.flush(), ring.counters(0, 0, 0, 0, 0, 0, 0, 9)]
    assert (
        plain(summarise(record(tmp_path / "run-1", [ring], frames)))
        .partition("\nlosses")[2]
        .startswith(
            "    unsupported_value 9 (drafter 0: 9)\n"
            "          step.set() did not read grad_norm (torch.Tensor): give it an int, float, str or bool in range\n"
        )
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


def test_a_run_without_workers_is_said_plainly(tmp_path: Path) -> None:
    text = plain(summarise(record(tmp_path / "run-1", [], [])))
    assert text.startswith(f"{NOTHING}\n\nrun        run-1 on node-a, 2026-01-01 12:00:00 UTC, 0 ns\n")
    assert text.endswith("\n\nlosses    no losses\nown cost  not known yet\n")


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="is not a recording"):
        summarise(tmp_path)


def account(
    role: str,
    index: int,
    busy: int = 0,
    starved: int = 0,
    backpressured: int = 0,
    lock_wait: int = 0,
    gpu: bool = True,
    phases: dict[str, int] | None = None,
    sources: dict[str, int] | None = None,
) -> Account:
    """Return a worker that lived for 100; what is not said is in no phase."""
    spent = [busy, starved, backpressured, lock_wait]
    states = dict(zip(State, [*spent, 100 - sum(spent)], strict=True))
    return Account(role, index, gpu, 100, states, phases or {}, sources or {})


FED = {"target": 5}
NOTHING = "No worker recorded a phase: put `with worker.step():` around a turn of its loop, and phases inside."
VERDICTS = {
    "slow target": (
        [account("target", i, busy=90, phases={"forward": 40, "pack_hidden": 48 if i == 1 else 20}) for i in range(5)]
        + [account("drafter", i, busy=39, starved=61, sources=FED) for i in range(3)],
        "drafter 0..2 starved 61 % of their time: target 0..4 are the bottleneck (busy 90 %); target 1 spends 48 % in pack_hidden.",
    ),
    "all targets alike": (
        [account("target", i, busy=80, phases={"forward": 60, "pack_hidden": 20}) for i in range(2)]
        + [account("drafter", 0, busy=10, starved=90, sources=FED)],
        "drafter 0 starved 90 % of its time: target 0, 1 are the bottleneck (busy 80 %); they spend 60 % in forward.",
    ),
    "slow drafters": (
        [
            account("target", 0, busy=30, backpressured=70),
            account("drafter", 0, busy=95, sources=FED, phases={"backward": 55, "forward": 40}),
        ],
        "target 0 backpressured 70 % of its time: drafter 0 is the bottleneck (busy 95 %); it spends 55 % in backward.",
    ),
    "through a role that waits itself": (
        [
            account("target", 0, busy=70, phases={"forward": 10, "pack_hidden": 20}),
            account("drafter", 0, busy=20, starved=80, sources={"postprocess": 9}),
            account("postprocess", 0, busy=10, starved=90, gpu=False, sources={"target": 9}),
        ],
        "drafter 0 starved 80 % of its time: target 0 is the bottleneck (busy 70 %).",
    ),
    "past a role that only passes items on": (
        [
            account("target", 0, busy=30, backpressured=70),
            account("drafter", 0, busy=95, sources={"target": 10}),
            account("postprocess", 0, busy=5, backpressured=95, gpu=False, sources={"target": 11}),
        ],
        "target 0 backpressured 70 % of its time: drafter 0 is the bottleneck (busy 95 %).",
    ),
    "a slow role on the items' way": (
        [
            account("target", 0, busy=20, backpressured=80),
            account("drafter", 0, busy=10, starved=90, sources={"target": 10}),
            account("postprocess", 0, busy=99, gpu=False, phases={"d2h": 90}, sources={"target": 11}),
        ],
        "drafter 0 starved 90 % of its time: postprocess 0 is the bottleneck (busy 99 %); it spends 90 % in d2h.",
    ),
    "a producer that is not busy either is not blamed": (
        [account("target", 0, busy=30), account("drafter", 0, busy=40, starved=60, sources=FED)],
        "drafter 0 starved 60 % of its time, waiting for target 0 (busy 30 %).",
    ),
    "roles that feed each other": (
        [account("target", 0, busy=10, starved=90, sources={"drafter": 1}), account("drafter", 0, busy=20, starved=80, sources=FED)],
        "target 0 starved 90 % of its time, waiting for drafter 0 (busy 20 %).",
    ),
    "unknown producer": ([account("drafter", 0, busy=40, starved=60, sources={"": 4})], "drafter 0 starved 60 % of its time."),
    "one of many": (
        [account("target", i, busy=90, starved=100 if i == 9 else 0) if i != 9 else account("target", 9, starved=100) for i in range(12)],
        "target 9 starved 100 % of its time.",
    ),
    "outliers of a role": (
        [account("drafter", i, busy=100 - wait, lock_wait=wait) for i, wait in enumerate((5, 90, 5, 80, 5))],
        "drafter 1, 3 waiting for locks 85 % of their time.",
    ),
    "nobody waits": (
        [account("target", i, busy=95, starved=5) for i in range(2)] + [account("drafter", 0, busy=70, starved=9)],
        "No role waits for more than 10 % of its time: target 0, 1 busy 95 %; drafter 0 busy 70 % and 21 % in no phase.",
    ),
    "without GPUs only those that train count": (
        [account("target", 0, busy=90, starved=10, gpu=False), account("main", 0, starved=100, gpu=False)],
        "target 0 starved 10 % of its time.",
    ),
    "other trainers": ([account("rank", 0, busy=50, starved=50, gpu=False)], "rank 0 starved 50 % of its time."),
    "a waiting role without a GPU, where those with one don't wait": (
        [
            account("target", 0, busy=23),
            account("drafter", 0, busy=99, sources={"target": 10}),
            account("postprocess", 0, busy=20, backpressured=79, gpu=False, sources={"target": 11}),
        ],
        "postprocess 0 backpressured 79 % of its time: drafter 0 is the bottleneck (busy 99 %).",
    ),
    "unnamed time": (
        [account("target", 0, busy=23)],
        "No role waits for more than 10 % of its time: target 0 busy 23 % and 77 % in no phase (name it: worker.phase).",
    ),
    "a worker that was never used": ([account("target", 0)], NOTHING),
    "nothing": ([], NOTHING),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_says_what_the_shares_say(name: str) -> None:
    workers, expected = VERDICTS[name]
    assert verdict(workers) == expected


def test_labels_name_ranges() -> None:
    assert label([account("target", index) for index in (0, 7, 2, 3, 4, 9, 8, 0)]) == "target 0, 2..4, 7..9"
    assert label([account("target", index) for index in (1, 0)]) == "target 0, 1"


def test_runs_are_listed_newest_first_with_what_cannot_be_read(tmp_path: Path) -> None:
    two_workers(tmp_path / "old")
    live = PlantedRing(1, "target", 0)
    live.step(0, 2 * S)
    record(tmp_path / "live", [live], [live.flush()], STARTED + 60 * S)
    record(tmp_path / "empty", [], [], STARTED + 30 * S)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    rows = runs.list_runs(tmp_path)
    assert [(row.run, row.workers, row.records, row.duration_ns, row.state) for row in rows[:3]] == [
        ("live", 1, 1, 2 * S, "1 of 1 not finished"),
        ("empty", 0, 0, 0, "no workers"),
        ("old", 2, 11, S, "finished, 1 killed"),
    ]
    assert (rows[3].run, (rows[3].problem or "").partition(": ")[0]) == ("broken", f"{tmp_path}/broken/run.json cannot be read")
    file = io.StringIO()
    runs.render(rows, tmp_path, Console(file=file, width=50, force_terminal=False))
    lines = file.getvalue().splitlines()
    assert lines[0].split() == ["run", "started", "(UTC)", "duration", "workers", "records", "size", "state"]
    assert [line.split()[0] for line in lines[2:5]] == ["live", "empty", "old"]
    assert lines[5].startswith("not readable: ")
    assert len(lines) == 6


def test_no_runs_says_how_to_make_one(tmp_path: Path) -> None:
    file = io.StringIO()
    base = tmp_path / "missing"
    runs.render(runs.list_runs(base), base, Console(file=file, width=20, force_terminal=False))
    assert file.getvalue() == f"no recordings in {base}; record one: otel-dflash run -- python train.py\n"


def test_units_read_well() -> None:
    assert [units.duration(ns) for ns in (0, 999, 1_000, 1_500, 999_499, 999_600, 20 * MS, 999_700_000, 12 * S, 999 * S, 3_723 * S)] == [
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
    assert [units.size(count) for count in (0, 999, 1_000, 15_300_000, 2_147_483_648)] == ["0 B", "999 B", "1.00 kB", "15.3 MB", "2.15 GB"]
    assert [units.plural(1, "record"), units.plural(2_000, "process")] == ["1 record", "2 000 processes"]
