"""`scaled_dot_product_attention` in shards against the whole: masks, options, and tokens that every rank holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from model_zoo import HEAD_SIZE, HEADS, VOCABULARY, WIDTH, RotaryDecoder, ids_of, loss_of, numbers, seeded
from one_device import (
    assert_close,
    assert_equals_one_device,
    assert_runs_equal,
    in_parallel,
    on_one_device,
    refused,
    refused_model,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from ulysses_dtensor import UlyssesPlan, count_collectives, parallelize_module
from ulysses_dtensor.layout import chunk
from ulysses_dtensor.sdpa import sharded_sdpa
from ulysses_dtensor.testing import run_on_mesh
from ulysses_dtensor.tokens import Tokens


def local_of(x: torch.Tensor, tokens: Tokens, dim: int, rank: int, ranks: int) -> torch.Tensor:
    """Returns what a rank holds of a sequence: its share of what is cut, and all that stands before and behind."""
    before, cut, after = x.split([tokens.before, tokens.cut, tokens.after], dim)
    start, stop = chunk(0, tokens.cut, ranks, rank)
    return torch.cat((before, cut.narrow(dim, start, stop - start), after), dim)


def in_shards(
    mesh: DeviceMesh,
    tensors: list[torch.Tensor],
    tokens: tuple[Tokens, Tokens],
    weights: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, list[torch.Tensor], list[str]]:
    """Returns this rank's output, gradients of its operands and of the mask, and the forward's collectives.

    A token that every rank holds has a copy on each: the ranks' gradients of the copies add up to its gradient.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    of_operand = (tokens[0], tokens[1], tokens[1])
    leaves = [
        local_of(x, each, -2, rank, ranks).detach().requires_grad_()
        for x, each in zip(tensors, of_operand, strict=True)
    ]
    mask = mask.detach().requires_grad_(mask.is_floating_point()) if mask is not None else None
    with count_collectives() as count:
        out = sharded_sdpa(leaves[0], leaves[1], leaves[2], mask, **options, tokens=tokens, group=mesh.get_group())
    share = torch.full((tokens[0].total,), 1 / ranks, dtype=torch.float64)  # of each rank in a token that all hold
    share[tokens[0].before : tokens[0].before + tokens[0].cut] = 1
    (out * local_of(weights * share[:, None], tokens[0], -2, rank, ranks)).sum().backward()
    given = [*leaves, *([mask] if mask is not None and mask.is_floating_point() else [])]
    return out.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in given], count.kinds


def whole_of(parts: list[torch.Tensor], tokens: Tokens, *, add: bool) -> torch.Tensor:
    """Returns the whole sequence of what the ranks hold; tokens that all hold are added up, or those of rank 0 taken."""
    ranks = len(parts)
    split = [
        x.split([tokens.before, tokens.local(ranks, rank) - tokens.before - tokens.after, tokens.after], -2)
        for rank, x in enumerate(parts)
    ]
    before, after = (sum(each[at] for each in split) if add else split[0][at] for at in (0, 2))
    return torch.cat((before, *(each[1] for each in split), after), -2)  # type: ignore[arg-type] - tensors are summed


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Tokens, Tokens]:
    """Draws the tokens of a query and of its keys: its own, another sequence's, others in front or behind."""

    def others() -> dict[str, int]:
        return {draw(st.sampled_from(["before", "after"])): draw(st.integers(0, 4))}

    query = Tokens(draw(st.integers(1, 12)), **others())
    kind = draw(st.sampled_from(["itself", "another", "whole", "with others"]))
    if kind == "itself":
        return query, query
    if kind == "whole":
        return query, Tokens(0, draw(st.integers(1, 9)))
    return query, Tokens(query.cut if kind == "with others" else draw(st.integers(1, 12)), **others())


@st.composite
def masks(draw: st.DrawFn, batch: int, heads: int, lengths: tuple[int, int]) -> torch.Tensor | None:
    """Draws a mask of any shape that broadcasts; every query may look at something."""
    if not draw(st.booleans()):
        return None
    shape = [draw(st.sampled_from([1, size])) for size in (batch, heads, *lengths)][draw(st.integers(0, 2)) :]
    x = numbers(*shape, seed=3)
    if draw(st.booleans()):
        return x
    allowed = x > -0.5
    allowed[..., :1] = True
    return allowed


