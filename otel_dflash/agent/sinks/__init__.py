"""The sinks of an agent and of a replay. A new one is a file here and a line in SINKS."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from otel_dflash.agent.sinks.sink import Sink, SinkSetup

SINKS: Final = {
    "spans": "otel_dflash.agent.sinks.spans:make",
    "metrics": "otel_dflash.agent.sinks.metrics:make",
}
"""Signal -> the function that makes its sinks. Named, not imported: loading the SDK would delay the agent's
start."""


def make_sinks(signal: str, setup: SinkSetup) -> list[Sink]:
    """Return a sink for each exporter that the environment names for a signal of SINKS. Loads the SDK.

    Raises:
        ConfigError: An exporter cannot be created.
        RecordingError: The directory is not a recording.
    """
    make: Callable[[SinkSetup], list[Sink]] = pkgutil.resolve_name(SINKS[signal])
    return make(setup)
