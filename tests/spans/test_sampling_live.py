"""Sampling as a user meets it: the live agent sends what a replay of its recording does, also when it is
killed, and metrics stay whole."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from otel_dflash.recording.recent import RECENT_BYTES_MAX
from otel_dflash.spans import identity
from otel_dflash.spans.sampling import Sampling
from tests.agent import agent_killed_at
from tests.otlp_receiver import OtlpReceiver
from tests.processes import clean_environment
from tests.running import Running, death, poll, spans_by_name, totals_received
from tests.spans.test_sampling import sent, step_ids

DRIVER = str(Path(agent_killed_at.__file__))
TENTH = {
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.1",
    "OTEL_DFLASH_KEEP": "slow,error",
}


def replayed(recording: Path, environ: dict[str, str]) -> dict[str, bytes]:
    """Return what a replay sends, by span id."""
    spans, _ = sent(recording, Sampling.from_environment(environ))
    return {span.span_id: span.encoded for span in spans}


def test_thinned_traces_and_whole_metrics_as_a_replay_sends_them(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    with Running(tmp_path, **receiver.environment("grpc"), **TENTH) as running:
        running.start_trainer()
        agent = running.start_agent()
        for _ in range(5):
            running.ask("steps 300")
        counts = running.end_trainer()
        assert death(agent) == 0, running.log.read_text()
        spans = receiver.spans()
        assert {span.span_id: span.encoded for span in spans} == replayed(running.recording, TENTH)
        assert len({span.span_id for span in spans}) == len(spans)
        wanted = spans_by_name(counts)
        assert totals_received(receiver) == {**wanted, "tokens": counts["tokens"]}, (
            "metrics know nothing of sampling"
        )
        said = running.delivery()["spans"]["sampled"]
        assert said["left_out_spans"] == sum(wanted.values()) - len(spans) > 0
        assert (said["sampler"], said["keep"], said["lost_traces"]) == (
            "parentbased_traceidratio 0.1",
            ["error", "slow"],
            0,
        )
        assert 0 < said["kept_steps"]["slow"] < 300
        assert not [line for line in running.log_lines() if "sampl" in line]


@pytest.mark.parametrize(
    ("point", "number"),
    [
        ("spans_sent_cursor_not_saved", 2),
        ("span_cursor_not_renamed", 1),
        ("span_cursor_not_renamed", 2),
        ("span_cursor_not_renamed", 5),
        ("written_tail_not_moved", 5),
        ("frame_half_written", 9),
    ],
)
def test_a_kill_loses_nothing_that_is_kept(
    point: str, number: int, tmp_path: Path, receiver: OtlpReceiver
) -> None:
    with Running(tmp_path, **receiver.environment("grpc"), **TENTH) as running:
        running.start_trainer()
        running.ask("steps 400")
        agent = running.start_agent(DRIVER, point, str(number))

        def is_dead() -> bool:
            if agent.poll() is None and running.is_drained():
                running.ask("steps 50")
            return agent.poll() is not None

        poll(is_dead)
        assert agent.returncode == -signal.SIGKILL
        running.ask("steps 100")
        last = running.start_agent()
        running.ask("steps 100")
        counts = running.end_trainer()
        assert death(last) == 0, running.log.read_text()
        wanted = replayed(running.recording, TENTH)
        assert {span.span_id: span.encoded for span in receiver.spans()} == wanted
        assert {(span.span_id, span.encoded) for span in receiver.spans()} == set(wanted.items()), (
            "a repeated span is byte-identical"
        )
        assert totals_received(receiver) == {**spans_by_name(counts), "tokens": counts["tokens"]}


HELD = """
import json, queue, threading
import otel_dflash

telemetry = otel_dflash.start()
items = telemetry.wrap_queue(queue.Queue(), "hidden_states")
target, filler, drafter = telemetry.worker("target", 0), telemetry.worker("postprocess", 0), telemetry.worker("drafter", 0)

kept = []

def drafter_step(take=False, seconds=0.0, fails=False):
    try:
        with drafter.step() as step:
            if take:
                with drafter.queue_get:
                    made_by = items.get()
                if seconds or fails:
                    kept.append([step.id, made_by])
            with drafter.forward:
                threading.Event().wait(seconds)
                if fails:
                    raise ValueError
    except ValueError:
        pass

for _ in range(60):
    with target.step() as step, target.queue_put:
        items.put(step.id)
print("made", flush=True)
input()
for _ in range(90):
    with filler.step():
        for _ in range(1600):
            with filler.d2h:
                pass
for number in range(120):  # what a step of this role may take: up to 0.3 s
    drafter_step(seconds=0.3 if number < 3 else 0.0)
planted = {10: 0.6, 30: 0.9, 50: 1.2}
for number in range(60):
    drafter_step(True, planted.get(number, 0.0), number == 40)
