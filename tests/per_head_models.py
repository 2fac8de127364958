"""A decoder whose attention has tensors for each head, of all kinds: learned, computed before, fixed, by kv head."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from model_zoo import HEAD_SIZE, VOCABULARY, WIDTH, FeedForward, Norm, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

from ulysses_dtensor import UlyssesAttention, UlyssesPlan

TEXT = "b h (sp s) d -> b (sp h) s d"
PER_HEAD = {
    "sinks": "h -> (sp h)",
    "slopes": "h -> (sp h)",
    "temperature": "h -> (sp h)",
    "buckets.weight": "n h -> n (sp h)",
    "bias": "1 h q k -> 1 (sp h) q k",
}


class PerHeadAttention(nn.Module):
    """Causal, with a learned sink, an ALiBi slope and a table of relative positions for each head, a scale for each kv head."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(heads))
        self.temperature = nn.Parameter(torch.rand(kv_heads) + 0.5)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1))
        self.buckets = nn.Embedding(5, heads)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:  # (B, H, S, D)
        batch, heads, tokens, _ = q.shape
        k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k * self.temperature[:, None, None], v))
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        scores = q @ k.mT - self.slopes[:, None, None] * distance  # type: ignore[index] - a buffer
        scores = scores + self.buckets(distance.clamp(0, 4)).permute(2, 0, 1)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(distance < 0, -torch.inf)
        sinks = self.sinks.view(1, -1, 1, 1).expand(batch, heads, tokens, 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ v


class PerHeadBlock(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.sizes = [heads, kv_heads, kv_heads]
        self.norm, self.mlp = Norm(), FeedForward()
        self.qkv = nn.Linear(WIDTH, sum(self.sizes) * HEAD_SIZE)
        self.inner, self.out = PerHeadAttention(heads, kv_heads), nn.Linear(heads * HEAD_SIZE, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2).split(self.sizes, dim=1)
        x = x + self.out(self.inner(q, k, v, bias).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class PerHeadDecoder(nn.Module):
    """Computes one bias of all pairs for all blocks, as T5 does."""

    def __init__(
        self, heads: int = 4, kv_heads: int = 2, *, checkpointed: bool = False, shared_bias: bool = True
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), Norm()
        self.relative = nn.Embedding(9, heads) if shared_bias else None
        self.layers = nn.ModuleList(PerHeadBlock(heads, kv_heads) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, positions = self.embed(ids), torch.arange(ids.shape[1])
        bias = None
        if self.relative is not None:
            distance = (positions[:, None] - positions).clamp(-4, 4) + 4
            bias = self.relative(distance).permute(2, 0, 1)[None]  # (1, H, S, S)
        for layer in self.layers:
            x = checkpoint(layer, x, bias, use_reentrant=False) if self.checkpointed else layer(x, bias)
        return self.head(self.norm(x))


def decoder(heads: int = 4, kv_heads: int = 2, **options: Any) -> nn.Module:
    return seeded(partial(PerHeadDecoder, heads, kv_heads, **options))


def plan_of(per_head: dict[str, str] | None = None, **options: Any) -> UlyssesPlan:
    style = UlyssesAttention(TEXT, per_head=PER_HEAD if per_head is None else per_head)
    return UlyssesPlan(attention={"layers.*.inner": style}, **options)
