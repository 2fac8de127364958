"""`distribute` and `redistribute`: apply a transition to tensors that carry layouts as placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ulysses_dtensor.collectives import all_gather, all_reduce_sum, group_of
from ulysses_dtensor.errors import LayoutError
from ulysses_dtensor.exchange import cut, move
from ulysses_dtensor.layout import Layout, LayoutLike, as_layout, mesh_sizes
from ulysses_dtensor.notation import Axis, render
from ulysses_dtensor.route import volume
from ulysses_dtensor.transition import Step, Transition

if TYPE_CHECKING:
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
        A DTensor of the same global shape in the layout's placements, or a tuple of them.

    Raises:
        LayoutError: `x` is no DTensor, is `Partial` or strided, or a layout does not fit its tensor and mesh.

    Communication: the steps of `Transition(src, layout, ...)` forward, those of its reverse backward. Tensors whose
    steps are alike go in one all-to-all (one for each dtype among them).

    Example:
        q, k, v = redistribute((q, k, v), "b s (sp h) d")
    """
    single = isinstance(x, DTensor)
    tensors = (x,) if isinstance(x, DTensor) else tuple(x)
    one_for_all = isinstance(layout, (str, Layout))
    layouts = tuple(as_layout(item) for item in ((layout,) * len(tensors) if one_for_all else layout))  # type: ignore[arg-type] - narrowed by one_for_all
    if len(layouts) != len(tensors):
        raise LayoutError(f"redistribute: {len(tensors)} tensors and {len(layouts)} layouts. Pass one layout, or one for each.")
    if not tensors:
        return ()
    transitions = tuple(_transition(tensor, dst) for tensor, dst in zip(tensors, layouts, strict=True))
    mesh = tensors[0].device_mesh
    for index, tensor in enumerate(tensors):
        if tensor.device_mesh != mesh:
            raise LayoutError(f"redistribute: tensor {index} is on {tensor.device_mesh}, tensor 0 on {mesh}. Move them apart.")
    outputs = _Redistribute.apply(mesh, transitions, *tensors)
    return outputs[0] if single else outputs


def layout_of(x: DTensor, names: LayoutLike) -> Layout:
    """Returns the layout in which `x` is held, its tensor axes named as in `names`.

    Raises:
        LayoutError: a placement is neither `Shard` nor `Replicate`, or the mesh has no dimension names.
    """
    names = as_layout(names)
    mesh_axes: dict[int, list[str]] = {}
    for (name, _), placement in zip(mesh_sizes(x.device_mesh), x.placements, strict=True):
        if type(placement) is Shard:
            mesh_axes.setdefault(placement.dim % x.ndim, []).append(name)
        elif type(placement) is not Replicate:
            remedy = "Reduce it first" if isinstance(placement, Partial) else "Bring it to Shard or Replicate first"
            raise LayoutError(f"redistribute: x is placed {placement} on {name!r}, which no layout can say. {remedy}.")
    axes = names.expand(x.ndim)
    if any(axis.name == "..." and dim in mesh_axes for dim, axis in enumerate(axes)):
        dim = next(dim for dim, axis in enumerate(axes) if axis.name == "..." and dim in mesh_axes)
        raise LayoutError(f"redistribute: x is cut at dim {dim}, which {names.text!r} covers with '...'. Name that axis.")
    kept: list[Axis] = []
    for dim, axis in enumerate(axes):
        if not (axis.name == "..." and kept and kept[-1].name == "..."):
            kept.append(Axis(axis.name, tuple(mesh_axes.get(dim, ()))))
    return Layout(render(tuple(kept)))


