"""Dropout on real ranks: each drops parts of its own, at the rate asked for, the same again in a recompute and from a seed."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo import GlooPool
from model_zoo import HEAD_SIZE, HEADS, VOCABULARY, WIDTH, LearnedPositions, ids_of, numbers, seeded
from one_device import assert_close, refused_model
from test_gloo_models import batch_of, mesh_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from ulysses_dtensor import PlanError, UlyssesAttention, UlyssesPlan, parallelize_module
from ulysses_dtensor.testing import run_on_mesh

DECLARED = {"layers.*.inner": UlyssesAttention("b h (sp s) d -> b (sp h) s d")}


class Sdpa(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)


class Formula(Sdpa):
    """Attention by hand, its weights dropped out by a function of torch."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.dropout((q @ k.mT).softmax(-1), self.p, self.training) @ v


class Bernoulli(Sdpa):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = (q @ k.mT).softmax(-1)
        return weights * torch.bernoulli(torch.full_like(weights, 1 - self.p)) / (1 - self.p) @ v


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


ATTENTIONS = {"sdpa": Sdpa, "formula": Formula, "bernoulli": Bernoulli}


def attention_of_identity(kind: str, declared: bool, p: float, tokens: int) -> torch.Tensor:
    """Returns which weights (H, S, S) attention dropped, read off from values that are the identity."""
    mesh = mesh_of((1, 2))
    model = Stack(lambda: Weights(ATTENTIONS[kind](p), tokens))
    plan = UlyssesPlan(attention=DECLARED if declared else {"layers.*.inner": "sdpa"})
    parallelize_module(model, mesh["sp"], plan)
    torch.manual_seed(3)
    out = model(torch.eye(tokens)[None].repeat(1, 1, HEADS))
    return out.view(tokens, HEADS, tokens).transpose(0, 1) == 0


class Weights(nn.Module):
    """Its result is the matrix of attention weights: every query alike, values the identity."""

    def __init__(self, inner: nn.Module, tokens: int) -> None:
        super().__init__()
        self.inner, self.tokens = inner, tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return self.inner(values * 0, values * 0, values).transpose(1, 2).flatten(2)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = (x.double().flatten() - x.double().mean() for x in (a, b))
    return float((a * b).mean() / (a.std() * b.std()))


def assert_dropped_at_rate(dropped: torch.Tensor, p: float) -> None:
    """Within five standard deviations of a mean of independent draws; the seed is fixed."""
    error = abs(float(dropped.double().mean()) - p)
    assert error < 5 * math.sqrt(p * (1 - p) / dropped.numel()), error


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(
    ("kind", "declared"), [("sdpa", False), ("sdpa", True), ("formula", True), ("bernoulli", True)]
)
def test_attention_drops_other_weights_in_each_head(gloo: GlooPool, kind: str, declared: bool, p: float) -> None:
    # flash-attention#612: equal seeds on the ranks gave each of their heads the same mask.
    tokens = 48
    first, second = gloo.run(2, attention_of_identity, kind, declared, p, tokens)
    assert torch.equal(first, second)  # both hold the whole result
    assert_dropped_at_rate(first, p)
    bound = 5 / math.sqrt(tokens * tokens)
    for a in range(HEADS):
        for b in range(a):
            assert abs(correlation(first[a], first[b])) < bound, (a, b)


def hidden_zeros(p: float, alike: bool) -> torch.Tensor:
    mesh = mesh_of((1, 2))
    model = seeded(lambda: Stack(lambda: Hidden(p)))
    parallelize_module(model, mesh["sp"], UlyssesPlan())
    torch.manual_seed(3 if alike else dist.get_rank())
    return model(torch.ones(2, 64, WIDTH, dtype=torch.float64)) == 0