@given(
    data=st.data(),
    tokens=sequences(),
    ranks=st.integers(1, 4),
    batch=st.sampled_from([1, 2]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    value_size=st.integers(1, 4),
    scale=st.sampled_from([None, 0.3]),
)
def test_output_and_gradients_equal_one_devices(
    data: st.DataObject,
    tokens: tuple[Tokens, Tokens],
    ranks: int,
    batch: int,
    kv_heads: int,
    group: int,
    value_size: int,
    scale: float | None,
) -> None:
    heads, lengths = kv_heads * group, (tokens[0].total, tokens[1].total)
    tensors = [
        numbers(batch, heads, lengths[0], 3, seed=0),
        numbers(batch, kv_heads, lengths[1], 3, seed=1),
        numbers(batch, kv_heads, lengths[1], value_size, seed=2),
    ]
    mask = data.draw(masks(batch, heads, lengths))
    options: dict[str, Any] = {"scale": scale, "enable_gqa": group > 1}
    options["is_causal"] = mask is None and data.draw(st.booleans())
    weights = numbers(batch, heads, lengths[0], value_size, seed=4)
    whole = [x.detach().requires_grad_() for x in tensors]
    learned = mask is not None and mask.is_floating_point()
    bias = mask.detach().requires_grad_(learned) if mask is not None else None
    expected = F.scaled_dot_product_attention(whole[0], whole[1], whole[2], bias, **options)
    (expected * weights).sum().backward()
    found = run_on_mesh({"sp": ranks}, in_shards, tensors, tokens, weights, mask, options)
    assert_close(
        whole_of([out for out, _, _ in found], tokens[0], add=False), expected.detach(), "output", 1e-9, floor=1e-3
    )
    for at, (x, of) in enumerate(zip(whole, (tokens[0], tokens[1], tokens[1]), strict=True)):
        assert x.grad is not None
        gradient = whole_of([gradients[at] for _, gradients, _ in found], of, add=True)
        assert_close(gradient, x.grad, f"gradient {at}", 1e-9, floor=1e-3)
    if learned and bias is not None and bias.grad is not None:
        total = torch.stack([gradients[3] for _, gradients, _ in found]).sum(0)
        assert_close(total, bias.grad, "gradient of the mask", 1e-9, floor=1e-3)
    into = ranks > 1  # the query always moves, and the output
    assert all(kinds == ["all-to-all"] * 2 * into for _, _, kinds in found)


def test_the_law_itself_fails_on_a_mask_of_other_heads() -> None:
    """diffusers#14316: an additive mask with a head axis, of which every rank took the first heads."""
    tensors = [numbers(1, 4, 6, 3, seed=at) for at in range(3)]
    mask, tokens = numbers(1, 4, 6, 6, seed=3), (Tokens(6), Tokens(6))
    expected = F.scaled_dot_product_attention(tensors[0], tensors[1], tensors[2], mask)

    def output() -> torch.Tensor:
        found = run_on_mesh({"sp": 2}, in_shards, tensors, tokens, tensors[0], mask, {})
        return torch.cat([out for out, _, _ in found], -2)

    assert_close(output(), expected, "output", 1e-9)
    mask = mask[:, [0, 1, 0, 1]]
    with pytest.raises(AssertionError, match="output"):
        assert_close(output(), expected, "output", 1e-9)


class Padded(nn.Module):
    """Makes a mask of keys out of one of tokens, (B, S), inside its block."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * HEAD_SIZE), nn.Linear(HEADS * HEAD_SIZE, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return x + self.out(out.transpose(1, 2).flatten(2))


class PaddedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Padded(), Padded()])

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        return x


@pytest.mark.parametrize("length", [8, 9])
def test_a_mask_of_tokens(length: int) -> None:
    """diffusers#13277: a mask (B, S) with B = 2."""
    mask = torch.arange(length) < torch.tensor([[5], [length]])
    assert_equals_one_device(seeded(PaddedModel), {"ids": ids_of(2, length), "mask": mask}, 2)


X = numbers(2, 4, 3, 5)


def given_to(*tensors: torch.Tensor, **options: Any) -> Any:
    def action(mesh: DeviceMesh) -> torch.Tensor:
        query, key, value = tensors
        tokens = (Tokens(6), Tokens(6))
        return sharded_sdpa(query, key, value, **options, tokens=tokens, group=mesh.get_group())

    return action


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (given_to(X[0, 0], X[0, 0], X[0, 0]), "query has 2 dims and so no head axis to cut"),
        (given_to(X, X.float(), X), "key is torch.float32, the query torch.float64"),
        (given_to(X, X[:, :2], X[:, :2]), "4 query heads and 2 kv heads. Pass enable_gqa=True"),
        (given_to(X, X, X, attn_mask=torch.zeros(3, 6)), "attn_mask=(3, 6) is not of the whole sequence, 6 by 6"),
        (given_to(X, X, X, attn_mask=torch.zeros(2, 6, 6)), "attn_mask=(2, 6, 6) has 2 heads, the query has 4"),
    ],
)
def test_rejects_what_it_cannot_cut(action: Any, message: str) -> None:
    assert message in refused(2, action)


# In models