def _transition(x: DTensor, dst: Layout) -> Transition:
    if not isinstance(x, DTensor):
        raise LayoutError(f"redistribute: x is a {type(x).__name__}, not a DTensor. Place it with distribute, or with from_local.")
    try:
        return Transition(layout_of(x, dst), dst, x.shape, x.device_mesh, itemsize=x.element_size())
    except LayoutError as error:
        raise LayoutError(
            f"redistribute: to {dst.text!r}, global shape {tuple(x.shape)}, placements {x.placements}: {error}"
        ) from error


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, transitions: tuple[Transition, ...], *tensors: DTensor) -> tuple[DTensor, ...]:
        ctx.mesh, ctx.transitions = mesh, transitions
        outputs = _apply(tensors, mesh, transitions)
        differentiable = [x.is_floating_point() or x.is_complex() for x in tensors]
        ctx.differentiable = differentiable
        ctx.mark_non_differentiable(*(out for out, ok in zip(outputs, differentiable, strict=True) if not ok))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[Any, ...]:
        kept = [index for index, ok in enumerate(ctx.differentiable) if ok]
        back, whole = [], list(gradients)
        for index in kept:
            forth = ctx.transitions[index]
            whole[index] = _summed(gradients[index])
            held = layout_of(whole[index], forth.dst)
            back.append(Transition(held, forth.src, forth.shape, ctx.mesh, itemsize=forth.itemsize))
        moved = _Redistribute.apply(ctx.mesh, tuple(back), *(whole[index] for index in kept))
        inputs: list[DTensor | None] = [None] * len(ctx.transitions)
        for index, gradient in zip(kept, moved, strict=True):
            inputs[index] = gradient
        return None, None, *inputs


def _summed(gradient: DTensor) -> DTensor:
    """Returns a gradient whose `Partial` placements are summed over their mesh axes; most have none."""
    pending = [(dim, placement) for dim, placement in enumerate(gradient.placements) if placement.is_partial()]
    if not pending:
        return gradient
    mesh, placements, local = gradient.device_mesh, list(gradient.placements), gradient.to_local().clone()
    for dim, placement in pending:
        if placement != Partial("sum"):
            raise LayoutError(f"redistribute: a gradient is placed {placement}; only sums can be reduced on the way back.")
        all_reduce_sum(local, mesh.get_group(dim))
        placements[dim] = Replicate()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=gradient.shape, stride=gradient.stride()
    )


def _apply(tensors: Sequence[DTensor], mesh: DeviceMesh, transitions: Sequence[Transition]) -> tuple[DTensor, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(f"redistribute: this rank is not part of {mesh}. Call it on the mesh's ranks alone.")
    local = [tensor.to_local() for tensor in tensors]
    for piece, transition in zip(local, transitions, strict=True):
        expected = transition.src.local_shape(transition.shape, transition.mesh, coordinate)
        if tuple(piece.shape) != expected:
            raise LayoutError(
                f"redistribute: this rank holds {tuple(piece.shape)} of global shape {transition.shape}, torch.chunk gives "
                f"it {expected}. Cut the tensor with distribute, or give from_local pieces as torch.chunk makes them."
            )
    # Step i of all tensors runs together; those over the same ranks share one all-to-all.
    for index in range(max(len(transition.steps) for transition in transitions)):
        shared: dict[tuple[str, ...], list[int]] = {}
        for at, transition in enumerate(transitions):
            if index < len(transition.steps):
                step = transition.steps[index]
                if step.kind == "all-to-all":
                    shared.setdefault(step.mesh_axes, []).append(at)
                else:
                    local[at] = _alone(local[at], mesh, transition, step, tuple(coordinate))
        for mesh_axes, members in shared.items():
            routes = [transitions[at].route(transitions[at].steps[index], coordinate) for at in members]
            moved = move([local[at] for at in members], routes, group_of(mesh, mesh_axes), add=False)
            for at, tensor in zip(members, moved, strict=True):
                local[at] = tensor
    return tuple(
        DTensor.from_local(
            piece, mesh, transition.dst.placements(mesh, piece.ndim), run_check=False, shape=x.shape, stride=x.stride()
        )
        for piece, x, transition in zip(local, tensors, transitions, strict=True)
    )


def _alone(x: torch.Tensor, mesh: DeviceMesh, transition: Transition, step: Step, coordinate: tuple[int, ...]) -> torch.Tensor:
    route = transition.route(step, coordinate)
    if step.kind == "slice":
        return cut(x, route.sends[0]).contiguous()
    group = group_of(mesh, step.mesh_axes)
    largest = max(volume(box) for box in route.receives)
    share = x.new_zeros(largest)
    share[: x.numel()].view(x.shape).copy_(x)
    whole = x.new_empty(route.out_shape)
    for row, box in zip(all_gather(share, group), route.receives, strict=True):
        target = cut(whole, box)
        target.copy_(row[: volume(box)].view(target.shape))
    return whole
