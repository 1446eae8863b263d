"""What becomes of the agent under `otel-dflash run`, and what is said at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.otlp_receiver import OtlpReceiver
from tests.processes import (
    DEADLINE_S,
    RUN,
    Start,
    children,
    completed,
    poll,
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


@pytest.fixture
def with_agent(environment: dict[str, str]) -> dict[str, str]:
    """The same with the real agent, however long that takes on a busy machine."""
    del environment["OTEL_DFLASH_AGENT"]
    environment["OTEL_DFLASH_EXIT_MS"] = "60000"
    return environment


# --- the agent


def test_agent_that_cannot_be_started_is_one_line_at_the_end(
    environment: dict[str, str], tmp_path: Path
) -> None:
    environment["OTEL_DFLASH_AGENT"] = "no-such-agent"
    expected = (
        b"otel-dflash: the agent could not be started: OTEL_DFLASH_AGENT is not a command that can be run: 'no-such-agent'; "
        b"set it to a path such as /opt/venv/bin/otel-dflash\n"
    )
    assert completed((*RUN, "echo", "trained"), environment, tmp_path) == (0, b"trained\n", expected)


def test_agent_that_fails_is_one_line_at_the_end(environment: dict[str, str], tmp_path: Path) -> None:
    failing = tmp_path / "agent"
    failing.write_text("#!/bin/sh\necho the reason >&2\nexit 9\n")
    failing.chmod(0o755)
    environment["OTEL_DFLASH_AGENT"] = str(failing)
    code, out, err = completed((*RUN, "echo", "trained"), environment, tmp_path)
    assert (code, out, err) == (
        0,
        b"trained\n",
        b"otel-dflash: the agent ended with exit code 9: the reason\n",
    )


def supervisor_of(process: subprocess.Popen[bytes]) -> int | None:
    return next((pid for pid, line in children(process.pid).items() if "/supervisor/" in line), None)


def agent_of(process: subprocess.Popen[bytes]) -> int | None:
    supervisor = supervisor_of(process)
    return next(iter(children(supervisor)), None) if supervisor else None


def agent_environment(process: subprocess.Popen[bytes]) -> dict[str, str]:
    poll(lambda: agent_of(process))
    entries = Path(f"/proc/{agent_of(process)}/environ").read_text().rstrip("\0").split("\0")
    return dict(entry.split("=", 1) for entry in entries)


HEADERS = {
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "t=1",
    "OTEL_EXPORTER_OTLP_METRICS_HEADERS": "m=1",
}
SHOW_ENVIRONMENT = "import json, os, sys; print(json.dumps(dict(os.environ)), flush=True); sys.stdin.read()"


@pytest.mark.parametrize(("flags", "passed"), [([], {}), (["--pass-otel-headers"], HEADERS)])
def test_header_variables_reach_the_agent_alone(
    flags: list[str], passed: dict[str, str], with_agent: dict[str, str], start: Start
) -> None:
    with_agent.update(HEADERS)
    process = start(*RUN[:-1], *flags, "--", sys.executable, "-c", SHOW_ENVIRONMENT)
    shown = json.loads(read_line(process))
    assert {name: value for name, value in shown.items() if "HEADERS" in name} == passed
    assert {name: value for name, value in agent_environment(process).items() if "HEADERS" in name} == HEADERS


def test_endpoint_flags_are_the_agents_and_win_over_the_environment(
    with_agent: dict[str, str], start: Start
) -> None:
    given = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:1",
        "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc",
    }
    with_agent.update(given)
    flags = ("--endpoint", "http://127.0.0.1:9", "--protocol", "http/protobuf")
    process = start(*RUN[:-1], *flags, "--", sys.executable, "-c", SHOW_ENVIRONMENT)
    shown = json.loads(read_line(process))
    assert {name: value for name, value in shown.items() if "OTLP" in name} == given
    assert {name: value for name, value in agent_environment(process).items() if "OTLP" in name} == {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }


def test_supervisor_and_agent_have_a_session_of_their_own(with_agent: dict[str, str], start: Start) -> None:
    process = start(*RUN, "cat")
    poll(lambda: agent_of(process))
    supervisor, agent = supervisor_of(process), agent_of(process)
    assert supervisor
    assert agent
    assert os.getsid(agent) == os.getsid(supervisor) == supervisor


def test_agent_that_is_killed_is_started_again(with_agent: dict[str, str], start: Start) -> None:
    process = start(*RUN, "cat")
    poll(lambda: agent_of(process))
    first = agent_of(process)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    poll(lambda: agent_of(process) not in (None, first))
    said = b"otel-dflash: the agent was killed by SIGKILL; it was started again (restarts: 1)\n"
    assert process.communicate(b"done", timeout=DEADLINE_S) == (b"done", said)
    assert process.returncode == 0


def test_command_that_never_starts_telemetry_is_shown_how(with_agent: dict[str, str], tmp_path: Path) -> None:
    with_agent["OTEL_DFLASH_RUN_ID"] = "r1"
    with_agent["OTEL_DFLASH_DIR"] = "runs"
    command = (sys.executable, "-m", "otel_dflash", "run", "--", "echo", "trained")
    expected = """\
