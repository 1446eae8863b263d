"""The `otel-dflash` command: parse, call, exit code. 0 is done, 1 failed, 2 a wrong argument or setting.

Every command imports what it needs when it runs, so `--help` and `version` are quick, and `run` starts the user's
program before numpy or OpenTelemetry is loaded.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from otel_dflash import config
from otel_dflash.cli.doctor import doctor_command
from otel_dflash.cli.options import (
    EXIT_FAILED,
    EXIT_OK,
    CommandsInOrder,
    directory_option,
    endpoint_option,
    keep_option,
    protocol_option,
)
from otel_dflash.cli.stack import stack_group
from otel_dflash.config import ConfigError
from otel_dflash.version import __version__

if TYPE_CHECKING:
    from otel_dflash.cli.supervise import Outcome, RunOptions

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
DISTRIBUTIONS = ("opentelemetry-sdk", "opentelemetry-exporter-otlp", "numpy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. A user's mistake is one line on stderr, never a traceback."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: print() would take the other one, and our lines are not the command's output
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    from otel_dflash.agent.recording import RecordingError
    from otel_dflash.cli.supervise import CommandError
    from otel_dflash.stack.engines import EngineError

    try:
        result = cli.main(arguments, prog_name="otel-dflash", standalone_mode=False)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "otel-dflash"
        return _fail(f"{error.format_message().rstrip('.')} (see: {path} --help)", EXIT_USAGE)
    except click.ClickException as error:
        return _fail(error.format_message(), EXIT_FAILED)
    except click.Abort:
        return EXIT_INTERRUPTED
    except CommandError as error:
        return _fail(str(error), error.code)
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    except (RecordingError, EngineError, OSError) as error:
        return _fail(str(error), EXIT_FAILED)
    return result if isinstance(result, int) else EXIT_OK


@click.group(
    cls=CommandsInOrder, context_settings=CONTEXT, invoke_without_command=True, epilog="Start here:  otel-dflash run -- python train.py"
)
@click.version_option(__version__, prog_name="otel-dflash", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """See why the GPUs of a DFlash training run are idle, at no cost to the run.

    The trainer writes a few words into memory; an agent beside it records them, and sends OpenTelemetry traces and
    metrics where the OTEL_EXPORTER_OTLP_* variables say.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] --",
    short_help="Run a training command and record it.",
)
@click.option("--run-id", metavar="ID", help="Name of the run.  [default: $OTEL_DFLASH_RUN_ID, else the time]")
@directory_option
@endpoint_option
@protocol_option
@keep_option
@click.option("--stack", is_flag=True, help="Bring the stack of this host up first (`otel-dflash stack up`) and send to it.")
@click.option("--quiet", is_flag=True, help="No summary at the end; problems are still said.")
@click.option(
    "--pass-otel-headers", is_flag=True, help="Leave OTEL_EXPORTER_OTLP_*HEADERS in COMMAND's environment, for an SDK of its own."
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

    stdin, stdout, stderr, signals and the exit code are COMMAND's own. The summary goes to stderr. Header variables
    (credentials of the collector) reach the agent alone, unless --pass-otel-headers.

    \b
    Examples:
      otel-dflash run -- python train.py --lr 3e-4
      otel-dflash run --stack -- python train.py
      otel-dflash run --endpoint http://localhost:4317 -- torchrun --nproc-per-node 8 train.py
      OTEL_EXPORTER_OTLP_ENDPOINT=https://collector:4318 OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf \\
        otel-dflash run --run-id night-7 -- bash train.sh
    """
    from otel_dflash.cli.supervise import RunOptions

    if stack and endpoint:
        raise click.UsageError("--stack and --endpoint name two places to send to; give one of them")
    return _supervise(RunOptions(command, run_id, directory, endpoint, protocol, quiet, pass_otel_headers, stack))


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
    from otel_dflash.cli.supervise import RunOptions

    script = _example_script()
    missing = [name for name in ("torch", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(f"the demo needs {' and '.join(missing)}; install: pip install 'otel-dflash[demo]'")
    return _supervise(RunOptions((sys.executable, str(script), *arguments)))


@cli.command("runs", short_help="List recordings.")
@directory_option
def runs_command(directory: Path | None) -> int:
    """List the recordings, the newest first."""
    from rich.console import Console

    from otel_dflash.cli import leftovers
    from otel_dflash.views import runs

    leftovers.finish(wait=True)
    base = directory.absolute() if directory else config.recordings_directory()
    runs.render(runs.list_runs(base), base, Console())
    return EXIT_OK


@cli.command("summary", short_help="Show where the time of a run went.")
@click.argument("run", default="latest")
@directory_option
def summary_command(run: str, directory: Path | None) -> int:
    """Show where the time of RUN went, per worker and phase; of a run that still goes on, too.

    RUN is a run id, the beginning of one, the path of a recording, or `latest`.

    \b
    Examples:
      otel-dflash summary
      otel-dflash summary night-7
      otel-dflash summary /mnt/runs/night-7
    """
    from rich.console import Console

    from otel_dflash.cli import leftovers
    from otel_dflash.views.render import render
    from otel_dflash.views.summary import summarise

    leftovers.finish(wait=True)
    render(summarise(find_recording(run, directory)), Console())
    return EXIT_OK


@cli.command("replay", short_help="Send a recording to an OTLP endpoint.")
@click.argument("run")
@endpoint_option
@protocol_option
@keep_option
@directory_option
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0.1), default=600.0, metavar="SECONDS", help="Give up then.  [default: 600]"
)
def replay_command(run: str, endpoint: str | None, protocol: str | None, directory: Path | None, timeout_s: float) -> int:
    """Send all spans and metrics of RUN with the times they were recorded at. Ids are the same each time.

    RUN is as for `summary`. Headers come from OTEL_EXPORTER_OTLP_HEADERS, never from the command line, where every user
    of the machine could read them.

    \b
    Examples:
      otel-dflash replay latest --endpoint http://localhost:4317
      otel-dflash replay night-7 --endpoint https://collector:4318 --protocol http/protobuf
    """
    from otel_dflash.cli import environment

    recording = find_recording(run, directory)
    environment.take_up(endpoint, protocol)
    if not environment.endpoint_of(os.environ):
        raise ConfigError(f"no endpoint; give --endpoint http://localhost:4317, or set {environment.ENDPOINT_VARIABLE}")

    from otel_dflash.agent.replay_run import replay

    result = replay(recording, timeout_s=timeout_s)
    sent = f"{result.spans} spans and {result.points} points of each metric series"
    for line in result.losses:
        click.echo(f"otel-dflash: {line}", err=True)
    if not result.delivered:
        raise click.ClickException(f"sent {sent}, not all of {recording.name}: {result.reason}; replay it again, its ids stay the same")
    click.echo(f"sent all of {recording.name}: {sent}")
    return EXIT_OK


cli.add_command(stack_group)
cli.add_command(doctor_command)


@cli.command("detail", short_help="Change what is captured while a run goes on.")
@click.argument("level", type=click.Choice(["off", "steps", "phases"]))
@click.option("--run", "run", metavar="ID", help="The run, or the beginning of its id.  [default: every run of yours that goes on here]")
def detail_command(level: str, run: str | None) -> int:
    """Change what the workers of a run capture, from their next step on: nothing, steps, or steps and phases (as at the start).

    \b
    Examples:
      otel-dflash detail steps
      otel-dflash detail phases --run night-7
    """
    from otel_dflash import session

    words = {"off": session.DETAIL_OFF, "steps": session.DETAIL_STEPS, "phases": session.DETAIL_PHASES}
    found = [one for one in session.running_sessions() if run is None or one.run_id.startswith(run)]
    if not found:
        raise click.ClickException(
            f"no run {run!r} goes on here" if run else "no run goes on here; start one: otel-dflash run -- python train.py"
        )
    for one in found:
        session.map_control(one)[0] = words[level]
        click.echo(f"{one.run_id}: {level}")
    return EXIT_OK


@cli.command("version", short_help="Show versions.")
def version_command() -> int:
    """Show the versions of otel-dflash, Python, and what the agent uses."""
    click.echo(f"otel-dflash {__version__}")
    click.echo(f"python {platform.python_version()} ({sys.executable})")
    for name in DISTRIBUTIONS:
        click.echo(f"{name} {_installed_version(name)}")
    return EXIT_OK


@cli.command("agent", short_help="What `run` and start() start; not for people.")
@click.argument("session_directory", metavar="SESSION_DIR", type=click.Path(path_type=Path, exists=True, file_okay=False))
def agent_command(session_directory: Path) -> int:
    """Record the session in SESSION_DIR and send its telemetry, until the last process of it has ended."""
    from otel_dflash.agent import loop

    return loop.main(session_directory)


def find_recording(run: str, directory: Path | None) -> Path:
    """Return the recording that `run` names: a path, `latest`, a run id, `<run>@<node>`, or the only one that begins so.

    Raises:
        ConfigError: None does, or several do.
    """
    from otel_dflash.agent.recording import RUN_FILE, list_recordings, read_info

    base = directory.absolute() if directory else config.recordings_directory()
    if os.sep in run or (Path(run) / RUN_FILE).is_file():
        return Path(run)
    found = {path.name: path for path in list_recordings(base)}
    if not found:
        raise ConfigError(f"no recordings in {base}; make one: otel-dflash run -- python train.py, or point --dir at them")
    newest = max(found.values(), key=lambda path: (path / RUN_FILE).stat().st_mtime_ns)
    if run == "latest":
        return newest
    first, _, node = run.partition("@")  # the first node of a run records under its bare id
    if node and first in found and read_info(found[first]).host == node:
        return found[first]
    matches = [run] if run in found else [name for name in found if name.startswith(run)]
    if len(matches) == 1:
        return found[matches[0]]
    if matches:
        names = ", ".join(matches[:4]) + (", ..." if len(matches) > 4 else "")
        raise ConfigError(f"{len(matches)} runs begin with {run!r}: {names}; give more of the id")
    raise ConfigError(f"no run {run!r} in {base}; the newest is {newest.name}, `otel-dflash runs` lists all")


def _supervise(options: RunOptions) -> int:
    from otel_dflash.cli import leftovers
    from otel_dflash.cli.supervise import run

    leftovers.finish(wait=False)
    return run(options, _report)


def _report(outcome: Outcome) -> None:
    from otel_dflash.cli import closing

    closing.report(outcome)


def _example_script() -> Path:
    """Return the example trainer: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).parents[1]
    places = [base / "examples" / "dflash" / "train.py" for base in (package.parent, package)]
    for place in places:
        if place.is_file():
            return place
    raise click.ClickException(f"the example is not installed ({places[1]}); reinstall otel-dflash")


def _installed_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _fail(message: str, code: int) -> int:
    with suppress(OSError):  # the exit code says it too
        click.echo(f"otel-dflash: {message}", err=True)
    return code
