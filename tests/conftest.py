from __future__ import annotations

import atexit
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

# A shell starts background jobs with these ignored, and children inherit that: the tests send them as a terminal does.
for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _default)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Session directories in a tmpfs and recordings of this test's own; this process has not started telemetry. The first is yielded."""
    shm = Path(tempfile.mkdtemp(prefix="otel-dflash-test-", dir="/dev/shm"))
    monkeypatch.setenv("OTEL_DFLASH_SHM", str(shm))
    monkeypatch.setenv("OTEL_DFLASH_DIR", str(tmp_path / "runs"))
    for name in ("OTEL_DFLASH_SESSION", "OTEL_DFLASH_RUN_ID", "OTEL_DFLASH_AGENT", "OTEL_DFLASH_DISABLED", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(telemetry_module, "_started", None)
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
    """A real OTLP server, gRPC and HTTP."""
    with OtlpReceiver() as receiver:
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
    left_out = sum("make engines" in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if left_out:
        terminalreporter.write_line(f"{left_out} tests against a real collector, Jaeger, Prometheus or Kafka left out: make engines")
