"""Entering and leaving the sequence region: whole plain tensors, DTensor shards, and the gradients between them.

The contract of gradients. Reducers (FSDP, DDP, ours) average parameters' gradients over the ranks. So where a gradient
goes from a DTensor of the region into a module it is multiplied by P: before the region and inside its modules each rank
holds P times its own tokens' part, after it each rank holds the same whole, and the average is right everywhere. Between
the modules a DTensor's gradient is the global tensor's own, whoever uses that tensor. A plain tensor that enters behind a
place where something left must bring back the whole instead; the gradient's graph tells which of the two it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from ulysses_dtensor.collectives import all_gather, all_reduce_sum
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.layout import chunk
from ulysses_dtensor.passes import graph_nodes, in_reentrant_recompute
from ulysses_dtensor.redistribute import redistribute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T", bound=torch.Tensor)


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
    # A reentrant checkpoint recomputes from a leaf that does not tell; what is right behind a leave is right before, too.
    untold = torch.compiler.is_compiling() or (x.is_leaf and in_reentrant_recompute())
    behind = x.requires_grad and (untold or is_behind_leave(x))
    if dim is None:
        return _Shared.apply(x, mesh) if behind else x
    if behind:
        return _EnterBehind.apply(x, mesh, dim, seq_len)
    return _piece(x.narrow(dim, 0, seq_len), mesh, dim)


def shard(
    local: torch.Tensor, mesh: DeviceMesh, dim: int, seq_len: int, on_backward: Callable[[], None] | None = None
) -> DTensor:
    """Returns the DTensor of global shape whose piece on this rank is `local`, a module's result on its own tokens.

    Cut at `dim` as `torch.chunk` cuts. The gradient is multiplied by P; `on_backward` is called when it arrives (not in
    compiled code, whose results notice elsewhere).
    """
    return _Shard.apply(local, mesh, dim, seq_len, mesh.size(), None if torch.compiler.is_compiling() else on_backward)


def joined(local: torch.Tensor, mesh: DeviceMesh, dim: int, seq_len: int) -> DTensor:
    """Returns the DTensor of global shape whose piece on this rank is `local`; the gradient is as it comes."""
    return _Shard.apply(local, mesh, dim, seq_len, 1, None)


def local_of(x: DTensor) -> torch.Tensor:
    """Returns this rank's piece of a tensor of the region; the gradient is divided by P."""
    _check_way(x)
    return _Local.apply(x)


def leave(x: DTensor, on_backward: Callable[[], None]) -> torch.Tensor:
    """Returns the whole tensor, plain, on every rank; `on_backward` is called when a gradient arrives.

    Communication: one all-gather forward, none backward: the gradient's own slice is taken.
    """
    _check_way(x)
    return _Leave.apply(x, on_backward)


def rejoined(gradient: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """Returns a whole plain gradient, the same on every rank, as that of a tensor of the region."""
    return _wrapped(_piece(gradient, mesh, dim).contiguous(), mesh, dim, gradient.shape[dim])


def noticed(x: T, on_backward: Callable[[], None]) -> T:
    """Returns `x` itself, of which `on_backward` is called when a gradient arrives (not in compiled code)."""
    if isinstance(x, DTensor):
        _check_way(x)
    if x.grad_fn is not None and not torch.compiler.is_compiling():
        x.register_hook(lambda _: on_backward())
    return x


_ENDS = frozenset({"_ShardBackward", "CheckpointFunctionBackward"})


def _check_way(x: DTensor) -> None:
    """Refuses a tensor of the region that went through a custom function of the model's own code, between our own.

    Its backward would see a shard's gradient. Torch's functions, by which hooks and FSDP pass it, may.
    """
    node = None if torch.compiler.is_compiling() else x.grad_fn
    while node is not None and node.name() not in _ENDS:
        kind = getattr(type(node), "_forward_cls", None)
        if kind is not None and kind.__module__.startswith("ulysses_dtensor."):
            return
        if kind is not None and not kind.__module__.startswith("torch."):
            raise PlanError(
                f"UlyssesPlan: the custom autograd function {kind.__name__} is applied to a hidden state between the blocks, "
                "where it is held in shards. Call it inside a module, so that it can be proven to keep tokens apart."
            )
        node = node.next_functions[0][0] if node.next_functions else None


def _wrapped(local: torch.Tensor, mesh: DeviceMesh, dim: int, seq_len: int) -> DTensor:
    shape = torch.Size((*local.shape[:dim], seq_len, *local.shape[dim + 1 :]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)


def _piece(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    start, stop = chunk(0, whole.shape[dim], mesh.size(), mesh.get_local_rank())
    return whole.narrow(dim, start, stop - start)


def _gathered(local: torch.Tensor, mesh: DeviceMesh, dim: int, seq_len: int) -> torch.Tensor:
    shares = [chunk(0, seq_len, mesh.size(), rank) for rank in range(mesh.size())]
    padded = F.pad(local, [*(0, 0) * (local.ndim - dim - 1), 0, shares[0][1] - local.shape[dim]])
    rows = all_gather(padded.reshape(-1), mesh.get_group())
    pieces = (
        row.view(padded.shape).narrow(dim, 0, stop - start) for row, (start, stop) in zip(rows, shares, strict=True)
    )
    return torch.cat(list(pieces), dim)


def _local_gradient(gradient: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Returns this rank's piece of a gradient that arrives as a DTensor, however it is placed."""
    if not isinstance(gradient, DTensor):
        raise PlanError(
            "UlyssesPlan: the gradient of a hidden state arrives as a plain tensor. A custom autograd function in the model's "
            "own code took the hidden state, unseen. Call it inside a module."
        )
    if tuple(gradient.placements) == (Shard(dim),):
        return gradient.to_local()
    names = [f"x{at}" for at in range(gradient.ndim)]
    names[dim] = f"({_axis(mesh)} {names[dim]})"
    return redistribute(gradient, " ".join(names)).to_local()


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        mesh: DeviceMesh,
        dim: int,
        seq_len: int,
        factor: int,
        on_backward: Callable[[], None] | None,
    ) -> DTensor:
        ctx.mesh, ctx.dim, ctx.factor, ctx.on_backward = mesh, dim, factor, on_backward
        return _wrapped(local.detach(), mesh, dim, seq_len)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override] - torch types it *Any
        if ctx.on_backward is not None:
            ctx.on_backward()
        local = _local_gradient(gradient, ctx.mesh, ctx.dim)
        return local if ctx.factor == 1 else local * ctx.factor, None, None, None, None, None


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.mesh, ctx.dim, ctx.seq_len = x.device_mesh, dim_of(x), x.shape[dim_of(x)]
        return x.to_local()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override] - torch types it *Any
        return (_wrapped(gradient / ctx.mesh.size(), ctx.mesh, ctx.dim, ctx.seq_len),)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, on_backward: Callable[[], None]) -> torch.Tensor:
        ctx.mesh, ctx.dim, ctx.on_backward = x.device_mesh, dim_of(x), on_backward
        return _gathered(x.to_local(), x.device_mesh, ctx.dim, x.shape[ctx.dim])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override] - torch types it *Any
        ctx.on_backward()
        return rejoined(gradient, ctx.mesh, ctx.dim), None


