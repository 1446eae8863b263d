"""A threaded trainer for tests, shaped like the users' own: targets -> postprocess -> hidden-state queue ->
drafters.

    pipeline_trainer.py TARGETS DRAFTERS STEPS FILE

Every third target step has two items, and a drafter step takes two. Phases and steps are counted by plain
integers, and each item carries the id of the target step that made it; both go to FILE as JSON. A step's
`batch_id` is its own id, as text.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import otel_dflash

TARGETS, DRAFTERS, STEPS = map(int, sys.argv[1:4])
ITEMS_PER_STEP = 2
END = None


@dataclass
class Item:
    made_by: int
    context: int


class Counted:
    """A worker whose phases and steps are counted."""

    def __init__(
        self, telemetry: otel_dflash.Telemetry, role: str, index: int, gpu: int | None = None
    ) -> None:
        self.worker = telemetry.worker(role, index, gpu=gpu)
        self.counts: Counter[str] = Counter()
        self.key = f"{role} {index}"

    @contextmanager
    def step(self, context: int | None = None) -> Iterator[otel_dflash.Step]:
        with self.worker.step() if context is None else self.worker.resume(context) as step:
            if context is None:
                self.counts["step"] += 1
                step.set(batch_id=str(step.id), tokens=self.counts["step"])
            yield step

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with self.worker.phase(name):
            self.counts[name] += 1
            yield


def main() -> None:
    telemetry = otel_dflash.start()
    transfers: queue.Queue[Any] = queue.Queue(4)
    hidden_states: queue.Queue[Any] = telemetry.wrap_queue(
        queue.Queue(16 if DRAFTERS else 0), "hidden_states"
    )
    targets = [Counted(telemetry, "target", index, gpu=index) for index in range(TARGETS)]
    postprocess = Counted(telemetry, "postprocess", 0)
    drafters = [Counted(telemetry, "drafter", index, gpu=TARGETS + index) for index in range(DRAFTERS)]
    consumed: dict[int, list[int]] = {}
    resumed: list[int] = []

    def target_loop(counted: Counted) -> None:
        for number in range(STEPS):
            with counted.step() as step:
                with counted("model_forward"), counted("pack_hidden"):
                    pass
                for _ in range(2 if number % 3 == 0 else 1):
                    with counted("queue_put"):
                        transfers.put(Item(step.id, step.produced()))

    def postprocess_loop(counted: Counted) -> None:
        while (item := transfers.get()) is not END:
            resumed.append(item.made_by)
            with counted.step(item.context):
                with counted("d2h"):
                    pass
                with counted("queue_put"):
                    hidden_states.put(item)

    def drafter_loop(counted: Counted) -> None:
        over = False
        while not over:
            with counted.step() as step:
                items = []
                for _ in range(ITEMS_PER_STEP):
                    with counted("queue_get"):
                        item = hidden_states.get()
                    if item is END:
                        over = True
                        break
                    items.append(item.made_by)
                    with counted("forward"):
                        pass
                with counted("optimizer"):
                    pass
                consumed[step.id] = items

    producers = [threading.Thread(target=target_loop, args=(counted,)) for counted in targets]
    middle = threading.Thread(target=postprocess_loop, args=(postprocess,))
    consumers = [threading.Thread(target=drafter_loop, args=(counted,)) for counted in drafters]
    for thread in (*producers, middle, *consumers):
        thread.start()
    for thread in producers:
        thread.join()
    transfers.put(END)
    middle.join()
    for _ in consumers:
        hidden_states.put(END)
    for thread in consumers:
        thread.join()
    counts = {counted.key: counted.counts for counted in (*targets, postprocess, *drafters)}
    Path(sys.argv[4]).write_text(json.dumps({"counts": counts, "consumed": consumed, "resumed": resumed}))


if __name__ == "__main__":
    main()
