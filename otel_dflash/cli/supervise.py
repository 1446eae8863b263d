"""`otel-dflash run`: starts the agent and the user's command, passes signals on, and ends as the command ended.

The supervisor has one thread and sleeps in `sigwaitinfo` with the signals blocked, so none can kill it before the
command has ended, and none is lost. The command inherits stdin, stdout, stderr, the process group and every
inheritable descriptor; the agent gets a session of its own, so Ctrl-C never reaches it. Standard library only:
what the closing summary needs is loaded after the command has ended.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from otel_dflash import config, session
from otel_dflash.cli import environment
from otel_dflash.config import ConfigError
from otel_dflash.session import Session
from otel_dflash.trainer.launch import AGENT_LOG, agent_command

if TYPE_CHECKING:
    from otel_dflash.stack.control import Addresses

FORWARDED: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2})
STOPS_THE_WAIT: Final = FORWARDED - {signal.SIGUSR1, signal.SIGUSR2}
WATCHED: Final = FORWARDED | {signal.SIGCHLD}
SI_KERNEL: Final = 0x80  # siginfo.si_code of what the terminal sends

AGENT_RESTARTS_MAX: Final = 3
AGENT_GRACE_S: Final = 3.8  # beyond its own exit timeout (OTEL_DFLASH_EXIT_MS): 5 s in all by default

EXIT_NOT_EXECUTABLE: Final = 126
EXIT_NOT_FOUND: Final = 127


class CommandError(Exception):
    """A command that cannot be started; `code` is what a shell would exit with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class RunOptions:
    """What the user asked of `run`."""

    command: tuple[str, ...]
    run_id: str | None = None
    directory: Path | None = None
    """Where recordings lie; None for OTEL_DFLASH_DIR or ./dflash-runs."""
    endpoint: str | None = None
    protocol: str | None = None
    quiet: bool = False
    pass_otel_headers: bool = False
    stack: bool = False
    """Bring the stack of this host up and send to it."""


@dataclass(frozen=True)
class Outcome:
    """What the closing summary says besides what the recording holds."""

    session: Session
    quiet: bool
    """Say problems only."""
    environment: Mapping[str, str]
    """The agent's."""
    agent_problem: str | None
    interrupted: bool
    """A signal came while the agent was flushing: the user wants out."""


def run(options: RunOptions, report: Callable[[Outcome], None]) -> int:
    """Run the command to its end, `report`, and return its exit code; die of the signal that it died of.

    Raises:
        CommandError: The command is not there or cannot be executed.
        ConfigError: A setting cannot work, or no directory can be written.
    """
    path = find_command(options.command)
    if config.is_disabled():
        _say("telemetry is off: OTEL_DFLASH_DISABLED or OTEL_SDK_DISABLED is set")
        _replace_process(path, options.command, os.environ)
    agent_environment = environment.with_endpoint(os.environ, options.endpoint, options.protocol)
    stack = _bring_up() if options.stack else None  # not before what is refused
    if stack:
        agent_environment = environment.with_stack(agent_environment, stack, options.protocol)
    environment.validate(agent_environment)
    config.ring_bytes()
    exit_wait_s = config.AgentConfig.from_environment().exit_timeout_s + AGENT_GRACE_S
    joined, is_new = session.create_or_join(options.run_id, options.directory)
    command_environment = environment.of_command(os.environ, joined, options.pass_otel_headers)
    if not is_new:
        with suppress(OSError):  # now: that rank may end before the command begins; which says so itself when it has
            session.register_process(joined)
        _replace_process(path, options.command, command_environment)
    membership = session.register_process(joined)
    agent = Agent(joined, agent_environment)
    if not options.quiet:
        _say(f"recording {joined.run_id} in {shown(joined.recording)}")

    mask = block_signals()
    agent.start(mask)
    try:
        child = spawn(path, options.command, command_environment, mask)
    except CommandError:
        membership.unlink(missing_ok=True)
        agent.wait(exit_wait_s)
        raise
    status = supervise(child, agent)
    membership.unlink(missing_ok=True)
    interrupted = not agent.wait(exit_wait_s)
    _say_goodbye(report, Outcome(joined, options.quiet, agent_environment, agent.problem, interrupted))
    if stack and not options.quiet:
        _say(f"the stack stays up (otel-dflash stack down stops it): {', '.join(f'{what} {url}' for what, url in stack.views().items())}")
    return leave(status)


