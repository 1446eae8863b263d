from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from otel_dflash.session import process_start
from otel_dflash.stack.engines import ENGINES, EngineError
from otel_dflash.stack.services import SERVICES
from tests.processes import poll
from tests.stack.conftest import NOWHERE, Stack, need_engine


def test_a_service_is_healthy_ends_and_starts_again_at_its_place(stack: Stack) -> None:
    collector = stack.start("otelcol")
    collector.kill()
    collector.start()
    collector.end()
    assert "Everything is ready" in collector.log


def test_a_busy_port_is_said_with_the_variable_that_chooses_another(stack: Stack) -> None:
    first = stack.start("otelcol")
    second = stack.prepare("otelcol", "second", OTELCOL_GRPC_PORT=first.values["OTELCOL_GRPC_PORT"])
    with pytest.raises(
        EngineError, match=r"address already in use.* choose another port: OTELCOL_GRPC_PORT="
    ):
        second.start()


@pytest.mark.parametrize("host", ["203.0.113.1", "nowhere.invalid"])
def test_a_host_that_is_not_this_one_is_said_with_its_variable(stack: Stack, host: str) -> None:
    with pytest.raises(
        EngineError,
        match=rf"otelcol cannot listen at {host}:\d+: .*; use an address of this host: OTELCOL_HOST=127.0.0.1$",
    ):
        stack.start("otelcol", OTELCOL_HOST=host)


def test_every_service_takes_the_shipped_configuration(stack: Stack) -> None:
    for name in SERVICES:
        stack.start(name)


def test_what_a_test_does_not_say_where_to_send_goes_nowhere(stack: Stack) -> None:
    """Else it would reach the engines that happen to run here."""
    values = {
        name: value for service in SERVICES for name, value in stack.prepare(service, service).values.items()
    }
    places = {name: value for name, value in values.items() if "://" in value}
    assert places == dict.fromkeys(
        ["JAEGER_PROMETHEUS_URL", "OTELCOL_TRACES_ENDPOINT", "OTELCOL_METRICS_ENDPOINT"], NOWHERE
    )


@pytest.mark.parametrize(("ci", "said"), [("", "1 skipped"), ("true", "1 failed")])
def test_without_engines_their_tests_are_left_out_with_the_remedy_and_fail_in_ci(
    ci: str, said: str, tmp_path: Path
) -> None:
    one = f"{__file__}::{test_a_service_is_healthy_ends_and_starts_again_at_its_place.__name__}"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CI": ci}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", one]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, said in ran.stdout) == (int(ci == "true"), True), ran.stdout
    assert f"otelcol {ENGINES['otelcol'].version} is not built here; build it: make engines" in ran.stdout


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.stack.conftest import Stack

started = Stack(Path(sys.argv[1])).start("otelcol")
print(started.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_service_outlives_a_test_run_that_is_killed(tmp_path: Path) -> None:
    need_engine("otelcol")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    poll(lambda: process_start(int(ran.stdout)) is None)
