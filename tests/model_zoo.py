"""Small models in plain torch, each written the way its kind is written: float64, no knowledge of any parallelism.

`ZOO` pairs a model with inputs of any sequence length. A sample's loss is `loss_of` what the model returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, LONGEST = 16, 4, 2, 4, 11, 48


# Parts


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.Linear(WIDTH, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def rotary_angles(length: int) -> torch.Tensor:
    """Returns (length, HEAD_SIZE / 2)."""
    frequencies = 100.0 ** -(torch.arange(0, HEAD_SIZE, 2, dtype=torch.float64) / HEAD_SIZE)
    return torch.outer(torch.arange(length, dtype=torch.float64), frequencies)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates (..., tokens, HEAD_SIZE) by tables (tokens, HEAD_SIZE)."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class SelfAttention(nn.Module):
    """Grouped-query attention, rotary when it is given tables, under a mask when it is given one."""

    def __init__(self, *, causal: bool = True, kv_heads: int = KV_HEADS) -> None:
        super().__init__()
        self.causal, self.kv_heads = causal, kv_heads
        self.q = nn.Linear(WIDTH, HEADS * HEAD_SIZE)
        self.kv = nn.Linear(WIDTH, 2 * kv_heads * HEAD_SIZE)
        self.out = nn.Linear(HEADS * HEAD_SIZE, WIDTH)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, HEADS, HEAD_SIZE).transpose(1, 2)
        k, v = self.kv(x).view(batch, tokens, 2, self.kv_heads, HEAD_SIZE).permute(2, 0, 3, 1, 4)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal and mask is None, enable_gqa=self.kv_heads != HEADS
        )
        return self.out(out.transpose(1, 2).reshape(batch, tokens, -1))


class Block(nn.Module):
    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.attention, self.mlp = SelfAttention(causal=causal), FeedForward()

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin, mask)
        return x + self.mlp(self.norm2(x))


# Models


class RotaryDecoder(nn.Module):
    """Tables computed in forward for the whole sequence; the head is the embedding."""

    def __init__(self, *, checkpointed: bool = False, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        angles = rotary_angles(ids.shape[1]).repeat(1, 2).to(x.dtype)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.checkpointed else layer(x, cos, sin)
        return self.head(self.norm(x))


class InnerAttention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class TableAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_SIZE, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * HEAD_SIZE, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * HEAD_SIZE, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_SIZE, WIDTH, bias=False)
        self.inner = InnerAttention()

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (w(x).view(batch, tokens, -1, HEAD_SIZE) for w in (self.wq, self.wk, self.wv))
        table = freqs_cis[:tokens][None, :, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * table).flatten(3)
            for t in (q, k)
        )
        out = self.inner(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))


class TableBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = TableAttention(), FeedForward()
        self.attention_norm, self.ffn_norm = Norm(), Norm()

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        return h + self.feed_forward(self.ffn_norm(h))


class TableDecoder(nn.Module):
    """The whole complex table goes to every block, which takes its first rows."""

    freqs_cis: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        angles = rotary_angles(LONGEST)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.layers = nn.ModuleDict({str(number): TableBlock() for number in range(2)})
        self.norm = Norm()
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        return self.output(self.norm(h))


class PackedAttention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (t.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2) for t in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(batch, tokens, width)))


class PackedBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = PackedAttention(dropout)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class LearnedPositions(nn.Module):
    """Learned positions, the loss inside forward, a head that is tied."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LONGEST, WIDTH),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(PackedBlock(dropout) for _ in range(2)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](positions))
        for block in self.transformer["h"]:  # type: ignore[union-attr] - a ModuleList
            x = block(x)
        x = self.transformer["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class VisionTransformer(nn.Module):
    """Patches by a convolution, a class token, learned positions; pools over the tokens or takes the class token."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.pool = pool
        self.patch = nn.Conv2d(3, WIDTH, kernel_size=2, stride=2)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos = nn.Parameter(torch.randn(1, LONGEST, WIDTH))
        self.blocks = nn.Sequential(*(Block(causal=False) for _ in range(2)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.norm(self.blocks(x + self.pos[:, : x.shape[1]]))
        return self.head(x[:, 0] if self.pool == "class" else x[:, 1:].mean(dim=1))


class SequenceFirstBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), FeedForward()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, batch, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(tokens, batch, 3, HEADS, HEAD_SIZE).permute(2, 1, 3, 0, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.permute(2, 0, 1, 3).reshape(tokens, batch, WIDTH))
        return x + self.mlp(self.norm2(x))


class SequenceFirst(nn.Module):
    """Hidden states (tokens, batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(SequenceFirstBlock() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids.t()) + rotary_angles(ids.shape[1]).sin().repeat(1, WIDTH // 2)[:, None, :WIDTH].to(
            self.embed.weight.dtype
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(0, 1)


class KeywordBlock(nn.Module):
    """Takes its hidden state by keyword, returns it with nothing or with a value for each token."""

    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.block, self.extra = Block(), extra
        self.gate = nn.Linear(WIDTH, 1)

    def forward(
        self, *, mask: torch.Tensor | None = None, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.block(hidden_states, mask=mask)
        return x, (self.gate(x) if self.extra else None)


class TupleDecoder(nn.Module):
    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleDict({"first": KeywordBlock(extra), "second": KeywordBlock(extra)})
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        x, gates = self.embed(ids), []
        for block in self.h.values():
            x, gate = block(hidden_states=x)
            gates.append(gate)
        return {"logits": self.head(self.norm(x)), "gates": gates}


class MaskedModel(nn.Module):
    """A mask over keys (B, 1, 1, S), or an additive one over pairs (B, 1, S, S), made before the blocks."""

    def __init__(self, additive: bool, heads: int = 1) -> None:
        super().__init__()
        self.additive, self.heads = additive, heads
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(causal=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        x, tokens = self.embed(ids), ids.shape[1]
        mask = keep[:, None, None, :]
        if self.additive:
            distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
            slopes = torch.arange(1, self.heads + 1, dtype=x.dtype)[:, None, None] / 4
            bias = torch.where(distance >= 0, -slopes * distance, -torch.inf).to(x.dtype)
            mask = bias[None].masked_fill(~mask & (distance != 0), -torch.inf)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)


class Experts(nn.Module):
    """Each token goes to its own two experts; an expert that no token chose does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(FeedForward() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return out.view_as(x)


class ExpertBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Experts()


class Skips(nn.Module):
    """A U-Net's long skips, and the embedding mixed into every block's input by a learned weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.weights = nn.Parameter(torch.rand(4))
        self.gate = nn.Parameter(torch.rand(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x0 = x = self.embed(ids)
        skips = []
        for number, block in enumerate(self.blocks):
            x = x + self.weights[number] * x0
            if number >= 2:
                x = x + self.gate * skips.pop()
            x = block(x)
            if number < 2:
                skips.append(x)
        return self.head(x)


class ModulatedBlock(nn.Module):
    """Scaled and shifted by an embedding of the time (B, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention, self.mlp = SelfAttention(causal=False), FeedForward()

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attention(self.norm(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class Diffusion(nn.Module):
    """Latents and a time step; the last layer is modulated in the model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 5)
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(ModulatedBlock() for _ in range(2))
        self.final = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        c = self.time(time[:, None])
        positions = rotary_angles(latents.shape[1]).sin().repeat(1, WIDTH)[:, :WIDTH].to(latents.dtype)
        x = self.input(latents) + positions
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.final(c)[:, None].chunk(2, dim=-1)
        return self.output(self.norm(x) * (1 + scale) + shift)


class Universal(nn.Module):
    """One block, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.stack = nn.ModuleList([Block()] * 3)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.stack:
            x = block(x)
        return self.head(x)


class MixesBetween(nn.Module):
    """Its own code mixes tokens between the blocks, and gates them by what it saw of all of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            if self.how == "mean":
                x = x + x.mean(1, keepdim=True)
            elif self.how == "gate":
                x = x * self.mix(x.mean(1, keepdim=True)).sigmoid()
            elif self.how == "roll":
                x = torch.roll(x, 1, dims=1)
            elif self.how == "cumsum":
                x = x + self.mix(x).cumsum(1) / 8
            else:
                x = torch.cat((x[:, :1], x[:, 1:] + self.mix(x[:, :-1])), dim=1)
        return self.head(x)


class ListBlock(nn.Module):
    """Its attention and its feed-forward are members of a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([SelfAttention(), FeedForward()])
        self.norm = Norm()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.layer[0](self.norm(x), cos, sin)
        return x + self.layer[1](x)


class TwoTowers(nn.Module):
    """Two sequences of different lengths, joined before the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.image = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(3, WIDTH)
        self.text_blocks = nn.ModuleList([Block()])
        self.image_blocks = nn.ModuleList([Block(causal=False)])
        self.joint = nn.ModuleList([Block(causal=False)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        text, image = self.embed(ids), self.image(pixels)
        for block in self.text_blocks:
            text = block(text)
        for block in self.image_blocks:
            image = block(image)
        x = torch.cat((text, image), dim=1)
        for block in self.joint:
            x = block(x)
        return self.head(x)


def sequential() -> nn.Module:
    """A model that is itself a Sequential: embedding, blocks, norm, head."""
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), Norm(), nn.Linear(WIDTH, VOCABULARY))


# Samples


@dataclass(frozen=True, slots=True)
class Sample:
    """A model and its inputs: `inputs(batch, seq_len)` gives the keyword arguments of the whole sequence."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, torch.Tensor]]
    longest: int = LONGEST

    def model(self) -> nn.Module:
        return seeded(self.build)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Returns the model that `build` makes from a fixed seed, in float64; random state is left as it was."""
    with torch.random.fork_rng(), float64():
        torch.manual_seed(7)
        return build()


@contextmanager
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ids_of(batch: int, seq_len: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, seq_len), generator=torch.Generator().manual_seed(seed))


def _ids(name: str, batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    return {name: ids_of(batch, seq_len)}


def _with_targets(batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    targets = ids_of(batch, seq_len, seed=1)
    targets[0, : seq_len // 2] = -1
    return {"idx": ids_of(batch, seq_len), "targets": targets}


def _with_keep(batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    keep = torch.ones(batch, seq_len, dtype=torch.bool)
    keep[0, (seq_len + 1) // 2 :] = False
    return {"ids": ids_of(batch, seq_len), "keep": keep}


def _images(batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    return {"images": numbers(batch, 3, 2, 2 * max(1, seq_len - 1))}


def _latents(batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    return {"latents": numbers(batch, seq_len, 5), "time": numbers(batch, seed=1)}


def _two_inputs(batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    return {"ids": ids_of(batch, seq_len), "pixels": numbers(batch, 2 * seq_len + 1, 3)}


_plain, _tokens = partial(_ids, "ids"), partial(_ids, "tokens")
ZOO = {
    sample.name: sample
    for sample in (
        Sample("rotary decoder", RotaryDecoder, _plain),
        Sample("whole table", TableDecoder, _tokens),
        Sample("learned positions", LearnedPositions, _with_targets),
        Sample("vision, class token", partial(VisionTransformer, "class"), _images),
        Sample("vision, mean", partial(VisionTransformer, "mean"), _images),
        Sample("sequence first", SequenceFirst, _plain),
        Sample("tuple with None", partial(TupleDecoder, False), _plain),
        Sample("tuple with values", partial(TupleDecoder, True), _plain),
        Sample("sequential", sequential, partial(_ids, "input")),
        Sample("padding mask", partial(MaskedModel, False), _with_keep),
        Sample("additive mask", partial(MaskedModel, True), _with_keep),
        Sample("additive mask of heads", partial(MaskedModel, True, HEADS), _with_keep),
        Sample("experts", partial(RotaryDecoder, block=ExpertBlock), _plain),
        Sample("skips", Skips, _plain),
        Sample("diffusion", Diffusion, _latents),
        Sample("one block three times", Universal, _plain),
        Sample("list in a block", partial(RotaryDecoder, block=ListBlock), _plain),
        Sample("two towers", TwoTowers, _two_inputs),
        Sample("checkpointed", partial(RotaryDecoder, checkpointed=True), _plain),
        *(
            Sample(f"{how} between blocks", partial(MixesBetween, how), _plain)
            for how in ("mean", "gate", "roll", "cumsum", "shift")
        ),
    )
}


def weighted(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns weights for a loss that no symmetry of the model makes blind."""
    return numbers(*x.shape, seed=seed + 100, dtype=x.dtype)


def loss_of(result: Any) -> torch.Tensor:
    """Returns the loss that a model returned, else a weighted mean over every number of its result."""
    leaves = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    for x in leaves:
        if x.ndim == 0:
            return x
    return sum(((x * weighted(x, seed)).sum() / x.numel() for seed, x in enumerate(leaves)), torch.zeros(()))
