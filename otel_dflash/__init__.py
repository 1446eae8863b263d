"""Zero-impact OpenTelemetry for DFlash training pipelines.

Usage::

    telemetry = otel_dflash.start()
    worker = telemetry.worker("target", 0, gpu=0)
    with worker.step() as step:
        with worker.model_forward: ...
        step.set(tokens=4096)

The training process does nothing but write a few words into memory; an agent process turns them into traces
and metrics.
"""

from otel_dflash.config import ConfigError
from otel_dflash.trainer.context import Context
from otel_dflash.trainer.telemetry import Telemetry, start
from otel_dflash.trainer.worker import Phase, Step, Worker
from otel_dflash.version import __version__

__all__ = ["start", "Telemetry", "Worker", "Step", "Phase", "Context", "ConfigError", "__version__"]
