"""What is counted: runs under callgrind, without an agent and without anything from outside the standard library.

gate.py starts it. Each burst runs `FEW` times and `MANY` times between two marks. The difference has no start-up, no
first call and no mark in it: `TURNS` turns and nothing else.
"""

from __future__ import annotations

import gc
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic_ns

from otel_dflash import Telemetry, Worker
from otel_dflash.session import create_session, remove_session
from otel_dflash.trainer import telemetry as telemetry_module

FEW = 500
MANY = 2500
TURNS = MANY - FEW
WARM_UP = 100  # turns after which Python has specialized the code

Burst = Callable[[int], None]


def mark() -> None:
    """End what callgrind counts into one file. Nothing else that runs here calls this function of the C library."""
    os.getppid()


def clock_reads(turns: int) -> None:
    for _ in range(turns):
        monotonic_ns()
        monotonic_ns()


def phases(worker: Worker) -> Burst:
    """Phases inside a step, as in a trainer."""

    def burst(turns: int) -> None:
        with worker.step():
            phase = worker.forward
            for _ in range(turns):
                with phase:
                    pass

    return burst


def steps(worker: Worker) -> Burst:
    def burst(turns: int) -> None:
        for _ in range(turns):
            with worker.step():
                pass

    return burst


def steps_with_attributes(worker: Worker) -> Burst:
    """Of each kind one: a number of the step, a text, and a record of its own."""

    def burst(turns: int) -> None:
        for _ in range(turns):
            with worker.step() as step:
                step.set(tokens=4096, bucket="512", loss=0.5)

    return burst


def handovers(worker: Worker, items: queue.Queue[object]) -> Burst:
    """A put and a get, inside a step."""

    def burst(turns: int) -> None:
        item = object()
        with worker.step():
            for _ in range(turns):
                items.put(item)
                items.get()

    return burst


def bursts(telemetry: Telemetry) -> dict[str, Burst]:
    """Return what is counted, by the line of the table. Each worker's ring holds all its records: nobody reads them."""
    return {
        "two clock reads": clock_reads,
        "phase": phases(telemetry.worker("target", 0)),
        "step": steps(telemetry.worker("target", 1)),
        "step with three attributes": steps_with_attributes(telemetry.worker("target", 2)),
        "queue.Queue put and get, wrapped": handovers(
            telemetry.worker("target", 3), telemetry.wrap_queue(queue.Queue(), "hidden_states")
        ),
    }


def fix_identity() -> None:
    """Make every run the same run. A ring's id and names are made of pid, thread and time: other ids are longer ints,
    and other hashes collide elsewhere, which moves the ratios by 0.3 %. The hot path has its own name for the clock."""
    os.getpid = lambda: 0
    time.monotonic_ns = lambda: 0
    threading.main_thread()._native_id = 1
    telemetry_module._ring_numbers = itertools.count()


def main() -> None:
    fix_identity()
    with TemporaryDirectory() as directory:
        session = create_session("instructions", Path(directory))
        try:
            telemetry = Telemetry(session)
            every = bursts(telemetry)
            for burst in every.values():
                burst(WARM_UP)
            gc.collect()
            gc.freeze()  # a collection within a burst counts, but only for what bursts leave behind
            for name, burst in every.items():
                print(name, flush=True)
                for turns in (FEW, MANY):
                    mark()
                    burst(turns)
            mark()
            telemetry.close()
        finally:
            remove_session(session)


if __name__ == "__main__":
    main()
