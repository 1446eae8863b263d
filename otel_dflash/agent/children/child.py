"""The parent's side of a child process: start it, ask it, wait until a deadline, then end or abandon it.

The two talk in JSON, one object a line, over the child's stdin and stdout::

    parent                     child
    {"request": "inventory"} ->
                            <- {"enter": "nvmlInit"}       before each call that may hang ...
                            <- {"leave": "nvmlInit"}       ... and after it
                            <- {"result": {...}}           or {"error": "ValueError: ..."}

A child that is late and inside an announced call is never killed: killing a process inside NVML has frozen a
GPU. It is abandoned: its pipes are closed, so it ends as soon as the call returns. Start another only once
`is_gone`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from otel_dflash.launch import interpreter

INHERITED_VARIABLES: Final = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME"),  # what it takes to start
    *("HOME", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE"),
)
"""All that a child inherits: no credential, and nothing that makes a library send data elsewhere."""
END_S: Final = 1.0  # for a process to stop or end; one that takes longer is stuck in the kernel
_POLL_S: Final = 0.005
_READ_BYTES: Final = 1 << 16  # what a pipe holds
_LINE_BYTES_MAX: Final = 1 << 20  # a longer line is not a message


class NoAnswerError(Exception):
    """A child did not answer and will not; the text says why."""

    def __init__(self, text: str, *, is_abandoned: bool = False) -> None:
        """`is_abandoned`: the process still hangs."""
        super().__init__(text)
        self.is_abandoned = is_abandoned


class Child:
    """One child process, used by one thread. After a NoAnswerError it is unusable: start another."""

    def __init__(self, module: str) -> None:
        """Start `module`, whose main part is `Parent.serve` (children/parent.py).

        Raises:
            OSError: The process cannot be started.
        """
        self._name = module.rpartition(".")[2]
        self._process = subprocess.Popen(
            [*interpreter(), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=scrubbed(os.environ),
            start_new_session=True,  # Ctrl-C is for the parent only
            bufsize=0,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._requests = self._process.stdin
        self._messages = self._process.stdout
        os.set_blocking(self._messages.fileno(), False)
        self._part = b""
        self._is_at_end = False
        self._open_calls: list[str] = []

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def request(self, name: str) -> None:
        """Ask without waiting; one request at a time. `answer` also reports what goes wrong here."""
        with suppress(BrokenPipeError):  # it has ended
            self._requests.write(json.dumps({"request": name}).encode() + b"\n")

    def answer(self, timeout_s: float) -> Any:
        """Return the result of the request within `timeout_s`.

        Raises:
            NoAnswerError: The child is late, has ended, or raised an exception.
        """
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._messages, select.POLLIN)
        while True:
            for message in self._read():
                if "result" in message:
                    return message["result"]
                if "error" in message:
                    self.close()
                    raise NoAnswerError(f"{self._name} failed: {message['error']}")
            if self._is_at_end and self._await_end():
                self._end()
                code = self._process.returncode
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                raise NoAnswerError(f"{self._name} {how}")
            left_s = deadline - time.monotonic()
            if self._is_at_end or left_s <= 0:
                what = "closed its stdout" if self._is_at_end else f"did not answer within {timeout_s:.2g} s"
                if self._end():
                    raise NoAnswerError(f"{self._name} {what} and was ended")
                where = self._open_calls[0] if self._open_calls else "the kernel"
                raise NoAnswerError(
                    f"{self._name} {what}: process {self.pid} hangs in {where} and is left alone",
                    is_abandoned=True,
                )
            poller.poll(left_s * 1e3)

    def close(self) -> None:
        """Close the child's stdin, at which it ends; after END_S it is killed or abandoned."""
        self._requests.close()
        self._await_end()
        self._end()

    def _await_end(self) -> bool:
        """Return whether the process ends within END_S."""
        deadline = time.monotonic() + END_S
        while not self.is_gone and time.monotonic() < deadline:
            for _ in self._read():  # a full pipe would block it
                pass
            time.sleep(_POLL_S)
        return self.is_gone

    def _read(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that a full pipe holds, and no more: a child that floods it has a deadline too.

        Announcements are not yielded: they change `_open_calls`.
        """
        if self._is_at_end:
            return
        try:
            data = os.read(self._messages.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        self._is_at_end = not data
        *lines, self._part = (self._part[:_LINE_BYTES_MAX] + data).split(b"\n")
        for line in lines:
            match _message(line):
                case {"enter": str() as call}:
                    self._open_calls.append(call)
                case {"leave": str() as call} if call in self._open_calls:
                    self._open_calls.remove(call)
                case message:
                    yield message

    def _end(self) -> bool:
        """End the process and return True; False when it is in an announced call and was abandoned."""
        may_be_killed = self.is_gone or self._is_stopped_outside_calls()
        self._requests.close()
        self._messages.close()
        if may_be_killed:
            self._process.kill()  # does nothing if it has ended
            self._process.wait()
        else:
            self._process.send_signal(signal.SIGCONT)
            threading.Thread(target=self._process.wait, daemon=True).start()  # reaps it, whenever it ends
        return may_be_killed

    def _is_stopped_outside_calls(self) -> bool:
        """Stop the process; return whether it has stopped, or ended, and no announced call is open.

        A process that is not stopped could begin a call between the check and the kill.
        """
        if self._open_calls:
            return False
        self._process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + END_S
        while not self._has_changed():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        for _ in self._read():  # what it announced before it stopped
            pass
        return self.is_gone or not self._open_calls

    def _has_changed(self) -> bool:
        """Return whether the process has stopped or ended, without reaping it."""
        if self._process.returncode is not None:
            return True
        try:
            return (
                os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            )
        except ChildProcessError:  # SIGCHLD is ignored here, so the kernel has reaped it
            return True


def _message(line: bytes) -> dict[str, Any]:
    """Return the message of a line; {} for one that is none: a .pth file may print before the program
    begins."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that a child may inherit."""
    return {name: environment[name] for name in INHERITED_VARIABLES if name in environment}
