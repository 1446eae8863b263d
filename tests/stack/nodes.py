"""A cluster on one host, for tests: the services of the cluster tier, and a run of two nodes, each with an
agent of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from otel_dflash.recording.directory import list_recordings
from tests.otlp_receiver import OtlpReceiver, Span
from tests.processes import clean_environment
from tests.running import DEADLINE_S, poll
from tests.stack.conftest import configured

TRAINER: Final = Path(__file__).parent / "split_trainer.py"
DELIVERED_FRAMES: Final = 40  # two rings, ten drains a second, and what else is recorded
LIVE_NS: Final = 3_000_000_000
ADDRESSES: Final = {"node-a": "127.0.0.2", "node-b": "127.0.0.3"}

GATEWAY: Final = configured("gateway")
TAIL_SAMPLING: Final = configured("tail-sampling")
KAFKA_NODE: Final = configured("kafka-node")
KAFKA_GATEWAY: Final = configured("kafka-gateway")
TIERS: Final = {tier.name: tier for tier in (GATEWAY, TAIL_SAMPLING, KAFKA_NODE, KAFKA_GATEWAY)}


class TwoNodes:
    """A run of split_trainer.py with the targets on node-a and the drafters on node-b, recorded side by side.
    Context manager."""

    def __init__(self, directory: Path, run: str = "night-7") -> None:
        self.runs = directory / "runs"
        self.run = run
        self._trainers: list[subprocess.Popen[str]] = []

    def start(self, endpoints: dict[str, str]) -> None:
        """Start both trainers; each node's agent sends to its endpoint, by HTTP."""
        drafters = self._start("node-b", endpoints["node-b"], "drafter")
        assert drafters.stdout
        port = drafters.stdout.readline().strip()
        self._start("node-a", endpoints["node-a"], "target", port)

    def finish(self) -> list[tuple[int, list[int]]]:
        """Let the run end and the agents deliver all; return (drafter step, the target steps whose items it
        took)."""
        drafters, targets = self._trainers
        assert targets.communicate(timeout=DEADLINE_S)[1] == ""
        taken, said = drafters.communicate(timeout=DEADLINE_S)
        assert (drafters.returncode, targets.returncode, said) == (0, 0, "")
        poll(
            lambda: (
                all(self._delivery(path) for path in list_recordings(self.runs))
                and len(list_recordings(self.runs)) == 2
            )
        )
        assert [self._delivery(path)["spans"]["delivered"] for path in list_recordings(self.runs)] == [
            True,
            True,
        ]
        return [(step, items) for step, items in json.loads(taken)]

    def await_delivery(self) -> None:
        """Wait until both nodes' collectors took more spans from their agents, about a second's."""
        before = self._positions()
        poll(
            lambda: all(
                now > then + DELIVERED_FRAMES for now, then in zip(self._positions(), before, strict=True)
            )
        )

    def spans(self) -> list[Span]:
        """Return all spans of both recordings, as a replay of them sends them."""
        with OtlpReceiver() as receiver:
            for path in list_recordings(self.runs):
                command = [sys.executable, "-m", "otel_dflash", "replay", str(path)]
                replayed = self._environment("", receiver.grpc_endpoint, protocol="grpc")
                subprocess.run(
                    command, env=replayed, stdout=subprocess.DEVNULL, timeout=DEADLINE_S, check=True
                )
            spans = receiver.spans()
        assert spans
        return spans

    def __enter__(self) -> TwoNodes:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._trainers:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def _start(self, node: str, endpoint: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(TRAINER), *arguments],
            env=self._environment(node, endpoint),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._trainers.append(process)
        return process

    def _environment(self, node: str, endpoint: str, protocol: str = "http/protobuf") -> dict[str, str]:
        return clean_environment(
            OTEL_DFLASH_RUN_ID=self.run,
            OTEL_DFLASH_NODE=node,
            OTEL_DFLASH_DIR=str(self.runs),
            OTEL_DFLASH_METRIC_MS="500",
            OTEL_DFLASH_EXIT_MS="60000",
            OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        )

    def _positions(self) -> list[int]:
        """Return how far the agents' spans have come, in frames, node by node."""
        return [
            int(json.loads(path.read_bytes())["position"])
            for run in list_recordings(self.runs)
            for path in run.glob("cursor-spans-*.json")
        ]

    @staticmethod
    def _delivery(recording: Path) -> Any:
        try:
            return json.loads((recording / "delivery.json").read_bytes())
        except OSError:
            return None


def backends(receivers: Sequence[OtlpReceiver]) -> str:
    """Return the receivers as GATEWAY_BACKENDS."""
    return f"[{', '.join(receiver.grpc_endpoint.removeprefix('http://') for receiver in receivers)}]"


def await_live(receivers: Sequence[OtlpReceiver], timeout_s: float = DEADLINE_S) -> None:
    """Wait until spans of all that work come about as they end: what an outage held up has arrived. A kill
    now meets the steady state."""
    before = sum(len(receiver.spans()) for receiver in receivers)

    def is_live() -> bool:
        spans = [span for receiver in receivers for span in receiver.spans()[-2000:]]
        newest = {
            span.resource["host.name"]: span.end_ns for span in sorted(spans, key=lambda span: span.end_ns)
        }
        more = sum(len(receiver.spans()) for receiver in receivers) > before + 200
        return more and len(newest) == len(ADDRESSES) and time.time_ns() - min(newest.values()) < LIVE_NS

    poll(is_live, timeout_s)


def step_totals(receivers: Sequence[OtlpReceiver]) -> Counter[str]:
    """Return how many steps the newest metric points count, by role."""
    totals: Counter[str] = Counter()
    for receiver in receivers:
        for point in receiver.latest("dflash.step.duration"):
            totals[f"{point.attributes['dflash.worker.role']}.step"] += point.count
    return totals


def steps(receivers: Sequence[OtlpReceiver]) -> Counter[str]:
    """Return how many different steps arrived as spans, by role."""
    names = {span.span_id: span.name for receiver in receivers for span in receiver.spans()}
    return Counter(name for name in names.values() if name.endswith(".step"))
