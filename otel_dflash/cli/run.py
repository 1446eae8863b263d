"""`otel-dflash run`: starts the agent's supervisor and the user's command, forwards signals, and ends as the
command ended.

It has one thread and sleeps in `sigwaitinfo` with the signals blocked, so no signal can kill it before the
command has ended, and no signal is lost. The command inherits stdin, stdout, stderr, the process group and
every inheritable descriptor; the supervisor gets its own session, so Ctrl-C never reaches it or the agent.
Standard library only: what the closing summary needs is loaded after the command has ended.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from otel_dflash import config, session
from otel_dflash.cli import environment
from otel_dflash.cli.signals import WATCHED, block_signals, leave, terminal_reached_child
from otel_dflash.cli.supervisor_process import SupervisorProcess
from otel_dflash.config import ConfigError
from otel_dflash.console import report, short_path
from otel_dflash.session import Session

if TYPE_CHECKING:
    from otel_dflash.stack.control import Addresses

EXIT_NOT_EXECUTABLE: Final = 126
EXIT_NOT_FOUND: Final = 127


class CommandError(Exception):
    """A command cannot be started; `code` is the exit code that a shell would return."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class RunOptions:
    """The options of `run`."""

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
    """What the closing summary reports besides what the recording holds."""

    session: Session
    quiet: bool
    """Report only problems."""
    environment: Mapping[str, str]
    """The agent's."""
    agent_problem: str | None
    interrupted: bool
    """A signal came while the agent was flushing: the user wants out."""


def run(options: RunOptions, show: Callable[[Outcome], None]) -> int:
    """Run the command to its end, show the outcome, and return its exit code, or die of the signal that
    killed it.

    Raises:
        CommandError: The command does not exist or cannot be executed.
        ConfigError: A setting cannot work, or no directory can be written.
    """
    path = find_command(options.command)
    if variable := config.disabled_by():
        report(f"telemetry is off: {variable} is set")
        _replace_process(path, options.command, os.environ)
    agent_environment = environment.with_endpoint(os.environ, options.endpoint, options.protocol)
    stack = _bring_up() if options.stack else None  # after all that may be refused
    if stack:
        agent_environment = environment.with_stack(agent_environment, stack, options.protocol)
    environment.validate(agent_environment)
    config.ring_bytes()
    exit_wait_s = config.AgentConfig.from_environment().exit_timeout_s + config.AGENT_GRACE_S
    joined, is_new = session.create_or_join(options.run_id, options.directory)
    command_environment = environment.of_command(os.environ, joined, options.pass_otel_headers)
    if not is_new:
        # now: that rank may end before the command registers; the command itself reports if it has
        with suppress(OSError):
            session.register_process(joined)
        _replace_process(path, options.command, command_environment)
    membership = session.register_process(joined)
    supervisor = SupervisorProcess(joined, agent_environment)
    if not options.quiet:
        report(f"recording {joined.run_id} in {short_path(joined.recording)}")

    mask = block_signals()
    supervisor.start(mask)
    try:
        child = spawn(path, options.command, command_environment, mask)
    except CommandError:
        membership.unlink(missing_ok=True)
        supervisor.wait(exit_wait_s)
        raise
    status = supervise(child, supervisor)
    membership.unlink(missing_ok=True)
    interrupted = not supervisor.wait(exit_wait_s)
    _print_summary(show, Outcome(joined, options.quiet, agent_environment, supervisor.problem, interrupted))
    if stack and not options.quiet:
        report(
            "the stack stays up (otel-dflash stack down stops it): "
            f"{', '.join(f'{what} {url}' for what, url in stack.views().items())}"
        )
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
    is_path = os.sep in name
    places = [Path(name)] if is_path else [Path(place, name) for place in os.get_exec_path()]
    # not exists(), which raises where a directory may not be searched
    there = (place for place in places if os.access(place, os.F_OK) and (is_path or place.is_file()))
    found = next(there, None)
    if found is None:
        remedy = "check the spelling, or give its path"
        if Path(name).is_file():
            remedy = f"try: otel-dflash run -- {'python ' if name.endswith('.py') else './'}{name}"
        raise CommandError(f"command not found: {name}; {remedy}", EXIT_NOT_FOUND)
    if found.is_dir():
        raise CommandError(f"cannot run {found}: it is a directory", EXIT_NOT_EXECUTABLE)
    remedy = f"otel-dflash run -- python {found}" if name.endswith(".py") else f"chmod +x {found}"
    raise CommandError(f"cannot run {found}: it is not executable; try: {remedy}", EXIT_NOT_EXECUTABLE)


def spawn(path: str, command: tuple[str, ...], environment: Mapping[str, str], mask: set[int]) -> int:
    """Start the command and return its pid. A script without a #! line goes to /bin/sh, as from a shell.

    Raises:
        CommandError: The kernel refuses it.
    """

    # posix_spawn and not subprocess: it sets the mask without Python code between fork and exec, and closes
    # no descriptor that the user passes on (3>file). Python ignores SIGPIPE and SIGXFSZ; its children must
    # not.
    def start(program: str, arguments: tuple[str, ...]) -> int:
        return os.posix_spawn(
            program, arguments, environment, setsigmask=mask, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ)
        )

    try:
        return start(path, command)
    except OSError as error:
        if error.errno == errno.ENOEXEC:
            return start("/bin/sh", ("sh", path, *command[1:]))
        reason = (
            "the interpreter in its first line is missing"
            if error.errno == errno.ENOENT
            else os.strerror(error.errno or 0)
        )
        raise CommandError(f"cannot run {path}: {reason}", EXIT_NOT_EXECUTABLE) from None


def supervise(child: int, supervisor: SupervisorProcess) -> int:
    """Forward signals to the child until it has ended; return its wait status."""
    while True:
        info = signal.sigwaitinfo(WATCHED)
        if info.si_signo != signal.SIGCHLD:
            if not terminal_reached_child(info, child):
                os.kill(child, info.si_signo)  # not reaped yet, so the pid is the child's
            continue
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        supervisor.is_running()


def _print_summary(show: Callable[[Outcome], None], outcome: Outcome) -> None:
    """Print the closing summary to stderr. It may be interrupted, and no failure in it changes the exit
    code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        show(outcome)
    except KeyboardInterrupt:
        report("summary interrupted")
    except Exception as error:  # noqa: BLE001 - the exit code of hours of training is worth more than a summary
        report(f"no summary: {type(error).__name__}: {error}")
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)


def _bring_up() -> Addresses:
    from otel_dflash.stack import control

    return control.up(report)


def _replace_process(path: str, command: tuple[str, ...], environment: Mapping[str, str]) -> None:
    """Become the command: there is nothing to supervise when telemetry is off, or another rank's `run` has
    the agent."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(path, command, environment)
    except OSError as error:
        raise CommandError(
            f"cannot run {path}: {os.strerror(error.errno or 0)}", EXIT_NOT_EXECUTABLE
        ) from None
