"""A whole run for tests: a training script under `otel-dflash run`, its agent, and a receiver."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.otlp_receiver import OtlpReceiver, Span
from tests.processes import clean_environment

TESTS = Path(__file__).parent
DEADLINE_S = 240


@dataclass(frozen=True)
class Ran:
    """A run that has ended, what it wrote, and what arrived."""

    said: Any
    recording: Path
    receiver: OtlpReceiver

    def spans(self) -> list[Span]:
        """Return the spans; none may have come twice."""
        spans = self.receiver.spans()
        assert len({span.span_id for span in spans}) == len(spans)
        return spans

    def step_spans(self) -> dict[str, Span]:
        """Return the step spans by the id that the trainer gave as batch_id."""
        return {
            str(span.attributes["dflash.batch.id"]): span
            for span in self.spans()
            if span.name.endswith(".step")
        }


def run(
    directory: Path, receiver: OtlpReceiver, command: list[str], protocol: str = "grpc", **variables: str
) -> Ran:
    """Run a Python script that writes JSON to the file FILE under `otel-dflash run`, to the end of the
    delivery."""
    file = directory / "said.json"
    environment = {
        **clean_environment(),
        "OTEL_DFLASH_METRIC_MS": "500",
        "OTEL_DFLASH_EXIT_MS": "60000",
        **receiver.environment(protocol),
        **variables,
    }
    script = [sys.executable, *(str(file) if word == "FILE" else word for word in command)]
    started = [
        sys.executable,
        "-m",
        "otel_dflash",
        "run",
        "--run-id",
        "run-1",
        "--dir",
        str(directory),
        "--quiet",
        "--",
        *script,
    ]
    ran = subprocess.run(
        started,
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert [
        line for line in ran.stderr.splitlines() if not line.startswith("[monitor] ")
    ] == []  # the example's own
    return Ran(json.loads(file.read_text()), directory / "run-1", receiver)
