"""Runs of a model on one device and on simulated ranks, compared number by number; refusals seen on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from model_zoo import loss_of, weighted
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ulysses_dtensor import PlanError, UlyssesPlan, count_collectives, parallelize_module
from ulysses_dtensor.testing import full_value, local_by_torch_chunk, run_on_mesh

Loss = Callable[[Any], torch.Tensor]
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Run:
    """What a forward and backward came to; outputs are whole."""

    loss: torch.Tensor
    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


def on_one_device(model: nn.Module, inputs: Mapping[str, Any], loss_fn: Loss = loss_of) -> Run:
    model = copy.deepcopy(model)
    result = call(model, inputs)
    loss = loss_fn(result)
    loss.backward()
    return Run(loss.detach(), whole(result), gradients_of(model), buffers_of(model))


def in_parallel(
    mesh: DeviceMesh, model: nn.Module, inputs: Mapping[str, Any], plan: Callable[[], Any], loss_fn: Loss
) -> Run:
    model = parallelize_module(copy.deepcopy(model), mesh, plan())
    with count_collectives() as forth:
        result = call(model, inputs)
    leaves = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    own = any(isinstance(x, DTensor) for x in leaves) and all(x.ndim for x in leaves)
    loss = loss_of_shards(result) if own else loss_fn(result)
    with count_collectives() as back:
        loss.backward()
    value = loss.detach().clone()
    if own:
        dist.all_reduce(value)
    return Run(value, whole(result), gradients_of(model), buffers_of(model), tuple(forth.kinds), tuple(back.kinds))


def call(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Calls by keyword, or by position where the model takes no names."""
    return model(*inputs.values()) if isinstance(model, nn.Sequential) else model(**inputs)


def whole(result: Any) -> list[torch.Tensor]:
    leaves = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    return [full_value(x) if isinstance(x, DTensor) else x.detach() for x in leaves]


def loss_of_shards(result: Any) -> torch.Tensor:
    """Returns this rank's part of `loss_of`: its own tokens over the global count."""
    total = torch.zeros(())
    for seed, x in enumerate(x for x in tree_leaves(result) if isinstance(x, torch.Tensor)):
        weights = weighted(torch.empty(x.shape, dtype=x.dtype), seed)
        if isinstance(x, DTensor):
            names = [f"x{at}" for at in range(x.ndim)]
            dim = x.placements[0].dim  # type: ignore[attr-defined] - a Shard
            names[dim] = f"({(x.device_mesh.mesh_dim_names or ('sp',))[0]} {names[dim]})"
            weights = local_by_torch_chunk(
                weights, " ".join(names), x.device_mesh, x.device_mesh.get_coordinate() or ()
            )
            total = total + (x.to_local() * weights).sum() / x.numel()
        else:
            own = (
                x * weights
            ).sum() / x.numel()  # every rank holds all of it: its whole gradient, its share of the sum
            total = total + own - own.detach() * (1 - 1 / dist.get_world_size())
    return total


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_runs_equal(run: Run, reference: Run, tolerance: float = TOLERANCE) -> None:
    """Checks loss, outputs, gradients and buffers; a gradient that one device leaves out is all zeros here."""
    assert len(run.outputs) == len(reference.outputs)
    assert run.gradients.keys() == reference.gradients.keys()
    assert_close(run.loss, reference.loss, "loss", tolerance)
    for number, (x, expected) in enumerate(zip(run.outputs, reference.outputs, strict=True)):
        assert_close(x, expected, f"output {number}", tolerance)
    largest = max((float(g.abs().max()) for g in reference.gradients.values() if g is not None), default=1.0)
    for name, expected in reference.gradients.items():
        gradient = run.gradients[name]
        if gradient is None or expected is None:
            assert gradient is None or not gradient.any(), f"gradient of {name}, which one device leaves out"
            assert expected is None or not expected.any(), f"gradient of {name} is missing"
            continue
        # What cancels to zero on one device may be rounding here: a floor far below any gradient of note.
        assert_close(gradient, expected, f"gradient of {name}", tolerance, floor=1e-4 * largest)
    for name, expected in reference.buffers.items():
        if expected.is_floating_point():
            assert_close(run.buffers[name], expected, f"buffer {name}", tolerance, floor=1.0)
        else:
            assert torch.equal(run.buffers[name], expected), f"buffer {name}"


def assert_close(x: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float, floor: float = 1e-300) -> None:
    assert x.shape == expected.shape, what
    assert x.dtype == expected.dtype, what
    if x.numel():
        assert not (torch.isnan(x) ^ torch.isnan(expected)).any(), f"{what}: NaN"
        x, expected = x.nan_to_num(), expected.nan_to_num()
        error = float((x - expected).abs().max()) / max(float(expected.abs().max()), floor)
        assert error <= tolerance, f"{what}: relative error {error:.1e}"


def assert_equals_one_device(
    model: nn.Module,
    inputs: Mapping[str, Any],
    ranks: int,
    *,
    plan: Callable[[], Any] = UlyssesPlan,
    loss_fn: Loss = loss_of,
) -> Run:
    """Checks every rank's run against one device and returns rank 0's."""
    reference = on_one_device(model, inputs, loss_fn)
    runs = run_on_mesh({"sp": ranks}, in_parallel, model, inputs, plan, loss_fn)
    for run in runs:
        assert_runs_equal(run, reference)
    return runs[0]


def refusal(mesh: DeviceMesh, action: Callable[[DeviceMesh], Any]) -> tuple[str, list[str]] | None:
    """Returns the PlanError of an action on this rank and the collectives until then."""
    with count_collectives() as count:
        try:
            action(mesh)
        except PlanError as error:
            return str(error), count.kinds
    return None


def refused(ranks: int, action: Callable[[DeviceMesh], Any], *, sizes: Mapping[str, int] | None = None) -> str:
    """Returns the message of an action that every rank refuses alike, before any exchange."""
    seen = run_on_mesh(sizes or {"sp": ranks}, refusal, action)
    assert all(each is not None for each in seen), f"not refused: {seen}"
    messages = {message for message, _ in seen if message}  # type: ignore[misc] - none is None
    assert len(messages) == 1, messages
    for _, kinds in seen:  # type: ignore[misc]
        assert "all-to-all" not in kinds, kinds
    return messages.pop()


def refused_model(
    model: nn.Module, inputs: Mapping[str, Any], ranks: int = 2, plan: Callable[[], Any] = UlyssesPlan
) -> str:
    """Returns the message with which every rank refuses to convert or to run a model."""
    return refused(ranks, lambda mesh: call(parallelize_module(copy.deepcopy(model), mesh, plan()), inputs))
