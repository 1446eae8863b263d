"""The signals of `otel-dflash run`: which are passed on, which the terminal has already delivered, and how to
end as the command ended."""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Final

FORWARDED: Final = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
STOPS_THE_WAIT: Final = FORWARDED - {signal.SIGUSR1, signal.SIGUSR2}
WATCHED: Final = FORWARDED | {signal.SIGCHLD}
SI_KERNEL: Final = 0x80  # siginfo.si_code of what the terminal sends


def block_signals() -> set[int]:
    """Block the signals that the supervisor waits for; return the previous mask, for the children."""
    # a parent may have it ignored, and then the child would be reaped unseen
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)}


def terminal_reached_child(info: signal.struct_siginfo, child: int) -> bool:
    """Return whether the kernel sent this signal to the whole foreground group, the child with it."""
    if info.si_code != SI_KERNEL or os.getpgid(child) != os.getpgrp():
        return False
    # a hangup goes to the session's leader alone
    return info.si_signo != signal.SIGHUP or os.getsid(0) != os.getpid()


def leave(status: int) -> int:
    """Return the exit code of a wait status; after a death by signal, die of the same signal, so that the
    parent sees it."""
    if sys.stderr is not None:  # None: closed
        try:
            sys.stderr.flush()
        except (OSError, ValueError):  # a full disk: Python would try again at its end, and exit with 120
            sys.stderr = None
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core that matters is the child's
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    return 128 + number  # reached as process 1 of a container, which no signal kills


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL; `signal 42` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
