"""Attention cut over rows of queries and columns of heads: equal to one device's, with what was promised sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from model_zoo import numbers
from one_device import assert_close
from torch.distributed.device_mesh import DeviceMesh

from ulysses_dtensor import count_collectives
from ulysses_dtensor.layout import chunk
from ulysses_dtensor.rows import Split, elements_sent
from ulysses_dtensor.sdpa import sharded_sdpa
from ulysses_dtensor.strategy import Strategy
from ulysses_dtensor.testing import run_on_mesh
from ulysses_dtensor.tokens import Tokens

SIZE = 3


def in_rows(
    mesh: DeviceMesh, tensors: list[torch.Tensor], weights: torch.Tensor, options: dict[str, Any], strategy: Strategy
) -> tuple[list[torch.Tensor], list[str], int]:
    """Returns this rank's output and gradients, and the collectives of the forward."""
    seq_len, group = tensors[0].shape[-2], mesh.get_group()
    start, stop = chunk(0, seq_len, dist.get_world_size(group), dist.get_rank(group))
    query, key, value = local = [x[..., start:stop, :].detach().requires_grad_() for x in tensors]
    tokens = (Tokens(seq_len), Tokens(seq_len))
    with count_collectives() as count:
        out = sharded_sdpa(query, key, value, **options, tokens=tokens, group=group, strategy=strategy)
    (out * weights[..., start:stop, :]).sum().backward()
    assert all(x.grad is not None for x in local)
    return [out.detach(), *(x.grad for x in local if x.grad is not None)], count.kinds, count.bytes_sent


@st.composite
def head_counts(draw: st.DrawFn) -> tuple[int, int]:
    count = draw(st.integers(1, 9))
    return count, draw(st.sampled_from([kv for kv in range(1, count + 1) if count % kv == 0]))


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 3),
    seq_len=st.integers(0, 30),
    heads=head_counts(),
    kind=st.sampled_from(["full", "causal", "mask", "mask of heads", "row mask"]),
    auto=st.booleans(),
)
def test_output_and_gradients_equal_one_device(
    rows: int, columns: int, seq_len: int, heads: tuple[int, int], kind: str, auto: bool
) -> None:
    tensors = [numbers(2, count, seq_len, SIZE, seed=at) for at, count in enumerate((heads[0], heads[1], heads[1]))]
    weights = numbers(2, heads[0], seq_len, SIZE, seed=7)
    options: dict[str, Any] = {"enable_gqa": heads[0] != heads[1], "is_causal": kind == "causal", "scale": 0.4}
    if "mask" in kind:
        shape = {
            "mask": (seq_len, seq_len),
            "mask of heads": (heads[0], seq_len, seq_len),
            "row mask": (2, 1, 1, seq_len),
        }
        options["attn_mask"] = numbers(*shape[kind], seed=5)
    whole = [x.detach().requires_grad_() for x in tensors]
    query, key, value = whole
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    (expected * weights).sum().backward()
    references = [expected.detach(), *(x.grad for x in whole)]
    found = run_on_mesh({"sp": rows * columns}, in_rows, tensors, weights, options, Strategy(rows, auto))
    for at, reference in enumerate(references):
        assert reference is not None
        assert_close(
            torch.cat([results[at] for results, _, _ in found], -2), reference, f"tensor {at}", 1e-9, floor=1e-3
        )
    if seq_len:  # of nothing, nothing need be sent
        assert all(kinds == ["all-to-all"] * 2 * (rows * columns > 1) for _, kinds, _ in found)


@given(rows=st.integers(1, 5), columns=st.integers(1, 4), seq_len=st.integers(0, 60), balanced=st.booleans())
def test_the_spans_of_all_rows_are_the_sequence(rows: int, columns: int, seq_len: int, balanced: bool) -> None:
    split = Split(rows, columns, balanced)
    for number, part in enumerate(split.parts(seq_len)):
        tokens = sorted(at for row in range(rows) for at in range(*split.spans(seq_len, row)[number]))
        assert tokens == list(range(*part))
    assert sum(stop - start for start, stop in split.parts(seq_len)) == seq_len


def test_a_causal_attentions_rows_have_the_same_work() -> None:
    split = Split(4, 2, balanced=True)
    work = [sum(sum(range(*span)) for span in split.spans(64, row)) for row in range(4)]
    assert len(set(work)) == 1
    uneven = Split(4, 2)
    assert len({sum(sum(range(*span)) for span in uneven.spans(64, row)) for row in range(4)}) == 4


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(16, 4, 4), (16, 1, 4), (16, 16, 2), (32, 2, 8), (12, 6, 4), (8, 1, 8)]
)
def test_auto_sends_the_fewer_bytes(heads: int, kv_heads: int, ranks: int) -> None:
    """Gathering keys and values is cheaper when H_kv (P - 1) < H."""
    query, key = (1, heads, 64 * ranks, 8), (1, kv_heads, 64 * ranks, 8)
    chosen = Strategy(auto=True).choose(query, key, key, 2, 1, ranks, causal=False)
    assert (chosen.rows == ranks) == (kv_heads * (ranks - 1) < heads)
    sent = [elements_sent(query, key, key, 2, 1, split) for split in Strategy(auto=True).splits(ranks, causal=False)]
    assert elements_sent(query, key, key, 2, 1, chosen) == min(sent)
    if kv_heads % ranks:
        return  # a kv head goes to several ranks, which makes moving heads dearer still
    share = 64 * 8
    assert sent == [(ranks - 1) * share * 2 * (heads + kv_heads) // ranks, (ranks - 1) * share * 2 * kv_heads]


def test_what_is_sent_is_what_was_priced() -> None:
    tensors = [numbers(1, count, 24, SIZE) for count in (4, 2, 2)]
    shapes = [tuple(x.shape) for x in tensors]
    for strategy in (Strategy(2), Strategy(4), Strategy(auto=True)):
        found = run_on_mesh({"sp": 4}, in_rows, tensors, tensors[0], {"is_causal": True, "enable_gqa": True}, strategy)
        split = strategy.choose(*shapes, 2, 1, 4, causal=True)  # type: ignore[misc] - three shapes
        assert max(sent for _, _, sent in found) == 8 * elements_sent(*shapes, 2, 1, split)  # type: ignore[misc]