def find_command(command: tuple[str, ...]) -> str:
    """Return the path of the program, found as a shell finds it.

    Raises:
        CommandError: Not found (127), or found and not executable (126).
        ConfigError: No command was given.
    """
    if not command or not command[0]:
        raise ConfigError("no command given; try: otel-dflash run -- python train.py")
    name = command[0]
    if path := shutil.which(name):
        return path
    if os.sep in name:
        found = Path(name) if Path(name).exists() else None
    else:
        found = next((entry for place in os.get_exec_path() if (entry := Path(place, name)).is_file()), None)
    if found is None:
        remedy = "check the spelling, or give its path"
        if Path(name).is_file():
            remedy = f"try: otel-dflash run -- {'python ' if name.endswith('.py') else './'}{name}"
        raise CommandError(f"command not found: {name}; {remedy}", EXIT_NOT_FOUND)
    if found.is_dir():
        raise CommandError(f"cannot run {found}: it is a directory", EXIT_NOT_EXECUTABLE)
    remedy = f"otel-dflash run -- python {found}" if name.endswith(".py") else f"chmod +x {found}"
    raise CommandError(f"cannot run {found}: it is not executable; try: {remedy}", EXIT_NOT_EXECUTABLE)


def shown(path: Path) -> str:
    """Return a path as a user types it: relative when it lies below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def block_signals() -> set[int]:
    """Block what the supervisor waits for; return the mask that was, for the children."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by a careless parent, it would reap the child unseen
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)}


def spawn(path: str, command: tuple[str, ...], environment: Mapping[str, str], mask: set[int]) -> int:
    """Start the command and return its pid. A script without a #! line goes to /bin/sh, as from a shell.

    Raises:
        CommandError: The kernel refuses it.
    """

    # posix_spawn and not subprocess: it sets the mask without Python code between fork and exec, and closes no
    # descriptor that the user hands on (3>file). Python itself ignores SIGPIPE and SIGXFSZ: not so its children.
    def start(program: str, arguments: tuple[str, ...]) -> int:
        return os.posix_spawn(program, arguments, environment, setsigmask=mask, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ))

    try:
        return start(path, command)
    except OSError as error:
        if error.errno == errno.ENOEXEC:
            return start("/bin/sh", ("sh", path, *command[1:]))
        reason = "the interpreter in its first line is missing" if error.errno == errno.ENOENT else os.strerror(error.errno or 0)
        raise CommandError(f"cannot run {path}: {reason}", EXIT_NOT_EXECUTABLE) from None


