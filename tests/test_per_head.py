"""Tensors with a part for each head, in attentions declared by layout: everything equals one device's."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo import GlooPool
from hypothesis import given
from hypothesis import strategies as st
from model_zoo import HEAD_SIZE, ids_of, loss_of, numbers, seeded
from one_device import assert_close, assert_equals_one_device, refused, refused_model
from per_head_models import PER_HEAD, TEXT, PerHeadAttention, PerHeadBlock, decoder, plan_of
from test_gloo_models import full, mesh_of, named, wrapped
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize_module

from ulysses_dtensor import LayoutError, PlanError, UlyssesAttention, distribute, parallelize_module
from ulysses_dtensor.per_head import Given
from ulysses_dtensor.testing import full_value, run_on_mesh


@st.composite
def heads(draw: st.DrawFn) -> tuple[int, int]:
    count = draw(st.integers(1, 6))
    return count, draw(st.sampled_from([kv for kv in range(1, count + 1) if count % kv == 0]))


@given(
    sizes=heads(),
    ranks=st.integers(1, 4),
    seq_len=st.integers(1, 14),
    checkpointed=st.booleans(),
    bias=st.booleans(),
    frozen=st.booleans(),
)
def test_outputs_and_gradients_equal_one_device(
    sizes: tuple[int, int], ranks: int, seq_len: int, checkpointed: bool, bias: bool, frozen: bool
) -> None:
    model = decoder(*sizes, checkpointed=checkpointed, shared_bias=bias)
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or "inner" in name)
    assert_equals_one_device(model, {"ids": ids_of(2, seq_len)}, ranks, plan=plan_of)


@pytest.mark.parametrize(
    ("sizes", "ranks"), [((2, 1), 4), ((1, 1), 3), ((6, 3), 4), ((6, 2), 4), ((12, 3), 4), ((5, 5), 4)], ids=str
)
def test_ranks_without_heads_and_kv_heads_that_do_not_divide(sizes: tuple[int, int], ranks: int) -> None:
    run = assert_equals_one_device(decoder(*sizes), {"ids": ids_of(2, 13)}, ranks, plan=plan_of)
    assert any("sinks" in name and gradient is not None and gradient.any() for name, gradient in run.gradients.items())


def test_the_check_itself_fails_on_the_first_heads_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(self: Given, heads: Any) -> torch.Tensor:
        return self.x.narrow(self.dim, 0, heads.num_kv if self.of_kv else heads.num_query)

    monkeypatch.setattr(Given, "cut", first)
    monkeypatch.setattr("ulysses_dtensor.stub._check_heads_alike", lambda *_: None)  # it would see it
    with pytest.raises(AssertionError, match="relative error"):
        assert_equals_one_device(decoder(4, 4), {"ids": ids_of(2, 9)}, 2, plan=plan_of)


@pytest.mark.parametrize("left_out", PER_HEAD)
def test_rejects_what_differs_by_head_and_is_not_declared(left_out: str) -> None:
    per_head = {name: text for name, text in PER_HEAD.items() if name != left_out}
    model = decoder(4, 4, shared_bias=left_out == "bias")
    message = refused_model(model, {"ids": ids_of(2, 9)}, 2, lambda: plan_of(per_head))
    assert "its declared attention gives a head another result when it is given some of the heads" in message
    assert "Name what has a part for each head in UlyssesAttention(..., per_head={...})" in message


class Numbered(nn.Module):
    """Numbers its heads by itself."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any = None) -> torch.Tensor:
        slopes = torch.arange(q.shape[1], dtype=q.dtype)[:, None, None]
        return F.scaled_dot_product_attention(q * slopes, k, v, enable_gqa=True)


def test_rejects_heads_that_are_numbered_elsewhere() -> None:
    model = decoder(shared_bias=False)
    for layer in model.layers:  # type: ignore[union-attr] - a ModuleList
        layer.inner = Numbered()
    message = refused_model(model, {"ids": ids_of(2, 9)}, 2, lambda: plan_of({"bias": PER_HEAD["bias"]}))
    assert "its declared attention gives a head another result when it is given some of the heads" in message


