"""The parent of a session's agent, the same under `otel-dflash run` and plain `start()`.

It starts the agent in the environment of the run, waits, and starts it again when it was killed or failed
while the session needs one. It knows the agent by its exit code and its lock alone, so either may be killed
without the other. It is detached, and has one thread.

    stdout   a line about the agent each time that changes; `run` reports the last one at its end
    stderr   the user's, for as long as the process that started it lives: a reader of it waits for its end
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from otel_dflash.config import ConfigError
from otel_dflash.console import short_path
from otel_dflash.launch import AGENT_LOG
from otel_dflash.session import (
    AGENT_EXIT_INCOMPLETE,
    LOCK_FILE,
    SESSION_FILE,
    SUPERVISOR_LOCK_FILE,
    Session,
    is_held,
    living_processes,
    open_lock,
    open_session,
    process_start,
)
from otel_dflash.supervisor.budget import HEALTHY_S, RestartBudget

AGENT_EXIT_SETTING: Final = 2  # a setting cannot work: starting again changes nothing
POLL_S: Final = 0.2  # on a kernel without pidfds
SESSION_POLL_S: Final = 1.0
UNSERVED_S: Final = 2.0  # what a ring of 1 MiB holds of 7 000 records/s; a longer pause is reported
LAST_WORDS_MAX: Final = 500  # so that a line to the user fits into a pipe that can be written to


class End(NamedTuple):
    """How an agent ended."""

    code: int | None
    """Its exit code, or minus the signal that killed it; None if it could not be started."""
    text: str
    """In words: "was killed by SIGKILL"."""


def main(arguments: Sequence[str]) -> int:
    """Supervise the agent of a session to its end. The exit code is 0, or 1 if the session is gone.

    Args:
        arguments: The session's directory, the pid of the process that starts this one, the agent's command.
    """
    session_directory, owner_pid, *command = arguments
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, children would be reaped unseen
    _fill_standard_streams()
    try:
        session = open_session(Path(session_directory))
        fcntl.flock(open_lock(session.path / SUPERVISOR_LOCK_FILE), fcntl.LOCK_EX)
    except (ConfigError, OSError):
        return 1
    user = os.dup(2)
    log = _open_log(session.recording / AGENT_LOG)
    os.dup2(log, 2)
    os.close(log)
    Supervisor(session, int(owner_pid), user, [*command, str(session.path)]).run()
    return 0


class Supervisor:
    """The supervisor of one session. Its own stderr is the agent's log."""

    def __init__(self, session: Session, owner_pid: int, user: int, command: list[str]) -> None:
        """Prepare to run `command`; `user` is a descriptor of the stderr of the process `owner_pid`."""
        self._session = session
        self._log = session.recording / AGENT_LOG
        self._owner = owner_pid, process_start(owner_pid)
        self._owner_pidfd = _pidfd(owner_pid)
        self._user: int | None = user
        self._command = command
        self._budget = RestartBudget(time.monotonic())
        self._restarts = 0
        self._has_reported = False

    def run(self) -> None:
        """Keep an agent running until the session has ended, or none can be kept running."""
        while self._is_needed():
            if is_held(self._session.path / LOCK_FILE):  # by an agent whose supervisor was killed
                self._pause(SESSION_POLL_S)
                continue
            started_s = time.monotonic()
            end = self._serve()
            if not self._restart(end, time.monotonic() - started_s):
                return

    def _is_needed(self) -> bool:
        """Return whether the session has not ended: an agent removes it at its end."""
        return (self._session.path / SESSION_FILE).exists()

    def _serve(self) -> End:
        """Start the agent and wait for its end."""
        log_bytes = os.fstat(2).st_size
        try:
            pid = os.posix_spawnp(
                self._command[0],
                self._command,
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)],
                setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
            )
        except OSError as error:
            return End(None, f"could not be started: {error}")
        pidfd = _pidfd(pid)
        while (waited := os.waitpid(pid, os.WNOHANG))[0] == 0:
            self._pause(POLL_S if pidfd is None else None, pidfd)
        if pidfd is not None:
            os.close(pidfd)
        code = os.waitstatus_to_exitcode(waited[1])
        if code < 0:
            return End(code, f"was killed by {_signal_name(-code)}")
        return End(code, f"ended with exit code {code}: {self._last_words(log_bytes)}")

    def _restart(self, end: End, lived_s: float) -> bool:
        """Wait until the agent may be started again; return False if it need not, or will not be."""
        if end.code == AGENT_EXIT_INCOMPLETE:
            place = self._session.recording
            self._tell(f"a part of the recording is missing: {place} could not be written (disk full?)")
            return False
        is_living = bool(living_processes(self._session))
        has_work = is_living or any(self._session.path.glob("ring-*")) or (end.code or 0) < 0
        if not self._is_needed() or not has_work:
            if end.code != 0:
                self._tell(f"the agent {end.text}")
            return False
        if end.code == 0 and is_held(self._session.path / LOCK_FILE):
            return True
        now_s = time.monotonic()
        wait_s = self._budget.take(now_s, lived_s)
        if lived_s >= HEALTHY_S:
            self._has_reported = False
        is_final = end.code == AGENT_EXIT_SETTING or (wait_s >= UNSERVED_S and not is_living)
        if is_final or wait_s >= UNSERVED_S:
            self._report_unserved(end, None if is_final else wait_s)
        if is_final:
            return False
        self._await(now_s + wait_s)
        self._restarts += 1
        self._tell(f"the agent {end.text}; it was started again (restarts: {self._restarts})")
        return True

    def _report_unserved(self, end: End, wait_s: float | None) -> None:
        """Report that nobody takes the records, once until an agent has worked for a while."""
        times = f", after {self._restarts} restarts" if self._restarts else ""
        self._tell(f"the agent {end.text}{times}; the newest part may be missing")
        if self._has_reported or self._user is None:
            return
        self._has_reported = True
        again = "it is not started again" if wait_s is None else f"it is started again in {wait_s:.0f} s"
        _write_line(
            self._user,
            f"otel-dflash: no agent is serving this run: it {end.text}{times}. Training goes on; records "
            f"that memory has no room for are dropped and counted; {again}, see {self._log}",
        )

    def _await(self, until_s: float) -> None:
        """Wait until that monotonic time, or until no process writes any more: the rings are left to save."""
        while (left_s := until_s - time.monotonic()) > 0 and living_processes(self._session):
            self._pause(min(left_s, SESSION_POLL_S))

    def _pause(self, timeout_s: float | None, agent_pidfd: int | None = None) -> None:
        """Wait until the agent or the owner of the user's stderr ends, at most `timeout_s`; close that stderr
        when its owner has ended."""
        watched = [pidfd for pidfd in (agent_pidfd, self._owner_pidfd) if pidfd is not None]
        if self._user is not None and self._owner_pidfd is None:
            timeout_s = POLL_S if timeout_s is None else min(timeout_s, POLL_S)
        select.select(watched, [], [], timeout_s)
        pid, start = self._owner
        if self._user is not None and (start is None or process_start(pid) != start):
            os.close(self._user)
            self._user = None
            if self._owner_pidfd is not None:
                os.close(self._owner_pidfd)
                self._owner_pidfd = None

    def _tell(self, text: str) -> None:
        """Tell `run`, and the agent's log."""
        _write_line(1, text)
        _write_line(2, f"{time.strftime('%Y-%m-%d %H:%M:%S')} otel-dflash supervisor: {text}")

    def _last_words(self, log_bytes: int) -> str:
        """Return the last line that the agent's log got since it had `log_bytes`."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(log_bytes, log.seek(0, os.SEEK_END) - select.PIPE_BUF))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            lines = []
        words = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return words[:LAST_WORDS_MAX] or f"nothing in {short_path(self._log)}"


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable once a process has ended; None if it has, or without pidfds."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _open_log(path: Path) -> int:
    """Open the agent's log for appending, or the null device: an agent without a log is better than none."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _fill_standard_streams() -> None:
    """Open those of the first three descriptors that are closed: no file of ours may become one of them."""
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _write_line(fd: int, text: str) -> None:
    """Write a line if that cannot block: the reader of a pipe or a terminal may have stopped, or gone."""
    with suppress(OSError, ValueError):
        if select.select([], [fd], [], 0)[1]:
            os.write(fd, f"{text}\n".encode())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
