"""`check_parity`: a converted model against itself bypassed, in place, gradients included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ulysses_dtensor.collectives import all_reduce_max, count_collectives
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.leftovers import tensors_in
from ulysses_dtensor.redistribute import redistribute
from ulysses_dtensor.region import Region, bypass, region_of
from ulysses_dtensor.tables import table
from ulysses_dtensor.trees import keystr, tree_flatten_with_path

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 5e-2
_SMALL = 1e-3


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
        return self.error <= self.tolerance


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
    with bypass(model):
        single = _run(model, inputs, loss_fn)
        control = _run(model, inputs, loss_fn)
    with count_collectives() as count:
        parallel = _run(model, inputs, loss_fn)
    problems = []
    if region.ranks == 1 or "all-to-all" not in count.kinds:
        problems.append("nothing ran in parallel: no exchange was made (one rank, or too few tokens for all ranks).")
    if not single.outputs:
        problems.append("nothing was compared: the result holds no tensor that could be found.")
    outputs = _rows(single.outputs, parallel.outputs, control.outputs, region)
    gradients = _rows(single.gradients, parallel.gradients, control.gradients, region)
    buffers = _rows(single.buffers, parallel.buffers, control.buffers, region)
    unsure = [row.name for row in (*outputs, *gradients, *buffers) if not row.control <= row.tolerance]
    if unsure:
        problems.append(
            f"one device twice differs already ({unsure[0]}): the model draws random numbers. Fix their seed."
        )
    if single.gradients and not any(row.largest > 0 for row in gradients):
        problems.append("every gradient is zero: the loss depends on no parameter.")
    missing = [name for name, value in single.gradients.items() if name not in parallel.gradients and bool(value.any())]
    problems += [f"{name} has a gradient on one device and none in parallel." for name in missing]
    return ParityReport((*outputs, *buffers), gradients, tuple(problems))


@dataclass(frozen=True, slots=True)
class _Result:
    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def _run(model: nn.Module, inputs: Any, loss_fn: Callable[[Any], torch.Tensor] | None) -> _Result:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with _kept(model), torch.random.fork_rng(devices):  # every run starts from the same buffers and random state
        return _forward_and_backward(model, inputs, loss_fn)


def _forward_and_backward(model: nn.Module, inputs: Any, loss_fn: Callable[[Any], torch.Tensor] | None) -> _Result:
    for p in model.parameters():
        p.grad = None
    if isinstance(inputs, Mapping):
        result = model(**inputs)
    else:
        result = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    outputs = {f"result{at}": _whole(x) for at, x in _named_tensors(result)}
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
    buffers = {
        name: buffer.detach().clone() for name, buffer in model.named_buffers() if not isinstance(buffer, DTensor)
    }
    return _Result({name: x.detach().clone() for name, x in outputs.items()}, gradients, buffers)


def _named_tensors(result: Any) -> list[tuple[str, torch.Tensor]]:
    found = []
    for path, x in tree_flatten_with_path(result)[0]:
        held = [x] if isinstance(x, torch.Tensor) else list(tensors_in(x))
        found += [(f"{keystr(path)}{f'[{at}]' if len(held) > 1 else ''}", y) for at, y in enumerate(held)]
    return found


def _whole(x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh.ndim == 1 and x.device_mesh.mesh_dim_names is not None:
        return redistribute(x, " ".join(f"x{dim}" for dim in range(x.ndim))).to_local()
    return x.full_tensor()


def _weighted(x: torch.Tensor) -> torch.Tensor:
    """A sum in which every element counts differently, so that no two can be swapped unseen."""
    weights = torch.arange(x.numel(), device=x.device, dtype=torch.float64).add(1).sin().view(x.shape)
    real = torch.view_as_real(x).sum(-1) if x.is_complex() else x
    return (real.double() * weights).sum() / max(1, x.numel()) ** 0.5


def _rows(
    single: dict[str, torch.Tensor], parallel: dict[str, torch.Tensor], control: dict[str, torch.Tensor], region: Region
) -> tuple[Row, ...]:
    figures = []
    sizes = {name: _size(value) for name, value in single.items()}
    overall = max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
    for name, value in single.items():
        largest = sizes[name]
        # What is rounding of zero, as the gradient of a key's bias, is measured against its likes.
        scale = max(largest if math.isfinite(largest) else 0.0, _SMALL * overall) or 1.0
        error = _difference(value, parallel.get(name)) / scale
        figures.append((error, _difference(value, control.get(name)) / scale, largest))
    if not figures:
        return ()
    shared = torch.tensor(figures, dtype=torch.float64, device=region.mesh.device_type)
    all_reduce_max(shared, region.mesh.get_group())
    return tuple(
        Row(name, error, again, _tolerance(value.dtype), largest)
        for (name, value), (error, again, largest) in zip(single.items(), shared.tolist(), strict=True)
    )


def _tolerance(dtype: torch.dtype) -> float:
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0.0
    return _TOLERANCE.get(dtype.to_real() if dtype.is_complex else dtype, _LOW_PRECISION_TOLERANCE)


def _size(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() and x.dtype != torch.bool else 0.0


def _difference(a: torch.Tensor, b: torch.Tensor | None) -> float:
    if b is None:
        return _size(a)
    if a.shape != b.shape:
        return float("inf")
    same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() or a.is_complex() else a == b
    if bool(same.all()):
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return float("inf")
    return float(torch.where(same, 0, (a - b).abs()).nan_to_num(float("inf")).max())


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
