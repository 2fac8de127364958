"""Logits on their way to a loss: views of a region's tensor that need not be gathered if a cross entropy follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from ulysses_dtensor.boundary import dim_of, noticed, rejoined
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.loss import cross_entropy

_CASTS = frozenset({"float", "double", "half", "bfloat16", "to", "type", "type_as", "contiguous"})
_FLATTENERS = frozenset({"view", "reshape", "flatten"})


class Deferred(torch.Tensor):
    """Tokens `[start, stop)` of logits (B, S, V), whole in shape, in shards in memory; rows (B * S, V) if `flat`.

    Only `Tail` makes and takes them: a cross entropy is computed on each rank's tokens, anything else gets the whole tensor.
    """

    base: DTensor
    start: int
    stop: int
    flat: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType] - how torch itself switches it off

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise PlanError(
            f"UlyssesPlan: some of a hidden state's tokens, or a flattened view of it, are used where they cannot be followed "
            f"({func}): in a checkpoint of a function, or after the model's forward. Make the function a module's forward, or "
            "leave out the checkpoint."
        )

    def whole(self, gather: Callable[[DTensor], torch.Tensor]) -> torch.Tensor:
        """Returns the plain tensor that one device would hold, `gather` giving the base whole."""
        part = gather(self.base)[:, self.start : self.stop]
        return part.flatten(0, 1) if self.flat else part


def _deferred(base: DTensor, start: int, stop: int, on_backward: Callable[[], None], *, flat: bool) -> Deferred:
    made = _Defer.apply(base, start, stop, flat, on_backward)
    made.base, made.start, made.stop, made.flat = base, start, stop, flat
    return made


def flat_rows(base: DTensor, on_backward: Callable[[], None]) -> Deferred:
    """Returns all tokens of a region's tensor (B, S, V), cut at dim 1, as rows (B * S, V)."""
    return _deferred(base, 0, base.shape[1], on_backward, flat=True)


class _Defer(torch.autograd.Function):
    """The view itself. A gradient arrives here only where code unseen took it: a custom function, hooks of modules, FSDP."""

    @staticmethod
    def forward(
        ctx: Any, base: DTensor, start: int, stop: int, flat: bool, on_backward: Callable[[], None]
    ) -> torch.Tensor:
        batch, seq_len, size = base.shape
        ctx.mesh, ctx.rows, ctx.past, ctx.flat = base.device_mesh, (batch, stop - start), (start, seq_len - stop), flat
        ctx.on_backward = on_backward
        shape = (batch * (stop - start), size) if flat else (batch, stop - start, size)
        return torch.Tensor._make_wrapper_subclass(Deferred, shape, dtype=base.dtype, device=base.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override] - torch types it *Any
        ctx.on_backward()
        gradient = gradient.unflatten(0, ctx.rows) if ctx.flat else gradient
        return rejoined(F.pad(gradient, (0, 0, *ctx.past)), ctx.mesh, 1), None, None, None, None


def defer(
    func: Callable[..., Any],
    name: str,
    args: Any,
    kwargs: Any,
    *,
    elementwise: Callable[..., DTensor | None],
    on_backward: Callable[[], None],
) -> Any:
    """Returns what `func` gives where that can stay in shards, None where it cannot.

    Args:
        func: the function called.
        name: its name.
        args: the first is a region's tensor of logits (B, S, V) cut at dim 1, or a `Deferred`.
        kwargs: the rest.
        elementwise: applies a function to a region's tensor shard by shard.
        on_backward: called when a gradient enters the region.
    """
    x = args[0] if args else None
    if isinstance(x, DTensor) and not isinstance(x, Deferred):
        if x.ndim != 3 or dim_of(x) != 1:
            return None
        x = _deferred(x, 0, x.shape[1], on_backward, flat=False)
    if not isinstance(x, Deferred) or any(
        isinstance(other, (DTensor, Deferred)) for other in (*args[1:], *kwargs.values())
    ):
        return None
    if func is F.cross_entropy:
        return _cross_entropy(x, *args[1:], **kwargs, on_backward=on_backward)
    if name in _CASTS:
        cast = elementwise(func, x.base, (x.base, *args[1:]), kwargs)
        return None if cast is None else _deferred(cast, x.start, x.stop, on_backward, flat=x.flat)
    if name == "__getitem__" and not x.flat:
        return _slice(x, args[1], on_backward)
    if name in _FLATTENERS:
        return _flatten(func, x, args, kwargs, on_backward)
    return None


def _slice(x: Deferred, index: Any, on_backward: Callable[[], None]) -> Deferred | DTensor | None:
    """Handles `x[:, a:b]`, `x[:, a:b, :]` and `x[..., a:b, :]`."""
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index[at : at + 1] = [slice(None)] * (3 - len(index) + 1)
    index += [slice(None)] * (3 - len(index))
    if (
        len(index) != 3
        or not all(isinstance(part, slice) for part in index)
        or index[0] != slice(None)
        or index[2] != slice(None)
    ):
        return None
    start, stop, step = index[1].indices(x.stop - x.start)
    if (x.start + start, x.start + stop, step) == (0, x.base.shape[1], 1):
        return x.base
    if step != 1:
        return None
    return _deferred(x.base, x.start + start, x.start + max(start, stop), on_backward, flat=False)


def _flatten(
    func: Callable[..., Any], x: Deferred, args: Any, kwargs: Any, on_backward: Callable[[], None]
) -> Deferred | DTensor | None:
    wanted = func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *args[1:], **kwargs).shape
    if tuple(wanted) == tuple(x.base.shape) and (x.start, x.stop) == (0, x.base.shape[1]):
        return x.base
    rows = (x.base.shape[0] * (x.stop - x.start), x.base.shape[2])
    return _deferred(x.base, x.start, x.stop, on_backward, flat=True) if tuple(wanted) == rows else None


def _cross_entropy(
    x: Deferred,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    on_backward: Callable[[], None],
) -> torch.Tensor | None:
    batch, seq_len, _ = x.base.shape
    tokens = x.stop - x.start
    if not x.flat or weight is not None or size_average is not None or reduce is not None or label_smoothing:
        return None
    if reduction not in ("mean", "sum") or target.is_floating_point() or tuple(target.shape) != (batch * tokens,):
        return None
    labels = F.pad(target.view(batch, tokens), (x.start, seq_len - x.stop), value=ignore_index)
    return cross_entropy(noticed(x.base, on_backward), labels, ignore_index=ignore_index, reduction=reduction)
