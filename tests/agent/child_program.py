"""A child that misbehaves as it is asked to. $TMPDIR, which children inherit, holds what it shares with the test:
`gate`, a FIFO to hang at, and `inside`, a byte that is 1 while it is in a call."""

from __future__ import annotations

import mmap
import os
import signal
import time
from pathlib import Path
from typing import Any

from otel_dflash.agent.children.parent import Parent

SHARED = Path(os.environ.get("TMPDIR", "/nowhere"))


def environment(parent: Parent) -> dict[str, str]:
    return dict(os.environ)


def hang(parent: Parent) -> None:
    (SHARED / "gate").read_text()


def hang_in_a_call(parent: Parent) -> None:
    with parent.entering("harmless"):
        pass
    with parent.entering("drive"):
        hang(parent)


def call_for_ever(parent: Parent) -> None:
    with open(SHARED / "inside", "r+b") as file:
        inside = mmap.mmap(file.fileno(), 1)
    while True:
        with parent.entering("drive"):
            inside[0] = 1
            time.sleep(1e-4)
            inside[0] = 0
        time.sleep(1e-4)


def flood(parent: Parent) -> None:
    while True:
        os.write(parent._messages, b"x" * 65_536)


def crash(parent: Parent) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def crash_in_a_call(parent: Parent) -> None:
    with parent.entering("drive"):
        os._exit(3)


def close_stdout(parent: Parent) -> None:
    os.close(parent._messages)
    hang(parent)


def close_stdout_in_a_call(parent: Parent) -> None:
    with parent.entering("drive"):
        close_stdout(parent)


def fail(parent: Parent) -> None:
    raise ValueError("no such thing")


def chatter(parent: Parent) -> list[Any]:
    print("printed", flush=True)
    os.write(1, b"written")
    return ["quiet", "x" * 1_000_000]


if __name__ == "__main__":
    os.write(1, b'before the program\n{"a": \n{\xff}\n[1]\n{"leave": "drive"}\n{"a": 1}\n{"half a line": ')
    answers = (
        *(environment, hang, hang_in_a_call, call_for_ever, flood, crash, crash_in_a_call),
        *(close_stdout, close_stdout_in_a_call, fail, chatter),
    )
    Parent().serve({answer.__name__: answer for answer in answers})
