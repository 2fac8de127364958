"""Values that tell tokens and positions apart: what is constant as initialised would hide from a test how it is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import CausalBias

_FLAT = 1e-2
_ROWS, _MANY = 16, 0.25


def telling(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Returns a copy of `x`, with values that differ from each other where those of `x` are alike, or most rows are.

    A table of zeros adds nothing, whichever of its rows a module takes; one of ones multiplies by nothing; a mask with two
    padded tokens mostly keeps. Floating values keep their sign; integers stay between those that there were, or between
    zero and what all were.
    """
    if isinstance(x, CausalBias):  # its values are nowhere
        return x
    copy = x.detach().clone()
    if copy.device.type == "meta" or copy.is_complex() or not copy.numel() or isinstance(copy, DTensor):
        return copy
    smallest, largest = (float(value) for value in copy.aminmax())
    if not largest - smallest < _FLAT and not _has_equal_rows(copy):
        return copy
    factors = torch.rand(copy.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(copy.device)
    if copy.dtype == torch.bool:
        return factors > 0.5
    if not copy.is_floating_point():
        low, high = (min(smallest, 0.0), largest) if smallest == largest else (smallest, largest)
        return (low + factors * (max(high - low, 1.0) + 1)).floor().to(copy.dtype)
    return (copy * (1 + factors) + (abs(largest) < _FLAT) * (0.1 + factors)).to(copy.dtype)


def _has_equal_rows(x: torch.Tensor) -> bool:
    """Whether, along a dim that may be tokens, many of the first rows, or of some spread over all, equal the next."""
    for dim, size in enumerate(x.shape):
        if size < _ROWS // 2:
            continue
        spread = {at * (size - 1) // _ROWS for at in range(_ROWS + 1)}
        for rows in (sorted({*range(min(size, _ROWS))}), sorted(spread)):
            some = x.index_select(dim, torch.tensor(rows, device=x.device)).movedim(dim, 0).reshape(len(rows), -1)
            if float((some[1:] == some[:-1]).all(1).double().mean()) > _MANY:
                return True
    return False


@contextmanager
def telling_values(module: nn.Module, others: Iterable[torch.Tensor]) -> Iterator[None]:
    """Gives the module's plain parameters, and some other tensors, telling values while the block runs.

    Those of a DTensor are left alone.
    """
    kept = []
    try:
        for number, p in enumerate((*module.parameters(), *others)):
            if isinstance(p, DTensor) or p.device.type == "meta" or p.is_inference():
                continue
            values = telling(p, seed=number + 1)
            if not torch.equal(values, p):
                kept.append((p, p.detach().clone()))
                p.data.copy_(values)
        yield
    finally:
        for p, values in kept:
            p.data.copy_(values)
