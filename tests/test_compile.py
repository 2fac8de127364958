"""Blocks of a converted model under torch.compile: one graph, the same numbers."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from flex_models import ByName, CompiledByName, flex_model
from gloo import GlooPool
from model_zoo import WIDTH, RotaryDecoder, float64, ids_of, numbers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ulysses_dtensor import UlyssesAttention, UlyssesPlan, parallelize_module


class WithoutTables(RotaryDecoder):
    """Its blocks are given the hidden state alone, whose global length nothing else tells."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def decoder() -> RotaryDecoder:
    with float64():
        torch.manual_seed(0)
        return WithoutTables()


def compiled_against_one_device(ranks: int, wrap: bool) -> float:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("sp",))
    model = decoder()
    single = copy.deepcopy(model)
    parallelize_module(model, mesh, UlyssesPlan())
    model(ids_of(2, 9))  # the first forward is eager: it proves that tokens stay apart
    for block in model.layers:
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        if wrap:
            fully_shard(block)
    if wrap:
        fully_shard(model)
    worst = 0.0
    for seq_len in (9, 9) if wrap else (10, 9):  # the first rank holds five tokens of both
        for each in (model, single):
            each.zero_grad()
            each(ids_of(2, seq_len)).square().mean().backward()
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            assert p.grad is not None, "a parameter without gradient"
            assert q.grad is not None, "a parameter without gradient"
            gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            worst = max(worst, float((gradient - q.grad).abs().max() / q.grad.abs().max()))
    return worst


@pytest.mark.parametrize("wrap", [False, True], ids=["alone", "under FSDP2"])
def test_blocks_compile_to_one_graph_each(gloo: GlooPool, wrap: bool) -> None:
    for worst in gloo.run(2, compiled_against_one_device, 2, wrap, timeout=240):
        assert worst < 1e-9


class Formula(nn.Module):
    """An attention called with q, k and v that no function mode could see."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class FormulaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.inner = nn.Linear(WIDTH, 3 * WIDTH), Formula()

    def forward(self, x: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 4, -1).permute(2, 0, 3, 1, 4)
        return x + self.inner(q, k, v).transpose(1, 2).reshape(batch, tokens, width)


def forward_of_compiled_blocks(ranks: int, case: str) -> float:
    """Returns how far compiled blocks are from one device; without gradients."""
    warnings.simplefilter("ignore")  # of an uncompiled FlexAttention
    plan = UlyssesPlan()
    if case == "declared":
        plan = UlyssesPlan(attention={"*inner": UlyssesAttention("b h (sp s) d -> b (sp h) s d")})
        with float64():
            torch.manual_seed(0)
            model: nn.Module = WithoutTables(block=FormulaBlock)
    else:
        model = flex_model("window of each head", "slopes", 6, 2, block=ByName if case == "flex" else CompiledByName)
    single = copy.deepcopy(model)
    parallelize_module(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("sp",)), plan)
    worst = 0.0
    with torch.no_grad():
        model(ids_of(2, 9))
        for block in model.layers:  # type: ignore[union-attr] - a ModuleList
            block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        for seq_len in (9, 10, 9):
            out, expected = model(ids_of(2, seq_len)), single(ids_of(2, seq_len))
            worst = max(worst, float((out - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("case", ["declared", "flex", "compiled flex"])
def test_attentions_in_compiled_blocks_see_the_whole_sequence(gloo: GlooPool, case: str) -> None:
    """If torch has moved what `flex.mode_is_open` asks, these see a shard alone."""
    for worst in gloo.run(2, forward_of_compiled_blocks, 2, case, timeout=240):
        assert worst < 1e-9


def compiled_first(ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("sp",))
    model: nn.Module = parallelize_module(decoder(), mesh, UlyssesPlan())
    torch.compile(model.layers[0], fullgraph=True, backend="aot_eager")  # type: ignore[index] - a ModuleList
    model.layers[0].compile(fullgraph=True, backend="aot_eager")  # type: ignore[index] - a ModuleList
    model(ids_of(2, 9))


def test_a_block_compiled_before_its_first_forward_says_what_to_do(gloo: GlooPool) -> None:
    with pytest.raises(Exception, match="Run the model once eagerly with such inputs"):
        gloo.run(2, compiled_first, 2, timeout=120)


class Scaled(nn.Module):
    """Attention by hand: no function in it is one that a block looks for."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT * scale.view(-1, 1, 1)).softmax(-1) @ v


class ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.inner = nn.Linear(WIDTH, 3 * WIDTH), Scaled()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        return x + self.inner(q, k, v, self.scale).transpose(1, 2).flatten(2)


def compiled_formula() -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
    with float64():
        torch.manual_seed(0)
        model = WithoutTables(block=ScaledBlock)
    single = copy.deepcopy(model)
    style = UlyssesAttention("b h (sp s) d -> b (sp h) s d", per_head={"scale": "h -> (sp h)"})
    parallelize_module(model, mesh, UlyssesPlan(attention={"layers.*.inner": style}))
    model(ids_of(2, 9))
    for block in model.layers:
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    return model(ids_of(2, 9)).detach(), single(ids_of(2, 9)).detach()


def test_a_compiled_attention_that_is_declared_sees_the_whole_sequence(gloo: GlooPool) -> None:
    for compiled, expected in gloo.run(2, compiled_formula):
        torch.testing.assert_close(compiled, expected, rtol=1e-9, atol=1e-12)


def encoder_compiled_against_one_device(ranks: int) -> float:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("sp",))
    with float64():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True)
        single = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16))
    model, x = copy.deepcopy(single), numbers(2, 9, 16)
    parallelize_module(model, mesh, UlyssesPlan())
    model(x)
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    for each in (model, single):
        each.zero_grad()
        (each(x) * numbers(2, 9, 16, seed=1)).mean().backward()
    worst = 0.0
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        assert p.grad is not None, "a parameter without gradient"
        assert q.grad is not None, "a parameter without gradient"
        worst = max(worst, float((p.grad - q.grad).abs().max()))
    return worst


def test_torchs_encoder_layers_compile_to_one_graph_each(gloo: GlooPool) -> None:
    for worst in gloo.run(2, encoder_compiled_against_one_device, 2, timeout=240):
        assert worst < 1e-11
