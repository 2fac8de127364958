"""Attentions declared by layout: what they may do with their heads and with what they are given, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flex_models import DENSE
from model_zoo import HEAD_SIZE, WIDTH, numbers, seeded
from one_device import assert_equals_one_device, refused, refused_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask

from ulysses_dtensor import PlanError, UlyssesAttention, UlyssesPlan, parallelize_module
from ulysses_dtensor.testing import run_on_mesh

Attend = Callable[..., torch.Tensor]
SEQ_LEN = 13
INPUT = {"x": numbers(2, SEQ_LEN, WIDTH)}


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).softmax(-1) @ v


class Inner(nn.Module):
    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> torch.Tensor:
        return self.attend(q, k, v, *given)


class DeclaredBlock(nn.Module):
    """`given_of` makes what the attention is given beside query, key and value, from the tokens at hand and the rest."""

    def __init__(self, attend: Any, heads: int, kv_heads: int, given_of: Any = None) -> None:
        super().__init__()
        self.sizes, self.given_of = [heads, kv_heads, kv_heads], given_of
        self.qkv, self.out = nn.Linear(WIDTH, sum(self.sizes) * HEAD_SIZE), nn.Linear(heads * HEAD_SIZE, WIDTH)
        self.inner: nn.Module = Inner(attend)

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2).split(self.sizes, 1)
        given = rest if self.given_of is None else self.given_of(x, *rest)
        return x + self.out(self.inner(q, k, v, *given).transpose(1, 2).flatten(2))


class DeclaredModel(nn.Module):
    def __init__(self, attend: Any, heads: int, kv_heads: int | None = None, given_of: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DeclaredBlock(attend, heads, kv_heads or heads, given_of) for _ in range(2)])

    def forward(self, x: torch.Tensor, rest: Any = ()) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


def model_of(attend: Any, heads: int, kv_heads: int | None = None, given_of: Any = None) -> nn.Module:
    return seeded(lambda: DeclaredModel(attend, heads, kv_heads, given_of))


def plan(per_head: Any = None) -> UlyssesPlan:
    style = UlyssesAttention("b h (sp s) d -> b (sp h) s d", per_head=per_head)
    return UlyssesPlan(attention={"layers.*.inner": style})


# Heads that differ


def alternating(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return plain(q * (1 + torch.arange(q.shape[1]) % 2)[:, None, None], k, v)


def last_is_another(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = plain(q, k, v)
    return torch.cat((out[:, :-1], 2 * out[:, -1:]), 1)


def in_pairs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = plain(q, k, v).unflatten(1, (-1, 2))
    return torch.stack((out[:, :, 0] - out[:, :, 1], out[:, :, 1]), 2).flatten(1, 2)


def repeated_by_a_constant(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return plain(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


@pytest.mark.parametrize(
    ("attend", "heads", "kv_heads", "ranks"),
    [
        (alternating, 4, 4, 4),
        (alternating, 8, 8, 3),
        (last_is_another, 4, 4, 2),
        (in_pairs, 8, 8, 3),
        (repeated_by_a_constant, 4, 2, 4),
    ],
)
def test_rejects_heads_that_differ_in_the_share_of_some_rank(
    attend: Attend, heads: int, kv_heads: int, ranks: int
) -> None:
    message = refused_model(model_of(attend, heads, kv_heads), INPUT, ranks, plan)
    assert "its declared attention gives a head another result when it is given some of the heads" in message


def test_pairs_of_heads_that_stay_together_are_right() -> None:
    assert_equals_one_device(model_of(in_pairs, 8), INPUT, 2, plan=plan)


def alibi_beside_a_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    bias = -(0.5 ** torch.arange(1, q.shape[1] + 1))[:, None, None] * distance.abs() + mask
    return (q @ k.mT + bias).softmax(-1) @ v


def test_rejects_heads_that_differ_beside_a_mask_of_all_tokens() -> None:
    """It cannot be run on a few tokens, so it is run on as many as there are."""
    inputs = {**INPUT, "rest": (numbers(SEQ_LEN, SEQ_LEN, seed=1),)}
    message = refused_model(model_of(alibi_beside_a_mask, 4), inputs, 2, plan)
    assert "depends on their numbers or on each other" in message


def test_a_token_that_a_mask_leaves_nothing_to_look_at_is_no_difference_of_heads() -> None:
    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ v

    mask = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril()
    mask[0] = False
    model = model_of(masked, 4)
    with torch.no_grad():
        expected = model(INPUT["x"], (mask,))
    assert expected.isnan().any()

    def run(mesh: DeviceMesh) -> torch.Tensor:
        with torch.no_grad():
            return parallelize_module(copy.deepcopy(model), mesh, plan())(INPUT["x"], (mask,))

    for out in run_on_mesh({"sp": 2}, run):
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rejects_a_bias_of_each_head_that_is_not_named(ranks: int) -> None:
    def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT + bias).softmax(-1) @ v

    inputs = {**INPUT, "rest": (numbers(1, 4, SEQ_LEN, SEQ_LEN, seed=1),)}
    assert "Name what has a part for each head" in refused_model(model_of(biased, 4), inputs, ranks, plan)


@pytest.mark.parametrize(("heads", "ranks"), [(2, 2), (3, 3), (3, 2)])
def test_rejects_a_block_mask_made_for_the_heads_at_hand(heads: int, ranks: int) -> None:
    def windows(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i - j <= 2 * h

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = create_block_mask(windows, None, q.shape[1], q.shape[2], q.shape[2], device="cpu", BLOCK_SIZE=4)
        return DENSE(q, k, v, block_mask=mask)

    def for_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, q.shape[2], q.shape[2], device="cpu", BLOCK_SIZE=4
        )
        return DENSE(q, k, v, block_mask=mask)

    message = refused_model(model_of(masked, heads), INPUT, ranks, plan)
    assert "H=None" in message or "a head another result when it is given some of the heads" in message
    assert_equals_one_device(model_of(for_all, heads), INPUT, ranks, plan=plan)


def test_rejects_a_scores_table_that_is_named_and_indexed_by_global_heads() -> None:
    def scored(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        return DENSE(q, k, v, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())

    inputs = {**INPUT, "rest": (numbers(4, seed=1).abs(),)}

    class Named(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: Any) -> torch.Tensor:
            return scored(q, k, v, slopes)

    model = model_of(scored, 4)
    for layer in model.layers:  # type: ignore[union-attr] - a ModuleList
        layer.inner = Named()
    message = refused_model(model, inputs, 2, lambda: plan({"slopes": "h -> (sp h)"}))
    assert "but for what a score_mod or mask_mod indexes by head: these see global numbers" in message
    assert_equals_one_device(model, inputs, 2, plan=plan)


# What is made from the tokens at hand


@pytest.mark.parametrize(
    ("given_of", "attend"),
    [
        (
            lambda x: (SimpleNamespace(scale=x.shape[1] ** -0.5),),
            lambda q, k, v, held: plain(q * held.scale, k, v),
        ),
        (lambda x: (lambda q, n=x.shape[1]: q / n,), lambda q, k, v, scaled: plain(scaled(q), k, v)),
        (lambda x: ({"scale": [x.mean()]},), lambda q, k, v, held: plain(q * held["scale"][0], k, v)),
    ],
    ids=["object", "function", "dictionary"],
)
def test_rejects_what_holds_facts_of_the_tokens_at_hand(given_of: Any, attend: Any) -> None:
    message = refused_model(model_of(attend, 4, given_of=given_of), INPUT, 2, plan)
    assert "its attention was called with other arguments" in message


# More ranks than heads


class Biased(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT + bias).softmax(-1) @ v


class FrozenButBias(nn.Module):
    """A trained bias beside frozen projections: the query of a rank without heads has no gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.bias = kind, nn.Parameter(torch.randn(SEQ_LEN, SEQ_LEN))
        self.layers = nn.ModuleList([FrozenBlock(kind) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.bias)
        return x


class FrozenBlock(DeclaredBlock):
    def __init__(self, kind: str) -> None:
        super().__init__(None, 2, 2)
        self.kind, self.inner = kind, Biased()
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:  # type: ignore[override] - no others
        if self.kind == "declared":
            return super().forward(x, bias)
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2).split(self.sizes, 1)
        if self.kind == "SDPA":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            out = DENSE(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[i, j])
        return x + self.out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["declared", "SDPA", "flex"])
