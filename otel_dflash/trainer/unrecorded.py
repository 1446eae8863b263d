"""Steps of a worker that got no ring: they are counted, and nothing else of them is kept."""

from __future__ import annotations

from typing import Any

from otel_dflash.session import DETAIL_OFF, count_unrecorded_step
from otel_dflash.trainer.binding import bound_class
from otel_dflash.trainer.worker import Step, Worker


def count_steps(worker: Worker, control: memoryview) -> None:
    """Let a worker count its steps in the session's control words until it is closed."""
    step = worker.step
    is_open = False

    def begin() -> Step:
        nonlocal is_open
        is_open = not worker._closed and control[0] != DETAIL_OFF
        return step

    def end(error: Any = None, value: Any = None, traceback: Any = None) -> None:
        nonlocal is_open
        if is_open:
            is_open = False
            count_unrecorded_step(control)

    def cancel() -> None:
        nonlocal is_open
        is_open = False

    step.__class__ = bound_class(step, {"begin": begin, "end": end, "cancel": cancel})