class Agent:
    """The agent process of this run. Killed, it is started again and goes on where its cursors stand."""

    def __init__(self, joined: Session, environment: Mapping[str, str]) -> None:
        self.problem: str | None = None
        """One line for the user, None while all is well."""
        self._session = joined
        self._log = joined.recording / AGENT_LOG
        self._environment = environment
        self._mask: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = 0

    def start(self, mask: set[int]) -> None:
        """Start it with signal mask `mask`; what it says goes to agent.log of the recording. Never raises."""
        self._mask = mask
        try:
            command = [*agent_command(), str(self._session.path)]
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(self._environment),
                    start_new_session=True,
                    preexec_fn=self._restore_mask,  # safe: the supervisor has one thread
                )
        except (ConfigError, OSError) as error:
            self._process = None
            self.problem = f"the agent could not be started: {error}"

    def is_running(self, *, needed: bool) -> bool:
        """Return whether it runs. Killed, or ended while it is needed, it is started again."""
        if self._process is None or (code := self._process.poll()) is None:
            return self._process is not None
        self._process = None
        if (code < 0 or (code == 0 and needed)) and self._restarts < AGENT_RESTARTS_MAX:
            self._restarts += 1
            if code < 0:
                self.problem = f"the agent was killed by {signal_name(-code)} and started again (restarts: {self._restarts})"
            self.start(self._mask)
        elif code < 0:
            self.problem = f"the agent was killed by {signal_name(-code)}, {self._restarts + 1} times: the newest part may be missing"
        elif code == session.AGENT_EXIT_INCOMPLETE:
            self.problem = f"a part of the recording is missing: {self._log.parent} could not be written (disk full?)"
        elif code or needed:
            self.problem = f"the agent ended with exit code {code}: {self._last_words()}"
        return self._process is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has flushed and ended, at most `timeout_s`; return False when a signal cut that short."""
        deadline = time.monotonic() + timeout_s
        while self.is_running(needed=False):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.problem = (
                    f"the agent still runs after {timeout_s:g} s (processes of the run may be alive): the newest part may be missing here"
                )
                break
            info = signal.sigtimedwait(WATCHED, left_s)
            if info and info.si_signo in STOPS_THE_WAIT:
                return False
        return True

    def _restore_mask(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _last_words(self) -> str:
        try:
            lines = self._log.read_bytes()[-4096:].decode(errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line.strip() for line in reversed(lines) if line.strip()), f"nothing in {shown(self._log)}")


def supervise(child: int, agent: Agent) -> int:
    """Pass signals to the child until it has ended; return its wait status."""
    while True:
        info = signal.sigwaitinfo(WATCHED)
        if info.si_signo != signal.SIGCHLD:
            if not terminal_reached_child(info, child):
                os.kill(child, info.si_signo)  # not reaped yet, so the pid is the child's
            continue
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        agent.is_running(needed=True)


def terminal_reached_child(info: signal.struct_siginfo, child: int) -> bool:
    """Return whether the kernel sent this signal to the whole foreground group, the child with it."""
    if info.si_code != SI_KERNEL or os.getpgid(child) != os.getpgrp():
        return False
    return info.si_signo != signal.SIGHUP or os.getsid(0) != os.getpid()  # a hangup goes to the session's leader alone


def signal_name(number: int) -> str:
    """Return SIGKILL for 9, and a number for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def leave(status: int) -> int:
    """Return the exit code in a wait status; after a death by signal die of the same, so that the parent sees it."""
    if sys.stderr is not None:  # None: closed
        with suppress(OSError, ValueError):
            sys.stderr.flush()
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core that matters is the child's
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    return 128 + number  # reached as process 1 of a container, which no signal kills


def _say_goodbye(report: Callable[[Outcome], None], outcome: Outcome) -> None:
    """Print the closing summary to stderr. It may be interrupted, and nothing that goes wrong in it changes the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        report(outcome)
    except KeyboardInterrupt:
        _say("summary interrupted")
    except Exception as error:  # noqa: BLE001 - the exit code of hours of training is worth more than a summary
        _say(f"no summary: {type(error).__name__}: {error}")
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)


def _bring_up() -> Addresses:
    from otel_dflash.stack import control

    return control.up(_say)


def _say(line: str) -> None:
    """Print one line to stderr, if that still leads anywhere: the terminal may be gone."""
    with suppress(OSError):
        print(f"otel-dflash: {line}", file=sys.stderr, flush=True)


def _replace_process(path: str, command: tuple[str, ...], environment: Mapping[str, str]) -> None:
    """Become the command: telemetry is off, or another rank's `run` has the agent, so there is nothing to supervise."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(path, command, environment)
    except OSError as error:
        raise CommandError(f"cannot run {path}: {os.strerror(error.errno or 0)}", EXIT_NOT_EXECUTABLE) from None
