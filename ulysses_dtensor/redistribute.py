"""`distribute` and `redistribute`: apply a transition to tensors that carry layouts as placements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ulysses_dtensor.collectives import all_gather, all_reduce_sum, group_of
from ulysses_dtensor.errors import LayoutError
from ulysses_dtensor.exchange import cut, move
from ulysses_dtensor.layout import Layout, LayoutLike, MeshSizes, as_layout, mesh_sizes
from ulysses_dtensor.notation import ELLIPSIS, Axis, render
from ulysses_dtensor.route import Route, volume
from ulysses_dtensor.transition import Transition

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def distribute(x: torch.Tensor, mesh: DeviceMesh, layout: LayoutLike) -> DTensor:
    """Returns `x` held in `layout`: every rank passes the same whole `x` and keeps its piece.

    Args:
        x: plain tensor of the global shape, equal on all ranks of the mesh.
        mesh: a `DeviceMesh` with named dimensions.
        layout: for example `"b (sp s) h d"`.

    Returns:
        A DTensor of the global shape of `x` with the layout's placements.

    Raises:
        LayoutError: the layout does not fit the mesh or the shape, or `x` is a DTensor already.

    Communication: none forward; backward gathers the gradient, so that it is whole on every rank like `x`.
    """
    if isinstance(x, DTensor):
        raise LayoutError(f"distribute: x is a DTensor already, placed {x.placements}. Use redistribute.")
    layout = as_layout(layout)
    layout.local_shape(x.shape, mesh)
    whole = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return redistribute(whole, layout)


@overload
def redistribute(x: DTensor, layout: LayoutLike) -> DTensor: ...
@overload
def redistribute(x: Sequence[DTensor], layout: LayoutLike | Sequence[LayoutLike]) -> tuple[DTensor, ...]: ...
def redistribute(
    x: DTensor | Sequence[DTensor], layout: LayoutLike | Sequence[LayoutLike]
) -> DTensor | tuple[DTensor, ...]:
    """Returns `x` brought to `layout`, equal in global value; several tensors share their collectives.

    The layout names the tensor axes of `x` in order; what `x` is held in is read from its placements. Differentiable:
    the gradient takes the way back.

    Args:
        x: a DTensor placed `Shard` or `Replicate` on a mesh with named dimensions, or several of them on one mesh.
        layout: the layout wanted; for several tensors one for all or one for each.

    Returns:
        A DTensor of the same global shape in the layout's placements, or a tuple of them; `x` itself where it is placed
        so already.

    Raises:
        LayoutError: `x` is no DTensor, is `Partial` or strided, or a layout does not fit its tensor and mesh.

    Communication: the steps of `Transition(src, layout, ...)` forward, those of its reverse backward. Tensors whose
    steps are alike go in one all-to-all (one for each dtype among them). A gradient that comes as `Partial` is summed
    first, one all-reduce for each such mesh axis.

    Example:
        q, k, v = redistribute((q, k, v), "b s (sp h) d")
    """
    single = isinstance(x, torch.Tensor)
    tensors = (x,) if isinstance(x, torch.Tensor) else tuple(x)
    layouts = (
        (as_layout(layout),) * len(tensors)
        if isinstance(layout, (str, Layout))
        else tuple(as_layout(item) for item in layout)
    )
    if len(layouts) != len(tensors):
        raise LayoutError(
            f"redistribute: {len(tensors)} tensors and {len(layouts)} layouts. Pass one layout, or one for each."
        )
    if not tensors:
        return ()
    transitions = tuple(_transition(tensor, dst) for tensor, dst in zip(tensors, layouts, strict=True))
    mesh = tensors[0].device_mesh
    for index, tensor in enumerate(tensors):
        if tensor.device_mesh != mesh:
            raise LayoutError(
                f"redistribute: tensor {index} is on {tensor.device_mesh}, tensor 0 on {mesh}. Move them apart."
            )
    _check_local(tensors, mesh, transitions)
    outputs = _move(tensors, mesh, transitions)
    return outputs[0] if single else outputs


def layout_of(x: DTensor, names: LayoutLike) -> Layout:
    """Returns the layout in which `x` is held, its tensor axes named as in `names`.

    A dim that `names` leaves unnamed (`...`, `1`) gets a name of its own, since any dim may be cut.

    Raises:
        LayoutError: a placement is neither `Shard` nor `Replicate`, or the mesh has no dimension names.
    """
    sizes = mesh_sizes(x.device_mesh)
    mesh_axes: dict[int, list[str]] = {}
    for (name, _), placement in zip(sizes, x.placements, strict=True):
        if type(placement) is Shard:
            mesh_axes.setdefault(placement.dim, []).append(name)
        elif type(placement) is not Replicate:
            remedy = "Reduce it first" if isinstance(placement, Partial) else "Bring it to Shard or Replicate first"
            raise LayoutError(f"layout_of: x is placed {placement!r} on {name!r}, which no layout can say. {remedy}.")
    axes = _named(as_layout(names), x.ndim, sizes).axes
    return Layout(render(tuple(Axis(axis.name, tuple(mesh_axes.get(dim, ()))) for dim, axis in enumerate(axes))))


@lru_cache(maxsize=1024)
def _named(layout: Layout, ndim: int, sizes: MeshSizes) -> Layout:
    """Returns `layout` with a name for each of `ndim` dims."""
    taken = {*layout.names, *(name for name, _ in sizes)}
    axes = []
    for dim, axis in enumerate(layout.expand(ndim)):
        name = axis.name
        if name in (ELLIPSIS, "1"):
            name = f"dim{dim}"
            while name in taken:
                name += "x"
        axes.append(Axis(name, axis.mesh_axes))
    return Layout(render(tuple(axes)))


def _transition(x: DTensor, dst: Layout) -> Transition:
    if not isinstance(x, DTensor):
        raise LayoutError(
            f"redistribute: x is a {type(x).__name__}, not a DTensor. Place it with distribute, or with from_local."
        )
    try:
        sizes = mesh_sizes(x.device_mesh)
        dst.local_box(x.shape, sizes, (0,) * len(sizes))
        named = _named(dst, x.ndim, sizes)
        return Transition(layout_of(x, named), named, x.shape, sizes, itemsize=x.element_size())
    except LayoutError as error:
        raise LayoutError(
            f"redistribute: to {dst.text!r}, global shape {tuple(x.shape)}, placements {x.placements}: {error}"
        ) from error


def _check_local(tensors: Sequence[DTensor], mesh: DeviceMesh, transitions: Sequence[Transition]) -> None:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(f"redistribute: this rank is not part of {mesh}. Call it on the mesh's ranks alone.")
    for tensor, transition in zip(tensors, transitions, strict=True):
        held = tuple(tensor.to_local().shape)
        expected = transition.src.local_shape(transition.shape, transition.mesh, coordinate)
        if held != expected:
            raise LayoutError(
                f"redistribute: this rank holds {held} of global shape {transition.shape}, torch.chunk gives it "
                f"{expected}. Cut the tensor with distribute, or give from_local pieces as torch.chunk makes them."
            )


def _move(tensors: Sequence[DTensor], mesh: DeviceMesh, transitions: Sequence[Transition]) -> tuple[DTensor, ...]:
    """Applies each transition to its tensor; one that is placed as wanted is returned as it is."""
    outputs = list(tensors)
    moving = [
        index
        for index, (x, transition) in enumerate(zip(tensors, transitions, strict=True))
        if transition.dst.placements(transition.mesh, x.ndim) != tuple(x.placements)
    ]
    if moving:
        planned = tuple(transitions[index] for index in moving)
        moved = _Redistribute.apply(mesh, planned, *(tensors[index] for index in moving))
        for index, output in zip(moving, moved, strict=True):
            outputs[index] = output
    return tuple(outputs)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mesh: DeviceMesh, transitions: tuple[Transition, ...], *tensors: DTensor
    ) -> tuple[DTensor, ...]:
        ctx.mesh, ctx.transitions = mesh, transitions
        ctx.kinds = tuple((x.dtype, x.device) for x in tensors)
        ctx.differentiable = tuple(x.is_floating_point() or x.is_complex() for x in tensors)
        ctx.set_materialize_grads(False)  # they would be plain tensors
        outputs = _apply(tensors, mesh, transitions)
        ctx.mark_non_differentiable(*(out for out, ok in zip(outputs, ctx.differentiable, strict=True) if not ok))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[Any, ...]:
        kept = [index for index, ok in enumerate(ctx.differentiable) if ok]
        back, held = [], []
        for index in kept:
            forth, given = ctx.transitions[index], gradients[index]
            # An output that nobody used sends zeros: what is exchanged must not depend on one rank's graph.
            gradient = _zeros(ctx.mesh, forth, *ctx.kinds[index]) if given is None else _summed(given)
            src = layout_of(gradient, forth.dst)
            back.append(Transition(src, forth.src, forth.shape, forth.mesh, itemsize=forth.itemsize))
            held.append(gradient)
        inputs: list[DTensor | None] = [None] * len(ctx.transitions)
        for index, gradient in zip(kept, _move(held, ctx.mesh, back), strict=True):
            inputs[index] = gradient
        return None, None, *inputs


def _zeros(mesh: DeviceMesh, transition: Transition, dtype: torch.dtype, device: torch.device) -> DTensor:
    local = torch.zeros(transition.dst.local_shape(transition.shape, mesh), dtype=dtype, device=device)
    return _wrap(local, mesh, transition)


def _wrap(local: torch.Tensor, mesh: DeviceMesh, transition: Transition) -> DTensor:
    """Returns a DTensor of the transition's result; `local` is contiguous, and so is the whole that it stands for."""
    placements = transition.dst.placements(transition.mesh, local.ndim)
    stride = tuple(prod(max(size, 1) for size in transition.shape[dim + 1 :]) for dim in range(local.ndim))
    shape = torch.Size(transition.shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _summed(gradient: DTensor) -> DTensor:
    """Returns a gradient whose `Partial` placements are summed over their mesh axes; most have none."""
    for placement in gradient.placements:
        if placement.is_partial() and placement != Partial("sum"):
            raise LayoutError(
                f"redistribute: a gradient is placed {placement!r}; only sums can be reduced on the way back. "
                "Give to_local grad_placements that are Shard, Replicate or Partial('sum')."
            )
    return _Sum.apply(gradient) if any(placement.is_partial() for placement in gradient.placements) else gradient


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        local = x.to_local().clone(memory_format=torch.contiguous_format)
        placements = list(x.placements)
        for dim, placement in enumerate(x.placements):
            if placement.is_partial():
                all_reduce_sum(local, x.device_mesh.get_group(dim))
                placements[dim] = Replicate()
        return DTensor.from_local(local, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> DTensor:
        return gradients[0]  # every rank's summand counts once in the whole, so each takes the whole gradient


def _apply(tensors: Sequence[DTensor], mesh: DeviceMesh, transitions: Sequence[Transition]) -> tuple[DTensor, ...]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = [tensor.to_local() for tensor in tensors]
    used = dict.fromkeys(step.mesh_axes for transition in transitions for step in transition.steps if step.mesh_axes)
    groups = {mesh_axes: group_of(mesh, mesh_axes) for mesh_axes in used}
    # Step i of all tensors runs together; those over the same ranks share one all-to-all.
    for index in range(max(len(transition.steps) for transition in transitions)):
        shared: dict[tuple[str, ...], list[int]] = {}
        for at, transition in enumerate(transitions):
            if index < len(transition.steps):
                step = transition.steps[index]
                if step.kind == "all-to-all":
                    shared.setdefault(step.mesh_axes, []).append(at)
                else:
                    route = transition.route(step, coordinate)
                    local[at] = (
                        _gather(local[at], route, groups[step.mesh_axes])
                        if step.kind == "all-gather"
                        else _copy(cut(local[at], route.sends[0])).view(route.out_shape)
                    )
        for mesh_axes, members in shared.items():
            routes = [transitions[at].route(transitions[at].steps[index], coordinate) for at in members]
            moved = move([local[at] for at in members], routes, groups[mesh_axes], add=False)
            for at, tensor in zip(members, moved, strict=True):
                local[at] = tensor
    return tuple(
        _wrap(piece if transition.steps else _copy(piece), mesh, transition)
        for piece, transition in zip(local, transitions, strict=True)
    )


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Returns contiguous memory of its own: a result neither holds on to its whole nor is written through."""
    return x.clone(memory_format=torch.contiguous_format)


def _gather(x: torch.Tensor, route: Route, group: ProcessGroup) -> torch.Tensor:
    share = x.new_zeros(max(volume(box) for box in route.receives))
    share[: x.numel()].view(x.shape).copy_(x)
    whole = x.new_empty(route.out_shape)
    for row, box in zip(all_gather(share, group), route.receives, strict=True):
        target = cut(whole, box)
        target.copy_(row[: volume(box)].view(target.shape))
    return whole
