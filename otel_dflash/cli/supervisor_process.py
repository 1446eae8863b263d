"""The supervisor of a run's agent: started beside the command, and waited for at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping

from otel_dflash.cli.signals import STOPS_THE_WAIT, WATCHED, signal_name
from otel_dflash.config import ConfigError
from otel_dflash.launch import agent_environment, supervisor_command
from otel_dflash.session import Session
from otel_dflash.supervisor.budget import HEALTHY_S, RestartBudget

STATUS_BYTES_MAX = 1 << 16  # what a pipe holds


class SupervisorProcess:
    """The supervisor of this run's agent. Another one takes over from one that was killed."""

    def __init__(self, joined: Session, environment: Mapping[str, str]) -> None:
        self._session = joined
        self._environment = environment
        self._mask: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._budget = RestartBudget(time.monotonic())
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        """Return one line about the agent for the user, None while all is well."""
        self._read_status()
        return self._problem

    def start(self, mask: set[int]) -> None:
        """Start it with the signal mask `mask`. Never raises."""
        self._mask = mask
        try:
            self._process = subprocess.Popen(
                supervisor_command(self._session),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=agent_environment(self._environment),
                start_new_session=True,
                preexec_fn=self._restore_mask,  # safe: `run` has one thread
            )
        except (ConfigError, OSError) as error:
            self._problem = f"the agent could not be started: {error}"
            return
        assert self._process.stdout
        os.set_blocking(self._process.stdout.fileno(), False)

    def is_running(self) -> bool:
        """Return whether it is running, after starting another one if it was killed."""
        if self._process is None or (code := self._process.poll()) is None:
            return self._process is not None
        self._read_status()
        self._process = None
        if code < 0:
            has_restart = self._budget.take(time.monotonic(), HEALTHY_S) == 0
            result = "started again" if has_restart else "nothing starts the agent again"
            self._problem = f"the supervisor of the agent was killed by {signal_name(-code)}; {result}"
            if has_restart:
                self.start(self._mask)
        return self._process is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait until the agent has flushed and both have ended, at most `timeout_s`; return False when a
        signal interrupts the wait."""
        deadline = time.monotonic() + timeout_s
        while self.is_running():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._read_status()
                self._problem = (
                    f"the agent is still running after {timeout_s:g} s (processes of the run may be "
                    f"alive): the newest part may be missing here"
                )
                break
            info = signal.sigtimedwait(WATCHED, left_s)
            if info and info.si_signo in STOPS_THE_WAIT:
                return False
        return True

    def _read_status(self) -> None:
        """Take the newest line that the supervisor has written."""
        if self._process is not None and self._process.stdout is not None:
            try:
                text = os.read(self._process.stdout.fileno(), STATUS_BYTES_MAX)
            except BlockingIOError:
                return
            lines = text.decode(errors="replace").splitlines()
            self._problem = lines[-1] if lines else self._problem

    def _restore_mask(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