class Attends(nn.Module):
    """`call` is given query, key and value, the tokens at hand and the rest."""

    def __init__(self, call: Any, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.call, self.sizes = call, [HEADS, kv_heads, kv_heads]
        self.qkv, self.out = nn.Linear(WIDTH, sum(self.sizes) * HEAD_SIZE), nn.Linear(HEADS * HEAD_SIZE, WIDTH)
        self.gate, self.bias = nn.Linear(WIDTH, HEADS), nn.Parameter(torch.randn(HEADS, 12, 12))

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2).split(self.sizes, 1)
        return x + self.out(self.call(self, q, k, v, x, *rest).transpose(1, 2).flatten(2))


class AttendsModel(nn.Module):
    def __init__(self, call: Any, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attends(call, kv_heads) for _ in range(2)])

    def forward(self, x: torch.Tensor, rest: Any = ()) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


DISTANCE = (torch.arange(12)[:, None] - torch.arange(12)).double()


@pytest.mark.parametrize(
    "mask_of",
    [
        lambda self, x: DISTANCE / x.shape[1] ** 0.5,
        lambda self, x: self.bias / x.shape[1] ** 0.5,
        lambda self, x: self.gate(x.mean(1))[:, :, None, None] * DISTANCE,
    ],
    ids=["a number of tokens", "a learned bias over it", "a mean of tokens"],
)
def test_rejects_a_whole_mask_with_values_of_the_tokens_at_hand(mask_of: Any) -> None:
    def call(self: Attends, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask_of(self, x))

    message = refused_model(seeded(lambda: AttendsModel(call)), {"x": numbers(2, 12, WIDTH)})
    assert "its attention was called with other arguments" in message


@pytest.mark.parametrize("ranks", [2, 3])
def test_rejects_a_mask_of_keys_cut_to_the_tokens_at_hand(ranks: int) -> None:
    """Of one token on a rank it would broadcast."""

    def call(self: Attends, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.bias[0, 0, : x.shape[1]])

    message = refused_model(seeded(lambda: AttendsModel(call)), {"x": numbers(2, 3, WIDTH)}, ranks)
    assert "is made from the tokens at hand" in message


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_one_kv_head_is_broadcast_as_torch_does(ranks: int) -> None:
    def call(self: Attends, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert_equals_one_device(seeded(lambda: AttendsModel(call, kv_heads=1)), {"x": numbers(2, 12, WIDTH)}, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_one_batch_of_queries_is_broadcast_as_torch_does(ranks: int) -> None:
    def call(
        self: Attends, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        k, v = self.qkv(memory).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2).split(self.sizes, 1)[1:]
        return F.scaled_dot_product_attention(q, k, v)

    inputs = {"x": numbers(1, 12, WIDTH), "rest": (numbers(3, 7, WIDTH, seed=1),)}
    assert_equals_one_device(seeded(lambda: AttendsModel(call)), inputs, ranks)


@pytest.mark.parametrize("sizes", [{"sp": 2}, {"sp": 5}, {"cp": 2, "sp": 1}, {"cp": 2, "sp": 2}], ids=str)
@pytest.mark.parametrize("kind", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("made", ["in the model", "in the block"])
def test_causal_masks_of_torchs_own_class(made: str, kind: Any, sizes: dict[str, int]) -> None:
    def call(
        self: Attends, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor, mask: Any = None
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=kind(x.shape[1], x.shape[1]) if mask is None else mask)

    class WithMask(AttendsModel):
        def forward(self, x: torch.Tensor, rest: Any = ()) -> torch.Tensor:
            return super().forward(x, () if made == "in the block" else (kind(x.shape[1], x.shape[1]),))

    model, inputs = seeded(lambda: WithMask(call)), {"x": numbers(2, 13, WIDTH)}
    reference = on_one_device(model, inputs)
    for run in run_on_mesh(sizes, in_parallel, model, inputs, UlyssesPlan, loss_of):
        assert_runs_equal(run, reference)


@pytest.mark.parametrize("keys", [1, 2, 9, 10])
def test_keys_as_many_as_the_probe_makes_up_or_takes_away(keys: int) -> None:
    """With two registers they are 3, 4, 11 and 12: what a number of tokens is does not decide whose they are."""

    def call(
        self: Attends, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        x = F.scaled_dot_product_attention(q, k, v)
        memory = torch.cat((self.gate.weight[None, :2].expand(len(text), -1, -1), text), 1)[
            :, : 1 if keys == 1 else None
        ]
        k, v = self.qkv(memory).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2).split(self.sizes, 1)[1:]
        return x + F.scaled_dot_product_attention(q, k, v)

    inputs = {"x": numbers(2, 16, WIDTH), "rest": (numbers(2, keys, WIDTH, seed=1),)}
    run = assert_equals_one_device(seeded(lambda: AttendsModel(call)), inputs, 2)
    assert run.forward.count("all-to-all") == 8


@pytest.mark.parametrize("seed", range(6))
def test_a_bfloat16_model_is_not_refused_for_its_rounding(seed: int) -> None:
    torch.manual_seed(seed)
    model = RotaryDecoder().bfloat16()
    run_on_mesh({"sp": 2}, lambda mesh: parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())(ids_of(2, 13)))
