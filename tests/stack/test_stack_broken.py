"""`otel-dflash stack` where something breaks under it: kills, hangs, full disks, damaged or foreign files."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from otel_dflash.session import process_start
from otel_dflash.stack import native, state
from otel_dflash.stack.engines import EngineError, cache_directory
from otel_dflash.stack.services import SERVICES
from tests.processes import poll
from tests.stack.host import DEADLINE_S, Host, sleeping


def test_an_up_that_was_killed_is_gone_on_with_and_undone(planted: Host) -> None:
    killed = planted.begin("stack", "up")
    poll(planted.pids)
    killed.kill()
    killed.wait(DEADLINE_S)
    pid = planted.pids()["prometheus"]
    assert process_start(pid)
    code, out, _ = planted.run("stack", "down")
    assert (code, out.splitlines()[0]) == (0, "prometheus stopped")
    assert process_start(pid) is None


STARTER = """
import os, signal, sys
from pathlib import Path
from otel_dflash.stack.services import SERVICES, launch
def end(pid):
    print(pid, flush=True)
    os.kill(os.getpid(), int(sys.argv[1]))
launch(SERVICES["prometheus"], Path.cwd(), {"PROMETHEUS_PORT": os.environ["PROMETHEUS_PORT"]}, end)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_engine_begins_that_its_starter_did_not_live_to_remember(
    number: signal.Signals, planted: Host
) -> None:
    command = [sys.executable, "-c", STARTER, str(int(number))]
    starter = subprocess.run(
        command,
        env=planted.environment,
        cwd=planted.directory,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert starter.returncode == -number
    pid = int(starter.stdout)
    poll(lambda: process_start(pid) is None)
    assert (planted.directory / "prometheus.log").read_text() == ""


def test_a_service_that_hangs_is_not_healthy_and_down_ends_it(
    engines: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.run("stack", "up")
    pid = engines.pids()["jaeger"]
    os.kill(pid, signal.SIGSTOP)
    code, out, _ = engines.run("stack", "status")
    assert (code, re.findall(r"^\w+ +(not healthy|healthy)", out, re.MULTILINE)) == (
        1,
        ["healthy", "not healthy", "healthy"],
    )
    monkeypatch.setenv("XDG_STATE_HOME", engines.environment["XDG_STATE_HOME"])
    monkeypatch.setattr(native, "TERM_S", 1.0)
    native.down(lambda line: None)
    assert process_start(pid) is None


IMPATIENT = """
import sys
from otel_dflash.cli.main import main
from otel_dflash.stack import services
services.HEALTHY_S = 0.2
sys.exit(main(["stack", "up", "--native"]))
"""


@pytest.mark.parametrize("runs_already", [False, True])
def test_what_does_not_get_healthy_is_stopped_again_unless_it_ran_before(
    runs_already: bool, planted: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", planted.environment["XDG_STATE_HOME"])
    planted.state.mkdir(parents=True)
    with sleeping() as process:
        own = {"PROMETHEUS_HOST": "127.0.0.1", "PROMETHEUS_PORT": planted.ports["PROMETHEUS_PORT"]}
        before = (
            {"prometheus": state.Started(process.pid, process_start(process.pid) or 0, "3.16.0", own)}
            if runs_already
            else {}
        )
        state.write(state.Stack(before))
        command = [sys.executable, "-c", IMPATIENT]
        up = subprocess.run(
            command, env=planted.environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert state.read().services == before
        assert process.poll() is None
    log = planted.state / "prometheus.log"
    assert (up.returncode, up.stdout, up.stderr) == (
        1,
        "" if runs_already else "stopped what this command had started: prometheus\n",
        (
            f"otel-dflash: prometheus is not healthy after 0.2 s; see {log}; to stop what is still running: "
            "otel-dflash stack down\n"
        ),
    )


def test_down_ends_all_of_it_where_no_file_can_be_written(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", host.environment["XDG_STATE_HOME"])
    said: list[str] = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with sleeping() as jaeger, sleeping() as otelcol, state.locked(said.append):
        one, two = (
            state.Started(process.pid, process_start(process.pid) or 0, "1.0", {})
            for process in (jaeger, otelcol)
        )
        state.write(state.Stack({"jaeger": one, "otelcol": two}))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as on a full disk
        try:
            native.down(said.append)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [process.wait(DEADLINE_S) for process in (jaeger, otelcol)] == [-signal.SIGTERM] * 2
    assert said == ["otelcol stopped", "jaeger stopped"]
    assert state.read() == state.Stack()


def test_what_another_version_started_is_shown_and_ended(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", host.environment["XDG_STATE_HOME"])
    host.state.mkdir(parents=True)
    with sleeping() as process:
        started = {
            "pid": process.pid,
            "start": process_start(process.pid),
            "version": "1.0",
            "variables": {"NO_MORE": "1"},
        }
        (host.state / "stack.json").write_text(json.dumps({"services": {"jaeger": started}, "compose": None}))
        assert state.read().services["jaeger"].variables == SERVICES["jaeger"].variables
        code, out, err = host.run("stack", "status")
        assert (code, err) == (1, "")
        assert re.search(r"^jaeger +(not )?healthy +N +1\.0 +http://127\.0\.0\.1:16686$", out, re.MULTILINE)
        assert host.run("stack", "down")[1].splitlines()[0] == "jaeger stopped"
        assert process.wait(DEADLINE_S) == -signal.SIGTERM


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        bytes(30),
        b'{"services": {}, "compose": "x"}',
        b'{"services": {"jaeger": {"pid": -1, "start": 1, "version": "1", "variables": {}}}, "compose": null}',
        b'{"services": {"jaeger": {"pid": "x", "start": 1, "version": "1", "variables": {}}}, "compose": null}',
        b'{"services": {"jaeger": {"pid": 1, "start": 1, "version": "1", "variables": null}}, "compose": null}',
        b'{"services": {"unknown": {"pid": 1, "start": 1, "version": "1", "variables": {}}}, "compose": null}',
    ],
)
def test_a_damaged_state_file_is_one_line(content: bytes, host: Host) -> None:
    host.state.mkdir(parents=True)
    (host.state / "stack.json").write_bytes(content)
    for command in ("status", "down", "up"):
        process = host.begin("stack", command)
        out, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, out) == (1, "")
        assert re.fullmatch(
            rf"otel-dflash: {host.state}/stack\.json cannot be read \(.*\); stop the services by hand \(ss -ltnp\) and remove it\n",
            err,
        )
    (host.state / "stack.json").unlink()


def test_an_xdg_path_that_is_not_absolute_does_not_count_and_no_home_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert state.directory() == tmp_path / ".local" / "state" / "otel-dflash" / "stack"
    assert cache_directory() == tmp_path / ".cache" / "otel-dflash" / "engines"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)  # a user of a container whom no passwd has
    for find, variable in ((state.directory, "XDG_STATE_HOME"), (cache_directory, "XDG_CACHE_HOME")):
        with pytest.raises(EngineError) as caught:
            find()
        assert (
            str(caught.value)
            == f"this user has no home directory; set {variable} to a directory that it can write"
        )


def test_down_ends_no_process_that_has_the_pid_of_one_that_was_started(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", host.environment["XDG_STATE_HOME"])
    with sleeping() as process:
        host.state.mkdir(parents=True)
        state.write(
            state.Stack(
                {"jaeger": state.Started(process.pid, (process_start(process.pid) or 0) - 1, "2.13.0", {})}
            )
        )
        code, out, err = host.run("stack", "down")
        assert (code, out.splitlines()[0], err) == (0, "jaeger had already ended", "")
        assert process.poll() is None


def test_what_does_not_end_is_killed_after_a_while(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", host.environment["XDG_STATE_HOME"])
    monkeypatch.setattr(native, "TERM_S", 0.2)
    said: list[str] = []
    with sleeping("trap '' TERM") as process, state.locked(said.append):
        state.write(
            state.Stack({"jaeger": state.Started(process.pid, process_start(process.pid) or 0, "2.13.0", {})})
        )
        native.down(said.append)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert said == ["jaeger did not end within 0.2 s and was killed"]
    assert state.read() == state.Stack()
