"""Sequence shards to head shards, one attention call, head shards to sequence shards: on plain local tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.exchange import exchange
from ulysses_dtensor.heads import Heads, heads_of
from ulysses_dtensor.layout import Box, chunk
from ulysses_dtensor.route import Route, route

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Shape = tuple[int, ...]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Heads], Any],
    *,
    seq_dim: int,
    head_dim: int,
    seq_len: int,
    group: ProcessGroup,
    also: tuple[torch.dtype, ...] = (),
) -> Any:
    """Returns this rank's tokens of an attention over the whole sequence.

    Args:
        query: local (..., H, ..., S/P, ..., D), its heads on `head_dim` and its tokens on `seq_dim`.
        key: local, H_kv heads; the same tokens.
        value: local, H_kv heads; the same tokens; its last size may differ from the query's.
        call: the attention itself. Gets the whole sequence of this rank's query heads and of the kv heads that they
            read, and the `Heads` that say which those are; returns a tensor shaped like its query but for the last dim.
        seq_dim: dim of the tokens.
        head_dim: dim of the heads.
        seq_len: tokens of the whole sequence, cut over the group as `torch.chunk` cuts.
        group: the ranks among which the sequence is cut.
        also: dtypes of what `call` returns beside the attention's output, in a tuple: each shaped like the query without
            its last dim. A tuple is returned then.

    Raises:
        PlanError: the tokens or heads are not what the plan promises.

    Communication: one all-to-all of query, key and value and one of the output; the same backward.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    seq_dim, head_dim = seq_dim % query.ndim, head_dim % query.ndim
    _check(query, key, value, seq_dim, head_dim, chunk(0, seq_len, ranks, rank), seq_len)
    num_heads, num_kv_heads = query.shape[head_dim], key.shape[head_dim]
    if ranks == 1:
        return call(query, key, value, heads_of(num_heads, num_kv_heads, 1, 0))
    wholes = tuple(_with(tuple(x.shape), seq_dim, seq_len) for x in (query, key, value))
    inward = _uncached(_routes_in)(wholes, seq_dim, head_dim, ranks, rank)
    query, key, value = exchange((query, key, value), inward, group)
    heads = heads_of(num_heads, num_kv_heads, ranks, rank)
    if heads.num_query:
        out, *others = call(query, key, value, heads) if also else (call(query, key, value, heads),)
    else:  # no kernel takes zero heads; the zeros stay connected, so that every rank joins the backward
        nothing = 0 * (query.sum() + key.sum() + value.sum())
        out = query.new_zeros((*query.shape[:-1], value.shape[-1])) + nothing
        others = [query.new_zeros(query.shape[:-1], dtype=dtype) + nothing.to(dtype) for dtype in also]
    sized_as_value = query.ndim - 1 not in (seq_dim, head_dim)  # the last dim, where it is the head size
    expected = (*query.shape[:-1], out.shape[-1]) if sized_as_value else tuple(query.shape)
    if tuple(out.shape) != expected or any(x.shape != query.shape[:-1] for x in others):
        raise PlanError(
            f"attention: the output is {tuple(out.shape)} for a query of {tuple(query.shape)} (this rank's heads, all "
            f"tokens), not {expected}. The attention must return its query's layout and read head counts from its inputs."
        )
    whole_out = (*wholes[0][:-1], out.shape[-1]) if sized_as_value else wholes[0]
    outward = [
        _uncached(_route_out)(whole, seq_dim, head_dim, ranks, rank)
        for whole in (whole_out, *[wholes[0][:-1]] * len(others))
    ]
    out, *others = exchange((out, *others), outward, group)
    return (out, *others) if also else out


def pair_kv(key: torch.Tensor, value: torch.Tensor, heads: Heads, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns key and value with one head for each query head where grouped-query attention could not pair them."""
    if heads.kv_of_query is None:
        return key, value
    index = torch.tensor(heads.kv_of_query, device=key.device)
    return key.index_select(head_dim, index), value.index_select(head_dim, index)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_dim: int,
    head_dim: int,
    own: tuple[int, int],
    seq_len: int,
) -> None:
    tokens = own[1] - own[0]
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != query.ndim:
            raise PlanError(f"attention: {name} has {x.ndim} dims, the query {query.ndim}. Give all the same dims.")
        if x.shape[seq_dim] != tokens:
            raise PlanError(
                f"attention: {name} has {x.shape[seq_dim]} tokens at dim {seq_dim}, this rank's share of {seq_len} is "
                f"{tokens}. Attention to another sequence (cross-attention, a kv cache) is not supported yet; "
                "run it under bypass."
            )
        if x.dtype != query.dtype:
            raise PlanError(f"attention: {name} is {x.dtype}, the query {query.dtype}. Bring them to one dtype.")
    if key.shape[head_dim] != value.shape[head_dim]:
        raise PlanError(
            f"attention: key has {key.shape[head_dim]} heads, value {value.shape[head_dim]}. They must agree."
        )


def routes_of(
    query: Shape, key: Shape, value: Shape, seq_dim: int, head_dim: int, ranks: int, rank: int
) -> tuple[tuple[Route, ...], Route]:
    """Returns the routes of query, key and value in, and of the output back, for global shapes."""
    inward = _routes_in((query, key, value), seq_dim, head_dim, ranks, rank)
    return inward, _route_out((*query[:-1], value[-1]), seq_dim, head_dim, ranks, rank)


@lru_cache(maxsize=1024)
def _routes_in(
    wholes: tuple[Shape, Shape, Shape], seq_dim: int, head_dim: int, ranks: int, rank: int
) -> tuple[Route, ...]:
    num_heads, num_kv_heads = wholes[0][head_dim], wholes[1][head_dim]
    owned = [heads_of(num_heads, num_kv_heads, ranks, peer) for peer in range(ranks)]
    routes = []
    for index, whole in enumerate(wholes):
        have = [_cut(whole, seq_dim, chunk(0, whole[seq_dim], ranks, peer)) for peer in range(ranks)]
        want = [_cut(whole, head_dim, heads.kv if index else heads.query) for heads in owned]
        routes.append(route(have, want, rank))
    return tuple(routes)


@lru_cache(maxsize=1024)
def _route_out(whole: Shape, seq_dim: int, head_dim: int, ranks: int, rank: int) -> Route:
    have, want = (
        [_cut(whole, dim, chunk(0, whole[dim], ranks, peer)) for peer in range(ranks)] for dim in (head_dim, seq_dim)
    )
    return route(have, want, rank)


def _uncached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what `lru_cache` wraps while torch.compile traces, which looks through the cache and warns of it."""
    return function.__wrapped__ if torch.compiler.is_compiling() else function  # type: ignore[attr-defined] - lru_cache's


def _cut(whole: Shape, dim: int, bounds: tuple[int, int]) -> Box:
    return tuple(bounds if at == dim else (0, size) for at, size in enumerate(whole))


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
