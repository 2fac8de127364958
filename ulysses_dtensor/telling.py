"""Values that tell tokens and positions apart: what is constant as initialised would hide from a test how it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_FLAT = 1e-2


def telling(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Returns a copy of `x`, with values that differ from each other where all those of `x` are alike.

    A table of zeros adds nothing, whichever of its rows a module takes; one of ones multiplies by nothing. Floating
    values keep their sign; integers stay between zero and what they were.
    """
    copy = x.detach().clone()
    if copy.device.type == "meta" or copy.is_complex() or not copy.numel() or isinstance(copy, DTensor):
        return copy
    smallest, largest = (float(value) for value in copy.aminmax())
    if not largest - smallest < _FLAT:
        return copy
    factors = torch.rand(copy.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(copy.device)
    if copy.dtype == torch.bool:
        return factors > 0.5
    if not copy.is_floating_point():
        return (factors * (copy + 1)).to(copy.dtype)
    return (copy * (1 + factors) + (abs(largest) < _FLAT) * (0.1 + factors)).to(copy.dtype)


@contextmanager
def telling_parameters(module: nn.Module) -> Iterator[None]:
    """Gives the module's plain parameters telling values while the block runs; those of a DTensor are left alone."""
    kept = []
    try:
        for number, p in enumerate(module.parameters()):
            if isinstance(p, DTensor) or p.device.type == "meta":
                continue
            values = telling(p, seed=number + 1)
            if not torch.equal(values, p):
                kept.append((p, p.detach().clone()))
                p.data.copy_(values)
        yield
    finally:
        for p, values in kept:
            p.data.copy_(values)
