"""`Transition`: the steps and bytes between two layouts, from sizes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, product
from math import prod
from typing import Literal

from ulysses_dtensor.errors import LayoutError
from ulysses_dtensor.layout import Layout, LayoutLike, MeshLike, MeshSizes, as_layout, cut_axis, mesh_sizes
from ulysses_dtensor.notation import ELLIPSIS, Axis, render
from ulysses_dtensor.route import Route, intersect, route, volume

Kind = Literal["all-to-all", "all-gather", "slice"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a transition: a collective over the joint group of `mesh_axes`, or a local slice (no axes)."""

    kind: Kind
    mesh_axes: tuple[str, ...]
    moved: tuple[str, ...]
    src: Layout
    dst: Layout


@dataclass(frozen=True, slots=True)
class Transition:
    """What it takes to bring a tensor of `shape` from `src` to `dst` on a mesh; needs no process group.

    A mesh axis that moves alone is one all-to-all over that axis; where moving an outer axis cuts the inner ones
    anew, one all-to-all over the joint group of those axes. Nothing is gathered unless an axis is dropped.

    Args:
        src: layout of what is held, or its text.
        dst: layout of what is wanted; the same tensor axes in the same order.
        shape: global shape.
        mesh: a `DeviceMesh`, or a mapping of mesh axis names to sizes.
        itemsize: bytes of one element.

    Raises:
        LayoutError: a layout does not bind to the mesh, or the two do not name the same tensor axes.

    Example:
        >>> print(Transition("b (sp s) h d", "b s (sp h) d", (1, 8, 4, 2), {"sp": 2}))
        b (sp s) h d -> b s (sp h) d, global shape (1, 8, 4, 2) on sp=2
          all-to-all over sp (2 ranks): (1, 4, 4, 2) -> (1, 8, 2, 2), 64 bytes sent per rank
    """

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    mesh: MeshSizes
    itemsize: int

    def __init__(
        self, src: LayoutLike, dst: LayoutLike, shape: Sequence[int], mesh: MeshLike, *, itemsize: int = 4
    ) -> None:
        object.__setattr__(self, "src", as_layout(src))
        object.__setattr__(self, "dst", as_layout(dst))
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "mesh", mesh_sizes(mesh))
        object.__setattr__(self, "itemsize", itemsize)
        _check_same_axes(self.src, self.dst, len(self.shape))
        for layout in (self.src, self.dst):
            layout.local_box(self.shape, self.mesh, (0,) * len(self.mesh))

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps in order; empty when nothing moves."""
        return _steps(self.src, self.dst, self.shape, self.mesh)

    def route(self, step: Step, coordinate: Sequence[int]) -> Route:
        """Returns the route of `step` for the rank at `coordinate`; peers are row-major over `step.mesh_axes`."""
        return _route(step, self.shape, self.mesh, tuple(coordinate))

    def elements_sent(self, coordinate: Sequence[int]) -> int:
        """Returns how many elements the rank at `coordinate` sends to others, over all steps."""
        return sum(_sent(step, self.shape, self.mesh, tuple(coordinate)) for step in self.steps)

    def bytes_sent(self, coordinate: Sequence[int]) -> int:
        """Returns how many bytes the rank at `coordinate` sends to others, over all steps."""
        return self.elements_sent(coordinate) * self.itemsize

    def reversed(self) -> Transition:
        """Returns the transition from `dst` back to `src`: what a gradient takes."""
        return Transition(self.dst, self.src, self.shape, self.mesh, itemsize=self.itemsize)

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh)
        lines = [f"{self.src} -> {self.dst}, global shape {self.shape} on {mesh}"]
        for step in self.steps:
            first = (0,) * len(self.mesh)
            shapes = " -> ".join(
                str(layout.local_shape(self.shape, self.mesh, first)) for layout in (step.src, step.dst)
            )
            if step.kind == "slice":
                lines.append(f"  slice {', '.join(step.moved)}: {shapes}, nothing sent")
                continue
            ranks = prod(size for name, size in self.mesh if name in step.mesh_axes)
            sent = [_sent(step, self.shape, self.mesh, at) * self.itemsize for at in coordinates(self.mesh)]
            figure = f"{sent[0]}" if len(set(sent)) == 1 else f"{min(sent)} to {max(sent)}"
            over = " x ".join(step.mesh_axes)
            lines.append(f"  {step.kind} over {over} ({ranks} ranks): {shapes}, {figure} bytes sent per rank")
        if not self.steps:
            lines.append("  nothing moves")
        return "\n".join(lines)


def coordinates(sizes: MeshSizes) -> Iterator[tuple[int, ...]]:
    """Yields every position on a mesh, row-major."""
    return product(*(range(size) for _, size in sizes))


def peers(sizes: MeshSizes, mesh_axes: tuple[str, ...], coordinate: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the positions that differ from `coordinate` on `mesh_axes` alone, row-major: a joint group's order."""
    ranges = [range(size) if name in mesh_axes else (at,) for (name, size), at in zip(sizes, coordinate, strict=True)]
    return list(product(*ranges))


def _check_same_axes(src: Layout, dst: Layout, ndim: int) -> None:
    pairs = zip(src.expand(ndim), dst.expand(ndim), strict=True)
    if any(a.name != b.name for a, b in pairs):
        raise LayoutError(
            f"Transition: {src.text!r} and {dst.text!r} do not name the same tensor axes in the same order. "
            "A transition moves mesh axes; permute or reshape the local tensor apart from it."
        )


