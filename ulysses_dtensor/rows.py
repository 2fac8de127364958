"""Attention cut over rows of ranks as well as over heads: each row of ranks has some of the queries, and all keys.

The ranks of a group form `rows` rows of `P` columns, in order. A rank's column says which heads it has, its row which query
tokens; keys and values of these heads go to every row. One column gathers keys and values and moves no query; one row is
Ulysses. For a causal attention a row has two chunks of queries, one from the head of the sequence and one from its tail, so
that all rows have the same work; tokens are brought into that order and back by the exchange itself.

Reference: head-tail order, Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2; heads and rows together, USP,
https://arxiv.org/abs/2405.07719.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ulysses_dtensor.attend import uncached
from ulysses_dtensor.exchange import exchange
from ulysses_dtensor.heads import Heads, heads_of
from ulysses_dtensor.layout import Box, chunk
from ulysses_dtensor.route import Route, route

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Shape = tuple[int, ...]
Span = tuple[int, int]
RowCall = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Heads, Span], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Split:
    """How the ranks of a group share an attention: `rows` of queries by `columns` of heads.

    `balanced`: a row has one chunk of queries from the head and one from the tail, for causal attention.
    """

    rows: int
    columns: int
    balanced: bool = False

    def parts(self, seq_len: int) -> list[Span]:
        """Returns the parts of the sequence of which every row has one span each."""
        if not self.balanced:
            return [(0, seq_len)]
        middle = chunk(0, seq_len, 2 * self.rows, self.rows - 1)[1]
        return [(0, middle), (middle, seq_len)]

    def spans(self, seq_len: int, row: int) -> list[Span]:
        """Returns the queries of a row, one span for each part; a span may be empty."""
        if self.balanced:
            return [chunk(0, seq_len, 2 * self.rows, at) for at in (row, 2 * self.rows - 1 - row)]
        ranks, first = self.rows * self.columns, row * self.columns
        return [(chunk(0, seq_len, ranks, first)[0], chunk(0, seq_len, ranks, first + self.columns - 1)[1])]


def attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: RowCall,
    *,
    seq_dim: int,
    head_dim: int,
    seq_len: int,
    split: Split,
    group: ProcessGroup,
) -> torch.Tensor:
    """Returns this rank's tokens of a self-attention over the whole sequence.

    Args:
        query: local (..., H, ..., S/N, ..., D) on each of N ranks, heads on `head_dim`, tokens on `seq_dim`.
        key: local, H_kv heads; the same tokens.
        value: local, H_kv heads; the same tokens.
        call: the attention of some queries `[start, stop)` to all keys. Gets these queries, keys and values of this rank's
            heads, the heads, and (start, stop).
        seq_dim: dim of the tokens.
        head_dim: dim of the heads.
        seq_len: tokens of the whole sequence, cut over the group as `torch.chunk` cuts.
        split: rows times columns are the ranks.
        group: the ranks, row by row.

    Communication: one all-to-all of query, key and value over the whole group and one of the output; the same backward.
    A key goes to every row: as many bytes as an all-to-all over a row and an all-gather over a column, in one step.
    """
    rank = dist.get_rank(group)
    seq_dim, head_dim = seq_dim % query.ndim, head_dim % query.ndim
    whole_query, whole_key, whole_value = (
        (*x.shape[:seq_dim], seq_len, *x.shape[seq_dim + 1 :]) for x in (query, key, value)
    )
    into = uncached(inward)(whole_query, whole_key, whole_value, seq_dim, head_dim, split, rank)
    back = uncached(outward)((*whole_query[:-1], value.shape[-1]), seq_dim, head_dim, split, rank)
    row, column = divmod(rank, split.columns)
    heads = heads_of(query.shape[head_dim], key.shape[head_dim], split.columns, column)
    start, _ = own = chunk(0, seq_len, split.rows * split.columns, rank)
    pieces = []
    for part in split.parts(seq_len):
        begin, end = _common(own, part)
        pieces.append(query.narrow(seq_dim, begin - start, end - begin) if begin < end else query.narrow(seq_dim, 0, 0))
    *queries, key, value = exchange((*pieces, key, value), into, group)
    outs = []
    for mine, span in zip(queries, split.spans(seq_len, row), strict=True):
        if heads.num_query and span[0] < span[1]:
            outs.append(call(mine, key, value, heads, span))
        else:  # no queries or no heads; the zeros stay connected, so that every rank joins the backward
            zeros = mine.new_zeros((*mine.shape[:-1], value.shape[-1]))
            outs.append(zeros + 0 * (mine.sum() + key.sum() + value.sum()))
    moved = exchange(outs, back, group)
    return moved[0] if len(moved) == 1 else torch.cat(moved, seq_dim)


@lru_cache(maxsize=1024)
def inward(
    query: Shape, key: Shape, value: Shape, seq_dim: int, head_dim: int, split: Split, rank: int
) -> tuple[Route, ...]:
    """Returns the routes of the parts of the query, of the key and of the value, for global shapes."""
    ranks = range(split.rows * split.columns)
    heads = [heads_of(query[head_dim], key[head_dim], split.columns, peer % split.columns) for peer in ranks]
    tokens = [chunk(0, query[seq_dim], len(ranks), peer) for peer in ranks]
    routes = []
    for number, part in enumerate(split.parts(query[seq_dim])):
        have = [_box(query, {seq_dim: _common(own, part)}) for own in tokens]
        spans = [split.spans(query[seq_dim], peer // split.columns)[number] for peer in ranks]
        want = [_box(query, {seq_dim: spans[peer], head_dim: heads[peer].query}) for peer in ranks]
        routes.append(route(have, want, rank))
    for whole in (key, value):
        have = [_box(whole, {seq_dim: own}) for own in tokens]
        routes.append(route(have, [_box(whole, {head_dim: each.kv}) for each in heads], rank))
    return tuple(routes)


@lru_cache(maxsize=1024)
def outward(whole: Shape, seq_dim: int, head_dim: int, split: Split, rank: int) -> tuple[Route, ...]:
    """Returns the routes of the parts of the output, for its global shape."""
    ranks = range(split.rows * split.columns)
    routes = []
    for number, part in enumerate(split.parts(whole[seq_dim])):
        have, want = [], []
        for peer in ranks:
            row, column = divmod(peer, split.columns)
            heads = chunk(0, whole[head_dim], split.columns, column)
            have.append(_box(whole, {seq_dim: split.spans(whole[seq_dim], row)[number], head_dim: heads}))
            want.append(_box(whole, {seq_dim: _common(chunk(0, whole[seq_dim], len(ranks), peer), part)}))
        routes.append(route(have, want, rank))
    return tuple(routes)


@lru_cache(maxsize=1024)
def elements_sent(query: Shape, key: Shape, value: Shape, seq_dim: int, head_dim: int, split: Split) -> int:
    """Returns the elements that the busiest rank sends forward, for global shapes; as many go back in the backward."""
    most = 0
    for rank in range(split.rows * split.columns):
        into = inward(query, key, value, seq_dim, head_dim, split, rank)
        back = outward((*query[:-1], value[-1]), seq_dim, head_dim, split, rank)
        most = max(most, sum(each.elements_sent for each in (*into, *back)))
    return most


def _common(a: Span, b: Span) -> Span:
    start = max(a[0], b[0])
    return (start, max(start, min(a[1], b[1])))


def _box(whole: Shape, bounds: dict[int, Span]) -> Box:
    return tuple(bounds.get(dim, (0, size)) for dim, size in enumerate(whole))
