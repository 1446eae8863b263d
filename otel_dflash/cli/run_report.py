"""What `otel-dflash run` prints after the command has ended, to stderr: stdout belongs to the user's
program."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from otel_dflash import config
from otel_dflash.cli.environment import ENDPOINT_VARIABLE, endpoint_of
from otel_dflash.cli.run import Outcome
from otel_dflash.console import report, short_path
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import RecordingError

if TYPE_CHECKING:
    from otel_dflash.recording.delivery import SampledSpans

EXAMPLE_ENDPOINT = "http://localhost:4317"
SNIPPET = """\
    import otel_dflash
    telemetry = otel_dflash.start()
    worker = telemetry.worker("target", 0, gpu=0)
    with worker.step() as step:                    # around one turn of your loop
        with worker.model_forward: hidden = target(batch)
"""


def show(outcome: Outcome) -> None:
    """Print where the time went, where the results are, and what went wrong; if `quiet`, only what went
    wrong."""
    recording = outcome.session.recording
    recorded = has_workers(recording)
    if outcome.interrupted:
        report(f"not waiting for the agent; see the run later: {command('summary', recording)}")
    elif recorded:
        _print_summary(recording, outcome.quiet)
    else:
        _print_how_to_record(outcome)
    if outcome.agent_problem:
        report(outcome.agent_problem)
    if recorded and not outcome.interrupted:
        for line in _delivery(recording, outcome.environment, outcome.quiet):
            report(line)


def command(name: str, recording: Path) -> str:
    """Return the command line that runs `name` on this recording from here."""
    run = recording.name if recording.parent == config.recordings_directory() else short_path(recording)
    return f"otel-dflash {name} {run}"


def has_workers(recording: Path) -> bool:
    """Return whether any worker wrote to the recording."""
    try:
        reader = RecordingReader(recording)
    except RecordingError:
        return False
    try:
        while not reader.catalog and reader.read():
            pass
        return bool(reader.catalog)
    finally:
        reader.close()


def _print_summary(recording: Path, quiet: bool) -> None:
    from rich.console import Console

    from otel_dflash.views.render import losses, render
    from otel_dflash.views.summary import summarise

    summary = summarise(recording)
    if quiet:
        for line in losses(summary):
            report(f"lost: {line.strip()}")
        return
    render_to = Console(stderr=True)
    render_to.print()
    render(summary, render_to)
    report(f"recorded in {short_path(recording)}; see it again: {command('summary', recording)}")


def _print_how_to_record(outcome: Outcome) -> None:
    if outcome.quiet or outcome.agent_problem:
        return
    report(
        "no telemetry was recorded: no process created a worker after start(), which a spawned process must "
        "call too. The minimum to add:"
    )
    print(f"\n{SNIPPET}", file=sys.stderr)


def _delivery(recording: Path, environment: Mapping[str, str], quiet: bool) -> Iterator[str]:
    """Yield what was not sent, why, and how to send it."""
    from otel_dflash.otlp import redaction, settings
    from otel_dflash.recording.delivery import read_delivery

    if not settings.exporter_names("traces", environment) and not settings.exporter_names(
        "metrics", environment
    ):
        if not quiet and not any(
            environment.get(name) for name in ("OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER")
        ):
            yield (
                f"nothing was sent: no endpoint is set. Send this run: {command('replay', recording)} "
                f"--endpoint {EXAMPLE_ENDPOINT}"
            )
            yield f"send the next run live: {ENDPOINT_VARIABLE}={EXAMPLE_ENDPOINT}"
        return
    reasons: dict[str, list[str]] = {}
    for name, signal in read_delivery(recording).signals.items():
        if signal.sampled and not quiet:
            yield _thinned(signal.sampled)
        if not signal.delivered:
            reasons.setdefault(signal.reason or "no reason given", []).append(name)
    if reasons:
        missing = "; ".join(f"{' and '.join(names)} ({reason})" for reason, names in reasons.items())
        again = (
            f"{command('replay', recording)} --endpoint {redaction.redact(endpoint_of(environment) or 'URL')}"
        )
        yield f"not delivered in full: {missing}. All is recorded; send it later: {again}"


def _thinned(sampled: SampledSpans) -> str:
    """Return a line about what the sampler left out."""
    line = f"{sampled.sampler} left out {sampled.left_out_spans:,} spans; the recording holds them"
    if sampled.keep:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sampled.kept_steps.items())
        line += f". Sent regardless: {counts} steps, with the traces of what they consumed"
    if sampled.lost_traces:
        line += f", except {sampled.lost_traces:,} of these traces that were left out too long ago"
    return line