# A route holds two boxes for each rank of its group: on a thousand ranks half a megabyte.
@lru_cache(maxsize=256)
def _route(step: Step, shape: tuple[int, ...], sizes: MeshSizes, coordinate: tuple[int, ...]) -> Route:
    group = peers(sizes, step.mesh_axes, coordinate)
    have = [step.src.local_box(shape, sizes, at) for at in group]
    want = [step.dst.local_box(shape, sizes, at) for at in group]
    return route(have, want, group.index(coordinate))


def _sent(step: Step, shape: tuple[int, ...], sizes: MeshSizes, coordinate: tuple[int, ...]) -> int:
    if step.kind == "slice":
        return 0
    if step.kind == "all-gather":
        # Every rank sends the largest share, padded to it when its own is smaller, to each of the others.
        largest = volume(step.src.local_box(shape, sizes, _first_of(sizes, step.mesh_axes, coordinate)))
        return largest * (len(peers(sizes, step.mesh_axes, coordinate)) - 1)
    # The route's own figure without the route: how much the ranks want of this box is a product over the dims, since
    # each mesh axis cuts one dim at most. Printing for a thousand ranks takes milliseconds, not their square.
    have = step.src.local_box(shape, sizes, coordinate)
    want = step.dst.local_box(shape, sizes, coordinate)
    wanted = prod(size for name, size in sizes if name in step.mesh_axes and name not in step.dst.mesh_axes)
    for axis, size, bounds in zip(step.dst.expand(len(shape)), shape, have, strict=True):
        wanted *= _wanted(axis, size, bounds, step.mesh_axes, sizes, _first_of(sizes, step.mesh_axes, coordinate))
    return wanted - volume(intersect(have, want))


@lru_cache(maxsize=4096)
def _wanted(
    axis: Axis,
    size: int,
    bounds: tuple[int, int],
    mesh_axes: tuple[str, ...],
    sizes: MeshSizes,
    coordinate: tuple[int, ...],
) -> int:
    """Returns how many of the indices in `bounds` the ranks along `mesh_axes` hold of an axis, summed over them."""
    total = 0
    for at in peers(sizes, tuple(name for name in mesh_axes if name in axis.mesh_axes), coordinate):
        start, stop = cut_axis(axis, size, {name: (n, i) for (name, n), i in zip(sizes, at, strict=True)})
        total += max(0, min(stop, bounds[1]) - max(start, bounds[0]))
    return total


def _first_of(sizes: MeshSizes, mesh_axes: tuple[str, ...], coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the position of the first rank of the group of `mesh_axes` that `coordinate` is in."""
    return tuple(0 if name in mesh_axes else at for (name, _), at in zip(sizes, coordinate, strict=True))


# How the steps are found. The state is {mesh axis: tensor dim or None}. A set of axes that change together is one step,
# whose group is those of them that were cut before, and every inner axis on a dim that one of them leaves or
# reaches, since that axis is cut anew. Orders in which no step needs a joint group win, then fewer collectives,
# then fewer elements sent.

_State = dict[str, int | None]


@lru_cache(maxsize=4096)
def _steps(src: Layout, dst: Layout, shape: tuple[int, ...], sizes: MeshSizes) -> tuple[Step, ...]:
    ndim = len(shape)
    before, after = (layout.dims_of_mesh_axes(sizes, ndim) for layout in (src, dst))
    changed = tuple(name for name, size in sizes if before[name] != after[name])
    best: tuple[tuple[int, int, int], tuple[Step, ...]] | None = None
    for order in _ordered_partitions(changed):
        steps = []
        layout, state = src, before
        for moved in order:
            target = {**state, **{name: after[name] for name in moved}}
            following = _with_state(dst.expand(ndim), target, sizes)
            step = _step(layout, following, moved, state, target, sizes)
            if step is not None:
                steps.append(step)
            layout, state = following, target
        joint = sum(len(step.mesh_axes) - 1 for step in steps if step.mesh_axes)
        sent = sum(_sent(step, shape, sizes, (0,) * len(sizes)) for step in steps)
        cost = (joint, sum(step.kind != "slice" for step in steps), sent)
        if best is None or cost < best[0]:
            best = (cost, tuple(steps))
    assert best is not None
    return best[1]


def _step(
    src: Layout, dst: Layout, moved: tuple[str, ...], before: _State, after: _State, sizes: MeshSizes
) -> Step | None:
    order = [name for name, size in sizes if size > 1]
    moved = tuple(name for name in moved if name in order)
    if not moved:
        return None
    touched = {(name, state[name]) for name in moved for state in (before, after) if state[name] is not None}
    group = tuple(
        name
        for name in order
        if before[name] is not None
        and (
            name in moved
            or any(before[name] == dim and order.index(outer) < order.index(name) for outer, dim in touched)
        )
    )
    if not group:
        return Step("slice", (), moved, src, dst)
    gathers = len(group) == 1 and group == moved and after[group[0]] is None
    return Step("all-gather" if gathers else "all-to-all", group, moved, src, dst)


def _with_state(axes: tuple[Axis, ...], state: _State, sizes: MeshSizes) -> Layout:
    cut = [Axis(axis.name, tuple(name for name, _ in sizes if state[name] == dim)) for dim, axis in enumerate(axes)]
    runs = groupby(cut, key=lambda axis: axis.name == ELLIPSIS)
    return Layout(render(tuple(chain.from_iterable([next(run)] if dots else run for dots, run in runs))))


def _ordered_partitions(names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yields every way to change `names` in one or several steps, several names a step allowed."""
    if not names:
        yield ()
        return
    for size in range(1, 2 ** len(names)):
        first = tuple(name for index, name in enumerate(names) if size >> index & 1)
        for rest in _ordered_partitions(tuple(name for name in names if name not in first)):
            yield (first, *rest)
