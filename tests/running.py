"""A session with real processes, for tests: trainer and agent are started, fed, killed and waited for
here."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from otel_dflash.recording.frames import Frame
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.session import create_session, register_process, remove_session
from tests.otlp_receiver import OtlpReceiver, Span
from tests.processes import clean_environment

DEADLINE_S = 90.0
TESTS = Path(__file__).parent


class Running:
    """A session, its trainer, and its agents. The test itself is a member until `end`, so that no agent
    leaves early. Context manager."""

    def __init__(self, directory: Path, **variables: str) -> None:
        self.session = create_session(directory=directory / "runs")
        self.environment = {
            **clean_environment(),
            "OTEL_DFLASH_SESSION": str(self.session.path),
            "OTEL_DFLASH_DRAIN_MS": "20",
            "OTEL_DFLASH_METRIC_MS": "300",
            "OTEL_DFLASH_EXIT_MS": "60000",
            **variables,
        }
        self.member = register_process(self.session)
        self.recording = self.session.recording
        self.log = self.recording / "agent.log"
        self.agents: list[subprocess.Popen[bytes]] = []
        self.trainer: subprocess.Popen[bytes] | None = None
        self.trainers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in [*self.agents, *self.trainers]:
            if process.poll() is None:
                process.kill()
            process.communicate()
        remove_session(self.session)

    # -- processes -----------------------------------------------------------

    def start_trainer(self, **variables: str) -> None:
        self.trainer = subprocess.Popen(
            [sys.executable, str(TESTS / "counting_trainer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**self.environment, **variables},
        )
        self.trainers.append(self.trainer)
        assert self._answer() == "ready"

    def ask(self, command: str) -> str:
        """Let the trainer do something; return what it says."""
        assert self.trainer
        assert self.trainer.stdin
        self.trainer.stdin.write(f"{command}\n".encode())
        self.trainer.stdin.flush()
        return self._answer()

    def end_trainer(self) -> Counter[str]:
        """End the trainer, and this test's part; return the trainer's counts."""
        assert self.trainer
        counts: Counter[str] = Counter(json.loads(self.ask("end")))
        assert self.trainer.wait(DEADLINE_S) == 0
        self.member.unlink(missing_ok=True)
        return counts

    def kill_trainer(self) -> None:
        """Kill the trainer, and end this test's part."""
        assert self.trainer
        self.trainer.kill()
        self.trainer.wait(DEADLINE_S)
        self.member.unlink(missing_ok=True)

    def start_agent(self, *command: str) -> subprocess.Popen[bytes]:
        """Start an agent: the shipped one, or a Python program of the tests."""
        run = [sys.executable, *(command or ("-m", "otel_dflash", "agent")), str(self.session.path)]
        with self.log.open("ab") as log:
            agent = subprocess.Popen(
                run, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment
            )
        self.agents.append(agent)
        return agent

    def is_drained(self) -> bool:
        """Return whether the recording holds all that the rings do."""
        from otel_dflash.agent.ring_reader import RingReader

        rings = [RingReader(path) for path in self.session.path.glob("ring-*")]
        for ring in rings:
            ring.look(over=True)
        return all(len(ring.published()) == 0 for ring in rings)

    def _answer(self) -> str:
        assert self.trainer
        assert self.trainer.stdout
        assert select.select([self.trainer.stdout], [], [], DEADLINE_S)[0], "the trainer is silent"
        return self.trainer.stdout.readline().decode().strip()

    # -- results -------------------------------------------------------------

    def frames(self) -> list[Frame]:
        """Return all frames of the recording; none may be missing."""
        reader = RecordingReader(self.recording)
        frames = []
        while found := reader.read():
            frames += found
        reader.close()
        assert reader.missing_frames == 0
        return frames

    def log_lines(self) -> list[str]:
        """Return what the agents said, without the time."""
        return [line.partition("otel-dflash")[2] or line for line in self.log.read_text().splitlines()]

    def delivery(self) -> Any:
        return json.loads((self.recording / "delivery.json").read_bytes())


def poll(condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met before the deadline"
        select.select([], [], [], 0.01)


def death(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; return its exit code, or minus the signal it died of."""
    return process.wait(DEADLINE_S)


def spans_by_name(counts: Mapping[str, int]) -> dict[str, int]:
    """Return how many spans the counting trainer's counts stand for."""
    return {name: count for name, count in counts.items() if "." in name}


def received_by_name(receiver: OtlpReceiver) -> dict[str, int]:
    """Return how many distinct spans arrived; a repeated one must be byte-identical."""
    distinct: dict[str, Span] = {}
    for span in receiver.spans():
        assert distinct.setdefault(span.span_id, span).encoded == span.encoded
    return dict(Counter(span.name for span in distinct.values()))


def repeated(receiver: OtlpReceiver) -> int:
    return len(receiver.spans()) - len(receiver.span_ids())


def totals_received(receiver: OtlpReceiver) -> dict[str, int]:
    """Return the newest totals in the trainer's own terms."""
    totals: Counter[str] = Counter()
    for point in receiver.latest("dflash.phase.duration"):
        totals[f"{point.attributes['dflash.worker.role']}.{point.attributes['dflash.phase']}"] += point.count
    for point in receiver.latest("dflash.step.duration"):
        totals[f"{point.attributes['dflash.worker.role']}.step"] += point.count
    totals["tokens"] = sum(int(point.value) for point in receiver.latest("dflash.worker.tokens"))
    return dict(totals)


def dropped(receiver: OtlpReceiver) -> dict[str, int]:
    """Return the lost records by reason, where there are any."""
    lost: Counter[str] = Counter()
    for point in receiver.latest("dflash.telemetry.events.dropped"):
        lost[str(point.attributes["dflash.telemetry.drop.reason"])] += int(point.value)
    return {reason: count for reason, count in lost.items() if count}


def assert_exact(running: Running, counts: Counter[str], receiver: OtlpReceiver) -> None:
    """Trainer, recording, spans and metrics agree, exactly."""
    wanted = spans_by_name(counts)
    assert received_by_name(receiver) == wanted
    assert totals_received(receiver) == {**wanted, "tokens": counts["tokens"]}
    assert dropped(receiver) == {}
    starts: dict[tuple[object, ...], set[int]] = {}
    points: dict[tuple[object, ...], set[bytes]] = {}
    for point in receiver.points():
        series = (point.name, *sorted(point.attributes.items()), point.resource["service.instance.id"])
        starts.setdefault(series, set()).add(point.start_ns)
        points.setdefault((*series, point.time_ns), set()).add(
            point.proto.SerializeToString(deterministic=True)
        )
    assert {key: found for key, found in starts.items() if len(found) > 1} == {}
    assert {key: found for key, found in points.items() if len(found) > 1} == {}, (
        "a repeated point must be byte-identical"
    )
    records = Counter({frame.ring: 0 for frame in running.frames()})
    for frame in running.frames():
        if frame.kind.name == "RECORDS":
            assert frame.first == records[frame.ring], "records of a ring must follow each other"
            records[frame.ring] += frame.count
    attributes_and_items = counts["drafter.step"] + counts["items"]
    assert sum(records.values()) == sum(wanted.values()) + attributes_and_items


def send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a process of the test's own."""
    if process.poll() is None:
        process.send_signal(number)
