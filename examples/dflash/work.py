"""The torch work of the pipeline's workers, and before it: train the target, and let it write the samples."""

from __future__ import annotations

import copy
import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from blocks import block_loss
from data import (
    BATCH_SEQUENCES,
    LENGTH_MAX,
    batches,
    load_text,
    make_batch,
    split_text,
    windows,
    write_samples,
)
from decode import Speculation, compare
from model import Drafter, Target, pack_hidden
from pipeline import Batch, Item
from torch import Tensor
from torch.nn import functional

TEACH_SEQUENCES, TEACH_LENGTH, TEACH_RATE = 4, 96, 6e-3
SAMPLES_MAX, HELD_OUT_SAMPLES = 450, 48
DRAFTER_RATE = 5e-3
DECODE_PROMPTS, DECODE_PROMPT = 8, 32


def teach(
    target: Target, text: Tensor, steps: int, generator: torch.Generator, progress: Callable[[int], object]
) -> None:
    """Teach the target to predict the next byte, then freeze it."""
    optimizer = torch.optim.AdamW(target.parameters(), lr=TEACH_RATE, betas=(0.9, 0.98))
    schedule = learning_rate(optimizer, warm_up=30, steps=steps)
    for step in range(steps):
        ids = windows(text, TEACH_SEQUENCES, TEACH_LENGTH + 1, generator)
        logits = target.logits(target.hidden(ids[:, :-1])[-1])
        torch.autograd.backward(functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        progress(step + 1)
    target.eval().requires_grad_(False)


def learning_rate(
    optimizer: torch.optim.Optimizer, warm_up: int, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Rise for `warm_up` steps, then fall along a cosine to 5 %."""

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warm_up) * (
            0.05 + 0.95 * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2
        )

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class TorchWork:
    """One frozen target for all target workers, and one drafter that the drafter workers train together."""

    def __init__(self, text: Path | None, seed: int, steps: int, accumulate: int) -> None:
        torch.manual_seed(seed)  # the weights; everything else is drawn from generators
        self.seed, self.accumulate = seed, accumulate
        self.samples_count = min(SAMPLES_MAX, steps * accumulate * BATCH_SEQUENCES)
        self.generator = torch.Generator().manual_seed(seed)
        self.text, self.held_out_text = split_text(load_text(text))
        self.target = Target()
        self.shared = Drafter(self.target)
        self.optimizer = torch.optim.AdamW(self.shared.parameters(), lr=DRAFTER_RATE, betas=(0.9, 0.98))
        self.schedule = learning_rate(self.optimizer, warm_up=10, steps=steps)
        self.lock = threading.Lock()  # held while the shared drafter changes or is copied
        self.newest_loss: Tensor | None = None

    def prepare(self, teach_steps: int, progress: Callable[[int], object]) -> None:
        teach(self.target, self.text, teach_steps, self.generator, progress)
        self.samples = write_samples(self.target, self.text, self.samples_count, self.generator)
        self.held_out = make_batch(
            write_samples(self.target, self.held_out_text, HELD_OUT_SAMPLES, self.generator)
        )

    def batches(self) -> Iterator[Batch]:
        return batches(self.samples, self.generator)

    def buffer(self) -> Tensor:
        return torch.empty(BATCH_SEQUENCES, LENGTH_MAX, len(self.shared.layer_ids) * self.target.width)

    @torch.no_grad()
    def model_forward(self, batch: Batch) -> list[Tensor]:
        return self.target.hidden(batch.ids)

    def pack_hidden(self, hidden: list[Tensor], buffer: Tensor) -> Tensor:
        return pack_hidden(hidden, self.shared.layer_ids, buffer)

    def d2h(self, packed: Tensor) -> Tensor:
        """Copy out of the target's buffer; from a GPU this would wait for the asynchronous copy to pinned
        memory."""
        return packed.to("cpu", copy=True)

    def drafter(self, index: int) -> Replica:
        with self.lock:
            return Replica(self, index)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        hidden = self.target.hidden(self.held_out.ids)
        length = self.held_out.ids.shape[1]
        packed = self.pack_hidden(
            hidden, torch.empty(HELD_OUT_SAMPLES, length, len(self.shared.layer_ids) * self.target.width)
        )
        generator = torch.Generator().manual_seed(self.seed)
        return float(
            block_loss(
                self.shared, self.target, packed, self.held_out.ids, self.held_out.loss_mask, generator
            )
        )

    def decode(self, tokens: int) -> Speculation:
        generator = torch.Generator().manual_seed(self.seed)
        prompts = windows(self.held_out_text, DECODE_PROMPTS, DECODE_PROMPT, generator)
        return compare(self.target, self.shared, list(prompts), tokens)

    def weights_sha256(self) -> str:
        digest = hashlib.sha256()
        for name, weight in sorted(self.shared.state_dict().items()):
            digest.update(name.encode())
            digest.update(bytes(weight.contiguous().flatten().view(torch.uint8).tolist()))
        return digest.hexdigest()


class Replica:
    """A drafter worker's own copy of the shared drafter.

    It computes gradients on the copy, hands them to the one shared optimizer, and takes the new weights:
    asynchronous data parallelism, in which a gradient may be as many steps old as there are other drafters.
    With one drafter it is plain training.
    """

    def __init__(self, work: TorchWork, index: int) -> None:
        self.work = work
        self.model = copy.deepcopy(work.shared)
        self.generator = torch.Generator().manual_seed(1000 * work.seed + index + 1)  # of anchors

    def forward(self, item: Item) -> Tensor:
        loss = block_loss(
            self.model, self.work.target, item.hidden, item.batch.ids, item.batch.loss_mask, self.generator
        )
        self.work.newest_loss = loss.detach()
        return loss

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss / self.work.accumulate)

    def optimizer(self) -> None:
        work = self.work
        with work.lock, torch.no_grad():
            for shared, own in zip(work.shared.parameters(), self.model.parameters(), strict=True):
                shared.grad, own.grad = own.grad, None
            work.optimizer.step()
            work.schedule.step()
            for shared, own in zip(work.shared.parameters(), self.model.parameters(), strict=True):
                own.copy_(shared)