otel-dflash: recording r1 in runs/r1
otel-dflash: no telemetry was recorded: no process created a worker after start(), which a spawned process must call too. The minimum to add:

    import otel_dflash
    telemetry = otel_dflash.start()
    worker = telemetry.worker("target", 0, gpu=0)
    with worker.step() as step:                    # around one turn of your loop
        with worker.model_forward: hidden = target(batch)

"""
    assert completed(command, with_agent, tmp_path) == (0, b"trained\n", expected.encode())


@pytest.fixture
def stuck_agent(environment: dict[str, str], tmp_path: Path) -> Iterator[Path]:
    """An agent that never ends, and writes its pid and its supervisor's to the file that this returns."""
    pid_file = tmp_path / "agent.pid"
    script = tmp_path / "agent"
    script.write_text(f"#!/bin/sh\necho $PPID $$ >{pid_file}\nexec sleep 1000\n")
    script.chmod(0o755)
    environment["OTEL_DFLASH_AGENT"] = str(script)
    yield pid_file
    for pid in pid_file.read_text().split():
        os.kill(int(pid), signal.SIGKILL)


def test_agent_that_does_not_end_is_waited_for_so_long_and_said(
    stuck_agent: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    environment["OTEL_DFLASH_EXIT_MS"] = "0"
    code, out, err = completed(
        (*RUN, "sh", "-c", f"until test -s {stuck_agent}; do sleep 0.01; done; exit 3"), environment, tmp_path
    )
    assert (code, out) == (3, b"")
    assert err == (
        b"otel-dflash: the agent is still running after 3.8 s (processes of the run may be alive): the newest part may be missing here\n"
    )


def test_ctrl_c_while_the_agent_flushes_ends_run_with_the_commands_exit_code(
    stuck_agent: Path, environment: dict[str, str], start: Start, tmp_path: Path
) -> None:
    environment["OTEL_DFLASH_EXIT_MS"] = "3600000"
    environment["OTEL_DFLASH_RUN_ID"] = "r1"
    ended = tmp_path / "ended"
    process = start(
        *RUN, "sh", "-c", f"until test -s {stuck_agent}; do sleep 0.01; done; touch {ended}; exit 3"
    )
    poll(ended.exists)  # else the command may not have begun, and the signal is for it
    poll(lambda: list(children(process.pid)) == [supervisor_of(process)])
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=DEADLINE_S) == (
        b"",
        b"otel-dflash: not waiting for the agent; see the run later: otel-dflash summary r1\n",
    )
    assert process.returncode == 3


# --- what is said at the end

TRAIN = """
import otel_dflash
telemetry = otel_dflash.start()
worker = telemetry.worker("target", 0)
for _ in range(3):
    with worker.step() as step:
        with worker.forward:
            step.set(tokens=10)
print("trained")
"""
WAIT_FOR_AGENT = """
import os, time
while not os.path.exists("runs/r1/run.json"):
    time.sleep(0.01)
"""


