"""`torch.nn.functional.scaled_dot_product_attention` on sequence shards: masks, heads and dropout made local."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant, causal_lower_right

from ulysses_dtensor.attend import attend, check, pair_kv
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.heads import Heads
from ulysses_dtensor.randomness import own_random_state
from ulysses_dtensor.rows import attend_rows
from ulysses_dtensor.strategy import ULYSSES, Strategy
from ulysses_dtensor.tokens import Tokens

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def sharded_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    tokens: tuple[Tokens, Tokens],
    group: ProcessGroup,
    strategy: Strategy = ULYSSES,
) -> torch.Tensor:
    """Returns this rank's tokens of `scaled_dot_product_attention` over the whole sequence.

    Args:
        query: local (..., H, S/P, D).
        key: local (..., H_kv, S_kv/P, D); or whole tokens, or both, as `tokens` says.
        value: local (..., H_kv, S_kv/P, D_v).
        attn_mask: global, broadcastable to (..., H, S, S_kv); a head axis of size H is cut to this rank's heads.
        dropout_p: drawn independently on every rank from the default generator's state.
        is_causal: as in torch, over the whole sequence.
        scale: as in torch.
        enable_gqa: as in torch; without it key and value have as many heads as the query.
        tokens: of the query, and of key and value.
        group: the ranks among which the sequence is cut.
        strategy: whether a self-attention is shared out by heads alone.

    Raises:
        PlanError: there is no head axis, or the mask is not of the whole sequence.
    """
    if query.ndim < 3:
        raise PlanError(
            f"scaled_dot_product_attention: query has {query.ndim} dims and so no head axis to cut. "
            "Give (..., heads, tokens, head size)."
        )
    query, key, value = (_as_autocast(x) for x in (query, key, value))
    num_heads, num_kv_heads = query.shape[-3], key.shape[-3]
    if num_kv_heads != num_heads and not enable_gqa:
        raise PlanError(
            f"scaled_dot_product_attention: {num_heads} query heads and {num_kv_heads} kv heads. "
            "Pass enable_gqa=True, or repeat the kv heads."
        )
    if attn_mask is not None:
        _check_mask(attn_mask, num_heads, (tokens[0].total, tokens[1].total))

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: Heads) -> torch.Tensor:
        mask = attn_mask
        if mask is not None and mask.ndim >= 3 and mask.shape[-3] != 1:
            mask = mask[..., heads.query[0] : heads.query[1], :, :]
        key, value = pair_kv(key, value, heads, head_dim=-3)
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=query.shape[-3] != key.shape[-3]
        )

    def call_rows(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: Heads, span: tuple[int, int]
    ) -> torch.Tensor:
        start, stop = span
        mask = attn_mask
        if mask is not None:
            if mask.ndim >= 3 and mask.shape[-3] != 1:
                mask = mask[..., heads.query[0] : heads.query[1], :, :]
            if mask.ndim >= 2 and mask.shape[-2] != 1:
                mask = mask[..., start:stop, :]
        key, value = pair_kv(key, value, heads, head_dim=-3)
        if is_causal:  # the keys behind the last query are not looked at; the others end where the queries do
            key, value = key.narrow(-2, 0, stop), value.narrow(-2, 0, stop)
            mask = causal_lower_right(stop - start, stop) if start else None
        gqa = query.shape[-3] != key.shape[-3]
        causal = is_causal and not start
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, causal, scale=scale, enable_gqa=gqa)

    def attention() -> torch.Tensor:
        seq_dim, head_dim, seq_len = query.ndim - 2, query.ndim - 3, tokens[0].cut
        apart = tokens[0] == tokens[1] == Tokens(seq_len) and not (is_causal and attn_mask is not None)
        if strategy != ULYSSES and apart:
            q, k, v = ((*x.shape[:-2], seq_len, x.shape[-1]) for x in (query, key, value))
            split = strategy.choose(q, k, v, seq_dim, head_dim, dist.get_world_size(group), causal=is_causal)
            if split.rows > 1:
                check(query, key, value, tokens, seq_dim=seq_dim, head_dim=head_dim, group=group)
                return attend_rows(
                    query,
                    key,
                    value,
                    call_rows,
                    seq_dim=seq_dim,
                    head_dim=head_dim,
                    seq_len=seq_len,
                    split=split,
                    group=group,
                )
        return attend(
            query,
            key,
            value,
            call,
            seq_dim=seq_dim,
            head_dim=head_dim,
            tokens=tokens,
            group=group,
            trained=[] if attn_mask is None else [attn_mask],
        )

    if dropout_p:
        with own_random_state(query.device, group):
            return attention()
    return attention()


class SdpaCall(NamedTuple):
    """The arguments of one call of `scaled_dot_product_attention`, as torch has them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def written_out(self) -> SdpaCall:
        """Returns the same call without what torch fills in: batches and kv heads that it broadcasts, masks of its own class."""
        operands, mask, is_causal = (self.query, self.key, self.value), self.attn_mask, self.is_causal
        leads = [tuple(x.shape[:-3]) for x in operands]
        if len(set(leads)) > 1 and len({x.ndim for x in operands}) == 1:
            lead = torch.broadcast_shapes(*leads)
            operands = tuple(x.expand(*lead, *x.shape[-3:]) for x in operands)
        if isinstance(mask, CausalBias):
            rows, columns = mask.seq_len_q, mask.seq_len_kv
            if mask.variant == CausalVariant.UPPER_LEFT or rows == columns:
                mask, is_causal = None, True
            else:
                mask = torch.ones(rows, columns, dtype=torch.bool, device=self.query.device).tril(columns - rows)
        one_kv_head = self.query.ndim >= 3 and self.query.shape[-3] != self.key.shape[-3] == 1
        return self._replace(
            query=operands[0],
            key=operands[1],
            value=operands[2],
            attn_mask=mask,
            is_causal=is_causal,
            enable_gqa=self.enable_gqa or one_kv_head,
        )


def _as_autocast(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` in the dtype to which autocast, where it is on, would bring it for this function."""
    if x.dtype == torch.float64 or not x.is_floating_point() or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _check_mask(mask: torch.Tensor, num_heads: int, lengths: tuple[int, int]) -> None:
    sizes = tuple(mask.shape)
    if any(size not in (1, length) for size, length in zip(sizes[::-1], lengths[::-1], strict=False)):
        raise PlanError(
            f"scaled_dot_product_attention: attn_mask={sizes} is not of the whole sequence, {lengths[0]} by {lengths[1]}. It was "
            "made from this rank's tokens; make it from the whole sequence before the blocks and pass it to them."
        )
    if len(sizes) >= 3 and sizes[-3] not in (1, num_heads):
        raise PlanError(
            f"scaled_dot_product_attention: attn_mask={sizes} has {sizes[-3]} heads, the query has {num_heads}. "
            "Give one head or all of them."
        )
