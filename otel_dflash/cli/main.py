"""The `otel-dflash` command: parse, call, return an exit code: 0 success, 1 failure, 2 a wrong argument or
setting.

Every command imports what it needs when it runs, so `--help` and `--version` are quick, and `run` starts the
user's program before it loads numpy or OpenTelemetry.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from otel_dflash.cli.doctor_command import doctor_command
from otel_dflash.cli.options import (
    EXIT_FAILED,
    EXIT_OK,
    CommandsInOrder,
    directory_option,
    endpoint_option,
    keep_option,
    protocol_option,
)
from otel_dflash.cli.output import outlive_reader
from otel_dflash.cli.stack_commands import stack_group
from otel_dflash.cli.view_commands import view_command
from otel_dflash.config import ConfigError
from otel_dflash.console import report
from otel_dflash.recording.directory import find_recording
from otel_dflash.version import __version__
from otel_dflash.views.registry import VIEWS

if TYPE_CHECKING:
    from otel_dflash.cli.run import Outcome, RunOptions

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
DISTRIBUTIONS = ("opentelemetry-sdk", "numpy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. A user's mistake is reported in one line on stderr,
    never as a traceback."""
    for name in ("stdout", "stderr"):
        # closed: print() would write to the other one, and our lines are not the command's output
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    outlive_reader()
    try:
        result = cli.main(arguments, prog_name="otel-dflash", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "otel-dflash"
        return _fail(f"{error.format_message().rstrip('.')} (see: {path} --help)", EXIT_USAGE)
    except click.ClickException as error:
        return _fail(error.format_message(), EXIT_FAILED)
    except click.Abort:
        return EXIT_INTERRUPTED
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        return _fail(str(error), code)
    return result if isinstance(result, int) else EXIT_OK


def _exit_code(error: Exception) -> int | None:
    """Return the exit code of what a user can put right, None for a bug. The classes are imported here: most
    commands need none of these modules."""
    from otel_dflash.cli.run import CommandError
    from otel_dflash.recording.run_info import RecordingError
    from otel_dflash.stack.engines import EngineError

    if isinstance(error, CommandError):
        return error.code
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_FAILED if isinstance(error, RecordingError | EngineError | OSError) else None


def _show_versions(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value:
        return
    from importlib import metadata

    found = [f"Python {platform.python_version()}"]
    for name in DISTRIBUTIONS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    click.echo(f"otel-dflash {__version__} ({', '.join(found)})")
    context.exit()


@click.group(
    cls=CommandsInOrder,
    context_settings=CONTEXT,
    invoke_without_command=True,
    epilog="Start here:  otel-dflash run -- python train.py",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_versions,
    help="Show the versions in use and exit.",
)
@click.pass_context
def cli(context: click.Context) -> None:
    """See why the GPUs of a DFlash training run are idle, at no cost to the run.

    The trainer writes a few words into memory; an agent beside it records them, and sends OpenTelemetry
    traces and metrics to the endpoint that the OTEL_EXPORTER_OTLP_* variables set.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] --",
    short_help="Run a training command and record it.",
)
@click.option(
    "--run-id", metavar="ID", help="Name of the run.  [default: $OTEL_DFLASH_RUN_ID, else the time]"
)
@directory_option
@endpoint_option
@protocol_option
@keep_option
@click.option(
    "--stack",
    is_flag=True,
    help="Bring the stack of this host up first (`otel-dflash stack up`) and send to it.",
)
@click.option("--quiet", is_flag=True, help="Print no summary at the end; problems are still reported.")
@click.option(
    "--pass-otel-headers",
    is_flag=True,
    help="Leave OTEL_EXPORTER_OTLP_*HEADERS in COMMAND's environment, for an SDK of its own.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND...")
def run_command(
    command: tuple[str, ...],
    run_id: str | None,
    directory: Path | None,
    endpoint: str | None,
    protocol: str | None,
    stack: bool,
    quiet: bool,
    pass_otel_headers: bool,
) -> int:
    """Run COMMAND, record what it and its children do, and print where the time went.

    stdin, stdout, stderr, signals and the exit code are COMMAND's own. The summary goes to stderr. Header
    variables (credentials of the collector) reach only the agent, unless --pass-otel-headers.

    \b
    Examples:
      otel-dflash run -- python train.py --lr 3e-4
      otel-dflash run --stack -- python train.py
      otel-dflash run --endpoint http://localhost:4317 -- torchrun --nproc-per-node 8 train.py
      OTEL_EXPORTER_OTLP_ENDPOINT=https://collector:4318 OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf \\
        otel-dflash run --run-id night-7 -- bash train.sh
    """
    from otel_dflash.cli.run import RunOptions

    if stack and endpoint:
        raise click.UsageError("--stack and --endpoint name two destinations; give only one of them")
    return _supervise(
        RunOptions(command, run_id, directory, endpoint, protocol, quiet, pass_otel_headers, stack)
    )


@cli.command(
    "demo",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Train a small drafter and see it recorded.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo_command(arguments: tuple[str, ...]) -> int:
    """Run the example trainer under `otel-dflash run`; ARGUMENTS go to the example.

    It trains a real, tiny DFlash drafter on a CPU in about a minute. It needs torch and tqdm.

    \b
    Examples:
      otel-dflash demo
      otel-dflash demo -- --help
    """
    from importlib.util import find_spec

    from otel_dflash.cli.run import RunOptions

    script = _example_script()
    missing = [name for name in ("torch", "tqdm") if find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"the demo needs {' and '.join(missing)}; install: pip install {' '.join(missing)}"
        )
    return _supervise(RunOptions((sys.executable, str(script), *arguments)))


for view in VIEWS:
    cli.add_command(view_command(view))


@cli.command("replay", short_help="Send a recording to an OTLP endpoint.")
@click.argument("run")
@endpoint_option
@protocol_option
@keep_option
@directory_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1),
    default=600.0,
    metavar="SECONDS",
    help="Give up after this long.  [default: 600]",
)
def replay_command(
    run: str, endpoint: str | None, protocol: str | None, directory: Path | None, timeout_s: float
) -> int:
    """Send all spans and metrics of RUN with their recorded times. Their ids are the same each time.

    RUN is as for `summary`. Headers come from OTEL_EXPORTER_OTLP_HEADERS, never from the command line, where
    every user of the machine could read them.

    \b
    Examples:
      otel-dflash replay latest --endpoint http://localhost:4317
      otel-dflash replay night-7 --endpoint https://collector:4318 --protocol http/protobuf
    """
    from otel_dflash.cli import environment

    recording = find_recording(run, directory, report)
    environment.take_up(endpoint, protocol)
    if not environment.endpoint_of(os.environ):
        raise ConfigError(
            f"no endpoint is set; give --endpoint http://localhost:4317, or set "
            f"{environment.ENDPOINT_VARIABLE}"
        )

    from otel_dflash.agent.replay_run import replay

    result = replay(recording, timeout_s=timeout_s)
    sent = f"{result.spans} spans and {result.points} points of each metric series"
    for line in result.losses:
        report(line)
    if not result.delivered:
        raise click.ClickException(
            f"sent {sent}, but not all of {recording.name}: {result.reason}; replay it again, its ids "
            "stay the same"
        )
    click.echo(f"sent all of {recording.name}: {sent}")
    return EXIT_OK


cli.add_command(stack_group)
cli.add_command(doctor_command)


@cli.command("detail", short_help="Change what an active run captures.")
@click.argument("level", type=click.Choice(["off", "steps", "phases"]))
@click.option(
    "--run",
    "run",
    metavar="ID",
    help="The run, or the beginning of its id.  [default: all your active runs on this machine]",
)
def detail_command(level: str, run: str | None) -> int:
    """Change what the workers of a run capture, from their next step on: nothing, steps, or steps and phases
    (as at the start).

    \b
    Examples:
      otel-dflash detail steps
      otel-dflash detail phases --run night-7
    """
    from otel_dflash import session, session_list

    words = {"off": session.DETAIL_OFF, "steps": session.DETAIL_STEPS, "phases": session.DETAIL_PHASES}
    sessions = [one for one in session_list.running_sessions() if run is None or one.run_id.startswith(run)]
    if not sessions:
        raise click.ClickException(
            f"run {run!r} is not active"
            if run
            else "no run is active; start one: otel-dflash run -- python train.py"
        )
    for one in sessions:
        session.map_control(one)[0] = words[level]
        click.echo(f"{one.run_id}: {level}")
    return EXIT_OK


@cli.command("agent", hidden=True)  # started by `run` and start()
@click.argument(
    "session_directory", metavar="SESSION_DIR", type=click.Path(path_type=Path, exists=True, file_okay=False)
)
@click.option("--record-only", is_flag=True, help="Send nothing, whatever the environment names.")
def agent_command(session_directory: Path, record_only: bool) -> int:
    """Record the session in SESSION_DIR and send its telemetry, until the last process of it has ended."""
    from otel_dflash.agent import loop

    return loop.main(session_directory, record_only=record_only)


@cli.command(
    "supervise",
    hidden=True,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def supervise_command(arguments: tuple[str, ...]) -> int:
    """Supervise an agent where the trainer has no interpreter for it: ARGUMENTS are supervisor.main's."""
    from otel_dflash.supervisor.supervisor import main as supervise

    return supervise(arguments)


def _supervise(options: RunOptions) -> int:
    from otel_dflash.cli import recovery
    from otel_dflash.cli.run import run

    recovery.finish(wait=False)
    return run(options, _report)


def _report(outcome: Outcome) -> None:
    from otel_dflash.cli import run_report

    run_report.show(outcome)


def _example_script() -> Path:
    """Return the example trainer: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).parents[1]
    places = [base / "examples" / "dflash" / "train.py" for base in (package.parent, package)]
    for place in places:
        if place.is_file():
            return place
    raise click.ClickException(f"the example is not installed ({places[1]}); try `pip install .` in a clone")


def _fail(message: str, code: int) -> int:
    report(message)
    return code
