"""Text, samples whose responses the target wrote, and length-bucketed batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from model import PAD, Cache, Target
from pipeline import Batch
from torch import Tensor

BATCH_SEQUENCES = 2
BUCKETS = (64, 96, 128)  # a batch holds sequences of one bucket: up to so many tokens
LENGTH_MAX = BUCKETS[-1]
PROMPT = 32  # tokens of a sample that come from the text; the rest, the response, is supervised
RESPONSE_MIN = 24
TEMPERATURE = 0.5  # of the written responses
HELD_OUT_SHARE = 0.1


def load_text(path: Path | None) -> Tensor:
    """Return the bytes of a file, or of the manual pages that Python ships, as ids [length]."""
    if path is None:
        from pydoc_data.topics import topics

        data = "\n".join(topics.values()).encode()
    else:
        data = path.read_bytes()
    return torch.frombuffer(bytearray(data.replace(b"\0", b" ")), dtype=torch.uint8).long()


def split_text(text: Tensor) -> tuple[Tensor, Tensor]:
    """Return the part to learn from and the held-out end."""
    cut = int(len(text) * (1 - HELD_OUT_SHARE))
    return text[:cut], text[cut:]


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return `count` random windows of the text, [count, length]."""
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length)]


@torch.no_grad()
def write_samples(target: Target, text: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    """Let the target write responses to prompts from the text.

    A drafter must learn what the target predicts, not what people wrote.
    """
    ids = new = windows(text, count, PROMPT, generator)
    cache: Cache = {}
    while ids.shape[1] < LENGTH_MAX:
        hidden = target.hidden(new, ids.shape[1] - new.shape[1], cache)
        likely = (target.logits(hidden[-1][:, -1]) / TEMPERATURE).softmax(-1)
        new = torch.multinomial(likely, 1, generator=generator)
        ids = torch.cat([ids, new], dim=1)
    lengths = torch.randint(PROMPT + RESPONSE_MIN, LENGTH_MAX + 1, (count,), generator=generator)
    return [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]


def make_batch(samples: list[Tensor], number: int = 0, bucket: int = LENGTH_MAX) -> Batch:
    """Pad samples to the longest of them."""
    length = max(map(len, samples))
    ids = torch.full((len(samples), length), PAD)
    loss_mask = torch.zeros(len(samples), length, dtype=torch.bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample
        loss_mask[row, PROMPT : len(sample)] = True
    tokens = sum(map(len, samples))
    return Batch(
        number, bucket, tokens, loss_tokens=tokens - PROMPT * len(samples), ids=ids, loss_mask=loss_mask
    )


def batches(samples: list[Tensor], generator: torch.Generator) -> Iterator[Batch]:
    """Yield batches for ever, in random order, each from one length bucket."""
    number = 0
    waiting: dict[int, list[Tensor]] = {bucket: [] for bucket in BUCKETS}
    while True:
        for i in torch.randperm(len(samples), generator=generator).tolist():
            bucket = next(bound for bound in BUCKETS if len(samples[i]) <= bound)
            waiting[bucket].append(samples[i])
            if len(waiting[bucket]) == BATCH_SEQUENCES:
                yield make_batch(waiting[bucket], number, bucket)
                waiting[bucket] = []
                number += 1