telemetry.close()
print(json.dumps(kept))
"""


def test_slow_and_failed_steps_of_a_live_run_are_sent_with_what_they_took_which_is_on_disk_only(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    sampling = {
        "OTEL_TRACES_SAMPLER": "always_off",
        "OTEL_DFLASH_KEEP": "slow,error",
        "OTEL_DFLASH_RING_BYTES": f"{16 << 20}",
    }
    with Running(tmp_path, **receiver.environment("grpc"), **sampling) as running:
        agent = running.start_agent()
        command = [sys.executable, "-c", HELD]
        trainer = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=running.environment
        )
        running.trainer = trainer
        running.trainers.append(trainer)
        assert trainer.stdout
        assert trainer.stdout.readline() == b"made\n"
        poll(running.is_drained)
        made = running.frames()[-1].number
        kept = json.loads(running.ask("go on"))
        assert (len(kept), death(trainer)) == (4, 0)
        running.member.unlink()
        assert death(agent) == 0, running.log.read_text()
        held = sum(len(frame.payload) for frame in running.frames() if frame.number > made)
        said = running.delivery()["spans"]["sampled"]
    assert held > RECENT_BYTES_MAX, "else the producers may be in memory"
    assert step_ids(receiver.spans()) == {identity.step_span_id(step) for pair in kept for step in pair}
    phases = ("target.step", "target.queue_put", "drafter.step", "drafter.queue_get", "drafter.forward")
    assert Counter(span.name for span in receiver.spans()) == dict.fromkeys(phases, 4)
    assert len({span.trace_id for span in receiver.spans()}) == 4, "each with its producer in one trace"
    assert (said["kept_steps"], said["lost_traces"]) == ({"slow": 3, "error": 1, "truncated": 0}, 0)


def run_command(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "otel_dflash", *arguments]
    return subprocess.run(
        command,
        env=clean_environment(OTEL_DFLASH_DIR=str(directory), **variables),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


SCRIPT = """
import otel_dflash
telemetry = otel_dflash.start()
worker = telemetry.worker("target", 0)
for number in range(50):
    try:
        with worker.step():
            with worker.model_forward:
                1 / (number - 33)
    except ZeroDivisionError:
        pass
"""


def test_run_and_replay_take_keep_and_always_off_alarms_nobody(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    variables = {**receiver.environment("http/protobuf"), "OTEL_TRACES_SAMPLER": "always_off"}
    quiet = run_command(
        tmp_path, "run", "--quiet", "--run-id", "a", "--", sys.executable, "-c", SCRIPT, **variables
    )
    assert (quiet.returncode, quiet.stderr, receiver.spans()) == (0, "", [])
    assert receiver.latest("dflash.step.duration")
    kept = run_command(
        tmp_path,
        "run",
        "--quiet",
        "--keep",
        "error",
        "--run-id",
        "b",
        "--",
        sys.executable,
        "-c",
        SCRIPT,
        **variables,
    )
    assert (kept.returncode, kept.stderr) == (0, "")
    names = ["target.step", "target.model_forward"]
    said = run_command(tmp_path, "run", "--keep", "error", "--", sys.executable, "-c", SCRIPT, **variables)
    assert said.stderr.splitlines()[-1] == (
        "otel-dflash: always_off left out 98 spans; the recording holds them. Sent regardless: 0 "
        "slow, 1 error, 0 truncated steps, "
        "with the traces of what they consumed"
    )
    assert [span.name for span in receiver.spans()] == names * 2
    again = run_command(tmp_path, "replay", "b", "--keep", "slow,error", **variables)
    assert (again.returncode, again.stderr, [span.name for span in receiver.spans()]) == (0, "", names * 3)
    assert receiver.spans()[0].encoded == receiver.spans()[4].encoded


def test_metrics_are_the_same_bytes_with_and_without_sampling(tmp_path: Path, receiver: OtlpReceiver) -> None:
    variables = receiver.environment("grpc")
    ran = run_command(
        tmp_path,
        "run",
        "--quiet",
        "--run-id",
        "a",
        "--",
        sys.executable,
        "-c",
        SCRIPT,
        OTEL_METRICS_EXPORTER="none",
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    points = []
    for thinned in ({}, TENTH, {"OTEL_TRACES_SAMPLER": "always_off"}):
        receiver.clear()
        assert run_command(tmp_path, "replay", "a", **variables, **thinned).returncode == 0
        for point in receiver.points():
            if hasattr(point.proto, "exemplars"):  # they lead to traces that are sent
                del point.proto.exemplars[:]
        points.append(
            [
                (point.name, point.resource, point.proto.SerializeToString(deterministic=True))
                for point in receiver.points()
            ]
        )
    assert points[0] == points[1] == points[2]
    assert {name for name, _, _ in points[0]} > {"dflash.step.duration", "dflash.worker.time"}


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (
            ("--keep", "slowest"),
            {},
            (
                "OTEL_DFLASH_KEEP (--keep) takes slow, error, or slow,error, got 'slowest'; unset it to go "
                "by the sampler"
            ),
        ),
        (
            (),
            {"OTEL_TRACES_SAMPLER": "sometimes"},
            "OTEL_TRACES_SAMPLER must be one of always_on, always_off, traceidratio,",
        ),
        (
            (),
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "ten"},
            "OTEL_TRACES_SAMPLER_ARG must be a ratio from 0 to 1",
        ),
    ],
)
def test_run_refuses_at_once_what_cannot_work(
    arguments: tuple[str, ...], variables: dict[str, str], message: str, tmp_path: Path
) -> None:
    ran = run_command(
        tmp_path, "run", *arguments, "--", sys.executable, "-c", "print('trained')", **variables
    )
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert message in ran.stderr
