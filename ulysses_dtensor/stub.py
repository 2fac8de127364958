"""Attention and dropout replaced by functions of each token alone: what a module sees while it is probed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.flex import seen_flex, stub_flex
from ulysses_dtensor.heads import heads_of
from ulysses_dtensor.inside import DROPOUTS, MULTIHEAD, declared_attention, drops


class AttentionStub(TorchFunctionMode):
    """Replaces attention by a function of each token alone that depends on all of query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.flags: list[tuple[Any, ...]] = []
        self.lengths: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        if func is seen_flex:
            return stub_flex(self._attention, *args, **kwargs)
        if func is declared_attention:
            return self._declared(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            raise PlanError(MULTIHEAD)
        if func in DROPOUTS and drops(func, args, kwargs):
            return args[0].clone()
        return func(*args, **kwargs)

    def _sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        flags = ("scaled_dot_product_attention", float(dropout_p), bool(is_causal), scale, bool(enable_gqa))
        if (
            attn_mask is not None
            and attn_mask.ndim >= 2
            and query.shape[-2] in attn_mask.shape[-2:]
            and query.shape[-2] > 1
        ):
            raise PlanError(
                f"its attention mask {tuple(attn_mask.shape)} is made from the tokens at hand ({query.shape[-2]}), not "
                "from the whole sequence. Make it before the blocks and pass it to them"
            )
        return self._attention(query, key, value, -2, -3, (*flags, attn_mask is None))

    def _declared(self, query: Any, key: Any, value: Any, call: Any, *, seq_dim: int, head_dim: int, mesh: Any) -> Any:
        if not self.flags and not torch.is_grad_enabled() and bool(query.isfinite().all()):
            _check_heads_alike(query, key, value, call, head_dim)
        return self._attention(query, key, value, seq_dim, head_dim, ("declared", seq_dim, head_dim))

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        seq_dim: int,
        head_dim: int,
        flags: tuple[Any, ...],
    ) -> torch.Tensor:
        if key.shape[seq_dim] != query.shape[seq_dim]:
            raise PlanError(
                f"its attention has {query.shape[seq_dim]} query and {key.shape[seq_dim]} key tokens: cross-attention, "
                "or a kv cache, is not supported yet"
            )
        self.flags.append((*flags, query.shape[head_dim], key.shape[head_dim], query.shape[-1], value.shape[-1]))
        self.lengths.add(query.shape[seq_dim])
        repeats, rest = divmod(query.shape[head_dim], max(1, key.shape[head_dim]))
        if rest:
            raise PlanError(
                f"its attention has {query.shape[head_dim]} query heads, no multiple of {key.shape[head_dim]} kv heads"
            )
        # Weights that differ along the head size: a rotation of query and key must not cancel.
        score = (query * _ramp(query)).sum(-1, keepdim=True)
        score = score + (key * _ramp(key).flip(-1)).sum(-1, keepdim=True).repeat_interleave(repeats, head_dim)
        return value.repeat_interleave(repeats, head_dim) + score / query.shape[-1]


def _check_heads_alike(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Any, head_dim: int) -> None:
    """Refuses a declared attention whose result for some heads differs when it is given those heads alone."""
    num_heads, num_kv_heads = query.shape[head_dim], key.shape[head_dim]
    if num_heads < 2 or num_heads % max(1, num_kv_heads):
        return
    whole, half = heads_of(num_heads, num_kv_heads, 1, 0), heads_of(num_heads, num_kv_heads, 2, 1)
    try:
        expected = call(query, key, value, whole).narrow(head_dim, half.query[0], half.num_query)
        kv = (x.narrow(head_dim, half.kv[0], half.num_kv) for x in (key, value))
        found = call(query.narrow(head_dim, half.query[0], half.num_query), *kv, half)
    except PlanError:
        raise
    except Exception:  # it cannot be run on a few tokens, as with a mask of the whole sequence at hand
        return
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-3}.get(query.dtype, 5e-2)
    if not torch.allclose(found, expected, rtol=0, atol=tolerance * max(1.0, float(expected.abs().max()))):
        raise PlanError(
            "its declared attention gives a head another result when it is given some of the heads: it depends on their numbers "
            "or on each other (ALiBi slopes, a bias for each head, a norm over heads), which is not supported yet"
        )


def _ramp(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, like.shape[-1], device=like.device, dtype=torch.float32).to(like.dtype)
