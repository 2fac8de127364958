"""A plan on two mesh dimensions: heads shared along one, queries along the other; and the choice by bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from gloo import GlooPool
from hypothesis import given
from hypothesis import strategies as st
from model_zoo import ZOO, Block, RotaryDecoder, SelfAttention, ids_of, loss_of, numbers, seeded
from one_device import Run, assert_runs_equal, in_parallel, on_one_device, refused
from test_cross import Painter, Translator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ulysses_dtensor import PlanError, UlyssesPlan, check_parity, parallelize_module
from ulysses_dtensor.testing import run_on_mesh


def assert_equal_on(model: nn.Module, inputs: dict[str, Any], sizes: dict[str, int], **options: Any) -> Run:
    reference = on_one_device(model, inputs)
    runs = run_on_mesh(sizes, in_parallel, model, inputs, lambda: UlyssesPlan(**options), loss_of)
    for run in runs:
        assert_runs_equal(run, reference)
    return runs[0]


@given(
    cp=st.integers(1, 3),
    sp=st.integers(1, 3),
    length=st.integers(1, 31),
    kv_heads=st.sampled_from([1, 2, 4]),
    causal=st.booleans(),
    outputs=st.sampled_from(["replicate", "shard"]),
    strategy=st.sampled_from(["ulysses", "auto"]),
)
def test_decoders(cp: int, sp: int, length: int, kv_heads: int, causal: bool, outputs: str, strategy: str) -> None:
    def block() -> nn.Module:
        made = Block(causal=causal)
        made.attention = SelfAttention(causal=causal, kv_heads=kv_heads)
        return made

    model = seeded(lambda: RotaryDecoder(block=block))
    assert_equal_on(model, {"ids": ids_of(2, length)}, {"cp": cp, "sp": sp}, outputs=outputs, strategy=strategy)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("length", [9, 14])
def test_the_zoo(name: str, length: int) -> None:
    sample = ZOO[name]
    assert_equal_on(sample.model(), sample.inputs(2, length), {"cp": 2, "sp": 2})


def test_cross_and_joint_attention_share_heads_over_all_ranks() -> None:
    sizes = {"cp": 2, "sp": 2}
    assert_equal_on(seeded(Translator), {"source": ids_of(2, 13), "target": ids_of(2, 9)}, sizes)
    assert_equal_on(seeded(lambda: Painter("text first")), {"pixels": numbers(2, 13, 3), "prompt": ids_of(2, 4)}, sizes)


def test_more_ranks_than_heads_use_all_ranks() -> None:
    """4 heads on 8 ranks: as many all-to-alls, and no rank without work."""
    run = assert_equal_on(seeded(RotaryDecoder), {"ids": ids_of(1, 24)}, {"cp": 2, "sp": 4})
    assert run.forward == ("all-reduce", *["all-to-all"] * 4, "all-gather")


def decoder_on_dp_cp_sp(wrap: str) -> None:
    """On (dp, cp, sp) = (1, 2, 2): gradients under whatever reduces them."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "sp"))
    model, ids = seeded(RotaryDecoder), {"ids": ids_of(2, 13)}
    reference = on_one_device(model, ids)
    ours = parallelize_module(copy.deepcopy(model), mesh["cp", "sp"], UlyssesPlan())
    if wrap == "fsdp":
        for layer in ours.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(ours)
    loss = loss_of(ours(**ids))
    loss.backward()
    gradients = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in ours.named_parameters()
    }
    found = Run(loss.detach(), reference.outputs, gradients, {})
    assert_runs_equal(found, reference)
    assert wrap == "fsdp" or check_parity(ours, ids).passed


@pytest.mark.parametrize("wrap", ["nothing", "fsdp"])
def test_gloo_ranks_with_data_parallelism(gloo: GlooPool, wrap: str) -> None:
    gloo.run(4, decoder_on_dp_cp_sp, wrap)


def test_rejects_three_dimensions() -> None:
    def run(mesh: DeviceMesh) -> None:
        parallelize_module(seeded(RotaryDecoder), mesh, UlyssesPlan())

    assert "has 3 dimensions. Pass the sequence dimension alone" in refused(8, run, sizes={"dp": 2, "cp": 2, "sp": 2})


def test_rejects_an_unknown_strategy() -> None:
    with pytest.raises(PlanError, match="strategy='ring' is neither 'ulysses' nor 'auto'"):
        UlyssesPlan(strategy="ring")  # type: ignore[arg-type]
