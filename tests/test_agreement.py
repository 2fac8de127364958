"""Ranks that do not agree raise one error on all of them, before the first exchange, at any forward."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_zoo import ZOO, RotaryDecoder, ids_of, numbers, seeded
from one_device import refused
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ulysses_dtensor import PlanError, UlyssesPlan, count_collectives, distribute, parallelize_module
from ulysses_dtensor.agreement import agree, content_hash
from ulysses_dtensor.testing import run_on_mesh

Inputs = Callable[[int], dict[str, Any]]
IDS = ids_of(2, 9)


def changed(at: tuple[int, int]) -> torch.Tensor:
    ids = IDS.clone()
    ids[at] = (ids[at] + 1) % 11
    return ids


DIFFERENT: dict[str, tuple[Inputs, str]] = {
    "batch": (
        lambda rank: {"ids": ids_of(2, 9, seed=rank)},
        r"input ids \(2, 9\) torch.int64: ranks \[0\] / \[1\] of the group differ",
    ),
    "one number": (lambda rank: {"ids": changed((1, 8)) if rank else IDS}, "ranks .0. / .1. of the group differ"),
    "order": (lambda rank: {"ids": IDS.flip(1) if rank else IDS}, "of the group differ"),
    "rows": (lambda rank: {"ids": IDS.flip(0) if rank else IDS}, "of the group differ"),
    "length": (lambda rank: {"ids": ids_of(2, 9 + rank)}, "the inputs' structure: ranks .0. / .1. of the group differ"),
    "type": (lambda rank: {"ids": IDS.int() if rank else IDS}, "the inputs' structure"),
    "position or keyword": (lambda rank: {"": IDS} if rank else {"ids": IDS}, "the inputs' structure"),
}


def forward(model: nn.Module, inputs: dict[str, Any]) -> Any:
    return model(*(value for name, value in inputs.items() if not name), **{n: v for n, v in inputs.items() if n})


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize(("inputs", "match"), DIFFERENT.values(), ids=DIFFERENT)
def test_rejects_inputs_that_differ_between_ranks_at_any_forward(inputs: Inputs, match: str, before: int) -> None:
    original = seeded(RotaryDecoder)

    def run(mesh: DeviceMesh) -> None:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        for _ in range(before):
            model(IDS).sum().backward()
        with count_collectives() as count, pytest.raises(PlanError) as raised:
            forward(model, inputs(mesh.get_local_rank()))
        assert count.kinds == ["all-reduce", "all-gather"]
        assert re.search(match, str(raised.value)), str(raised.value)
        assert "UlyssesPlan on RotaryDecoder: the ranks of a sequence group must make the same call" in str(
            raised.value
        )
        model(IDS)

    run_on_mesh({"sp": 2}, run)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_names_the_ranks_and_the_input_that_differ(ranks: int) -> None:
    """Noise or a time step of each rank's own: Open-Sora#721, DeepSpeed#7484, accelerate#3092."""
    original, sample = ZOO["diffusion"].model(), ZOO["diffusion"].inputs(2, 13)

    def run(mesh: DeviceMesh) -> None:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        own = numbers(2, seed=5) if mesh.get_local_rank() == ranks - 1 else sample["time"]
        model(sample["latents"], own)

    message = refused(ranks, run)
    assert f"(2,) torch.float64: ranks {list(range(ranks - 1))} / [{ranks - 1}] of the group differ" in message
    assert "(2, 13, 5)" not in message
    assert "Give all of them the same batch (sampler, noise, time step) and the same weights" in message


DIFFERENT_CALLS: dict[str, tuple[Callable[[DeviceMesh, nn.Module], Any], str]] = {
    "plan": (
        lambda mesh, model: parallelize_module(
            model, mesh, UlyssesPlan(outputs="shard" if mesh.get_local_rank() else "replicate")
        )(IDS),
        "the plan: ranks [0] / [1] of the group differ",
    ),
    "weights": (
        lambda mesh, model: parallelize_module(scaled(model, 1 + mesh.get_local_rank()), mesh, UlyssesPlan())(IDS),
        "parameters and buffers: ranks [0] / [1] of the group differ",
    ),
    "mode": (
        lambda mesh, model: parallelize_module(model.train(mesh.get_local_rank() == 0), mesh, UlyssesPlan())(IDS),
        "what is called, and how: ranks [0] / [1] of the group differ",
    ),
    "gradients": (
        lambda mesh, model: without_gradients(parallelize_module(model, mesh, UlyssesPlan()), mesh.get_local_rank()),
        "what is called, and how: ranks [0] / [1] of the group differ",
    ),
    "autocast": (
        lambda mesh, model: autocast(parallelize_module(model, mesh, UlyssesPlan()), mesh.get_local_rank()),
        "what is called, and how: ranks [0] / [1] of the group differ",
    ),
}


def scaled(model: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        next(model.parameters()).mul_(factor)
    return model


def without_gradients(model: nn.Module, rank: int) -> Any:
    with torch.set_grad_enabled(rank == 0):
        return model(IDS)


def autocast(model: nn.Module, rank: int) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0):
        return model(IDS)


@pytest.mark.parametrize(("run", "match"), DIFFERENT_CALLS.values(), ids=DIFFERENT_CALLS)
def test_rejects_calls_that_differ_between_ranks(run: Callable[[DeviceMesh, nn.Module], Any], match: str) -> None:
    original = seeded(RotaryDecoder)
    assert match in refused(2, lambda mesh: run(mesh, copy.deepcopy(original)))


