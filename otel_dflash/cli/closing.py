"""What `otel-dflash run` says after the command has ended, on stderr: stdout belongs to the user's program."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from otel_dflash import config
from otel_dflash.agent.recording import RecordingError, RecordingReader
from otel_dflash.cli.environment import ENDPOINT_VARIABLE, endpoint_of
from otel_dflash.cli.supervise import Outcome, shown

EXAMPLE_ENDPOINT = "http://localhost:4317"
SNIPPET = """\
    import otel_dflash
    telemetry = otel_dflash.start()
    worker = telemetry.worker("target", 0, gpu=0)
    with worker.step() as step:                    # around one turn of your loop
        with worker.model_forward: hidden = target(batch)
"""


def report(outcome: Outcome) -> None:
    """Print where the time went, where the results are, and what went wrong; with `quiet` only the last."""
    recording = outcome.session.recording
    recorded = has_workers(recording)
    if outcome.interrupted:
        say(f"not waiting for the agent; see the run later: {command('summary', recording)}")
    elif recorded:
        _print_summary(recording, outcome.quiet)
    elif not recorded:
        _say_nothing_recorded(outcome)
    if outcome.agent_problem:
        say(outcome.agent_problem)
    if recorded and not outcome.interrupted:
        for line in _delivery(recording, outcome.environment, outcome.quiet):
            say(line)


def say(line: str) -> None:
    """Print one line of ours to stderr."""
    print(f"otel-dflash: {line}", file=sys.stderr)


def command(name: str, recording: Path) -> str:
    """Return the command line that does `name` to this recording from here."""
    run = recording.name if recording.parent == config.recordings_directory() else shown(recording)
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
            say(f"lost: {line.strip()}")
        return
    render_to = Console(stderr=True)
    render_to.print()
    render(summary, render_to)
    say(f"recorded in {shown(recording)}; see it again: {command('summary', recording)}")


def _say_nothing_recorded(outcome: Outcome) -> None:
    if outcome.quiet or outcome.agent_problem:
        return
    say("no telemetry was recorded: the command made no worker. The least to add:")
    print(f"\n{SNIPPET}", file=sys.stderr)


def _delivery(recording: Path, environment: Mapping[str, str], quiet: bool) -> Iterator[str]:
    """Yield what was not sent, why, and how to send it."""
    from otel_dflash.agent import exporters, noise
    from otel_dflash.views.summary import delivery

    if not exporters.exporter_names("traces", environment) and not exporters.exporter_names("metrics", environment):
        if not quiet and not any(environment.get(name) for name in ("OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER")):
            yield f"nothing was sent: no endpoint is set. Send this run: {command('replay', recording)} --endpoint {EXAMPLE_ENDPOINT}"
            yield f"send the next as it runs: {ENDPOINT_VARIABLE}={EXAMPLE_ENDPOINT}"
        return
    reasons: dict[str, list[str]] = {}
    for name, state in delivery(recording).items():
        if state.get("sampled") and not quiet:
            yield _thinned(state["sampled"])
        if not state.get("delivered", True):
            reasons.setdefault(state["reason"] or "no reason given", []).append(name)
    if reasons:
        missing = "; ".join(f"{' and '.join(names)} ({reason})" for reason, names in reasons.items())
        again = f"{command('replay', recording)} --endpoint {noise.redact(endpoint_of(environment) or 'URL')}"
        yield f"not delivered in full: {missing}. All is recorded; send it later: {again}"


def _thinned(sampled: Mapping[str, Any]) -> str:
    """Return what the sampler did."""
    said = f"{sampled['sampler']} left out {sampled['left_out_spans']:,} spans; the recording holds them"
    if sampled["keep"]:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sampled["kept_steps"].items())
        said += f". Sent whatever it says: {counts} steps, with the traces of what they consumed"
    if sampled["lost_traces"]:
        said += f", but for {sampled['lost_traces']:,} of these traces that were left out too long before"
    return said