def recorded(
    environment: dict[str, str], cwd: Path, *flags: str, program: str = TRAIN
) -> tuple[str, list[str]]:
    """Record TRAIN; return what the summary says, and our own lines below it."""
    environment["OTEL_DFLASH_RUN_ID"] = "r1"
    environment["OTEL_DFLASH_DIR"] = "runs"
    code, out, err = completed(
        (*RUN[:3], "run", *flags, "--", sys.executable, "-c", program), environment, cwd
    )
    assert (code, out) == (0, b"trained\n"), err
    lines = err.decode().splitlines()
    ours = [line for line in lines if line.startswith("otel-dflash: ")]
    return "\n".join(line for line in lines if line not in ours), ours


def test_closing_summary_says_where_the_recording_is_and_how_to_send_it(
    with_agent: dict[str, str], tmp_path: Path
) -> None:
    summary, ours = recorded(with_agent, tmp_path)
    assert "target" in summary
    assert "forward" in summary
    assert ours == [
        "otel-dflash: recording r1 in runs/r1",
        "otel-dflash: recorded in runs/r1; see it again: otel-dflash summary r1",
        "otel-dflash: nothing was sent: no endpoint is set. Send this run: otel-dflash replay r1 --endpoint http://localhost:4317",
        "otel-dflash: send the next run live: OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4317",
    ]


def test_recording_elsewhere_is_named_by_its_path(with_agent: dict[str, str], tmp_path: Path) -> None:
    ours = recorded(with_agent, tmp_path, "--dir", "elsewhere")[1]
    assert ours[1] == "otel-dflash: recorded in elsewhere/r1; see it again: otel-dflash summary elsewhere/r1"


def test_quiet_says_nothing_when_all_is_well(with_agent: dict[str, str], tmp_path: Path) -> None:
    assert recorded(with_agent, tmp_path, "--quiet") == ("", [])
    assert (tmp_path / "runs" / "r1" / "run.json").exists()


def test_quiet_says_what_was_lost(with_agent: dict[str, str], tmp_path: Path) -> None:
    program = TRAIN.replace(
        'print("trained")', 'with worker.step() as step: step.set(loss=[1])\nprint("trained")'
    )
    assert recorded(with_agent, tmp_path, "--quiet", program=program) == (
        "",
        [
            "otel-dflash: lost: unsupported_value 1 (target 0: 1)",
            (
                "otel-dflash: lost: step.set() did not read loss (list): give it an int, float, str or "
                "bool in range"
            ),
        ],
    )


def test_what_was_not_delivered_is_said_with_the_way_to_send_it(
    with_agent: dict[str, str], tmp_path: Path
) -> None:
    with_agent["OTEL_DFLASH_EXIT_MS"] = "1200"  # it tries until then, once it is there
    program = TRAIN.replace('print("trained")', f'{WAIT_FOR_AGENT}\nprint("trained")')
    summary, ours = recorded(
        with_agent, tmp_path, "--quiet", "--endpoint", "http://127.0.0.1:9", program=program
    )
    assert (summary, len(ours)) == ("", 1)
    assert ours[0].startswith("otel-dflash: not delivered in full: spans and metrics (")
    assert ours[0].endswith(
        ". All is recorded; send it later: otel-dflash replay r1 --endpoint http://127.0.0.1:9"
    )


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_replay_sends_what_a_run_recorded(protocol: str, with_agent: dict[str, str], tmp_path: Path) -> None:
    recorded(with_agent, tmp_path)
    with OtlpReceiver() as receiver:
        endpoint = receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint
        command = (*RUN[:3], "replay", "r1", "--endpoint", endpoint, "--protocol", protocol)
        code, out, err = completed(command, with_agent, tmp_path)
        assert (code, err) == (0, b"")
        assert out.startswith(b"sent all of r1: 6 spans and ")
        assert sorted(span.name for span in receiver.spans()) == ["target.forward"] * 3 + ["target.step"] * 3
        assert len(receiver.span_ids()) == 6