class Hidden(nn.Module):
    """Attention whose result counts for nothing, then a dropout of the hidden state."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (HEADS, HEAD_SIZE)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return self.drop(x + 0 * attended)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_hidden_dropout_drops_other_parts_of_each_shard(gloo: GlooPool, p: float, alike: bool) -> None:
    first, second = gloo.run(2, hidden_zeros, p, alike)
    assert torch.equal(first, second)
    assert_dropped_at_rate(first, p)
    a, b = first.chunk(2, dim=1)
    assert abs(correlation(a, b)) < 5 / math.sqrt(a.numel())


def test_the_correlation_itself_sees_equal_masks() -> None:
    mask = torch.rand(48, 48, generator=torch.Generator().manual_seed(0)) < 0.1
    assert correlation(mask, mask) > 0.99
    with pytest.raises(AssertionError):
        assert_dropped_at_rate(mask, 0.5)


# The same again


class Decoder(nn.Module):
    """Drops hidden states and attention weights; checkpointed in either of torch's two ways, or not."""

    def __init__(self, kind: str, reentrant: bool | None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(DropBlock(ATTENTIONS[kind](0.3)) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class DropBlock(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.qkv, self.drop = inner, nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        return x + self.drop(self.inner(q, k, v).transpose(1, 2).flatten(2))


def run_of(kind: str, reentrant: bool | None, seed: int) -> dict[str, torch.Tensor]:
    mesh = mesh_of((1, 2))
    model = seeded(partial(Decoder, kind, reentrant))
    parallelize_module(model, mesh["sp"], UlyssesPlan(attention=DECLARED))
    torch.manual_seed(seed)
    logits = model(ids_of(2, 13))
    logits.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return {"logits": logits.detach(), **gradients}


def comes_again(kind: str) -> None:
    first = run_of(kind, None, 5)
    for reentrant in (None, False, True):
        again = run_of(kind, reentrant, 5)
        for name, x in first.items():
            assert_close(again[name], x, f"{name}, reentrant={reentrant}", 1e-13)  # sums come in another order
    other = run_of(kind, None, 6)
    assert not torch.equal(first["logits"], other["logits"])


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_dropout_comes_again_in_a_recompute_and_from_a_seed(gloo: GlooPool, kind: str) -> None:
    gloo.run(2, comes_again, kind)


# Numbers that a block draws by itself


class Path(nn.Module):
    """Drops its whole update for a sample, as stochastic depth does, or for single tokens; or a condition's parts."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.qkv = how, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        update = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.how == "samples":
            keep = torch.rand(len(x), 1, 1) < 0.5
        elif self.how == "samples, in place":
            keep = x.new_empty(len(x), 1, 1).bernoulli_(0.5)
        elif self.how == "tokens":
            keep = torch.rand(*x.shape[:2], 1) < 0.999  # hardly ever drops: no value tells
        elif self.how == "tokens, in place":
            keep = x.new_empty(*x.shape[:2], 1).bernoulli_(0.999)
        elif self.how == "condition":
            keep = F.dropout(torch.ones(len(x), 1, WIDTH, dtype=x.dtype), 0.5)
        elif self.how == "features":
            keep = F.dropout1d(x.mT, 0.5).mT
        else:
            keep = torch.dropout(torch.ones_like(x), 0.5, True)
        return x + update * keep


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "tokens",
            "it draws random numbers (rand) for the tokens at hand: ranks that are seeded alike would draw the same",
        ),
        ("tokens, in place", "it draws random numbers (bernoulli_) for the tokens at hand"),
    ],
)
def test_rejects_draws_that_would_be_others_than_one_devices(how: str, said: str) -> None:
    x = torch.ones(2, 9, WIDTH, dtype=torch.float64)
    assert said in refused_model(seeded(lambda: Stack(lambda: Path(how))), {"x": x}, 2)


def paths(how: str, alike: bool) -> tuple[torch.Tensor, torch.Tensor] | str:
    """Returns what a model gives on two ranks, and on one."""
    mesh = mesh_of((1, 2))
    model = seeded(lambda: Stack(lambda: Path(how)))
    single = copy.deepcopy(model)
    parallelize_module(model, mesh["sp"], UlyssesPlan())
    x = torch.randn(6, 9, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for each in (model, single):
        torch.manual_seed(4 if alike else dist.get_rank())
        try:
            results.append(each(x).detach())
        except PlanError as error:
            return str(error)
    return results[0], results[1]


@pytest.mark.parametrize("how", ["samples", "samples, in place", "condition", "features"])
def test_a_sample_is_dropped_on_all_ranks_as_on_one_device(gloo: GlooPool, how: str) -> None:
    for parallel, single in gloo.run(2, paths, how, True):
        torch.testing.assert_close(parallel, single, rtol=1e-9, atol=1e-12)
    for message in gloo.run(2, paths, how, False):
        assert re.search(r"the model draws random numbers \(|Seed the ranks of a sequence group alike", str(message))


def test_dropout_by_torchs_own_name_is_each_ranks_own(gloo: GlooPool) -> None:
    (parallel, _), _ = gloo.run(2, paths, "elements", True)
    x = torch.randn(6, 9, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dropped = torch.eq(torch.as_tensor(parallel), x)
    assert_dropped_at_rate(dropped, 0.5)
    a, b = dropped[:, :4], dropped[:, 5:]
    assert abs(correlation(a, b)) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_rejects_attention_dropout_where_a_rank_has_no_head(kind: str) -> None:
    original = seeded(partial(Decoder, kind, None))

    def run(mesh: DeviceMesh) -> str:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan(attention=DECLARED))
        try:
            model(ids_of(1, 13))
        except PlanError as error:
            return str(error)
        return ""

    for message in run_on_mesh({"sp": HEADS + 1}, run):
        assert "the attention draws random numbers, and some rank has no head to call it with" in message


def unlike_seeds() -> torch.Tensor:
    mesh = mesh_of((1, 2))
    model = parallelize_module(seeded(lambda: LearnedPositions(dropout=0.3)), mesh["sp"], UlyssesPlan())
    torch.manual_seed(dist.get_rank())
    model.transformer["drop"].p = 0.0  # type: ignore[index, union-attr] - before the blocks each would drop its own
    inputs: Any = batch_of("learned positions", 0)[0]
    return model(**inputs)[1].detach()


def test_ranks_that_drop_need_not_be_seeded_alike(gloo: GlooPool) -> None:
    first, second = gloo.run(2, unlike_seeds)
    assert torch.equal(first, second)


class Joined(nn.Module):
    """Drops text and image while they are joined; `order` is how."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.qkv = order, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joined = torch.cat((text, image) if self.order == "text first" else (image, text), 1)
        q, k, v = self.qkv(joined).unflatten(-1, (3, HEADS, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        out = F.dropout(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), 0.5)
        count = text.shape[1]
        if self.order == "text first":
            return out[:, count:], out[:, :count]
        return out[:, : out.shape[1] - count], out[:, out.shape[1] - count :]


class JoinedModel(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Joined(order)])

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.blocks[0](image, text)


def joined_zeros(order: str, text: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = mesh_of((1, 2))
    model = seeded(lambda: JoinedModel(order))
    parallelize_module(model, mesh["sp"], UlyssesPlan())
    torch.manual_seed(3)
    image, text_out = model(numbers(4, 80, WIDTH), numbers(4, text, WIDTH, seed=1))
    return image == 0, text_out == 0


@pytest.mark.parametrize("text", [40, 7])
@pytest.mark.parametrize("order", ["text first", "image first"])
def test_joined_tokens_are_dropped_alike_and_each_ranks_own_apart(gloo: GlooPool, order: str, text: int) -> None:
    (image, of_text), (other_image, of_other_text) = gloo.run(2, joined_zeros, order, text)
    assert torch.equal(of_text, of_other_text)
    assert torch.equal(image, other_image)  # gathered: both hold the same whole
    assert_dropped_at_rate(image, 0.5)
    assert_dropped_at_rate(of_text, 0.5)
    first, second = image[:, :40], image[:, 40:]
    assert abs(correlation(first, second)) < 5 / math.sqrt(first.numel())
    if text == 40:
        assert abs(correlation(first, of_text)) < 5 / math.sqrt(first.numel())


KEPT: list[torch.Tensor] = []  # not the module's, which may keep nothing made from the tokens at hand


class DropsMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        kept = F.dropout(torch.ones_like(memory), 0.5)
        KEPT[:] = [kept]
        k, v = self.kv(memory * kept).unflatten(-1, (2, HEADS, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        q = self.q(x).unflatten(-1, (HEADS, HEAD_SIZE)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class DropsMemoryModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.blocks = nn.ModuleList([Encodes()]), nn.ModuleList([DropsMemory(), DropsMemory()])

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        memory = self.encoder[0](memory)
        for block in self.blocks:
            x = block(x, memory)
        return x


def memory_dropped(tokens: int, seeded_alike: bool) -> tuple[torch.Tensor, float]:
    mesh = mesh_of((1, 2))
    model = seeded(DropsMemoryModel)
    parallelize_module(model, mesh["sp"], UlyssesPlan())
    torch.manual_seed(3 if seeded_alike else 3 + dist.get_rank())
    model(numbers(4, 30, WIDTH), numbers(4, tokens, WIDTH, seed=1))
    return KEPT[0], float(torch.rand(()))


@pytest.mark.parametrize("seeded_alike", [True, False])
@pytest.mark.parametrize("tokens", [80, 79])
def test_a_memory_in_shards_is_dropped_by_each_rank_on_its_own(gloo: GlooPool, tokens: int, seeded_alike: bool) -> None:
    (first, after), (second, other_after) = gloo.run(2, memory_dropped, tokens, seeded_alike)
    assert first.shape[1] + second.shape[1] == tokens
    count = second.shape[1]
    assert abs(correlation(first[:, :count], second)) < 5 / math.sqrt(second.numel())
    assert (after == other_after) is seeded_alike  # generators that stood alike stand alike afterwards
