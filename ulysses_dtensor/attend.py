"""Sequence shards to head shards, one attention call, head shards to sequence shards: on plain local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.exchange import exchange
from ulysses_dtensor.gradients import tie
from ulysses_dtensor.heads import Heads, heads_of
from ulysses_dtensor.layout import Box, chunk
from ulysses_dtensor.route import Route, route
from ulysses_dtensor.tokens import Tokens

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Shape = tuple[int, ...]
Result = TypeVar("Result", torch.Tensor, tuple[torch.Tensor, ...])


def _zeros(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_zeros((*query.shape[:-1], value.shape[-1]))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Heads], Result],
    *,
    seq_dim: int,
    head_dim: int,
    tokens: tuple[Tokens, Tokens],
    group: ProcessGroup,
    without_heads: Callable[[torch.Tensor, torch.Tensor], Any] = _zeros,
    trained: Iterable[torch.Tensor] = (),
) -> Result:
    """Returns this rank's tokens of an attention over the whole sequence.

    Args:
        query: local (..., H, ..., S/P, ..., D), its heads on `head_dim` and its tokens on `seq_dim`.
        key: local, H_kv heads.
        value: local, H_kv heads; the same tokens as the key; its last size may differ from the query's.
        call: the attention itself. Gets the whole sequence of this rank's query heads and of the kv heads that they
            read, and the `Heads` that say which those are; returns a tensor shaped like its query but for the last dim,
            or several, in which the last dim may be missing (a logsumexp).
        seq_dim: dim of the tokens.
        head_dim: dim of the heads.
        tokens: of the query, and of key and value: which are cut over the group, which every rank holds.
        group: the ranks among which the sequence is cut.
        without_heads: what `call` would return for (query, value) of no heads, for more ranks than heads.
        trained: what else `call` computes with that may have a gradient (a learned bias).

    Raises:
        PlanError: the tokens or heads are not what the plan promises.

    Communication: one all-to-all of what is cut of query, key and value, and one of the output; the same backward.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    seq_dim, head_dim = seq_dim % query.ndim, head_dim % query.ndim
    of_operand = (tokens[0], tokens[1], tokens[1])
    check(query, key, value, tokens, seq_dim=seq_dim, head_dim=head_dim, group=group)
    num_heads, num_kv_heads = query.shape[head_dim], key.shape[head_dim]
    if ranks == 1:
        return call(query, key, value, heads_of(num_heads, num_kv_heads, 1, 0))
    heads = heads_of(num_heads, num_kv_heads, ranks, rank)
    if torch.is_grad_enabled() and num_heads and not heads_of(num_heads, num_kv_heads, ranks, ranks - 1).num_query:
        # A rank without heads does not call it: it has to know of the same gradients as those that do.
        query = tie(query, list(trained))
    cut = [at for at, each in enumerate(of_operand) if each.cut]
    operands = [query, key, value]
    wholes = tuple(_with(tuple(x.shape), seq_dim, each.cut) for x, each in zip(operands, of_operand, strict=True))
    routes = uncached(_routes_in)(wholes, seq_dim, head_dim, ranks, rank)
    middles = [_middle(operands[at], of_operand[at], seq_dim) for at in cut]
    moved = dict(zip(cut, exchange(middles, [routes[at] for at in cut], group), strict=True)) if cut else {}
    for at, (x, each) in enumerate(zip(operands, of_operand, strict=True)):
        start, stop = heads.kv if at else heads.query
        mine = x.narrow(head_dim, start, stop - start) if each.total != each.cut or not each.cut else x
        operands[at] = _around(mine, moved.get(at), each, seq_dim)
    query, key, value = operands
    if heads.num_query:
        result = call(query, key, value, heads)
    else:  # no kernel takes zero heads; the zeros stay connected, so that every rank joins the backward
        nothing = 0 * (query.sum() + key.sum() + value.sum())
        found = without_heads(query, value)
        result = found + nothing if isinstance(found, torch.Tensor) else tuple(x + nothing.to(x.dtype) for x in found)
    outs = (result,) if isinstance(result, torch.Tensor) else result
    _check_outputs(outs, query, seq_dim, head_dim)
    outs = _bring_back(outs, tokens[0], num_heads, seq_dim, head_dim, group)
    return outs[0] if isinstance(result, torch.Tensor) else outs  # type: ignore[return-value] - as the call returned it


