"""A small run with known answers, for tests of what Jaeger is asked: 2 targets, a postprocess worker, 2
drafters, 8 batches.

Each drafter step takes two batches. Drafter 0's second step (number 2) is slow in forward, and its step after
all batches fails. Drafter 1's second step (number 3) waits while target 0 is slow with batch 6. All but that
wait is one thread, so the order is always the same.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

import otel_dflash

SLOW_S = 0.3
SLOW_BATCH, SLOW_STEP, WAITING_STEP = 6, 2, 3


def main() -> None:
    telemetry = otel_dflash.start()
    targets = [telemetry.worker("target", index, gpu=index) for index in range(2)]
    postprocess = telemetry.worker("postprocess", 0)
    drafters = [telemetry.worker("drafter", index, gpu=2 + index) for index in range(2)]
    hidden_states: queue.Queue[int] = telemetry.wrap_queue(queue.Queue(), "hidden_states", capacity=64)

    def make(batch: int) -> None:
        target, bucket = targets[batch % 2], 128 * (1 + batch % 2)
        with target.step() as step:
            with target.queue_get:
                pass
            step.set(tokens=100 + batch, loss_tokens=80, bucket=bucket, batch_id=batch)
            with target.model_forward:
                work(batch == SLOW_BATCH)
            with target.pack_hidden:
                pass
            context = step.produced()
        with postprocess.resume(context) as step:
            step.set(bucket=bucket)
            with postprocess.d2h:
                pass
            with postprocess.queue_put:
                hidden_states.put(batch)

    def draft(number: int, begins: Callable[[], object] = bool, took: Callable[[], object] = bool) -> None:
        drafter = drafters[number % 2]
        with drafter.step() as step:
            with drafter.queue_get:
                begins()
                hidden_states.get()
            took()
            with drafter.queue_get:
                hidden_states.get()
            with drafter.forward:
                work(number == SLOW_STEP)
            with drafter.backward:
                pass
            with drafter.optimizer:
                pass
            step.set(step=number, tokens=200)

    for number in range(WAITING_STEP):
        make(2 * number)
        make(2 * number + 1)
        draft(number)
    waits, took = threading.Event(), threading.Event()
    waiting = threading.Thread(target=draft, args=(WAITING_STEP, waits.set, took.set))
    waiting.start()
    waits.wait()
    make(SLOW_BATCH)
    took.wait()
    make(SLOW_BATCH + 1)
    waiting.join()
    with suppress(ZeroDivisionError), drafters[0].step() as step, drafters[0].optimizer:
        step.set(step=WAITING_STEP + 1)
        print(1 / 0)


def work(slow: bool) -> None:
    """Do nothing, or nothing for SLOW_S."""
    if slow:
        threading.Event().wait(SLOW_S)


if __name__ == "__main__":
    main()
