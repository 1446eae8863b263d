"""The agent as a process: when it ends, what it survives, what it says."""

from __future__ import annotations

import re
import resource
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from otel_dflash.recording.frames import FrameKind
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.segments import segments
from otel_dflash.records import NameKind
from otel_dflash.session import AGENT_EXIT_INCOMPLETE
from tests.otlp_receiver import OtlpReceiver, SilentServer
from tests.running import (
    DEADLINE_S,
    Running,
    assert_exact,
    death,
    dropped,
    poll,
    received_by_name,
    repeated,
    spans_by_name,
    totals_received,
)

PROTOCOLS = ["grpc", "http/protobuf"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_trainer_recording_spans_and_metrics_agree(
    protocol: str, tmp_path: Path, receiver: OtlpReceiver
) -> None:
    with Running(tmp_path, **receiver.environment(protocol)) as running:
        agent = running.start_agent()
        running.start_trainer()
        for _ in range(3):
            running.ask("steps 300")
        running.ask("more")
        counts = running.end_trainer()
        assert death(agent) == 0
        assert_exact(running, counts, receiver)
        assert repeated(receiver) == 0
        delivery = running.delivery()
        assert {
            name: (said["delivered"], said["failures"], said["pending"], said["reason"])
            for name, said in delivery.items()
        } == {
            "spans": (True, 0, 0, None),
            "metrics": (True, 0, 0, None),
        }
        assert running.log_lines() == []


def test_it_ends_by_itself_and_removes_the_session(tmp_path: Path) -> None:
    with Running(tmp_path) as running:
        agent = running.start_agent()
        running.start_trainer()
        running.ask("steps 10")
        running.end_trainer()
        ended = time.monotonic()
        assert death(agent) == 0
        exit_s = int(running.environment["OTEL_DFLASH_EXIT_MS"]) / 1e3
        assert time.monotonic() - ended < exit_s, "it may flush so long, and has nothing to"
        assert not running.session.path.exists()
        assert running.delivery() == {}


def test_a_second_agent_of_a_session_ends_at_once(tmp_path: Path) -> None:
    with Running(tmp_path) as running:
        running.start_trainer()
        agent = running.start_agent()
        running.ask("steps 10")
        poll(running.is_drained)
        assert death(running.start_agent()) == 0
        assert agent.poll() is None
        counts = running.end_trainer()
        assert death(agent) == 0
        frames = [frame for frame in running.frames() if frame.kind == FrameKind.RECORDS]
        assert sum(frame.count for frame in frames) == 9 * counts["target.step"]


def test_two_processes_share_a_session_and_the_last_one_ends_it(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    with Running(tmp_path, **receiver.environment("grpc")) as first:
        agent = first.start_agent()
        first.start_trainer()
        first.ask("steps 10")
        one = first.trainer
        first.start_trainer()
        first.ask("steps 20")
        other, first.trainer = first.trainer, one
        ended = first.end_trainer()
        assert receiver.wait_for(lambda receiver: len(receiver.span_ids()) == 210, 30)
        assert agent.poll() is None
        first.trainer = other
        counts = ended + first.end_trainer()
        assert death(agent) == 0
        assert received_by_name(receiver) == spans_by_name(counts)
        assert totals_received(receiver) == {**spans_by_name(counts), "tokens": counts["tokens"]}
        assert len({span.resource["process.pid"] for span in receiver.spans()}) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_ends_every_process_of_a_job_does_not_end_the_agent_before_the_trainer(
    number: signal.Signals, tmp_path: Path, receiver: OtlpReceiver
) -> None:
    with Running(tmp_path, **receiver.environment("grpc")) as running:
        agent = running.start_agent()
        running.start_trainer()
        running.ask("steps 50")
        poll(running.is_drained)
        agent.send_signal(number)
        running.ask("steps 50")
        counts = running.end_trainer()
        assert death(agent) == 0
        assert_exact(running, counts, receiver)
        assert repeated(receiver) == 0


def test_a_trainer_killed_inside_nested_phases_leaves_them_truncated(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    with Running(tmp_path, **receiver.environment("grpc")) as running:
        agent = running.start_agent()
        running.start_trainer()
        running.ask("steps 2")
        running.ask("hang")
        running.kill_trainer()
        killed = time.time_ns()
        assert death(agent) == 0
        cut = [span for span in receiver.spans() if span.attributes.get("dflash.span.truncated")]
        names = {span.span_id: span.name for span in receiver.spans()}
        assert {(span.name, names.get(span.parent_id)) for span in cut} == {
            ("target.step", None),
            ("target.outer", "target.step"),
            ("target.inner", "target.outer"),
        }
        assert all(span.start_ns <= span.end_ns <= killed + DEADLINE_S * 1e9 for span in cut)
        assert len({span.end_ns for span in cut}) == 1
        assert sum(received_by_name(receiver).values()) == 2 * 7 + 4
        inside = [
            span.name
            for span in receiver.spans()
            if span.parent_id in {span.span_id for span in cut} and span not in cut
        ]
        assert inside == ["target.model_forward"]


def test_a_session_removed_under_it_is_served_to_its_end_and_said_once(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    with Running(tmp_path, **receiver.environment("grpc")) as running:
        agent = running.start_agent()
        running.start_trainer()
        running.ask("steps 10")
        poll(running.is_drained)
        shutil.rmtree(running.session.path)
        running.ask("steps 10")
        poll(lambda: "was removed" in running.log.read_text())
        running.ask("steps 10")
        counts = running.end_trainer()
        assert death(agent) == 0
        assert_exact(running, counts, receiver)
        assert running.log_lines() == [
            (
                f" agent: {running.session.path} was removed: workers created from now on record nothing, "
                "earlier ones are served to their end"
            )
        ]
        assert death(running.start_agent()) == 2
        assert "Traceback" not in running.log.read_text()


@pytest.mark.parametrize("position", ["1e30", "1e999"])
def test_a_position_that_cannot_be_one_does_not_stop_it(
    position: str, tmp_path: Path, receiver: OtlpReceiver
) -> None:
    with Running(tmp_path, **receiver.environment("grpc")) as running:
        (running.recording / "cursor-spans-otlp.json").write_text(f'{{"position": {position}}}')
        agent = running.start_agent()
        running.start_trainer()
        running.ask("steps 10")
        counts = running.end_trainer()
        assert death(agent) == 0
        assert_exact(running, counts, receiver)


@pytest.mark.parametrize("room_for_the_log", [True, False])
def test_a_full_disk_is_said_once_and_all_is_exported_all_the_same(
    room_for_the_log: bool, tmp_path: Path, receiver: OtlpReceiver
) -> None:
    with Running(tmp_path, **receiver.environment("grpc")) as running:
        agent = running.start_agent()
        running.start_trainer()
        running.ask("steps 50")
        assert receiver.wait_for(lambda receiver: len(receiver.span_ids()) == 350, 30)
        limits = resource.prlimit(agent.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (2000 if room_for_the_log else 0, limits[1]))
        for _ in range(5):
            running.ask("steps 50")
            poll(running.is_drained)
        assert receiver.wait_for(lambda receiver: len(receiver.span_ids()) == 2100, 30)
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, limits)
        poll(lambda: running.ask("steps 1") and len(segments(running.recording)) > 1)  # it is recorded again
        counts = running.end_trainer()
        assert death(agent) == AGENT_EXIT_INCOMPLETE
        assert received_by_name(receiver) == spans_by_name(counts)
        assert totals_received(receiver) == {**spans_by_name(counts), "tokens": counts["tokens"]}
        assert dropped(receiver) == {}
        said = running.log.read_text()
        # a line that found no room is written with the next one, unless PYTHONUNBUFFERED is set
        assert said.count("cannot be written (disk full?)") in ({1} if room_for_the_log else {0, 1})
        assert "Traceback" not in said
        assert running.delivery()["recording"]["lost_frames"] > 0
        reader = RecordingReader(running.recording)
        while reader.read():
            pass
        reader.close()
        assert reader.missing_frames == running.delivery()["recording"]["lost_frames"]


def test_a_rerun_is_another_instance(tmp_path: Path, receiver: OtlpReceiver) -> None:
    instances = []
    for run in ("one", "two"):
        receiver.clear()
        with Running(tmp_path / run, **receiver.environment("grpc")) as running:
            agent = running.start_agent()
            running.start_trainer()
            running.ask("steps 1")
            running.end_trainer()
            assert death(agent) == 0
            found = {
                (span.resource["service.instance.id"], span.resource["service.name"])
                for span in receiver.spans()
            }
            instances.append({instance for instance, _ in found})
            assert {name for _, name in found} == {"dflash-target", "dflash-drafter"}
            assert {
                point.resource["service.instance.id"] for point in receiver.points("dflash.worker.batches")
            } == instances[-1]
    assert instances[0].isdisjoint(instances[1])


def test_metrics_arrive_while_spans_go_into_a_black_hole(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with SilentServer() as silent:
        variables = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": silent.endpoint,
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": receiver.grpc_endpoint,
        }
        with Running(tmp_path, **variables, OTEL_DFLASH_EXIT_MS="1000") as running:
            agent = running.start_agent()
            running.start_trainer()
            for turn in range(1, 4):
                running.ask("steps 20")
                assert receiver.wait_for(
                    lambda _, turn=turn: totals_received(receiver).get("target.step") == 20 * turn, 30
                )
            assert silent.wait_for_connection()
            counts = running.end_trainer()
            assert death(agent) == 0
            assert totals_received(receiver) == {**spans_by_name(counts), "tokens": counts["tokens"]}
            delivery = running.delivery()
            assert (delivery["metrics"]["delivered"], delivery["spans"]["delivered"]) == (True, False)
            assert delivery["spans"]["pending"] > 0


def test_a_failing_endpoint_is_one_line_for_each_kind_and_all_arrives_when_it_is_back(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    receiver.down = True
    with Running(
        tmp_path, **receiver.environment("http/protobuf"), OTEL_EXPORTER_OTLP_TIMEOUT="1"
    ) as running:
        agent = running.start_agent()
        running.start_trainer()
        for _ in range(5):
            running.ask("steps 20")
        poll(lambda: "503" in running.log.read_text() or "down" in running.log.read_text().lower())
        poll(lambda: len(running.log_lines()) >= 2)
        receiver.down = False
        counts = running.end_trainer()
        assert death(agent) == 0
        assert_exact(running, counts, receiver)
        kinds = Counter(re.sub(r"\(\d+ times\)|\d+(\.\d+)?", "#", line) for line in running.log_lines())
        assert len(kinds) <= 4
        assert max(kinds.values()) <= 2, kinds  # spans and metrics
        assert all(line.startswith(": ") for line in running.log_lines())


def test_a_run_too_short_to_load_the_exporters_says_that_nothing_was_sent(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    with Running(tmp_path, **receiver.environment("grpc"), OTEL_DFLASH_EXIT_MS="0") as running:
        running.start_trainer()
        running.ask("steps 10")
        running.end_trainer()
        assert death(running.start_agent()) == 0
        delivery = running.delivery()
        assert {name: (said["delivered"], said["reason"]) for name, said in delivery.items()} == {
            "spans": (False, "the exporters were not loaded yet"),
            "metrics": (False, "the exporters were not loaded yet"),
        }
        assert sum(frame.count for frame in running.frames() if frame.kind == FrameKind.RECORDS) == 90


def test_names_beside_the_rings_that_are_no_rings_do_no_harm(tmp_path: Path) -> None:
    with Running(tmp_path) as running:
        (running.session.path / "ring-1-1").mkdir()
        (running.session.path / "ring-1-2").write_bytes(b"odflash1" + bytes(200_000))
        (running.session.path / "process-x").touch()
        (running.session.path / "process-1-None").touch()
        agent = running.start_agent()
        running.start_trainer()
        running.ask("more")
        running.end_trainer()
        assert death(agent) == 0
        assert len(running.log_lines()) == 2
        assert not running.session.path.exists()
        reader = RecordingReader(running.recording)
        while reader.read():
            pass
        reader.close()
        assert {names.entries[0][0] for names in reader.catalog.values()} == {NameKind.WORKER}
