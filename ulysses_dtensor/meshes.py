"""Which device meshes a plan takes."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ulysses_dtensor.collectives import group_of
from ulysses_dtensor.errors import LayoutError, PlanError
from ulysses_dtensor.layout import mesh_sizes


def sequence_mesh(mesh: Any, who: str) -> DeviceMesh:
    """Returns `mesh` when it is a one-dimensional `DeviceMesh` with a name.

    Raises:
        PlanError: it is anything else, or this rank is not on it.
    """
    return checked_mesh(mesh, who, dims=1)


def plan_mesh(mesh: Any, who: str) -> tuple[DeviceMesh, dict[str, int]]:
    """Returns a one-dimensional mesh of all ranks of `mesh`, row by row, and the sizes of its own one or two dimensions.

    The joint mesh of two dimensions has a group of its own, made at first use by its members.

    Raises:
        PlanError: it is no mesh of one or two named dimensions, this rank is not on it, or its ranks do not ascend.
    """
    mesh = checked_mesh(mesh, who)
    sizes = dict(mesh_sizes(mesh))
    if mesh.ndim == 1:
        return mesh, sizes
    try:
        group = group_of(mesh, tuple(sizes))
    except LayoutError as error:
        raise PlanError(f"{who}: {error}") from error
    return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=("_".join(sizes),)), sizes


def checked_mesh(mesh: Any, who: str, *, dims: int = 2) -> DeviceMesh:
    """Returns `mesh` when it is a `DeviceMesh` of at most `dims` named dimensions that this rank is on.

    Raises:
        PlanError: it is anything else.
    """
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(
            f"{who}: mesh={mesh!r} is a {type(mesh).__name__}, not a DeviceMesh. Pass for example mesh['sp']."
        )
    if mesh.mesh_dim_names is None:
        raise PlanError(f"{who}: {mesh} has no dimension names. Pass mesh_dim_names to init_device_mesh.")
    if mesh.ndim > dims:
        raise PlanError(
            f"{who}: {mesh} has {mesh.ndim} dimensions. Pass the sequence dimension alone, for example mesh['sp']"
            + (", or two, mesh['cp', 'sp']." if dims == 2 else ".")
        )
    if mesh.get_coordinate() is None:
        raise PlanError(f"{who}: this rank is not part of {mesh}. Pass the mesh that holds it.")
    return mesh
