"""Models that call FlexAttention, by every kind of reference, and a dense function of its signature with gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.attention.flex_attention as flex_module
from model_zoo import VOCABULARY, WIDTH, float64
from torch import nn
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

from ulysses_dtensor.flex import seen_flex

SIZE = 4
COMPILED = torch.compile(flex_attention, backend="aot_eager")


def dense_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """What `flex_attention` is defined to be, with all scores at hand and gradients on any device."""
    batch, heads, tokens, size = query.shape
    assert enable_gqa or key.shape[1] == heads
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (size**-0.5 if scale is None else scale)
    b, h, t = (torch.arange(count) for count in (batch, heads, tokens))
    if score_mod is not None:
        mapped = score_mod
        for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
            mapped = torch.vmap(mapped, in_dims=(0, *dims))
        scores = mapped(scores, b, h, t, t)
    if block_mask is not None:
        assert tuple(block_mask.seq_lengths) == (tokens, tokens)
        blocks = block_mask.to_dense().bool()
        for dim, block in zip((-2, -1), block_mask.BLOCK_SIZE, strict=True):
            blocks = blocks.repeat_interleave(block, dim).narrow(dim, 0, tokens)
        mask = create_mask(block_mask.mask_mod, batch, heads, tokens, tokens, device="cpu")
        scores = scores.masked_fill(~(mask & blocks), -torch.inf)
    out, lse, top = scores.softmax(-1).nan_to_num(0.0) @ value, scores.logsumexp(-1), scores.amax(-1)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=top if return_aux.max_scores else None)
    return (out, lse) if return_lse else out


DENSE = partial(seen_flex, dense_flex)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def window_of_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k <= 2 * h)


def made_of(documents: torch.Tensor) -> Callable[..., Any]:
    return lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (q >= k)


MASKS: dict[str, Callable[[torch.Tensor, int], BlockMask | None]] = {
    "none": lambda ids, heads: None,
    "causal": lambda ids, heads: block_mask(causal, None, None, ids.shape[1]),
    "window of each head": lambda ids, heads: block_mask(window_of_head, None, heads, ids.shape[1]),
    "head in a mask of one": lambda ids, heads: block_mask(
        lambda b, h, q, k: (q >= k) & ((q + h) % 3 != 1) | (q == k), None, None, ids.shape[1], size=128
    ),
    "documents": lambda ids, heads: block_mask(made_of(ids.sort(-1).values // 3), ids.shape[0], None, ids.shape[1]),
    "documents, heads": lambda ids, heads: block_mask(
        made_of(ids.sort(-1).values // 3), ids.shape[0], heads, ids.shape[1]
    ),
}


def block_mask(mod: Any, batch: int | None, heads: int | None, tokens: int, *, size: int = 4) -> BlockMask:
    return create_block_mask(mod, batch, heads, tokens, tokens, device="cpu", BLOCK_SIZE=size)


class FlexBlock(nn.Module):
    """Projections around a FlexAttention whose score_mod is named."""

    def __init__(self, heads: int, kv_heads: int, score: str, flex: Any = DENSE, **options: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.score, self.flex, self.options = heads, kv_heads, score, flex, options
        self.qkv, self.out = nn.Linear(WIDTH, (heads + 2 * kv_heads) * SIZE), nn.Linear(heads * SIZE, WIDTH)
        self.bias = nn.Parameter(torch.rand(heads))
        self.register_buffer("slopes", 0.7 ** torch.arange(heads))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return self.flex(q, k, v, **options)

    def score_mod(self) -> Any:
        slopes, bias = self.slopes, self.bias
        return {
            "none": None,
            "number of the head": lambda s, b, h, q, k: s * (1 + h) - 0.1 * (q - k) * h,
            "slopes": lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(),  # type: ignore[index] - a buffer
            "learned": lambda s, b, h, q, k: s + bias[h] * (q - k).cos(),
        }[self.score]

    def forward(self, x: torch.Tensor, mask: BlockMask | None = None) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            each.view(batch, tokens, -1, SIZE).transpose(1, 2)
            for each in self.qkv(x).split([self.heads * SIZE, *[self.kv_heads * SIZE] * 2], -1)
        )
        options = {"score_mod": self.score_mod(), "block_mask": mask, **self.options}
        result = self.attend(q, k, v, enable_gqa=self.heads != self.kv_heads, **options)
        out, *aux = result if isinstance(result, tuple) else (result,)
        out = out.transpose(1, 2).reshape(batch, tokens, -1)
        for each in aux:
            for statistic in each if isinstance(each, tuple) else (each,):
                if statistic is not None:
                    out = out + statistic.transpose(1, 2).repeat_interleave(SIZE, -1)
        return x + self.out(out)


class ByName(FlexBlock):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return flex_attention(q, k, v, **options)


class CompiledByName(FlexBlock):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return COMPILED(q, k, v, **options)


class OnTheClass(FlexBlock):
    kernel: ClassVar[Any] = flex_attention

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return OnTheClass.kernel(q, k, v, **options)


class Static(FlexBlock):
    kernel = staticmethod(flex_attention)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return self.kernel(q, k, v, **options)


def closed_over() -> Any:
    inner = flex_attention
    return lambda q, k, v, **options: inner(q, k, v, **options)


class InAClosure(FlexBlock):
    call = staticmethod(closed_over())

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return self.call(q, k, v, **options)


class ThroughItsModule(FlexBlock):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return flex_module.flex_attention(q, k, v, **options)


class ImportedInside(FlexBlock):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention as inside

        return inside(q, k, v, **options)


class FlexModel(nn.Module):
    """Makes its block mask from the ids, and passes it to its blocks."""

    def __init__(self, mask: str, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.mask = mask
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = MASKS[self.mask](ids, self.layers[0].heads)  # type: ignore[arg-type] - an int
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def flex_model(
    mask: str = "causal",
    score: str = "slopes",
    heads: int = 4,
    kv_heads: int = 2,
    block: Callable[..., nn.Module] = FlexBlock,
    **options: Any,
) -> FlexModel:
    with float64():
        torch.manual_seed(0)
        return FlexModel(mask, lambda: block(heads, kv_heads, score, **options))