class _EnterBehind(torch.autograd.Function):
    """Takes this rank's tokens; the gradient is brought back whole, without the factor P, as what left before expects it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh, dim: int, seq_len: int) -> torch.Tensor:
        ctx.mesh, ctx.dim, ctx.seq_len, ctx.past = mesh, dim, seq_len, x.shape[dim] - seq_len
        return _piece(x.narrow(dim, 0, seq_len), mesh, dim).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override] - torch types it *Any
        whole = _gathered(gradient, ctx.mesh, ctx.dim, ctx.seq_len) / ctx.mesh.size()
        return F.pad(whole, [*(0, 0) * (whole.ndim - ctx.dim - 1), 0, ctx.past]), None, None, None


class _Shared(torch.autograd.Function):
    """Identity for a tensor used whole by every rank behind a leave: the ranks' gradients are averaged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override] - torch types it *Any
        total = gradient.contiguous().clone()
        all_reduce_sum(total, ctx.mesh.get_group())
        return total / ctx.mesh.size(), None


def is_behind_leave(x: torch.Tensor) -> bool:
    """Whether something that left a region is in the graph of `x`; a reentrant checkpoint hides whether it is.

    What a module made of its tokens, and every rank holds whole (a text stream of joint attention), has not left.
    """
    return _stems_from(x, _LEAVING | {"CheckpointFunctionBackward"})


def holds_unannounced(x: torch.Tensor) -> bool:
    """Whether a module's result on its own tokens was made of something that left a region, other than by way of `enter`."""
    return not torch.compiler.is_compiling() and _stems_from(x, _LEAVING)


def _stems_from(x: torch.Tensor, kinds: frozenset[str]) -> bool:
    return any(node.name() in kinds for node in graph_nodes([x], until=_ENTERING))


_ENTERING = frozenset({"_LocalBackward", "_EnterBehindBackward", "_SharedBackward"})
_LEAVING = frozenset({"_ShardBackward", "_LeaveBackward", "_DeferBackward"})


def holds_dtensor(values: Iterable[Any], kinds: tuple[type, ...] = (DTensor,)) -> bool:
    """Whether a DTensor, or another of these kinds, is among some values, or in a list or tuple among them; no parameter is."""
    return any(
        (isinstance(x, kinds) and not isinstance(x, nn.Parameter))
        or (isinstance(x, (list, tuple)) and holds_dtensor(x, kinds))
        for x in values
    )


def _axis(mesh: DeviceMesh) -> str:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names[0]


def dim_of(x: DTensor) -> int:
    """Returns the dim at which a tensor of the region is cut."""
    (placement,) = x.placements
    assert type(placement) is Shard
    return placement.dim


def is_shard_of(x: Any, mesh: object) -> TypeGuard[DTensor]:
    """Whether `x` is a DTensor cut over `mesh`: a hidden state inside the region."""
    return isinstance(x, DTensor) and x.device_mesh == mesh and type(x.placements[0]) is Shard
