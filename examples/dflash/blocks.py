"""What the drafter is trained on: random anchors, the blocks after them, the attention mask, and the loss."""

from __future__ import annotations

import torch
from model import MASK, Drafter, Target
from torch import Tensor
from torch.nn import functional


def draw_anchors(loss_mask: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `count` anchors per sequence at random, among positions p where p and p + 1 are both supervised.

    Returns anchors [batch, count] in rising order and keep [batch, count]: False where a sequence has fewer
    places than `count`.
    """
    possible = loss_mask.clone()
    possible[:, :-1] &= loss_mask[:, 1:]
    possible[:, -1] = False
    order = torch.rand(possible.shape, generator=generator).masked_fill(~possible, -1.0)
    anchors = order.topk(count, dim=1).indices.sort(dim=1).values
    return anchors, possible.gather(1, anchors)


def block_mask(anchors: Tensor, keep: Tensor, block: int, context: int) -> Tensor:
    """Return what each block token may attend to: [batch, blocks x block, context + blocks x block], True =
    visible.

    Its own block in both directions, and the context strictly before its anchor: the anchor's own hidden
    state doesn't exist yet when the block is drafted. Other blocks are invisible. A block that isn't kept
    sees only itself, token by token (an all-False row is NaN).
    """
    batch, blocks = anchors.shape
    queries = blocks * block
    owner = torch.arange(queries) // block
    before_anchor = torch.arange(context) < anchors[:, owner, None]
    same_block = (owner[:, None] == owner).expand(batch, -1, -1)
    visible = torch.cat([before_anchor, same_block], dim=2) & keep[:, owner, None]
    visible[:, :, context:] |= torch.eye(queries, dtype=torch.bool)
    return visible


def block_positions(anchors: Tensor, block: int) -> Tensor:
    """Return the absolute position of every block token, [batch, blocks x block]."""
    return (anchors[:, :, None] + torch.arange(block)).flatten(1)


def loss_weights(anchors: Tensor, keep: Tensor, loss_mask: Tensor, block: int, gamma: float) -> Tensor:
    """Weigh slot k of a block exp(-(k - 1) / gamma): an early mistake ends the accepted prefix. [batch,
    blocks x block].

    Zero for the anchor itself, unkept blocks, places past the end, and tokens that aren't supervised.
    """
    positions = block_positions(anchors, block)
    length = loss_mask.shape[1]
    slot = torch.arange(block).repeat(anchors.shape[1])
    supervised = (positions < length) & loss_mask.gather(1, positions.clamp(max=length - 1))
    valid = supervised & (slot > 0) & keep.repeat_interleave(block, dim=1)
    return valid * torch.exp(-(slot - 1) / gamma)


def block_loss(
    drafter: Drafter,
    target: Target,
    packed: Tensor,
    ids: Tensor,
    loss_mask: Tensor,
    generator: torch.Generator,
    anchors_max: int = 16,
) -> Tensor:
    """Return the position-decayed cross-entropy of all blocks: sum of weight x loss / sum of weights."""
    block, length = drafter.block, ids.shape[1]
    anchors, keep = draw_anchors(loss_mask, min(anchors_max, length), generator)
    positions = block_positions(anchors, block)
    tokens = torch.full(positions.shape, MASK)
    tokens[:, ::block] = ids.gather(1, anchors)
    logits = drafter(target, packed, tokens, positions, block_mask(anchors, keep, block, length))
    labels = ids.gather(1, positions.clamp(max=length - 1))
    weights = loss_weights(anchors, keep, loss_mask, block, gamma=block / 2)
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(
        weights
    )
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)
