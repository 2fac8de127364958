"""When two values of a probe count as equal: by dtype, and by what matrix products round to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ulysses_dtensor.leftovers import tensors_in

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_PLAIN_FLOAT32_TOLERANCE = 1e-5  # without TF32, which keeps ten bits
_LOW_PRECISION_TOLERANCE, _LOW_PRECISION_MEAN_TOLERANCE = 5e-2, 1e-2  # the second sees positions of a usual size


def close(a: torch.Tensor | None, b: torch.Tensor | None, *, summands: Sequence[torch.Tensor] = ()) -> bool:
    """Whether two results are equal to rounding; NaN equals NaN, None only itself.

    `summands` are what the results are sums of: these round, and may cancel; in a float64 model a norm may make them in float32.
    """
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    if a.is_complex():
        return close(torch.view_as_real(a), torch.view_as_real(b), summands=[torch.view_as_real(x) for x in summands])
    if not a.is_floating_point():
        return torch.equal(a, b)
    low = torch.is_autocast_enabled(a.device.type) or a.dtype not in _TOLERANCE
    tolerance = _LOW_PRECISION_TOLERANCE if low else _TOLERANCE[a.dtype]
    if not low and a.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        tolerance = tolerance if a.is_cuda and torch.backends.cudnn.allow_tf32 else _PLAIN_FLOAT32_TOLERANCE
    if summands:
        tolerance = max(tolerance, _PLAIN_FLOAT32_TOLERANCE)
    finite = torch.stack([torch.nan_to_num(x).double() for x in (a, *summands)])
    scale = float(finite.abs().max()) if a.numel() else 1.0
    if not torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True):
        return False
    apart = torch.nan_to_num(a - b).double().norm()
    return not low or float(apart) <= (1 + len(summands)) * _LOW_PRECISION_MEAN_TOLERANCE * float(finite.norm())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit, NaN apart."""
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def alike(a: Any, b: Any) -> bool:
    """Whether two values that a module keeps are equal, in the tensors that they hold too."""
    simple = (bool, int, float, str, type(None))
    if isinstance(a, simple) or isinstance(b, simple):
        return type(a) is type(b) and a == b
    ours, theirs = list(tensors_in(a)), list(tensors_in(b))
    return len(ours) == len(theirs) and all(map(close, ours, theirs))
