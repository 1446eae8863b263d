"""A trainer and its agent's supervisor, for tests that kill them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from otel_dflash.session import SESSION_FILE
from tests.processes import DEADLINE_S, clean_environment, poll, read_line

PROGRAM = (sys.executable, "-m", "otel_dflash")
OWN_USER = () if os.getuid() == 0 else ("--user", "--map-root-user")
HOW: dict[str, tuple[str, ...]] = {
    "start": (),
    "run": (*PROGRAM, "run", "--quiet", "--"),
    "first process": ("unshare", *OWN_USER, "--pid", "--fork", "--mount-proc"),  # of a container
}
RATE = 7000
RING_RECORDS = 15_360  # of the default ring of 1 MiB
# Does what each line on stdin says, and answers with its counts: `RECORDS RATE`, a number of records at so many a
# second, or `drained`, when the agent has taken all.
TRAINER = """
import json, os, sys, time
import otel_dflash
from otel_dflash.records import Counter, Header
from otel_dflash.trainer import telemetry as module
module.AGENT_START_S = 0.0
if os.environ.get("FROZEN"):
    sys.frozen = True
telemetry = otel_dflash.start()
worker = telemetry.worker("target", 0)
ring = worker._writer.ring()
counts = {"steps": 0}

def answer():
    counts["dropped"] = ring.words[Header.COUNTERS + Counter.DROPPED_RING_FULL]
    counts["taken"] = ring.words[Header.TAIL]
    print(json.dumps(counts), flush=True)

answer()
for line in sys.stdin:
    if line == "drained\\n":
        while ring.words[Header.TAIL] < 2 * counts["steps"] - counts["dropped"]:
            time.sleep(0.01)
    else:
        records, rate = map(int, line.split())
        begun = time.monotonic()
        for n in range(records // 2):
            while time.monotonic() - begun < 2 * n / rate:
                pass
            with worker.step():
                with worker.forward:
                    pass
            counts["steps"] += 1
    answer()
"""


class Training:
    """A trainer under `otel-dflash run`, or alone, whose session lies in a place of its own."""

    def __init__(self, directory: Path, shm: Path, how: str, **variables: str) -> None:
        self.shm = shm
        self.recording = directory / "runs" / "r1"
        self.environment = clean_environment(
            OTEL_DFLASH_DIR=str(directory / "runs"),
            OTEL_DFLASH_SHM=str(shm),
            OTEL_DFLASH_EXIT_MS="60000",
        )
        self.process = subprocess.Popen(
            (*HOW[how], sys.executable, "-c", TRAINER),
            env={**self.environment, "OTEL_DFLASH_RUN_ID": "r1", **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        line = read_line(self.process)
        if not line and how == "first process":
            pytest.skip("this machine allows no PID namespace of our own")
        self.counts: dict[str, int] = json.loads(line)

    def ask(self, line: str) -> dict[str, int]:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()
        self.counts = json.loads(read_line(self.process))
        return self.counts

    def end(self) -> str:
        """End the trainer; return what it and its supervisor wrote to stderr."""
        _, text = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0
        return str(text.decode())

    def command(self, *arguments: str, **variables: str) -> str:
        """Run a command in a session that looks old enough to be finished; return what it prints."""
        for path in self.shm.glob(f"*/*/{SESSION_FILE}"):
            then = time.time() - 61
            os.utime(path, (then, then))
        result = subprocess.run(
            (*PROGRAM, *arguments),
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        return result.stdout

    def summary(self) -> dict[str, str]:
        """Return the pairs of the summary's footer and header."""
        text = self.command("summary", "r1")
        pairs = re.findall(r"^(\w[\w ]*?)  +(.*(?:\n  +\S.*)*)", text, re.MULTILINE)
        return {name: re.sub("\n +", "\n", value) for name, value in pairs}

    # -- processes of the session

    def supervisor(self) -> int | None:
        return next((pid for pid, line in self.processes().items() if "/supervisor/" in " ".join(line)), None)

    def agent(self) -> int | None:
        return next((pid for pid, line in self.processes().items() if str(self.shm) in line[-1]), None)

    def kill_agent(self) -> int:
        poll(self.agent)
        agent = self.agent()
        assert agent
        os.kill(agent, signal.SIGKILL)
        poll(lambda: self.agent() != agent)
        return agent

    def kill_supervisor(self) -> None:
        supervisor = self.supervisor()
        assert supervisor
        os.kill(supervisor, signal.SIGKILL)
        poll(lambda: self.supervisor() != supervisor)

    def wait_for_end(self) -> None:
        poll(lambda: not self.processes())

    def processes(self) -> dict[int, list[str]]:
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                line = path.read_text().rstrip("\0").split("\0")
                if any(word.startswith(str(self.shm)) for word in line):
                    found[int(path.parent.name)] = line
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        while found := self.processes():  # a supervisor may just start an agent again
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def records(summary: dict[str, str]) -> int:
    found = re.search(r"([\d ]+) records", summary["recording"])
    assert found
    return int(found[1].replace(" ", ""))
