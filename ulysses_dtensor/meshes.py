"""Which device meshes a plan takes."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ulysses_dtensor.errors import PlanError


def sequence_mesh(mesh: Any, who: str) -> DeviceMesh:
    """Returns `mesh` when it is a one-dimensional `DeviceMesh` with a name.

    Raises:
        PlanError: it is anything else, or this rank is not on it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(
            f"{who}: mesh={mesh!r} is a {type(mesh).__name__}, not a DeviceMesh. Pass for example mesh['sp']."
        )
    if mesh.mesh_dim_names is None:
        raise PlanError(f"{who}: {mesh} has no dimension names. Pass mesh_dim_names to init_device_mesh.")
    if mesh.ndim != 1:
        raise PlanError(
            f"{who}: {mesh} has {mesh.ndim} dimensions. Pass the sequence dimension alone, for example mesh['sp']."
        )
    if mesh.get_coordinate() is None:
        raise PlanError(f"{who}: this rank is not part of {mesh}. Pass the mesh that holds it.")
    return mesh
