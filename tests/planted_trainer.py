"""A trainer for tests that knows where its time went: it reads the clock before and after each change of what
a worker does.

    planted_trainer.py FILE

Between two changes a worker is in one state, for at least the time from after the first to before the second,
and for at most the time from before the first to after the second. FILE gets these sums of each worker as
JSON: {worker: {state: [at least, at most]}}.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import otel_dflash

now = time.monotonic_ns
ROUNDS = 5


class Witness:
    """One worker, and all its changes of state as (before, after, state from then on)."""

    def __init__(self, telemetry: otel_dflash.Telemetry, role: str, index: int) -> None:
        self.key = f"{role} {index}"
        before = now()
        self.worker = telemetry.worker(role, index)
        self.changes = [(before, now(), "other")]
        self.states = ["other"]

    def __call__(self, name: str, state: str | None = None) -> Planted:
        usual = {"queue_get": "starved", "prefetch_get": "starved", "queue_put": "backpressured"}
        return Planted(self, self.worker.phase(name, state), state or usual.get(name, "busy"))

    def close(self) -> None:
        before = now()
        self.worker.close()
        self.changes.append((before, now(), "closed"))

    def truth(self) -> dict[str, list[int]]:
        sums: dict[str, list[int]] = {}
        for (before, after, state), (next_before, next_after, _) in zip(
            self.changes, self.changes[1:], strict=False
        ):
            least, most = sums.setdefault(state, [0, 0])
            sums[state] = [least + next_before - after, most + next_after - before]
        first, last = self.changes[0], self.changes[-1]
        return {**sums, "wall": [last[0] - first[1], last[1] - first[0]]}


class Planted:
    """A phase with the script's own clock around its beginning and its end."""

    def __init__(self, witness: Witness, phase: otel_dflash.Phase, state: str) -> None:
        self.witness, self.phase, self.state = witness, phase, state

    def __enter__(self) -> None:
        states = self.witness.states
        states.append(self.state)
        before = now()
        self.phase.__enter__()
        self.witness.changes.append((before, now(), states[-1]))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        states = self.witness.states
        states.pop()
        before = now()
        self.phase.__exit__(kind, error, traceback)
        self.witness.changes.append((before, now(), states[-1]))


def spin(ms: float) -> None:
    until = now() + int(ms * 1e6)
    while now() < until:
        pass


def sleep(ms: float) -> None:
    time.sleep(ms / 1e3)


def target_loop(own: Witness, items: queue.Queue[int], lock: threading.Lock) -> None:
    sleep(400)  # before the first step
    for number in range(ROUNDS):
        with own.worker.step() as step:
            step.set(tokens=number)
            sleep(10)  # a gap inside a step
            with own("prefetch_get"):
                sleep(15)
            with own("model_forward"):
                spin(10)
                with own("attention"):
                    spin(10)
                    with own("queue_get"):  # the innermost phase counts
                        sleep(10)
                with own("weights", "lock_wait"), lock:
                    pass
                spin(5)
            with own("queue_put"):
                items.put(number)
        sleep(12)  # a gap between steps
    with own("checkpoint"):  # outside any step
        sleep(20)
    sleep(15)  # after all


def drafter_loop(own: Witness, items: queue.Queue[int], lock: threading.Lock) -> None:
    for number in range(ROUNDS):
        sleep(20)
        with own.worker.step():
            with own("queue_get"):
                items.get()
            try:
                with own("forward"), own("kernel"):
                    sleep(60)
                    raise ArithmeticError(number)
            except ArithmeticError:
                sleep(10)
            try:
                with own("queue_get"):
                    queue.Queue[int]().get(timeout=0.015)
            except queue.Empty:
                pass
            with own("sync", "lock_wait"):
                sleep(15)
            with own("optimizer"):
                sleep(35)  # slower than the targets: they wait


def holder_loop(own: Witness, items: queue.Queue[int], lock: threading.Lock) -> None:
    sleep(250)
    for _ in range(3 * ROUNDS):
        with own.worker.step(), own("hold"), lock:
            sleep(25)
        sleep(15)


def main() -> None:
    telemetry = otel_dflash.start()
    items: queue.Queue[int] = telemetry.wrap_queue(queue.Queue(1), "hidden_states", capacity=1)
    lock = threading.Lock()
    loops = {"target": target_loop, "drafter": drafter_loop, "postprocess": holder_loop}
    # one after the other: the quicker, the better it is timed
    witnesses = {role: Witness(telemetry, role, 0) for role in loops}

    def run(role: str) -> None:
        loops[role](witnesses[role], items, lock)
        witnesses[role].close()

    threads = [threading.Thread(target=run, args=(role,)) for role in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Path(sys.argv[1]).write_text(json.dumps({own.key: own.truth() for own in witnesses.values()}))


if __name__ == "__main__":
    main()