def test_ranks_that_exchanged_something_else_before_are_found() -> None:
    original = seeded(RotaryDecoder)

    def run(mesh: DeviceMesh) -> None:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        model(IDS)
        from ulysses_dtensor.region import region_of

        region = region_of(model)
        assert region is not None
        region.history += "x" * mesh.get_local_rank()
        with pytest.raises(PlanError, match=r"the exchanges so far: ranks \[0\] / \[1\] of the group differ"):
            model(IDS)

    run_on_mesh({"sp": 2}, run)


def test_an_error_of_one_rank_is_raised_on_all_with_the_rank_that_found_it() -> None:
    original = seeded(RotaryDecoder)

    def run(mesh: DeviceMesh) -> None:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        model(distribute(IDS, mesh, "b (sp s)") if mesh.get_local_rank() == 1 else IDS)

    message = refused(3, run)
    assert "an input of torch.int64 is cut already" in message
    assert message.endswith("(found on ranks [1] of the sequence group)")


def test_an_error_of_all_ranks_is_raised_as_it_is() -> None:
    original = seeded(RotaryDecoder)

    def run(mesh: DeviceMesh) -> None:
        parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())(distribute(IDS, mesh, "b (sp s)"))

    assert "found on ranks" not in refused(3, run)


def test_checked_at_first_alone_when_asked() -> None:
    original = seeded(RotaryDecoder)

    def run(mesh: DeviceMesh) -> list[list[str]]:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan(check="first", outputs="shard"))
        counts = []
        for _ in range(2):
            with count_collectives() as count:
                model(IDS)
            counts.append(count.kinds)
        return counts

    exchanges = ["all-to-all"] * 4
    assert run_on_mesh({"sp": 2}, run) == [[["all-reduce", *exchanges], exchanges]] * 2


def test_one_rank_alone_asks_nobody() -> None:
    original = seeded(RotaryDecoder)

    def run(mesh: DeviceMesh) -> list[str]:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        with count_collectives() as count:
            model(IDS)
        return [kind for kind in count.kinds if kind == "all-reduce"]

    assert run_on_mesh({"sp": 1}, run) == [[]]


def test_replicas_may_have_inputs_of_their_own() -> None:
    original = seeded(RotaryDecoder)
    expected = [original(ids_of(2, 9, seed=dp)) for dp in range(2)]

    def run(mesh: DeviceMesh) -> torch.Tensor:
        model = parallelize_module(copy.deepcopy(original), mesh["sp"], UlyssesPlan())
        return model(ids_of(2, 9, seed=mesh.get_local_rank("dp"))).detach()

    for rank, logits in enumerate(run_on_mesh({"dp": 2, "sp": 2}, run)):
        torch.testing.assert_close(logits, expected[rank // 2].detach(), rtol=1e-12, atol=1e-12)


# The parts


@given(st.lists(st.floats(allow_nan=True, width=32), min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_a_hash_sees_values_and_their_order(values: list[float], random: Any) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    assert content_hash(x) == content_hash(x.clone())
    other = values.copy()
    random.shuffle(other)
    y = torch.tensor(other, dtype=torch.float32)
    same = torch.equal(x.view(torch.int32), y.view(torch.int32))
    assert (content_hash(x) == content_hash(y)) == same


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
)
def test_every_dtype_and_memory_order_can_be_hashed(dtype: torch.dtype) -> None:
    x = (numbers(3, 5) * 9).to(dtype) if dtype != torch.bool else numbers(3, 5) > 0
    assert content_hash(x) == content_hash(x.t().contiguous().t())
    assert content_hash(x) != content_hash(x.flip(0))
    assert content_hash(torch.zeros(0, dtype=dtype)) == content_hash(torch.zeros(0, 3, dtype=dtype))


def test_many_inputs_are_all_compared() -> None:
    def run(mesh: DeviceMesh, at: int) -> str:
        inputs = [torch.zeros(2) for _ in range(200)]
        inputs[at][1] += mesh.get_local_rank()
        with pytest.raises(PlanError) as raised:
            agree(mesh, problem=None, args=inputs, kwargs={}, facts=(), who="here")
        return str(raised.value)

    assert "input" in run_on_mesh({"sp": 2}, run, 3)[0]
    assert "inputs past the first ones: ranks [0] / [1] of the group differ" in run_on_mesh({"sp": 2}, run, 150)[1]


def test_inputs_that_are_no_tensors_are_compared_too() -> None:
    def run(mesh: DeviceMesh, value: Callable[[int], Any]) -> None:
        agree(mesh, problem=None, args=(), kwargs={"option": value(mesh.get_local_rank())}, facts=(), who="here")

    for value in (lambda rank: rank, lambda rank: bool(rank), lambda rank: "ab"[rank], lambda rank: [None] * rank):
        assert "the inputs' structure: ranks [0] / [1] of the group differ" in refused(
            2, lambda mesh, v=value: run(mesh, v)
        )
    run_on_mesh({"sp": 2}, run, lambda rank: 3)


def test_the_order_of_keywords_does_not_matter() -> None:
    def run(mesh: DeviceMesh) -> None:
        pairs = [("a", torch.zeros(1)), ("b", torch.ones(1))]
        agree(mesh, problem=None, args=(), kwargs=dict(pairs[:: 1 - 2 * mesh.get_local_rank()]), facts=(), who="here")

    run_on_mesh({"sp": 2}, run)
