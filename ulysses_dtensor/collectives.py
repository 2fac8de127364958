"""The only file that calls torch.distributed collectives: each is counted where somebody asks for the count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ulysses_dtensor.errors import LayoutError
from ulysses_dtensor.layout import mesh_sizes
from ulysses_dtensor.transition import coordinates, peers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.device_mesh import DeviceMesh

_NATIVE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)


@dataclass(slots=True)
class CollectiveCount:
    """Collectives that this rank started and the bytes it sent to others, in order of their start."""

    calls: list[tuple[str, int]] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """Kind of each collective, for example `"all-to-all"`."""
        return [kind for kind, _ in self.calls]

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other ranks, over all collectives."""
        return sum(sent for _, sent in self.calls)


_counts: ContextVar[tuple[CollectiveCount, ...]] = ContextVar("ulysses_dtensor_counts", default=())


@contextmanager
def count_collectives() -> Iterator[CollectiveCount]:
    """Counts this library's collectives of the calling thread inside the block.

    Example:
        >>> with count_collectives() as count:
        ...     pass
        >>> count.kinds
        []
    """
    count = CollectiveCount()
    token = _counts.set((*_counts.get(), count))
    try:
        yield count
    finally:
        _counts.reset(token)


def all_to_all(
    send: torch.Tensor, in_splits: list[int], out_splits: list[int], group: ProcessGroup
) -> tuple[torch.Tensor, Work | None]:
    """Starts an all-to-all of a flat buffer; wait on the returned work before the result is read.

    Args:
        send: flat, the piece for rank 0 of the group first.
        in_splits: elements for each rank.
        out_splits: elements from each rank.
        group: its size is the length of both lists.
    """
    received = send.new_empty(sum(out_splits))
    scale = 1 if send.dtype in _NATIVE else send.element_size()
    wire_in, wire_out = (send, received) if scale == 1 else (send.view(torch.uint8), received.view(torch.uint8))
    splits = [[scale * n for n in out_splits], [scale * n for n in in_splits]]
    if torch.compiler.is_compiling():
        dist.all_to_all_single(wire_out, wire_in, splits[0], splits[1], group=group)
        return received, None
    own = dist.get_rank(group)
    _record("all-to-all", (sum(in_splits) - in_splits[own]) * send.element_size())
    work = dist.all_to_all_single(wire_out, wire_in, splits[0], splits[1], group=group, async_op=True)
    return received, cast("Work | None", work)


def all_gather(send: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Returns the equally long flat tensors of all ranks, one row for each rank of the group."""
    ranks = dist.get_world_size(group)
    received = send.new_empty(ranks * send.numel())
    wire_in, wire_out = (
        (send, received) if send.dtype in _NATIVE else (send.view(torch.uint8), received.view(torch.uint8))
    )
    _record("all-gather", (ranks - 1) * send.numel() * send.element_size())
    dist.all_gather_single(wire_out, wire_in, group=group)
    return received.view(ranks, send.numel())


def all_reduce_max(values: torch.Tensor, group: ProcessGroup) -> None:
    """Replaces `values` by the largest over the group, element by element."""
    _record("all-reduce", 2 * values.numel() * values.element_size())
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)


def all_reduce_sum(values: torch.Tensor, group: ProcessGroup) -> None:
    """Replaces `values` by the sum over the group, element by element."""
    _record("all-reduce", 2 * values.numel() * values.element_size())
    dist.all_reduce(values, dist.ReduceOp.SUM, group=group)


def _record(kind: str, bytes_sent: int) -> None:
    if not torch.compiler.is_compiling():
        for count in _counts.get():
            count.calls.append((kind, bytes_sent))


# Joint groups live as long as the default group under which they were made, members as long as their mesh.
_joint_groups: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()
_members: WeakKeyDictionary[DeviceMesh, dict[tuple[Any, ...], tuple[int, ...]]] = WeakKeyDictionary()


def group_of(mesh: DeviceMesh, mesh_axes: Sequence[str]) -> ProcessGroup:
    """Returns the group of the ranks that differ from this one on `mesh_axes` alone, row-major over them.

    The group of several axes is made at first use, by its members alone; all of them must come here.

    Raises:
        LayoutError: the mesh lists its ranks in another order than the group numbers them.
    """
    mesh_axes = tuple(mesh_axes)
    if len(mesh_axes) == 1 and torch.compiler.is_compiling():
        return mesh.get_group(mesh_axes[0])
    members = members_of(mesh, mesh_axes)
    if len(mesh_axes) == 1:
        return mesh.get_group(mesh_axes[0])
    world = dist.group.WORLD
    assert world is not None
    if members == tuple(range(dist.get_world_size())):
        return world
    groups = _joint_groups.setdefault(world, {})
    if members not in groups:
        made = dist.new_group(list(members), use_local_synchronization=True)
        groups[members] = cast("ProcessGroup", made)
    return groups[members]


def members_of(mesh: DeviceMesh, mesh_axes: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the global ranks that differ from this one on `mesh_axes` alone, row-major over them.

    Raises:
        LayoutError: they do not ascend here or elsewhere on the mesh. Torch numbers a group's ranks in ascending order,
            so that rank i of the group would not be position i on the mesh.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    known, key = _members.setdefault(mesh, {}), (mesh_axes, *coordinate)
    if key not in known:
        sizes, ranks = mesh_sizes(mesh), mesh.mesh
        for at in coordinates(tuple((name, 1 if name in mesh_axes else size) for name, size in sizes)):
            row = tuple(int(ranks[peer].item()) for peer in peers(sizes, mesh_axes, at))
            if row != tuple(sorted(row)):
                raise LayoutError(
                    f"mesh: the ranks along {' x '.join(mesh_axes)} are {row}, which do not ascend, and a group "
                    "numbers them in ascending order. Build the mesh as init_device_mesh does, and slice it in its "
                    "own order."
                )
        known[key] = tuple(int(ranks[peer].item()) for peer in peers(sizes, mesh_axes, tuple(coordinate)))
    return known[key]
