from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import otel_dflash
from otel_dflash.session import Session, create_session
from otel_dflash.trainer import telemetry as telemetry_module
from tests.otlp_receiver import OtlpReceiver

STACK = Path(__file__).with_name("stack")

# `nohup`, a shell's background jobs and supervisors leave signals ignored or blocked, and children inherit that, but no
# handler: this process stays as deaf as it was, what it starts hears again. SIGINT is also sent to this process, as a
# terminal does. Python itself ignores the other two.
signal.pthread_sigmask(signal.SIG_SETMASK, ())
for _number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else lambda *_: None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what takes longest last: who broke something hears it early. Engines take longer than any mark."""
    items.sort(
        key=lambda item: (item.path.is_relative_to(STACK), item.get_closest_marker("slow") is not None)
    )


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Session directories in a tmpfs and recordings of this test's own; this process has not started
    telemetry. The first is yielded."""
    shm = Path(tempfile.mkdtemp(prefix="otel-dflash-test-", dir="/dev/shm"))
    monkeypatch.setenv("OTEL_DFLASH_SHM", str(shm))
    monkeypatch.setenv("OTEL_DFLASH_DIR", str(tmp_path / "runs"))
    for name in (
        "OTEL_DFLASH_SESSION",
        "OTEL_DFLASH_RUN_ID",
        "OTEL_DFLASH_AGENT",
        "OTEL_DFLASH_DISABLED",
        "OTEL_SDK_DISABLED",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(telemetry_module, "_own", otel_dflash.Telemetry())
    yield shm
    shutil.rmtree(shm, ignore_errors=True)


@pytest.fixture
def session(places: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session without an agent, which start() joins: rings stay as they are."""
    session = create_session("run-1")
    monkeypatch.setenv("OTEL_DFLASH_SESSION", str(session.path))
    return session


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    """A real OTLP server, gRPC and HTTP, at a loopback address of this process. At the usual one, an agent of another
    suite on this machine may still try a port that its receiver has given back."""
    pid = os.getpid()
    with OtlpReceiver(f"127.{1 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}") as receiver:
        yield receiver


@pytest.fixture
def telemetry(session: Session) -> Iterator[otel_dflash.Telemetry]:
    """Telemetry of this process in `session`."""
    telemetry = otel_dflash.start()
    yield telemetry
    telemetry.close()
    atexit.unregister(telemetry.close)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was left out because no engine is built."""
    left_out = sum(
        "make engines" in str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])
    )
    if left_out:
        terminalreporter.write_line(
            f"{left_out} tests against a real collector, Jaeger, Prometheus or Kafka left out: make engines"
        )
