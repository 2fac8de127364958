"""`check_parity`: a converted model against itself bypassed, in place, gradients included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from ulysses_dtensor.collectives import all_reduce_max, count_collectives
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.redistribute import redistribute
from ulysses_dtensor.region import Region, bypass, region_of
from ulysses_dtensor.tables import table

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 5e-2


@dataclass(frozen=True, slots=True)
class Row:
    """One compared tensor: largest difference relative to the largest value, parallel and one device twice."""

    name: str
    error: float
    control: float
    tolerance: float
    largest: float

    @property
    def passed(self) -> bool:
        """Whether the difference is rounding."""
        return self.error <= self.tolerance + 10 * self.control


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What `check_parity` found; `str` is a table, `passed` the verdict, the same on every rank of the group."""

    outputs: tuple[Row, ...]
    gradients: tuple[Row, ...]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether everything equals one device's and the comparison could have failed."""
        return not self.problems and all(row.passed for row in (*self.outputs, *self.gradients))

    @property
    def output_error(self) -> float:
        """Largest relative error of an output."""
        return max((row.error for row in self.outputs), default=0.0)

    @property
    def gradient_error(self) -> float:
        """Largest relative error of a gradient."""
        return max((row.error for row in self.gradients), default=0.0)

    def __str__(self) -> str:
        rows = [
            (
                kind,
                row.name,
                f"{row.error:.1e}",
                f"{row.control:.1e}",
                f"{row.tolerance:.0e}",
                "ok" if row.passed else "DIFFERS",
            )
            for kind, group in (("output", self.outputs), ("gradient", self.gradients))
            for row in group
        ]
        title = f"parity {'passed' if self.passed else 'FAILED'}" + "".join(f"\n{problem}" for problem in self.problems)
        return table(("", "tensor", "relative error", "one device twice", "tolerance", ""), rows, title=title)


def check_parity(model: nn.Module, inputs: Any, loss_fn: Callable[[Any], torch.Tensor] | None = None) -> ParityReport:
    """Returns how a converted model's outputs and gradients differ from its own, run on one device, on real inputs.

    Runs the model bypassed twice (the second is the control) and parallel once, and puts gradients and buffers back as
    they were. Every rank of the group calls it.

    Args:
        model: a converted model, with or without FSDP2 or DDP around it.
        inputs: a tuple of positional, a mapping of keyword arguments, or one tensor; whole on every rank.
        loss_fn: maps the model's result to a scalar. None: the result's `loss`, else a weighted sum of all outputs.

    Raises:
        PlanError: nothing is converted, or dropout is on (it is equal in distribution only).

    Communication: that of the three runs, and one small all-reduce.
    """
    region = next((found for module in model.modules() if (found := region_of(module)) is not None), None)
    if region is None:
        raise PlanError(f"check_parity: {type(model).__name__} is not converted. Call parallelize_module first.")
    dropouts = [
        name for name, m in model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p
    ]
    if dropouts:
        raise PlanError(
            f"check_parity: {dropouts[0]} drops at random (one of {len(dropouts)}), which is equal in distribution only. "
            "Call model.eval() first, or set p=0."
        )
    with _kept(model):
        with bypass(model):
            single = _run(model, inputs, loss_fn)
            control = _run(model, inputs, loss_fn)
        with count_collectives() as count:
            parallel = _run(model, inputs, loss_fn)
    problems = []
    if region.ranks == 1 or "all-to-all" not in count.kinds:
        problems.append("nothing ran in parallel: no exchange was made (one rank, or too few tokens for all ranks).")
    outputs = _rows(single.outputs, parallel.outputs, control.outputs, region)
    gradients = _rows(single.gradients, parallel.gradients, control.gradients, region)
    if single.gradients and not any(row.largest > 0 for row in gradients):
        problems.append("every gradient is zero: the loss depends on no parameter.")
    missing = [name for name, value in single.gradients.items() if name not in parallel.gradients and bool(value.any())]
    problems += [f"{name} has a gradient on one device and none in parallel." for name in missing]
    return ParityReport(outputs, gradients, tuple(problems))


@dataclass(frozen=True, slots=True)
class _Result:
    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def _run(model: nn.Module, inputs: Any, loss_fn: Callable[[Any], torch.Tensor] | None) -> _Result:
    for p in model.parameters():
        p.grad = None
    if isinstance(inputs, Mapping):
        result = model(**inputs)
    else:
        result = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    outputs = {
        f"result{keystr(path)}": _whole(x)
        for path, x in tree_flatten_with_path(result)[0]
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    if loss_fn is not None:
        loss = loss_fn(result)
        outputs["loss"] = loss
    elif isinstance(getattr(result, "loss", None), torch.Tensor):
        loss = result.loss
    else:
        loss = torch.stack([_weighted(x) for x in outputs.values() if x.requires_grad] or [torch.zeros(())]).sum()
    if loss.requires_grad:
        loss.backward()
    gradients = {name: _whole(p.grad).detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return _Result({name: x.detach().clone() for name, x in outputs.items()}, gradients)


def _whole(x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh.ndim == 1 and x.device_mesh.mesh_dim_names is not None:
        return redistribute(x, " ".join(f"x{dim}" for dim in range(x.ndim))).to_local()
    return x.full_tensor()


def _weighted(x: torch.Tensor) -> torch.Tensor:
    """A sum in which every element counts differently, so that no two can be swapped unseen."""
    weights = torch.arange(x.numel(), device=x.device, dtype=torch.float64).sin().view(x.shape)
    return (x.double() * weights).sum() / max(1, x.numel()) ** 0.5


def _rows(
    single: dict[str, torch.Tensor], parallel: dict[str, torch.Tensor], control: dict[str, torch.Tensor], region: Region
) -> tuple[Row, ...]:
    figures = []
    for name, value in single.items():
        largest = float(value.abs().max()) if value.numel() else 0.0
        scale = largest or 1.0
        error = _difference(value, parallel.get(name)) / scale
        figures.append((error, _difference(value, control.get(name)) / scale, largest))
    if not figures:
        return ()
    shared = torch.tensor(figures, dtype=torch.float64, device=region.mesh.device_type)
    all_reduce_max(shared, region.mesh.get_group())
    return tuple(
        Row(name, error, again, _TOLERANCE.get(value.dtype, _LOW_PRECISION_TOLERANCE), largest)
        for (name, value), (error, again, largest) in zip(single.items(), shared.tolist(), strict=True)
    )


def _difference(a: torch.Tensor, b: torch.Tensor | None) -> float:
    if b is None:
        return float(a.abs().max()) if a.numel() else 0.0
    if a.shape != b.shape:
        return float("inf")
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs()).nan_to_num(float("inf"))
    return float(difference.max()) if a.numel() else 0.0


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
