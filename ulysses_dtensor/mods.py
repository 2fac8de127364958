"""FlexAttention's score_mod and block_mask for some of the heads: global head numbers, masks cut to those heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from ulysses_dtensor.contents import held_hash
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.heads import Heads

Mod = Callable[..., torch.Tensor]


def score_mod_of(score_mod: Mod | None, heads: Heads) -> Mod | None:
    """Returns `score_mod` for a call that numbers these heads from zero: it sees their global numbers."""
    first = heads.query[0]
    if score_mod is None or not first:
        return score_mod

    def of_heads(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return score_mod(score, b, h + first, q_idx, kv_idx)

    return of_heads


def block_mask_of(block_mask: BlockMask | None, heads: Heads) -> BlockMask | None:
    """Returns `block_mask` for a call with these heads alone: cut to them, its mask_mod seeing their global numbers."""
    if block_mask is None:
        return None
    first, mask_mod = heads.query[0], block_mask.mask_mod
    if block_mask.kv_num_blocks.shape[1] == 1:
        if not first:
            return block_mask
        cut = block_mask.to(block_mask.kv_num_blocks.device)  # another one with the same tensors
    else:
        cut = block_mask[:, first : heads.query[1]]

    def of_heads(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return mask_mod(b, h + first, q_idx, kv_idx)

    cut.mask_mod = of_heads
    return cut


def check_block_mask(block_mask: BlockMask, query: torch.Tensor, num_heads: int) -> None:
    """Refuses a block mask that cannot be cut to some of `num_heads` heads.

    Raises:
        PlanError: it has other heads or another batch size, or was sliced, or cannot be sliced.
    """
    sizes = tuple(block_mask.kv_num_blocks.shape[:-1])
    if len(sizes) != 2 or sizes[0] not in (1, query.shape[0]) or sizes[1] not in (1, num_heads):
        raise PlanError(
            f"flex_attention: block_mask is of batch and heads {sizes}, the query of {(query.shape[0], num_heads)}. Give each "
            "one or all of them; inside a declared attention, which has some of the heads, make it with H=None."
        )
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":  # what torch puts there
        raise PlanError(
            "flex_attention: block_mask was sliced, and has lost its mask_mod. Set it from the mask that was sliced."
        )
    if sizes[1] > 1 and getattr(block_mask, "dq_kv_order", None) is not None:
        raise PlanError(
            "flex_attention: block_mask has several heads and a tensor dq_kv_order, with which torch cannot cut it to some of "
            "its heads. Leave it out."
        )


def described(name: str, mod: Any) -> str | None:
    """Returns a text that is equal for two functions, or two block masks, of the same code that hold equal values."""
    if mod is None:
        return None
    function = mod.mask_mod if isinstance(mod, BlockMask) else mod
    return f"{name} {getattr(function, '__name__', '')} with what it holds ({held_hash(mod):x})"
