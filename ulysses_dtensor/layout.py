"""`Layout`: which tensor axis each mesh axis cuts, as text, DTensor placements and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from ulysses_dtensor.errors import LayoutError, caret
from ulysses_dtensor.notation import ELLIPSIS, Axis, parse, position_of, render

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

MeshSizes = tuple[tuple[str, int], ...]
"""A mesh's dimension names and sizes, outermost first."""

Box = tuple[tuple[int, int], ...]
"""One (start, stop) for each tensor dim."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a global tensor is held across a mesh, written as einops text.

    A name alone is a tensor axis; `(sp s)` is the tensor axis `s` cut by the mesh axis `sp`; `...` stands for any
    axes and `1` for an axis of size one. Sizes that do not divide follow `torch.chunk`, and several mesh axes on one
    tensor axis nest in the mesh's order.

    Args:
        text: for example `"b (sp s) h d"`.

    Raises:
        LayoutError: the text breaks the grammar.

    Example:
        >>> layout = Layout("b (sp s) h d")
        >>> layout.local_shape((2, 9, 4, 8), {"sp": 2}, coordinate=(1,))
        (2, 4, 4, 8)
        >>> print(layout.move("sp", to="h"))
        b s (sp h) d

    Reference:
        einops, https://einops.rocks (the grammar); `torch.distributed.tensor.Shard` (the meaning).
    """

    text: str
    axes: tuple[Axis, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", parse(self.text))
        object.__setattr__(self, "text", render(self.axes))

    def __repr__(self) -> str:
        return f"Layout({self.text!r})"

    def __str__(self) -> str:
        return self.text

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes this layout names, from left to right."""
        return tuple(name for axis in self.axes for name in axis.mesh_axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensor axes this layout names, from left to right (`...` and `1` included)."""
        return tuple(axis.name for axis in self.axes)

    def placements(self, mesh: MeshLike, ndim: int | None = None) -> tuple[Placement, ...]:
        """Returns the DTensor placements on `mesh`, one for each of its dimensions.

        Args:
            mesh: a `DeviceMesh` with named dimensions (a mapping of names to sizes will do).
            ndim: how many dims the tensor has; needed when a cut axis stands right of `...`.

        Raises:
            LayoutError: the layout does not bind to the mesh.

        Example:
            >>> Layout("b (sp s) h d").placements({"dp": 2, "sp": 4})
            (Replicate(), Shard(dim=1))
        """
        from torch.distributed.tensor import Replicate, Shard

        dims = self.dims_of_mesh_axes(mesh, ndim)
        return tuple(Replicate() if dim is None else Shard(dim) for dim in dims.values())

    def dims_of_mesh_axes(self, mesh: MeshLike, ndim: int | None = None) -> dict[str, int | None]:
        """Returns the tensor dim that each mesh axis cuts, None where the tensor is replicated over it."""
        sizes = mesh_sizes(mesh)
        _check_binding(self, sizes)
        if ndim is None:
            cut = [index for index, axis in enumerate(self.axes) if axis.mesh_axes]
            if ELLIPSIS in self.names and cut and max(cut) > self.names.index(ELLIPSIS):
                raise LayoutError(
                    f"Layout: {self.text!r} cuts an axis right of '...', whose dim depends on the tensor. Pass ndim."
                )
            axes = self.axes
        else:
            axes = self.expand(ndim)
        dims: dict[str, int | None] = dict.fromkeys(name for name, _ in sizes)
        for dim, axis in enumerate(axes):
            dims.update(dict.fromkeys(axis.mesh_axes, dim))
        return dims

    def expand(self, ndim: int) -> tuple[Axis, ...]:
        """Returns one axis for each of `ndim` dims, `...` replaced by as many unnamed axes as it takes."""
        if ELLIPSIS not in self.names:
            if len(self.axes) != ndim:
                raise LayoutError(f"Layout: {self.text!r} names {len(self.axes)} axes, the tensor has {ndim} dims.")
            return self.axes
        missing = ndim - len(self.axes) + 1
        if missing < 0:
            raise LayoutError(f"Layout: {self.text!r} needs at least {len(self.axes) - 1} dims, the tensor has {ndim}.")
        at = self.names.index(ELLIPSIS)
        return (*self.axes[:at], *(Axis(ELLIPSIS) for _ in range(missing)), *self.axes[at + 1 :])

    def dim(self, name: str, ndim: int) -> int:
        """Returns the tensor dim that the axis `name` stands for in a tensor of `ndim` dims."""
        for dim, axis in enumerate(self.expand(ndim)):
            if axis.name == name:
                return dim
        raise LayoutError(f"Layout: {self.text!r} has no tensor axis {name!r}, only {', '.join(self.names)}.")

    def local_shape(
        self, global_shape: Sequence[int], mesh: MeshLike, coordinate: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Returns the shape that one rank holds of a tensor of `global_shape`.

        Args:
            global_shape: sizes of the whole tensor.
            mesh: a `DeviceMesh`, or a mapping of mesh axis names to sizes (no process group needed).
            coordinate: the rank's position on the mesh; the calling rank's when None (a `DeviceMesh` only).

        Raises:
            LayoutError: the layout does not bind to the mesh, or the shape does not fit the layout.
        """
        return tuple(stop - start for start, stop in self.local_box(global_shape, mesh, coordinate))

    def local_box(self, global_shape: Sequence[int], mesh: MeshLike, coordinate: Sequence[int] | None = None) -> Box:
        """Returns the (start, stop) of each dim that one rank holds of a tensor of `global_shape`."""
        sizes = mesh_sizes(mesh)
        if coordinate is None:
            coordinate = _own_coordinate(mesh)
        if len(coordinate) != len(sizes) or any(
            not 0 <= at < size for at, (_, size) in zip(coordinate, sizes, strict=True)
        ):
            raise LayoutError(f"Layout: coordinate={tuple(coordinate)} is no position on the mesh {dict(sizes)}.")
        _check_binding(self, sizes)
        axes = self.expand(len(global_shape))
        where = {name: (size, at) for (name, size), at in zip(sizes, coordinate, strict=True)}
        box = []
        for dim, (axis, size) in enumerate(zip(axes, global_shape, strict=True)):
            if axis.name == "1" and size != 1:
                raise LayoutError(f"Layout: {self.text!r} says size 1 at dim {dim}, the tensor has {size}.")
            box.append(cut_axis(axis, size, where))
        return tuple(box)

    def move(self, mesh_axis: str, *, to: str | None) -> Layout:
        """Returns this layout with `mesh_axis` cutting the tensor axis `to` instead, or none when `to` is None.

        A mesh axis arrives innermost, just left of the tensor axis's name.

        Raises:
            LayoutError: the layout does not have that mesh axis or that tensor axis.
        """
        if mesh_axis not in self.mesh_axes:
            raise LayoutError(f"Layout.move: {self.text!r} has no mesh axis {mesh_axis!r}.")
        if to is not None and (to not in self.names or to in (ELLIPSIS, "1")):
            raise LayoutError(f"Layout.move: {self.text!r} has no tensor axis {to!r} to move {mesh_axis!r} to.")
        axes = []
        for axis in self.axes:
            kept = tuple(name for name in axis.mesh_axes if name != mesh_axis)
            axes.append(Axis(axis.name, (*kept, mesh_axis) if axis.name == to else kept))
        return Layout(render(tuple(axes)))


LayoutLike: TypeAlias = Layout | str
MeshLike: TypeAlias = "DeviceMesh | Mapping[str, int] | MeshSizes"


def as_layout(layout: LayoutLike) -> Layout:
    """Returns `layout` as a `Layout`; text is parsed.

    Raises:
        LayoutError: it is neither, or its text breaks the grammar.
    """
    if isinstance(layout, Layout):
        return layout
    if not isinstance(layout, str):
        raise LayoutError(
            f'Layout: {layout!r} is a {type(layout).__name__}. Pass a Layout or its text, "b (sp s) h d".'
        )
    return _from_text(layout)


def mesh_sizes(mesh: MeshLike) -> MeshSizes:
    """Returns the names and sizes of a mesh's dimensions, outermost first.

    Raises:
        LayoutError: the mesh has no dimension names.
    """
    if isinstance(mesh, tuple):
        return mesh
    if isinstance(mesh, Mapping):
        return tuple(mesh.items())
    if mesh.mesh_dim_names is None:
        raise LayoutError("Layout: the mesh has no dimension names. Pass mesh_dim_names to init_device_mesh.")
    return tuple(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Returns the (start, stop) of part `index` when `[start, stop)` is cut as `torch.chunk` cuts it."""
    size = -(-(stop - start) // parts)
    return min(stop, start + index * size), min(stop, start + (index + 1) * size)


def cut_axis(axis: Axis, size: int, where: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Returns the (start, stop) of an axis of `size`; `where` is (parts, index) of each mesh axis that cuts it."""
    start, stop = 0, size
    for name in axis.mesh_axes:
        start, stop = chunk(start, stop, *where[name])
    return start, stop


@lru_cache(maxsize=1024)
def _from_text(text: str) -> Layout:
    return Layout(text)


def _own_coordinate(mesh: MeshLike) -> Sequence[int]:
    coordinate = None if isinstance(mesh, (tuple, Mapping)) else mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError("Layout: this rank has no coordinate on the mesh. Pass coordinate.")
    return coordinate


@lru_cache(maxsize=4096)
def _check_binding(layout: Layout, sizes: MeshSizes) -> None:
    order = [name for name, _ in sizes]
    mesh = f"the mesh {dict(sizes)}"
    for axis in layout.axes:
        if axis.name in order:
            raise LayoutError(caret(layout.text, position_of(layout.text, axis.name), _misplaced(axis, mesh)))
        for name in axis.mesh_axes:
            if name not in order:
                reason = (
                    f"Layout: {name!r} in {axis} is no dimension of {mesh}. "
                    "Left of a tensor axis write mesh dimensions alone."
                )
                raise LayoutError(caret(layout.text, position_of(layout.text, name), reason))
        right = [name for name in order if name in axis.mesh_axes]
        if list(axis.mesh_axes) != right:
            wanted = Axis(axis.name, tuple(right))
            reason = f"Layout: {axis} nests against the order of {mesh}, which has no placement. Write {wanted}."
            raise LayoutError(caret(layout.text, position_of(layout.text, axis.mesh_axes[0]), reason))


def _misplaced(axis: Axis, mesh: str) -> str:
    if axis.mesh_axes:
        wanted = Axis(axis.mesh_axes[-1], (*axis.mesh_axes[:-1], axis.name))
        return (
            f"Layout: {axis} has the mesh axis {axis.name!r} on the right, which would interleave the elements; "
            f"no placement does that. Write {wanted}."
        )
    return (
        f"Layout: {axis.name!r} is a dimension of {mesh} and cannot name a tensor axis. "
        f"Write ({axis.name} x), or rename one of the two."
    )
