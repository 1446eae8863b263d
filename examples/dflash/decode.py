"""Greedy decoding with the target, and speculative decoding with the drafter: both give the same tokens."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from model import MASK, Drafter, Target, pack_hidden
from torch import Tensor


@dataclass(frozen=True)
class Speculation:
    """The results of decoding some prompts both ways."""

    lossless: bool  # every token equals plain greedy decoding of the target
    # mean over verifications of accepted draft tokens + 1 (the target's own next token)
    acceptance_length: float
    tokens: int
    verifications: int


def greedy(target: Target, prompt: Tensor, count: int) -> list[int]:
    """Decode `count` tokens after the prompt [length], one target forward per token."""
    ids = prompt
    for _ in range(count):
        logits = target.logits(target.hidden(ids[None])[-1][:, -1])
        ids = torch.cat([ids, logits.argmax(-1)])
    return list(ids[len(prompt) :].tolist())


def speculate(target: Target, drafter: Drafter, prompt: Tensor, count: int) -> tuple[list[int], list[int]]:
    """Decode `count` tokens after the prompt; return them and the accepted + 1 of every verification.

    Each turn drafts a block behind the newest token in one drafter forward and verifies it in one target
    forward: the longest prefix that agrees with the target's argmax is kept, and the target's own token after
    it is the anchor of the next block.
    """
    block, accepted_lengths = drafter.block, []
    hidden = target.hidden(prompt[None])
    buffer = hidden[0].new_empty(1, len(prompt) + count + 2 * block, len(drafter.layer_ids) * target.width)
    ids = torch.cat([prompt, target.logits(hidden[-1][:, -1]).argmax(-1)])  # the first anchor
    while len(ids) - len(prompt) < count:
        context = len(ids) - 1  # hidden states are known strictly before the anchor
        packed = pack_hidden(hidden, drafter.layer_ids, buffer)
        tokens = torch.full((1, block), MASK)
        tokens[0, 0] = ids[-1]
        positions = torch.arange(context, context + block)[None]
        everything = torch.ones(1, block, context + block, dtype=torch.bool)
        draft = drafter(target, packed[:, :context], tokens, positions, everything).argmax(-1)[0, 1:]

        hidden = target.hidden(torch.cat([ids, draft])[None])
        # what the target predicts after the anchor and each draft token
        wanted = target.logits(hidden[-1][0, context:]).argmax(-1)
        accepted = int((draft == wanted[:-1]).cumprod(0).sum())
        ids = torch.cat([ids, draft[:accepted], wanted[accepted : accepted + 1]])
        accepted_lengths.append(accepted + 1)
    return list(ids[len(prompt) : len(prompt) + count].tolist()), accepted_lengths


@torch.no_grad()
def compare(target: Target, drafter: Drafter, prompts: list[Tensor], count: int) -> Speculation:
    """Decode every prompt both ways.

    The target runs in float64 here. The promise of losslessness is about exact arithmetic: a forward over
    eight tokens and one over a single token add in different orders, and in float32 a near tie between two
    tokens may then fall either way.
    """
    target, drafter = copy.deepcopy(target).double(), copy.deepcopy(drafter).double()
    lossless, lengths = True, []
    for prompt in prompts:
        tokens, accepted = speculate(target, drafter, prompt, count)
        lossless &= tokens == greedy(target, prompt, count)
        lengths += accepted
    return Speculation(lossless, sum(lengths) / len(lengths), count * len(prompts), len(lengths))
