"""`torch.nn.functional.multi_head_attention_forward`, which `nn.MultiheadAttention` calls, over any attention of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ulysses_dtensor.errors import PlanError

_WHO = "multi_head_attention_forward"
NO_WEIGHTS = (
    "nn.MultiheadAttention: its attention weights are used, which no rank holds where tokens are in shards. "
    "Pass need_weights=False, or run the model under bypass"
)
Sdpa = Callable[..., torch.Tensor]


class Withheld(torch.Tensor):
    """Stands for the attention weights, which most callers throw away; any use of it raises."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType] - how torch itself switches it off

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise PlanError(f"{NO_WEIGHTS}.")

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(f"{NO_WEIGHTS}.")

    tolist = numpy = __array__ = _refuse  # they ask for memory, past any dispatch


class WithheldInGraph:
    """The same while a block is compiled, where no such tensor can be made; what uses it was refused in the eager run."""


def multi_head_attention(
    sdpa: Sdpa,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns what torch's function of these arguments returns, but for the weights: `Withheld` in their place.

    `sdpa` is the attention of heads: query (N, H, L, D), key and value (N, H, S, D), mask, dropout, is_causal to (N, H, L, D).
    The rest are torch's own arguments. `query` (L, N, E) or (L, E), `key` and `value` (S, N, E) or (S, E) are local, where
    `sdpa` makes whole sequences of them. `key_padding_mask` (N, S) or (S) and `attn_mask` (L, S) or (N * H, L, S) are global;
    True where nothing is looked at, or numbers to add. Tokens that `bias_k`, `bias_v` and `add_zero_attn` add come last in key
    and value.

    Raises:
        PlanError: the arguments do not fit each other, or are static keys and values.
    """
    if static_k is not None or static_v is not None:
        raise PlanError(f"{_WHO}: static_k and static_v are not supported. Pass key and value, or run under bypass.")
    is_batched = query.ndim == 3
    if not is_batched:
        query, key, value = _with_batch(query, key, value)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    _check(query, key, value, embed_dim_to_check, num_heads, use_separate_proj_weight)
    if (bias_k is None) != (bias_v is None):
        raise PlanError(f"{_WHO}: one of bias_k and bias_v is None. Give both or none.")
    if is_causal and attn_mask is None:
        raise PlanError(
            f"{_WHO}: is_causal=True without attn_mask. Torch takes it as a hint; give the causal mask too."
        )
    is_causal = is_causal and key_padding_mask is None and not need_weights
    batch, width = query.shape[1:]
    mask = None if is_causal else _merged(attn_mask, key_padding_mask, batch, num_heads, query.dtype)

    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    q, k, v = _projected(query, key, value, weights, in_proj_bias)
    if bias_k is not None and bias_v is not None:
        k, v = torch.cat((k, bias_k.expand(1, batch, width))), torch.cat((v, bias_v.expand(1, batch, width)))
    if add_zero_attn:
        k, v = (torch.cat((x, x.new_zeros(1, batch, width))) for x in (k, v))
    if mask is not None:
        mask = F.pad(mask, (0, int(bias_k is not None) + int(add_zero_attn)))
        if need_weights:  # torch's own softmax, other than SDPA's, gives NaN where nothing is to be looked at
            mask = mask.masked_fill((mask == -torch.inf).all(-1, keepdim=True), torch.nan)

    q, k, v = (x.reshape(-1, batch, num_heads, width // num_heads).permute(1, 2, 0, 3) for x in (q, k, v))
    out = sdpa(q, k, v, mask, dropout_p if training else 0.0, is_causal)  # (N, H, L, D)
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    withheld = _withheld(q, k, is_batched, average_attn_weights) if need_weights else None
    return (out if is_batched else out.squeeze(1)), withheld


def _with_batch(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns (tokens, 1, size) for (tokens, size), the same tensor for the same."""
    made = {id(x): x.unsqueeze(1) for x in tensors}
    return [made[id(x)] for x in tensors]


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, width: int, num_heads: int, separate: bool
) -> None:
    shapes = f"query={tuple(query.shape)}, key={tuple(key.shape)}, value={tuple(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 3:
        raise PlanError(f"{_WHO}: {shapes}. Give all of them (tokens, batch, size), or all (tokens, size).")
    if query.shape[-1] != width or width % num_heads:
        raise PlanError(f"{_WHO}: {shapes} for a width of {width} in {num_heads} heads.")
    alike = key.shape[:2] == value.shape[:2] if separate else key.shape == value.shape
    if not alike or key.shape[1] != query.shape[1]:
        raise PlanError(f"{_WHO}: {shapes} do not fit each other.")


