"""`otel-dflash run` with an endpoint that refuses or never answers, for the whole run; then `replay` to one
that lives."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from otel_dflash.recording.frames import FrameKind
from otel_dflash.recording.reader import RecordingReader
from tests.otlp_receiver import OtlpReceiver, SilentServer
from tests.processes import clean_environment
from tests.running import (
    DEADLINE_S,
    TESTS,
    dropped,
    poll,
    received_by_name,
    spans_by_name,
    totals_received,
)

pytestmark = pytest.mark.slow

TRAINER = (sys.executable, str(TESTS / "counting_trainer.py"))
COMMAND = (sys.executable, "-m", "otel_dflash")


@contextmanager
def refusing() -> Iterator[str]:
    """Yield an endpoint on which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@contextmanager
def silent() -> Iterator[str]:
    with SilentServer() as server:
        yield server.endpoint


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("broken", [refusing, silent])
def test_the_agent_ends_by_itself_and_replay_delivers_all_once(
    broken: Callable[[], Iterator[str]], protocol: str, tmp_path: Path
) -> None:
    """How soon: tests/bench/bench_exit.py."""
    environment = clean_environment(OTEL_DFLASH_DIR=str(tmp_path))
    with broken() as endpoint:  # type: ignore[attr-defined]
        run = subprocess.Popen(
            [
                *COMMAND,
                "run",
                "--run-id",
                "run-1",
                "--endpoint",
                endpoint,
                "--protocol",
                protocol,
                "--",
                *TRAINER,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        try:
            assert run.stdin
            assert run.stdout
            poll((tmp_path / "run-1" / "run.json").exists)  # the agent is there
            tried = time.monotonic() + 1.5  # the exporters are loaded, and have tried
            while time.monotonic() < tried:
                run.stdin.write(b"steps 5\n")
                run.stdin.flush()
                run.stdout.readline()
                select.select([], [], [], 0.01)
            out, err = run.communicate(b"end\n", timeout=DEADLINE_S)
        finally:
            run.kill()
            run.communicate()
    counts: Counter[str] = Counter(json.loads(out.splitlines()[-1]))
    assert run.returncode == 0

    delivery = json.loads((tmp_path / "run-1" / "delivery.json").read_bytes())
    for said in (delivery["spans"], delivery["metrics"]):
        assert not said["delivered"]
        assert said["pending"] > 0
        assert said["reason"]
        assert "\n" not in said["reason"]
    assert "otel-dflash: not delivered in full: " in err.decode()
    assert "the agent still runs" not in err.decode()
    assert "Traceback" not in (tmp_path / "run-1" / "agent.log").read_text()
    reader = RecordingReader(tmp_path / "run-1")
    records = 0
    while frames := reader.read():
        records += sum(frame.count for frame in frames if frame.kind == FrameKind.RECORDS)
    reader.close()
    assert (records, reader.missing_frames) == (9 * counts["target.step"], 0)

    with OtlpReceiver() as receiver:
        again = receiver.environment(protocol)
        replayed = subprocess.run(
            [
                *COMMAND,
                "replay",
                "run-1",
                "--endpoint",
                again["OTEL_EXPORTER_OTLP_ENDPOINT"],
                "--protocol",
                protocol,
            ],
            capture_output=True,
            env=environment,
            timeout=DEADLINE_S,
            check=False,
        )
        assert (replayed.returncode, replayed.stderr) == (0, b"")
        wanted = spans_by_name(counts)
        assert received_by_name(receiver) == wanted
        assert len(receiver.spans()) == sum(wanted.values())
        assert totals_received(receiver) == {**wanted, "tokens": counts["tokens"]}
        assert dropped(receiver) == {}
