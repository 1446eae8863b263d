"""`otel-dflash run` with real processes and a stand-in for the agent: what it passes through, and what cannot
start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import (
    COUNT_SIGNALS,
    DEADLINE_S,
    RUN,
    Start,
    Terminal,
    children,
    completed,
    poll,
    python,
    read_line,
    starter,
    user_environment,
)


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return user_environment(tmp_path_factory.mktemp("user"))


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    with starter(environment, tmp_path) as popen:
        yield popen


# --- exit status, streams, environment


@pytest.mark.parametrize("code", [0, 3, 255])
def test_exit_code_is_the_commands(code: int, environment: dict[str, str], tmp_path: Path) -> None:
    assert completed(python(f"raise SystemExit({code})"), environment, tmp_path) == (code, b"", b"")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGINT, signal.SIGPIPE]
)
def test_death_by_signal_is_visible_to_the_parent(
    number: signal.Signals, environment: dict[str, str], tmp_path: Path
) -> None:
    assert completed((*RUN, "sh", "-c", f"kill -{number.value} $$"), environment, tmp_path) == (
        -number,
        b"",
        b"",
    )


def test_stdin_and_stdout_pass_through_untouched(environment: dict[str, str], tmp_path: Path) -> None:
    given = bytes(range(256)) * 1000
    assert completed((*RUN, "cat"), environment, tmp_path, given) == (0, given, b"")


def test_stderr_passes_through(environment: dict[str, str], tmp_path: Path) -> None:
    assert completed((*RUN, "sh", "-c", "echo oops >&2"), environment, tmp_path) == (0, b"", b"oops\n")


def test_further_descriptors_pass_through(start: Start) -> None:
    reader, writer = os.pipe()
    process = start(*RUN, "bash", "-c", f"echo kept >&{writer}", pass_fds=[writer])
    os.close(writer)
    assert process.wait(DEADLINE_S) == 0
    with open(reader, "rb") as file:
        assert file.read() == b"kept\n"


def test_command_has_no_signal_blocked_and_none_ignored(environment: dict[str, str], tmp_path: Path) -> None:
    code, out, _ = completed(
        (*RUN, "grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"), environment, tmp_path
    )
    masks = {
        name: int(mask, 16) & 0x7FFFFFFF
        for name, mask in (line.split(":") for line in out.decode().splitlines())
    }
    assert (code, masks) == (0, {"SigBlk": 0, "SigIgn": 0})  # 32 and 33 are the C library's own


def test_arguments_are_passed_on_as_they_are(environment: dict[str, str], tmp_path: Path) -> None:
    command = (*RUN, "printf", "<%s>", "--quiet", "--", "a b", "", "$HOME")
    assert completed(command, environment, tmp_path) == (0, b"<--quiet><--><a b><><$HOME>", b"")


@pytest.mark.parametrize("first_line", ["#!/bin/sh\n", ""])
def test_shell_script_runs_and_its_children_join_the_session(
    first_line: str, environment: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        f'{first_line}test -d "$OTEL_DFLASH_SESSION" && env | sed -n s/OTEL_DFLASH_SESSION=//p\nexit 4\n'
    )
    script.chmod(0o755)
    code, out, _ = completed((*RUN, "./train.sh"), environment, tmp_path)
    assert code == 4
    assert Path(out.decode().strip()).parent.name == f"otel-dflash-{os.getuid()}"
    assert completed((*RUN, "bash", "train.sh"), environment, tmp_path)[0] == 4


def test_python_module_runs(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:], __name__); sys.exit(6)")
    assert completed((*RUN, sys.executable, "-m", "train", "--lr", "1"), environment, tmp_path) == (
        6,
        b"['--lr', '1'] __main__\n",
        b"",
    )


def test_torchrun_workers_share_the_session(environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(
        "import os; open(os.environ['LOCAL_RANK'], 'w').write(os.environ['OTEL_DFLASH_SESSION'])"
    )
    launcher = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    )
    result = subprocess.run(
        (*RUN, *launcher), env=environment, cwd=tmp_path, capture_output=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    sessions = [(tmp_path / rank).read_text() for rank in ("0", "1")]
    assert sessions[0] == sessions[1] != ""


@pytest.mark.parametrize("variable", ["OTEL_DFLASH_DISABLED", "OTEL_SDK_DISABLED"])
def test_disabled_runs_the_bare_command(variable: str, environment: dict[str, str], tmp_path: Path) -> None:
    environment[variable] = "true"
    environment["OTEL_EXPORTER_OTLP_HEADERS"] = "authorization=secret"
    code, out, err = completed((*RUN, "env"), environment, tmp_path)
    assert (code, err) == (
        0,
        f"otel-dflash: telemetry is off: {variable} is set\n".encode(),
    )
    assert b"OTEL_DFLASH_SESSION" not in out
    assert b"authorization=secret" in out
    assert not (tmp_path / "runs").exists()


# --- signals


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2]
)
def test_signal_to_run_reaches_the_command_once(number: signal.Signals, start: Start) -> None:
    process = start(*python(COUNT_SIGNALS))
    assert read_line(process) == b"ready\n"
    process.send_signal(number)
    assert read_line(process) == f"{number.name} 1\n".encode()
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=DEADLINE_S) == (b"SIGUSR1 2\n", b"")
    assert process.returncode == 42


def test_run_outlives_signals_that_the_command_ignores(start: Start) -> None:
    process = start(*python(COUNT_SIGNALS))
    assert read_line(process) == b"ready\n"
    for count in (1, 2, 3):
        process.send_signal(signal.SIGTERM)
        assert read_line(process) == f"SIGTERM {count}\n".encode()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(DEADLINE_S) == 44


def test_run_dies_of_the_signal_that_it_passed_on(start: Start) -> None:
    process = start(*RUN, "sleep", "1000")
    poll(lambda: any(line.startswith("sleep ") for line in children(process.pid).values()))
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == -signal.SIGTERM


def test_ctrl_c_at_a_terminal_reaches_the_command_once_each_time(start: Start) -> None:
    terminal = Terminal(start, *python(COUNT_SIGNALS))
    terminal.expect(b"ready\r\n")
    terminal.type(b"\x03")
    terminal.expect(b"SIGINT 1\r\n")
    terminal.type(b"\x03")
    terminal.expect(b"SIGINT 2\r\n")
    terminal.process.send_signal(signal.SIGUSR1)
    assert terminal.rest() == b"SIGUSR1 3\r\n"
    assert terminal.process.wait(DEADLINE_S) == 43


def test_ctrl_c_ends_a_plain_python_program_and_run_as_it(start: Start) -> None:
    terminal = Terminal(start, *python("print('ready', flush=True); import signal; signal.pause()"))
    terminal.expect(b"ready\r\n")
    terminal.type(b"\x03")
    assert terminal.rest().rstrip().endswith(b"KeyboardInterrupt")
    assert terminal.process.wait(DEADLINE_S) == -signal.SIGINT


def test_hangup_of_a_terminal_that_run_leads_reaches_the_command(start: Start) -> None:
    terminal = Terminal(start, *python("print('ready', flush=True); import signal; signal.pause()"))
    terminal.expect(b"ready\r\n")
    os.close(terminal.master)
    assert terminal.process.wait(DEADLINE_S) == -signal.SIGHUP


def test_ctrl_z_stops_and_fg_continues(start: Start) -> None:
    terminal = Terminal(
        start,
        "bash",
        "-c",
        'set -m; "$@"; echo stopped $?; fg >/dev/null; echo ended $?',
        "bash",
        *python(COUNT_SIGNALS),
    )
    terminal.expect(b"ready\r\n")
    terminal.type(b"\x1a")
    terminal.expect(b"stopped 148\r\n")
    (run,) = children(terminal.process.pid)
    poll(lambda: os.tcgetpgrp(terminal.master) == run)  # fg has given it the terminal
    terminal.type(b"\x03")
    terminal.expect(b"SIGINT 1\r\n")
    os.kill(run, signal.SIGUSR1)
    terminal.expect(b"SIGUSR1 2\r\n")
    terminal.expect(b"ended 42\r\n")
    terminal.rest()


# --- what cannot start


def test_missing_command(environment: dict[str, str], tmp_path: Path) -> None:
    expected = b"otel-dflash: command not found: no-such-trainer; check the spelling, or give its path\n"
    assert completed((*RUN, "no-such-trainer"), environment, tmp_path) == (127, b"", expected)
    assert completed((*RUN, "./no.sh"), environment, tmp_path) == (
        127,
        b"",
        b"otel-dflash: command not found: ./no.sh; check the spelling, or give its path\n",
    )


def test_a_place_that_cannot_be_searched_holds_no_command(
    environment: dict[str, str], tmp_path: Path
) -> None:
    searched = {**environment, "PATH": f"{tmp_path / ('x' * 300)}:{environment['PATH']}"}
    expected = b"otel-dflash: command not found: no-such-trainer; check the spelling, or give its path\n"
    assert completed((*RUN, "no-such-trainer"), searched, tmp_path) == (127, b"", expected)


def test_script_given_as_command(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    expected = b"otel-dflash: command not found: train.py; try: otel-dflash run -- python train.py\n"
    assert completed((*RUN, "train.py"), environment, tmp_path) == (127, b"", expected)
    expected = (
        b"otel-dflash: cannot run train.py: it is not executable; try: otel-dflash run -- python train.py\n"
    )
    assert completed((*RUN, "./train.py"), environment, tmp_path) == (126, b"", expected)


def test_not_executable(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("")
    expected = b"otel-dflash: cannot run train.sh: it is not executable; try: chmod +x train.sh\n"
    assert completed((*RUN, "./train.sh"), environment, tmp_path) == (126, b"", expected)


def test_directory_as_command(environment: dict[str, str], tmp_path: Path) -> None:
    expected = f"otel-dflash: cannot run {tmp_path}: it is a directory\n".encode()
    assert completed((*RUN, str(tmp_path)), environment, tmp_path) == (126, b"", expected)


def test_script_with_a_missing_interpreter(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    expected = f"otel-dflash: cannot run {script}: the interpreter in its first line is missing\n".encode()
    assert completed((*RUN, str(script)), environment, tmp_path) == (126, b"", expected)


def test_no_command(environment: dict[str, str], tmp_path: Path) -> None:
    expected = b"otel-dflash: no command given; try: otel-dflash run -- python train.py\n"
    assert completed(RUN, environment, tmp_path) == (2, b"", expected)


@pytest.mark.parametrize(
    "endpoint", ["ftp://localhost:4317", "http://", "http://localhost:port", "http://localhost:99999"]
)
def test_bad_endpoint_stops_before_training(
    endpoint: str, environment: dict[str, str], tmp_path: Path
) -> None:
    environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    code, out, err = completed((*RUN, "touch", "trained"), environment, tmp_path)
    assert (code, out, err.count(b"\n")) == (2, b"", 1)
    assert err.startswith(
        b"otel-dflash: OTEL_EXPORTER_OTLP_ENDPOINT is not an endpoint that OTLP over gRPC can use, got"
    )
    assert list(tmp_path.iterdir()) == []


def test_bad_protocol(environment: dict[str, str], tmp_path: Path) -> None:
    environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://localhost:4318"
    environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/json"
    code, out, err = completed((*RUN, "true"), environment, tmp_path)
    assert (code, out, err.count(b"\n")) == (2, b"", 1)
    assert err.startswith(
        b"otel-dflash: OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be one of grpc, http/protobuf, got 'http/json'"
    )


def test_directory_that_cannot_be_written(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment["OTEL_DFLASH_DIR"] = str(tmp_path / "file")
    environment["OTEL_DFLASH_RUN_ID"] = "r1"
    code, out, err = completed((*RUN, "true"), environment, tmp_path)
    assert (code, out) == (2, b"")
    assert err.decode() == (
        f"otel-dflash: cannot create the recording {tmp_path}/file/r1: Not a directory; set "
        "OTEL_DFLASH_DIR to a writable directory\n"
    )


def test_bad_agent_setting_stops_before_training(environment: dict[str, str], tmp_path: Path) -> None:
    environment["OTEL_DFLASH_EXIT_MS"] = "soon"
    code, out, err = completed((*RUN, "touch", "trained"), environment, tmp_path)
    assert (code, out) == (2, b"")
    assert err.startswith(
        b"otel-dflash: OTEL_DFLASH_EXIT_MS must be an integer from 0 to 3600000, got 'soon'"
    )
    assert list(tmp_path.iterdir()) == []