def _bring_back(
    outs: tuple[torch.Tensor, ...], tokens: Tokens, num_heads: int, seq_dim: int, head_dim: int, group: ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Exchanges head shards for this rank's tokens of all heads, and for all of the tokens that every rank holds."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if not tokens.total:
        return tuple(out.new_zeros(_with(tuple(out.shape), head_dim, num_heads)) + 0 * out.sum() for out in outs)
    pieces, routes = [], []
    for out in outs:
        for start, size in (
            (0, tokens.before),
            (tokens.before, tokens.cut),
            (tokens.before + tokens.cut, tokens.after),
        ):
            if size:
                whole = _with(_with(tuple(out.shape), head_dim, num_heads), seq_dim, size)
                cut_at = seq_dim if (start, size) == (tokens.before, tokens.cut) else None
                pieces.append(out.narrow(seq_dim, start, size) if size != out.shape[seq_dim] else out)
                routes.append(uncached(_route_out)(whole, cut_at, head_dim, ranks, rank))
    moved = list(exchange(pieces, routes, group))
    each = len(moved) // len(outs)
    return tuple(
        moved[at] if each == 1 else torch.cat(moved[at : at + each], seq_dim) for at in range(0, len(moved), each)
    )


def _middle(x: torch.Tensor, tokens: Tokens, dim: int) -> torch.Tensor:
    others = tokens.before + tokens.after
    return x.narrow(dim, tokens.before, x.shape[dim] - others) if others else x


def _around(x: torch.Tensor, moved: torch.Tensor | None, tokens: Tokens, dim: int) -> torch.Tensor:
    """Returns what was moved between what `x` holds before and after it."""
    if moved is None:
        return x
    before, after = x.narrow(dim, 0, tokens.before), x.narrow(dim, x.shape[dim] - tokens.after, tokens.after)
    parts = [part for part, size in ((before, tokens.before), (moved, 1), (after, tokens.after)) if size]
    return moved if len(parts) == 1 else torch.cat(parts, dim)


def pair_kv(key: torch.Tensor, value: torch.Tensor, heads: Heads, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns key and value with one head for each query head where grouped-query attention could not pair them."""
    if heads.kv_of_query is None:
        return key, value
    index = torch.tensor(heads.kv_of_query, device=key.device)
    return key.index_select(head_dim, index), value.index_select(head_dim, index)


def check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: tuple[Tokens, Tokens],
    *,
    seq_dim: int,
    head_dim: int,
    group: ProcessGroup,
) -> None:
    """Refuses operands of an attention that do not fit each other, or their tokens.

    Raises:
        PlanError: the dims, tokens, dtypes or heads differ.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    operands, of_operand = (query, key, value), (tokens[0], tokens[1], tokens[1])
    for name, x, each in zip(("query", "key", "value"), operands, of_operand, strict=True):
        if x.ndim != query.ndim:
            raise PlanError(f"attention: {name} has {x.ndim} dims, the query {query.ndim}. Give all the same dims.")
        if x.shape[seq_dim] != each.local(ranks, rank):
            raise PlanError(
                f"attention: {name} has {x.shape[seq_dim]} tokens at dim {seq_dim}, this rank's share of {each.cut} and the "
                f"{each.before + each.after} that all ranks hold are {each.local(ranks, rank)}."
            )
        if x.dtype != query.dtype:
            raise PlanError(f"attention: {name} is {x.dtype}, the query {query.dtype}. Bring them to one dtype.")
    if key.shape[head_dim] != value.shape[head_dim]:
        raise PlanError(
            f"attention: key has {key.shape[head_dim]} heads, value {value.shape[head_dim]}. They must agree."
        )


def _check_outputs(outs: tuple[torch.Tensor, ...], query: torch.Tensor, seq_dim: int, head_dim: int) -> None:
    shape, last_is_free = tuple(query.shape), query.ndim - 1 not in (seq_dim, head_dim)
    for out in outs:
        fits = tuple(out.shape) == shape
        if last_is_free:
            fits = tuple(out.shape[: query.ndim - 1]) == shape[:-1] and out.ndim <= query.ndim
        if not fits:
            raise PlanError(
                f"attention: the output is {tuple(out.shape)} for a query of {shape} (this rank's heads, all tokens). "
                "The attention must return its query's layout and read head counts from its inputs."
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
def _route_out(whole: Shape, seq_dim: int | None, head_dim: int, ranks: int, rank: int) -> Route:
    """From head shards to token shards, or to all tokens on every rank (`seq_dim` None)."""
    have = [_cut(whole, head_dim, chunk(0, whole[head_dim], ranks, peer)) for peer in range(ranks)]
    everything = tuple((0, size) for size in whole)
    want = [
        everything if seq_dim is None else _cut(whole, seq_dim, chunk(0, whole[seq_dim], ranks, peer))
        for peer in range(ranks)
    ]
    return route(have, want, rank)


def uncached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what `lru_cache` wraps while torch.compile traces, which looks through the cache and warns of it."""
    return function.__wrapped__ if torch.compiler.is_compiling() else function  # type: ignore[attr-defined] - lru_cache's


def _cut(whole: Shape, dim: int, bounds: tuple[int, int]) -> Box:
    return tuple(bounds if at == dim else (0, size) for at, size in enumerate(whole))


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