class Open(nn.Module):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class LocalBias(PerHeadBlock):
    """Makes the bias from the tokens at hand: one token a rank would be broadcast to all pairs."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, x.new_zeros(1, 4, x.shape[1], x.shape[1]))


class LocalLength(PerHeadBlock):
    def forward(self, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return super().forward(x, x.shape[1])  # type: ignore[arg-type] - a number on purpose


@pytest.mark.parametrize(("kind", "said"), [(LocalBias, "a tensor (1, 4, 11, 11)"), (LocalLength, "5 for 11")])
def test_rejects_arguments_made_from_the_tokens_at_hand(kind: type[nn.Module], said: str) -> None:
    model = decoder()
    block: Any = seeded(lambda: kind(4, 2))
    block.inner, model.layers = Open(), nn.ModuleList([block])
    message = refused_model(model, {"ids": ids_of(2, 2)}, 2, lambda: plan_of({}))
    assert "its attention was called with other arguments for" in message
    assert said in message


# Under what people train with


def trains(wrap: str, options: dict[str, Any], sizes: tuple[int, int]) -> None:
    """Checks loss and gradients of two steps, through a deep copy of the converted model, against one device."""
    original, mesh = decoder(2, 1, **options), mesh_of(sizes)
    model = copy.deepcopy(parallelize_module(copy.deepcopy(original), mesh["sp"], plan_of()))
    model = wrapped(model, wrap, mesh, "layers")
    for step in range(2):
        inputs = [ids_of(2, 13 - step, seed=10 + dp) for dp in range(sizes[0])]
        loss_of(model(inputs[mesh.get_local_rank("dp")])).backward()
        (sum(loss_of(original(ids)) for ids in inputs) / sizes[0]).backward()  # type: ignore[union-attr] - a tensor
        for (key, p), (_, q) in zip(named(model), named(original), strict=True):
            assert p.grad is not None, f"{key} has no gradient"
            assert q.grad is not None
            gradient = full(p.grad)
            if wrap == "unwrapped":  # over dp nobody reduces
                gradient = gradient.clone()
                dist.all_reduce(gradient, group=mesh.get_group("dp"))
                gradient /= sizes[0]
            assert_close(gradient, q.grad, f"gradient of {key}", 1e-9, floor=1e-4)
            p.grad = q.grad = None


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("wrap", ["FSDP2", "HSDP", "DDP", "unwrapped"])
def test_learned_sinks_train_as_on_one_device(gloo: GlooPool, wrap: str, checkpointed: bool) -> None:
    # verl#4551, torchtitan#3978: sinks of a sharded parameter. Two heads: with four ranks, two of them have none.
    sizes = (2, 2) if wrap == "HSDP" else (1, 4)
    gloo.run(4, trains, wrap, {"checkpointed": checkpointed}, sizes)


def pickled_whole() -> None:
    mesh = mesh_of((1, 2))
    model = parallelize_module(decoder(), mesh["sp"], plan_of())
    ids = ids_of(2, 9)
    expected = model(ids).detach()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twin = torch.load(buffer, weights_only=False)
    assert torch.equal(twin(ids).detach(), expected)


def test_a_converted_model_can_be_saved_whole(gloo: GlooPool) -> None:
    gloo.run(2, pickled_whole)


# Alone, outside a plan


@given(sizes=heads(), ranks=st.integers(1, 4), seq_len=st.integers(1, 12))
def test_alone_on_dtensors_parameters_get_the_gradient_of_their_heads(
    sizes: tuple[int, int], ranks: int, seq_len: int
) -> None:
    inner = seeded(lambda: PerHeadAttention(*sizes))
    tensors = [numbers(2, count, seq_len, HEAD_SIZE, seed=at) for at, count in enumerate((sizes[0], *[sizes[1]] * 2))]
    bias, weights = numbers(1, sizes[0], seq_len, seq_len, seed=5), numbers(2, sizes[0], seq_len, HEAD_SIZE, seed=6)
    expected = copy.deepcopy(inner)
    reference = expected(*tensors, bias)
    (reference * weights).sum().backward()

    def run(mesh: DeviceMesh) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        style = UlyssesAttention(TEXT, per_head=PER_HEAD)
        module = torch_parallelize_module(copy.deepcopy(inner), mesh, style)
        out = module(*(distribute(x, mesh, style.src) for x in tensors), bias=bias)
        (out.to_local() * distribute(weights, mesh, style.src).to_local()).sum().backward()
        gradients = {name: p.grad for name, p in module.named_parameters()}
        assert all(gradient is not None for gradient in gradients.values())
        return full_value(out), gradients  # type: ignore[return-value] - none is None

    runs = run_on_mesh({"sp": ranks}, run)
    assert_close(runs[0][0], reference.detach(), "output", 1e-12)
    for name, p in expected.named_parameters():
        total = torch.stack([gradients[name] for _, gradients in runs]).sum(0)
        assert_close(total, p.grad, f"gradient of {name}", 1e-9, floor=1e-4)  # type: ignore[arg-type] - it has one


def test_parameters_are_whole_again_after_an_error() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = nn.Parameter(torch.ones(4))

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            assert self.sinks.shape == (2,)
            assert [tuple(p.shape) for p in self.parameters()] == [(2,)]
            raise RuntimeError("out of memory")

    def run(mesh: DeviceMesh) -> None:
        style = UlyssesAttention(TEXT, per_head={"sinks": "h -> (sp h)"})
        module = torch_parallelize_module(Fails(), mesh, style)
        sinks = module.sinks
        x = distribute(numbers(2, 4, 6, 3), mesh, style.src)
        with pytest.raises(RuntimeError, match="out of memory"):
            module(x, x, x)
        assert module.sinks is sinks
        assert list(module.parameters()) == [sinks]
        assert isinstance(sinks, nn.Parameter)

    run_on_mesh({"sp": 2}, run)


# What it takes, and what it refuses


def test_prints_as_its_constructor_and_in_the_plan() -> None:
    style = UlyssesAttention(TEXT, per_head={"sinks": "h->( sp h )", "bias": "... h q k -> ... (sp h) q k"})
    printed = f"UlyssesAttention({TEXT!r}, per_head={{'sinks': 'h -> (sp h)', 'bias': '... h q k -> ... (sp h) q k'}})"
    assert repr(style) == repr(eval(printed)) == printed
    assert "per_head={'sinks'" in repr(plan_of())
    assert repr(UlyssesAttention(TEXT, per_head={})) == f"UlyssesAttention({TEXT!r})"


@pytest.mark.parametrize(
    "text",
    [
        "h",
        "h -> h",
        "h -> (sp g)",
        "(sp h) -> (sp h)",
        "h -> (cp h)",
        "h -> (sp h) -> h",
        7,
    ],
)
def test_rejects_layouts_that_do_not_cut_one_axis(text: Any) -> None:
    with pytest.raises(PlanError, match=r"per_head\['sinks'\]=.* must name the same axes on both sides and cut one of"):
        UlyssesAttention(TEXT, per_head={"sinks": text})


def test_rejects_malformed_entries() -> None:
    with pytest.raises(LayoutError):
        UlyssesAttention(TEXT, per_head={"sinks": "h -> (sp h"})
    with pytest.raises(PlanError, match=r"per_head=\['sinks'\] is a list\. Pass a mapping of names to layouts\."):
        UlyssesAttention(TEXT, per_head=["sinks"])  # type: ignore[arg-type] - on purpose
    for name in ("", "a b", "a..b", 3):
        with pytest.raises(PlanError, match="names neither an argument nor a parameter"):
            UlyssesAttention(TEXT, per_head={name: "h -> (sp h)"})  # type: ignore[dict-item] - on purpose


def test_rejects_a_name_that_the_module_does_not_have() -> None:
    message = refused_model(decoder(), {"ids": ids_of(2, 9)}, 2, lambda: plan_of({"sink": "h -> (sp h)"}))
    assert (
        "per_head['sink']: PerHeadAttention has no such argument, parameter or buffer, only q, k, v, bias, " in message
    )


@pytest.mark.parametrize(
    ("text", "given_to", "said"),
    [
        ("h -> (sp h)", {}, "['x']: Open was called without it, and it has no such parameter or buffer."),
        ("h -> (sp h)", {"x": [1.0] * 4}, "['x'] is a list. Give the whole plain tensor on every rank"),
        ("h -> (sp h)", {"x": torch.ones(2, 4)}, "['x'] has 2 dims, its layout 'h -> (sp h)' names 1."),
        ("... h q k -> ... (sp h) q k", {"x": torch.ones(2, 4)}, "['x'] has 2 dims"),
        (
            "a h -> a (sp h)",
            {"x": torch.ones(4, 2)},
            "['x'] is (4, 2): 2 heads at dim 1, where the attention has 4 query",
        ),
        (
            "h -> (sp h)",
            {"x": torch.ones(1)},
            "['x'] is (1,): 1 heads at dim 0, where the attention has 4 query heads.",
        ),
    ],
)
def test_rejects_tensors_that_do_not_fit(text: str, given_to: dict[str, Any], said: str) -> None:
    def action(mesh: DeviceMesh) -> None:
        style = UlyssesAttention(TEXT, per_head={"x": text})
        module = torch_parallelize_module(Open(), mesh, style)
        x = distribute(numbers(2, 4, 6, 3), mesh, style.src)
        module(x, x, x, **given_to)

    assert f"UlyssesAttention: per_head{said}" in refused(2, action)


def test_rejects_a_wrong_size_in_a_model_before_any_exchange() -> None:
    model = decoder(4, 4)
    model.layers[0].inner.sinks = nn.Parameter(torch.zeros(3))  # type: ignore[index, union-attr] - a ModuleList
    message = refused_model(model, {"ids": ids_of(2, 9)}, 2, plan_of)
    assert "layers.0 (PerHeadBlock): UlyssesAttention: per_head['sinks'] is (3,): 3 heads at dim 0" in message
