"""Entering and leaving the sequence region: whole plain tensors, DTensor shards, and the gradients between them.

The contract of gradients. Reducers (FSDP, DDP, ours) average parameters' gradients over the ranks. So what leaves the
region multiplies its gradient by P: before and inside the region each rank holds P times its own tokens' part, after it
each rank holds the same whole, and the average is right everywhere. A tensor that enters behind a place where something
left must bring back the whole instead; the gradient's graph tells which of the two it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Shard

from ulysses_dtensor.collectives import all_reduce_sum
from ulysses_dtensor.layout import chunk
from ulysses_dtensor.redistribute import distribute, redistribute

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh


def enter(x: torch.Tensor, mesh: DeviceMesh, dim: int | None, seq_len: int) -> torch.Tensor:
    """Returns this rank's tokens of a plain tensor that every rank holds whole.

    Args:
        x: plain; dim `dim` has at least `seq_len` entries, those past it (a longer table) are left out.
        mesh: one-dimensional.
        dim: the dim of the tokens, or None for a tensor that every rank uses whole.
        seq_len: tokens of the whole sequence.

    Communication: none forward. Backward none before the first place where something left the region; behind one, the
    gradient is gathered (`dim` given) or summed (`dim` None), and divided by P.
    """
    behind = x.requires_grad and (torch.compiler.is_compiling() or _is_behind_leave(x))
    if dim is None:
        return _Shared.apply(x, mesh) if behind else x
    if behind:
        names = [f"x{at}" for at in range(x.ndim)]
        names[dim] = f"({_axis(mesh)} {names[dim]})"
        whole = _Unscaled.apply(x.narrow(dim, 0, seq_len), mesh.size())
        return distribute(whole, mesh, " ".join(names)).to_local()
    start, stop = chunk(0, seq_len, mesh.size(), mesh.get_local_rank())
    return x.narrow(dim, start, stop - start)


def shard(local: torch.Tensor, mesh: DeviceMesh, dim: int, seq_len: int) -> DTensor:
    """Returns the DTensor of global shape whose piece on this rank is `local`, cut at `dim` as `torch.chunk` cuts."""
    shape = torch.Size((*local.shape[:dim], seq_len, *local.shape[dim + 1 :]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)


def leave(x: DTensor, on_backward: Callable[[], None] | None = None) -> torch.Tensor:
    """Returns the whole tensor, plain, on every rank.

    Communication: one all-gather forward, none backward: the gradient's own slice is taken and multiplied by P.
    """
    return _Leave.apply(x, on_backward)


def scaled(x: DTensor, on_backward: Callable[[], None] | None = None) -> DTensor:
    """Returns `x` for use outside the region: a global tensor, whose gradient is multiplied by P on the way back."""
    return _Scaled.apply(x, on_backward)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, on_backward: Callable[[], None] | None) -> torch.Tensor:
        ctx.mesh, ctx.placements, ctx.on_backward = x.device_mesh, x.placements, on_backward
        return redistribute(x, " ".join(f"x{dim}" for dim in range(x.ndim))).to_local()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override] - torch types it *Any
        if ctx.on_backward is not None:
            ctx.on_backward()
        (placement,) = ctx.placements
        seq_len = gradient.shape[placement.dim]
        start, stop = chunk(0, seq_len, ctx.mesh.size(), ctx.mesh.get_local_rank())
        piece = gradient.narrow(placement.dim, start, stop - start) * ctx.mesh.size()
        return shard(piece, ctx.mesh, placement.dim, seq_len), None


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, on_backward: Callable[[], None] | None) -> DTensor:
        ctx.ranks, ctx.on_backward = x.device_mesh.size(), on_backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Any, ...]:  # type: ignore[override] - torch types it *Any
        if ctx.on_backward is not None:
            ctx.on_backward()
        return gradient * ctx.ranks, None


class _Unscaled(torch.autograd.Function):
    """Identity whose gradient is divided by P: undoes the factor where the whole gradient is brought back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override] - torch types it *Any
        return gradient / ctx.ranks, None


class _Shared(torch.autograd.Function):
    """Identity for a tensor used whole by every rank behind a leave: the ranks' gradients are averaged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override] - torch types it *Any
        total = gradient.contiguous().clone()
        all_reduce_sum(total, ctx.mesh.get_group())
        return total / ctx.mesh.size(), None


def _is_behind_leave(x: torch.Tensor) -> bool:
    pending, seen = [x.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if node.name() in ("_LeaveBackward", "_ScaledBackward"):
            return True
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)
    return False


def _axis(mesh: DeviceMesh) -> str:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names[0]


def is_shard_of(x: Any, mesh: DeviceMesh) -> bool:
    """Whether `x` is a DTensor cut over `mesh`: a hidden state inside the region."""
    return isinstance(x, DTensor) and x.device_mesh == mesh and type(x.placements[0]) is Shard