def _merged(
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    batch: int,
    num_heads: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Returns both masks as one to add, that broadcasts to (N, H, L, S); all sizes global."""
    mask = None
    if attn_mask is not None:
        rows = 1 if attn_mask.ndim == 2 else batch * num_heads
        if attn_mask.ndim not in (2, 3) or (attn_mask.ndim == 3 and attn_mask.shape[0] != rows):
            raise PlanError(
                f"{_WHO}: attn_mask={tuple(attn_mask.shape)} is neither (L, S) nor ({batch * num_heads}, L, S)."
            )
        mask = _to_add(attn_mask, dtype)
        mask = mask[None, None] if mask.ndim == 2 else mask.reshape(batch, num_heads, *mask.shape[1:])
    if key_padding_mask is not None:
        if key_padding_mask.ndim != 2 or key_padding_mask.shape[0] != batch:
            raise PlanError(f"{_WHO}: key_padding_mask={tuple(key_padding_mask.shape)} is not ({batch}, S).")
        padding = _to_add(key_padding_mask, dtype)[:, None, None, :]
        if mask is not None and mask.shape[-1] != padding.shape[-1]:
            raise PlanError(
                f"{_WHO}: attn_mask and key_padding_mask are for {mask.shape[-1]} and {padding.shape[-1]} keys."
            )
        mask = padding if mask is None else mask + padding
    return mask


def _to_add(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise PlanError(
            f"{_WHO}: a mask of {mask.dtype}. Give bools, True where nothing is looked at, or numbers to add."
        )
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


def _projected(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: torch.Tensor | tuple[torch.Tensor | None, ...] | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Returns query, key and value projected to (tokens, N, E); in one product where they are one tensor."""
    if isinstance(weights, torch.Tensor) and query is key and key is value:
        return F.linear(query, weights, bias).chunk(3, -1)
    parts = weights.chunk(3) if isinstance(weights, torch.Tensor) else weights
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if parts is None or any(part is None for part in parts):
        raise PlanError(f"{_WHO}: projection weights are missing. Give in_proj_weight, or one for each of q, k and v.")
    return tuple(
        F.linear(x, part, each)
        for x, part, each in zip((query, key, value), parts, biases, strict=True)
        if part is not None
    )


def withheld(weights: torch.Tensor) -> Withheld | WithheldInGraph:
    """Returns what stands for these weights."""
    if torch.compiler.is_compiling():
        return WithheldInGraph()
    return torch.Tensor._make_wrapper_subclass(Withheld, weights.shape, dtype=weights.dtype, device=weights.device)


def _withheld(q: torch.Tensor, k: torch.Tensor, is_batched: bool, averaged: bool) -> Withheld:
    shape = (*((q.shape[0],) * is_batched), *(() if averaged else (q.shape[1],)), q.shape[2], k.shape[2])
    return torch.Tensor._make_wrapper_subclass(Withheld, shape, dtype=q.dtype, device=q.device)


def refuse_nested_tensors(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses an encoder where torch, on one device, would leave out padding: it puts zeros there, which a mode keeps it from.

    Raises:
        PlanError: this is an `nn.TransformerEncoder` in inference with nested tensors on and a padding mask.
    """
    if not isinstance(module, nn.TransformerEncoder) or not module.use_nested_tensor:
        return
    padding = args[2] if len(args) > 2 else kwargs.get("src_key_padding_mask")
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    if padding is not None and not module.training and not trained:
        raise PlanError(
            "nn.TransformerEncoder: in eval() without gradients torch leaves out padded tokens on one device and gives zeros for "
            "them, which differs from what it gives in training and from what it gives in shards. Make it with "
            "enable_nested_tensor=False, or set encoder.use_nested_tensor = False."
        )
