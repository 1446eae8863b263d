"""Runs that send what they record to a real engine, for tests, and what their recordings hold by the same
rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.otlp_receiver import OtlpReceiver, Span
from tests.processes import clean_environment

DEADLINE_S: Final = 120.0


def send_run(directory: Path, endpoint: str, *script: str, run_id: str = "run-1", **variables: str) -> Path:
    """Run a Python script under `otel-dflash run` until all is delivered to `endpoint` by gRPC; return its
    recording."""
    command = [
        sys.executable,
        "-m",
        "otel_dflash",
        "run",
        "--run-id",
        run_id,
        "--dir",
        str(directory),
        "--quiet",
        "--endpoint",
        endpoint,
    ]
    ran = subprocess.run(
        [*command, "--", sys.executable, *script],
        env=clean_environment(OTEL_DFLASH_EXIT_MS="60000", **variables),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert [
        line for line in ran.stderr.splitlines() if not line.startswith("[monitor] ")
    ] == []  # the example's own
    return directory / run_id


def recorded_spans(recording: Path, **variables: str) -> dict[str, Span]:
    """Return by id all spans that a replay of a recording sends."""
    with OtlpReceiver() as receiver:
        command = [
            sys.executable,
            "-m",
            "otel_dflash",
            "replay",
            str(recording),
            "--endpoint",
            receiver.grpc_endpoint,
        ]
        subprocess.run(
            command,
            env=clean_environment(**variables),
            stdout=subprocess.DEVNULL,
            timeout=DEADLINE_S,
            check=True,
        )
        spans = receiver.spans()
    assert spans
    found = {span.span_id: span for span in spans}
    assert len(found) == len(spans)
    return found