def test_a_rank_without_heads_joins_the_backward_of_what_others_trained(kind: str) -> None:
    made = plan if kind == "declared" else UlyssesPlan
    for ranks in (2, 3):
        assert_equals_one_device(seeded(lambda: FrozenButBias(kind)), INPUT, ranks, plan=made)


def test_rejects_another_dtype_than_the_querys_where_a_rank_has_no_head() -> None:
    def in_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return plain(q.float(), k.float(), v.float())

    def block_casts(x: torch.Tensor) -> tuple[()]:
        return ()

    model = model_of(in_float32, 2, given_of=block_casts)
    for layer in model.layers:  # type: ignore[union-attr] - a ModuleList
        layer.out = nn.Sequential(Cast(), layer.out)  # type: ignore[arg-type] - a module
    message = refused_model(model, INPUT, 3, plan)
    assert "returns torch.float32 for a query of torch.float64, which a rank without heads cannot know" in message
    with pytest.raises(AssertionError, match=r"relative error \d\.\de-0[78]"):  # right to what float32 rounds
        assert_equals_one_device(model, INPUT, 2, plan=plan)


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def test_rejects_a_buffer_that_a_rank_without_heads_would_not_write() -> None:
    class Counts(Inner):
        def __init__(self) -> None:
            super().__init__(plain)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> torch.Tensor:
            self.calls += 1
            return super().forward(q, k, v, *given)

    model = model_of(plain, 2)
    for layer in model.layers:  # type: ignore[union-attr] - a ModuleList
        layer.inner = Counts()
    assert "writes a buffer, and a rank without heads would not" in refused_model(model, INPUT, 3, plan)


def test_a_closure_over_a_pooled_state_is_refused_on_every_rank() -> None:
    """Rank 2 of 3 has no head and would not see it."""

    class Scored(DeclaredBlock):
        def forward(self, x: torch.Tensor, mod: Any) -> torch.Tensor:  # type: ignore[override] - no others
            q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2).split(self.sizes, 1)
            return x + self.out(DENSE(q, k, v, score_mod=mod).transpose(1, 2).flatten(2))

    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.ModuleList([Scored(None, 2, 2)]) for _ in range(2))
            self.gain = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first[0](x, None)
            gain = self.gain(x.mean((0, 1)))
            return self.second[0](x, lambda s, b, h, i, j: s + gain[h] * (i - j).cos())

    model = seeded(Stages)

    def run(mesh: DeviceMesh) -> str:
        with pytest.raises(PlanError) as error:
            parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())(INPUT["x"])
        return str(error.value)

    for said in run_on_mesh({"sp": 3}, run):
        assert "uses a hidden state that it was not given as an argument" in said


def test_the_refusals_come_before_any_exchange() -> None:
    model = model_of(alternating, 4)
    refused(4, lambda mesh: parallelize_module(copy.deepcopy(model), mesh, plan())(INPUT["x"]))
