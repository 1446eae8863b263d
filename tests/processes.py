"""Real processes for the tests of `otel-dflash run`: a user's environment, a stand-in for the agent, a
terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

Start = Callable[..., "subprocess.Popen[bytes]"]

DEADLINE_S = 60
RUN = (sys.executable, "-m", "otel_dflash", "run", "--quiet", "--")

COUNT_SIGNALS = """
import os, signal, sys
count = 0
def note(number, frame):
    global count
    count += 1
    os.write(1, f"{signal.Signals(number).name} {count}\\n".encode())
    if number == signal.SIGUSR1:
        sys.exit(40 + count)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, note)
os.write(1, b"ready\\n")
while True:
    signal.pause()
"""
# Lives as the agent does: until no process of the session is left.
AGENT = """#!/bin/sh
while kill -0 $PPID 2>/dev/null && for entry in "$2"/process-*; do test -e "$entry"; done; do sleep 0.02; done
"""
# Takes the terminal on stdin as its controlling one, then becomes the command in its arguments.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], "
    "sys.argv[1:])"
)


def clean_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a child that knows nothing of this one's telemetry and proxies."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OTEL_") and not name.lower().endswith("_proxy")
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}


def user_environment(directory: Path) -> dict[str, str]:
    """Return the environment of a user without any OpenTelemetry setting, and the stand-in for the agent."""
    agent = directory / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "PYTEST_", "PYTHONUNBUFFERED"))
    }
    ours = {"OTEL_DFLASH_DIR": "runs", "OTEL_DFLASH_SHM": str(directory), "OTEL_DFLASH_AGENT": str(agent)}
    return {**kept, **ours, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHON_COLORS": "0"}


@contextmanager
def starter(environment: Mapping[str, str], cwd: Path) -> Iterator[Start]:
    """Give a function that starts processes; end those that are left."""
    started = []

    def popen(*command: str, **settings: object) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, env=environment, cwd=cwd, **{**pipes, **settings})  # type: ignore[call-overload]
        started.append(process)
        return process  # type: ignore[no-any-return]

    try:
        yield popen
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()
            for pid in members_of_session(process.pid):  # of a terminal whose test failed
                os.kill(pid, signal.SIGKILL)


def completed(
    command: tuple[str, ...], environment: Mapping[str, str], cwd: Path, given: bytes = b""
) -> tuple[int, bytes, bytes]:
    result = subprocess.run(
        command, env=environment, cwd=cwd, input=given, capture_output=True, timeout=DEADLINE_S, check=False
    )
    return result.returncode, result.stdout, result.stderr


def python(program: str) -> tuple[str, ...]:
    return (*RUN, sys.executable, "-c", program)


def read_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout
    assert select.select([process.stdout], [], [], DEADLINE_S)[0], "no output before the deadline"
    return process.stdout.readline()


def children(pid: int) -> dict[int, str]:
    """Return the command lines of a process's children."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


def members_of_session(leader: int) -> list[int]:
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(entry.name)) == leader:
                members.append(int(entry.name))
    return members


def poll(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "condition not met before the deadline"
        select.select([], [], [], 0.01)


class Terminal:
    """A pseudo terminal with a process in its foreground."""

    def __init__(self, start: Start, *command: str) -> None:
        self.master, slave = pty.openpty()
        self.process = start(
            sys.executable,
            "-c",
            TAKE_TERMINAL,
            *command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = b""

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def expect(self, text: bytes) -> None:
        """Read until `text` appears, and forget all up to it."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.seen:
            ready = select.select([self.master], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, f"{text!r} did not appear; seen: {self.seen!r}"
            self.seen += os.read(self.master, 4096)
        self.seen = self.seen.split(text, 1)[1]

    def rest(self) -> bytes:
        """Return what else appears before the terminal closes."""
        while select.select([self.master], [], [], DEADLINE_S)[0]:
            try:
                self.seen += os.read(self.master, 4096)
            except OSError:  # EIO: every process has closed it
                break
        os.close(self.master)
        return self.seen
