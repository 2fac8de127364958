"""The exchange: pack pieces for every rank, one all-to-all, unpack; its backward is the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ulysses_dtensor.collectives import all_to_all
from ulysses_dtensor.layout import Box
from ulysses_dtensor.route import Route, volume

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def exchange(tensors: Sequence[torch.Tensor], routes: Sequence[Route], group: ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Moves several plain local tensors along their routes in one all-to-all (one for each dtype among them).

    Differentiable. Where a route sends an element to several ranks, their gradients are summed on the way back.

    Args:
        tensors: local tensors, each of its route's `in_shape`, in any memory order.
        routes: one for each tensor; all ranks of the group hold the matching ones.
        group: the process group that the routes number.

    Returns:
        One tensor for each route, of its `out_shape`.

    Communication: one all-to-all forward and one backward, `elements_sent` of the routes each.
    """
    return _Exchange.apply(group, tuple(routes), *tensors)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, routes: tuple[Route, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.routes = group, routes
        outputs = move(tensors, routes, group, add=False)
        ctx.differentiable = tuple(_is_differentiable(tensor) for tensor in tensors)
        ctx.mark_non_differentiable(*(out for out, ok in zip(outputs, ctx.differentiable, strict=True) if not ok))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        kept = [index for index, ok in enumerate(ctx.differentiable) if ok]
        back = tuple(ctx.routes[index].reversed() for index in kept)
        given = tuple(gradients[index] for index in kept)
        # Dynamo traces no function that keeps a group inside another's backward; it has no second derivative either.
        compiling = torch.compiler.is_compiling()
        moved = move(given, back, ctx.group, add=True) if compiling else _ExchangeBack.apply(ctx.group, back, *given)
        inputs: list[torch.Tensor | None] = [None] * len(ctx.routes)
        for index, gradient in zip(kept, moved, strict=True):
            inputs[index] = gradient
        return None, None, *inputs


class _ExchangeBack(torch.autograd.Function):
    """The adjoint of `_Exchange`, itself differentiable: its own backward is the exchange again."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, routes: tuple[Route, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.routes = group, routes
        return move(tensors, routes, group, add=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        forth = tuple(route.reversed() for route in ctx.routes)
        return None, None, *_Exchange.apply(ctx.group, forth, *gradients)


def move(
    tensors: Sequence[torch.Tensor], routes: Sequence[Route], group: ProcessGroup, *, add: bool
) -> tuple[torch.Tensor, ...]:
    """Does the exchange without autograd; `add` sums the pieces that land on one place instead of placing them."""
    for tensor, route in zip(tensors, routes, strict=True):
        assert tuple(tensor.shape) == route.in_shape, (tuple(tensor.shape), route)
    started = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        fused = [routes[index] for index in members]
        send = _pack([tensors[index] for index in members], fused)
        in_splits = [sum(sizes) for sizes in zip(*(route.in_splits for route in fused), strict=True)]
        out_splits = [sum(sizes) for sizes in zip(*(route.out_splits for route in fused), strict=True)]
        started.append((members, fused, *all_to_all(send, in_splits, out_splits, group)))
    outputs: dict[int, torch.Tensor] = {}
    for members, fused, received, work in started:
        if work is not None:
            work.wait()
        outputs.update(zip(members, _unpack(received, fused, add=add), strict=True))
    return tuple(outputs[index] for index in range(len(tensors)))


def _pack(tensors: list[torch.Tensor], routes: list[Route]) -> torch.Tensor:
    """Returns one flat buffer: for every peer in order, the piece of every tensor in order."""
    send = tensors[0].new_empty(sum(sum(route.in_splits) for route in routes))
    start = 0
    for boxes in zip(*(route.sends for route in routes), strict=True):
        for tensor, box in zip(tensors, boxes, strict=True):
            size = volume(box)
            if size:
                piece = cut(tensor, box)
                send[start : start + size].view(piece.shape).copy_(piece)
                start += size
    return send


def _unpack(received: torch.Tensor, routes: list[Route], *, add: bool) -> list[torch.Tensor]:
    if len(routes) == 1 and not add and _lands_in_order(routes[0]):
        return [received.view(routes[0].out_shape)]
    # Pieces that are placed cover their output; pieces that are summed start from zero.
    outputs = [received.new_zeros(route.out_shape) if add else received.new_empty(route.out_shape) for route in routes]
    start = 0
    for boxes in zip(*(route.receives for route in routes), strict=True):
        for output, box in zip(outputs, boxes, strict=True):
            size = volume(box)
            if size:
                target = cut(output, box)
                piece = received[start : start + size].view(target.shape)
                if add:
                    target.add_(piece)
                else:
                    target.copy_(piece)
                start += size
    return outputs


def _lands_in_order(route: Route) -> bool:
    """Whether the pieces, one after the other, are the output in memory order, so that no copy is needed.

    They are when each takes up along the first dim that it does not fill where the one before it ended, and all dims
    outside that one have size one. Pieces make up the output, so that one cut in two dims has a neighbour that fails.
    """
    at = 0
    for box in route.receives:
        if not volume(box):
            continue
        outer = next((dim for dim, size in enumerate(route.out_shape) if box[dim] != (0, size)), None)
        if outer is not None:
            if any(size != 1 for size in route.out_shape[:outer]) or box[outer][0] != at:
                return False
            at = box[outer][1]
    return True


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Returns the view of `tensor` inside `box`."""
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
