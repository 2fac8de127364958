"""A byte-level decoder in plain torch: rotary positions, grouped-query attention, SwiGLU, tied embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary positions."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, width // num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(width, num_kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x_BSE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q_BHSD = self.query(x_BSE).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k_BKSD = self.key(x_BSE).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        v_BKSD = self.value(x_BSE).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        q_BHSD, k_BKSD = rotate(q_BHSD, cos, sin), rotate(k_BKSD, cos, sin)
        out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=True)
        return self.output(out_BHSD.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated feed-forward, each behind a norm."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, num_heads, num_kv_heads)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A decoder-only transformer over bytes: tokens (B, S) to logits (B, S, 256)."""

    def __init__(self, width: int = 128, num_layers: int = 4, num_heads: int = 8, num_kv_heads: int = 4) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, num_kv_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        cos, sin = rotary_table(tokens.shape[1], self.head_dim, like=x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def rotary_table(seq_len: int, head_dim: int, *, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosine and sine, each (S, D/2), of the rotary angles of positions 0 .. S-1."""
    frequencies = 10000.0 ** -torch.linspace(0, 1, head_dim // 2, device=like.device, dtype=like.dtype)
    angles = torch.arange(seq_len, device=like.device, dtype=like.dtype)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns `x` (..., S, D) with its halves rotated by the angles of its positions."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
