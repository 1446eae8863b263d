"""Sleeps in place of device work: the pipeline of eight GPUs runs on two cores.

Nothing is trained, and torch is not imported.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from pipeline import Batch, Item

SECONDS = {
    "model_forward": 0.040,
    "pack_hidden": 0.002,
    "d2h": 0.003,
    "forward": 0.012,
    "backward": 0.020,
    "optimizer": 0.004,
}
SEQUENCES = 4
BUCKETS = (64, 96, 128)


class SimulatedWork:
    """The same calls as TorchWork, each of a stated length."""

    newest_loss = None

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def batches(self) -> Iterator[Batch]:
        number = 0
        while True:
            bucket = self.random.choice(BUCKETS)
            lengths = [self.random.randint(bucket - 31, bucket) for _ in range(SEQUENCES)]
            prompts = [self.random.choice((16, 28, 40)) for _ in range(SEQUENCES)]
            yield Batch(
                number, bucket, sum(lengths), loss_tokens=sum(lengths) - min(sum(prompts), sum(lengths))
            )
            number += 1

    def buffer(self) -> None:
        return None

    def model_forward(self, batch: Batch) -> None:
        time.sleep(SECONDS["model_forward"])

    def pack_hidden(self, hidden: None, buffer: None) -> None:
        time.sleep(SECONDS["pack_hidden"])

    def d2h(self, packed: None) -> None:
        time.sleep(SECONDS["d2h"])

    def drafter(self, index: int) -> SimulatedDrafter:
        return SimulatedDrafter()


class SimulatedDrafter:
    """The sleeps of one drafter."""

    def forward(self, item: Item) -> None:
        time.sleep(SECONDS["forward"])

    def backward(self, loss: None) -> None:
        time.sleep(SECONDS["backward"])

    def optimizer(self) -> None:
        time.sleep(SECONDS["optimizer"])
