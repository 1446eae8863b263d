"""A trainer for tests in which time stands: a drafter waits for an item that comes only when stdin ends, a target
has ended by an exception, a copier is in no phase."""

from __future__ import annotations

import queue
import sys
import threading
from contextlib import suppress

import otel_dflash

telemetry = otel_dflash.start()
items: queue.Queue[int] = telemetry.wrap_queue(queue.Queue(), "hidden_states")
copier = telemetry.worker("postprocess", 0)
# Held here, because a worker that nobody holds is closed when it is collected.
failed = telemetry.worker("target", 0, gpu=0)


def drafter() -> None:
    worker = telemetry.worker("drafter", 0, gpu=5)
    while True:
        with worker.step():
            with worker.queue_get:
                item = items.get()
            if item < 0:
                return
            with worker.forward:
                pass


def target() -> None:
    with suppress(ArithmeticError):  # the thread ends, without a traceback on stderr
        for number in range(5):
            with failed.step() as step:
                step.set(step=100 + number)
                with failed.model_forward:
                    items.put(1 // (4 - number))


threads = [threading.Thread(target=work) for work in (target, drafter)]
for thread in threads:
    thread.start()
sys.stdin.read()
items.put(-1)
for thread in threads:
    thread.join()
