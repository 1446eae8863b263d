"""The models: a small causal target, and the DFlash drafter that reads the target's hidden states.

DFlash (Chen, Liang, Liu, arXiv 2602.06036) drafts a block of tokens in one forward. The block starts with a
real token, the anchor; the rest are MASK tokens that the drafter fills in together. What it knows of the text
before the anchor are hidden states of the frozen target: they are fused once, and every draft layer projects
them to extra keys and values beside those of the block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 257  # bytes and MASK
PAD = 0  # a byte that text doesn't contain
MASK = 256

Cache = dict[nn.Module, tuple[Tensor, Tensor]]  # the keys and values of each attention so far


def target_layer_ids(target_layers: int, draft_layers: int) -> list[int]:
    """Return the target layers the drafter reads: one per draft layer, evenly spread over 1..target_layers -
    3."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def pack_hidden(hidden: list[Tensor], layer_ids: list[int], out: Tensor) -> Tensor:
    """Copy the chosen layers side by side into `out` and return the part of it that is used, [batch, length,
    layers x width].

    `hidden[0]` is the embedding, so layer i is `hidden[i + 1]`. Equal to torch.cat, but nothing is allocated.
    """
    batch, length, width = hidden[0].shape
    packed = out[:batch, :length]
    for i, layer in enumerate(layer_ids):
        packed[..., i * width : (i + 1) * width].copy_(hidden[layer + 1])
    return packed


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, length, size] at absolute positions [batch or 1, length]."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = positions[:, None, :, None].to(x.dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Multi-head attention with RMS-normed queries and keys; keys and values may come from a longer sequence
    than queries."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.q_norm = nn.RMSNorm(width // heads, eps=1e-6)
        self.k_norm = nn.RMSNorm(width // heads, eps=1e-6)

    def forward(
        self,
        x: Tensor,
        source: Tensor,
        x_positions: Tensor,
        source_positions: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Attend from x to source, after what the cache holds. mask [batch, x length, source length], True =
        visible; None = causal."""
        q = rotate(self.q_norm(self.split(self.q(x))), x_positions)
        k = rotate(self.k_norm(self.split(self.k(source))), source_positions)
        v = self.split(self.v(source))
        if cache is not None:
            if self in cache:
                k, v = torch.cat([cache[self][0], k], dim=2), torch.cat([cache[self][1], v], dim=2)
            cache[self] = (k, v)
        causal = mask is None and q.shape[2] > 1
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None if mask is None else mask[:, None], is_causal=causal
        )
        return torch.as_tensor(self.o(out.transpose(1, 2).flatten(2)))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class Layer(nn.Module):
    """A decoder layer: attention and a SwiGLU MLP, each normed before and added to its input.

    With a context it is a draft layer: the context takes part as keys and values only (KV injection), through
    the same projections.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.gate_up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        h = self.attention_norm(x)
        source, source_positions = h, positions
        if context is not None:
            source = torch.cat([context, h], dim=1)
            before = torch.arange(context.shape[1]).expand(len(x), -1)
            source_positions = torch.cat([before, positions], dim=1)
        x = x + self.attention(h, source, positions, source_positions, mask, cache)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return torch.as_tensor(x + self.down(functional.silu(gate) * up))


class Target(nn.Module):
    """The model to be sped up: a causal transformer over bytes. Frozen once taught."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 6) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def hidden(self, ids: Tensor, start: int = 0, cache: Cache | None = None) -> list[Tensor]:
        """Return the embedding and the output of every layer, each [batch, length, width].

        With a cache the tokens before `start` come from there, and `ids` may then be one token long.
        """
        positions = torch.arange(start, start + ids.shape[1])[None]
        hidden = [self.embedding(ids)]
        for layer in self.layers:
            hidden.append(layer(hidden[-1], positions, cache=cache))
        return hidden

    def logits(self, last_hidden: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.norm(last_hidden)))


class Drafter(nn.Module):
    """The block-diffusion drafter. Trained: fusion, norms and draft layers; embedding and head are the
    target's, frozen."""

    def __init__(self, target: Target, layers: int = 2, block: int = 8) -> None:
        super().__init__()
        self.block = block
        self.layer_ids = target_layer_ids(len(target.layers), layers)
        self.fuse = nn.Linear(layers * target.width, target.width, bias=False)
        self.context_norm = nn.RMSNorm(target.width, eps=1e-6)
        self.layers = nn.ModuleList(Layer(target.width, target.heads) for _ in range(layers))
        self.norm = nn.RMSNorm(target.width, eps=1e-6)

    def forward(
        self, target: Target, packed: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor
    ) -> Tensor:
        """Return logits [batch, n, vocabulary] for the n block tokens at `positions`, given the packed hidden
        states of the context."""
        context = self.context_norm(self.fuse(packed))
        x = target.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, context, mask)
        return torch.as_tensor(target.head(self.norm(x)))
