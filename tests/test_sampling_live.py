"""Sampling as a user meets it: the live agent sends what a replay of its recording does, also when it is killed, and metrics stay whole."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from otel_dflash.agent.sampling import Sampling
from tests import agent_killed_at
from tests.otlp_receiver import OtlpReceiver
from tests.processes import clean_environment
from tests.running import Running, death, poll, spans_by_name, totals_received
from tests.test_sampling import sent

DRIVER = str(Path(agent_killed_at.__file__))
TENTH = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1", "OTEL_DFLASH_KEEP": "slow,error"}


def replayed(recording: Path, environ: dict[str, str]) -> dict[str, bytes]:
    """Return what a replay sends, by span id."""
    spans, _ = sent(recording, Sampling.from_environment(environ))
    return {span.span_id: span.encoded for span in spans}


def test_thinned_traces_and_whole_metrics_as_a_replay_sends_them(tmp_path: Path, receiver: OtlpReceiver) -> None:
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
        assert totals_received(receiver) == {**wanted, "tokens": counts["tokens"]}, "metrics know nothing of sampling"
        said = running.delivery()["spans"]["sampled"]
        assert said["left_out_spans"] == sum(wanted.values()) - len(spans) > 0
        assert (said["sampler"], said["keep"], said["lost_traces"]) == ("parentbased_traceidratio 0.1", ["error", "slow"], 0)
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
def test_a_kill_loses_nothing_that_is_kept(point: str, number: int, tmp_path: Path, receiver: OtlpReceiver) -> None:
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
        assert {(span.span_id, span.encoded) for span in receiver.spans()} == set(wanted.items()), "a repeated span is byte-identical"
        assert totals_received(receiver) == {**spans_by_name(counts), "tokens": counts["tokens"]}


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


def test_run_and_replay_take_keep_and_always_off_alarms_nobody(tmp_path: Path, receiver: OtlpReceiver) -> None:
    variables = {**receiver.environment("http/protobuf"), "OTEL_TRACES_SAMPLER": "always_off"}
    quiet = run_command(tmp_path, "run", "--quiet", "--run-id", "a", "--", sys.executable, "-c", SCRIPT, **variables)
    assert (quiet.returncode, quiet.stderr, receiver.spans()) == (0, "", [])
    assert receiver.latest("dflash.step.duration")
    kept = run_command(tmp_path, "run", "--quiet", "--keep", "error", "--run-id", "b", "--", sys.executable, "-c", SCRIPT, **variables)
    assert (kept.returncode, kept.stderr) == (0, "")
    names = ["target.step", "target.model_forward"]
    said = run_command(tmp_path, "run", "--keep", "error", "--", sys.executable, "-c", SCRIPT, **variables)
    assert said.stderr.splitlines()[-1] == (
        "otel-dflash: always_off left out 98 spans; the recording holds them. Sent whatever it says: 0 slow, 1 error, 0 truncated steps, "
        "with the traces of what they consumed"
    )
    assert [span.name for span in receiver.spans()] == names * 2
    again = run_command(tmp_path, "replay", "b", "--keep", "slow,error", **variables)
    assert (again.returncode, again.stderr, [span.name for span in receiver.spans()]) == (0, "", names * 3)
    assert receiver.spans()[0].encoded == receiver.spans()[4].encoded


def test_metrics_are_the_same_bytes_with_and_without_sampling(tmp_path: Path, receiver: OtlpReceiver) -> None:
    variables = receiver.environment("grpc")
    ran = run_command(tmp_path, "run", "--quiet", "--run-id", "a", "--", sys.executable, "-c", SCRIPT, OTEL_METRICS_EXPORTER="none")
    assert (ran.returncode, ran.stderr) == (0, "")
    points = []
    for thinned in ({}, TENTH, {"OTEL_TRACES_SAMPLER": "always_off"}):
        receiver.clear()
        assert run_command(tmp_path, "replay", "a", **variables, **thinned).returncode == 0
        for point in receiver.points():
            if hasattr(point.proto, "exemplars"):  # they lead to traces that are sent
                del point.proto.exemplars[:]
        points.append([(point.name, point.resource, point.proto.SerializeToString(deterministic=True)) for point in receiver.points()])
    assert points[0] == points[1] == points[2]
    assert {name for name, _, _ in points[0]} > {"dflash.step.duration", "dflash.worker.time"}


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (
            ("--keep", "slowest"),
            {},
            "OTEL_DFLASH_KEEP (--keep) takes slow, error, or slow,error, got 'slowest'; unset it to go by the sampler",
        ),
        ((), {"OTEL_TRACES_SAMPLER": "sometimes"}, "OTEL_TRACES_SAMPLER must be one of always_on, always_off, traceidratio,"),
        (
            (),
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "ten"},
            "OTEL_TRACES_SAMPLER_ARG must be a ratio from 0 to 1",
        ),
    ],
)
def test_run_refuses_at_once_what_cannot_work(arguments: tuple[str, ...], variables: dict[str, str], message: str, tmp_path: Path) -> None:
    ran = run_command(tmp_path, "run", *arguments, "--", sys.executable, "-c", "print('trained')", **variables)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert message in ran.stderr
