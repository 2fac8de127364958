"""Counting collectives, and which ranks make up a group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ulysses_dtensor import LayoutError, count_collectives
from ulysses_dtensor.collectives import all_gather, all_reduce_max, all_reduce_sum, all_to_all, group_of, members_of
from ulysses_dtensor.testing import run_on_mesh, run_ranks


def test_every_collective_is_counted_with_its_bytes() -> None:
    def on_rank(mesh: DeviceMesh) -> tuple[list[tuple[str, int]], list[tuple[str, int]], int]:
        group, x = mesh.get_group(), torch.ones(6)
        with count_collectives() as outer:
            received, work = all_to_all(x, [1, 2, 3], [mesh.get_rank() + 1] * 3, group)
            assert work is not None
            work.wait()
            assert torch.equal(received, torch.ones(3 * (mesh.get_rank() + 1)))
            with count_collectives() as inner:
                assert all_gather(x[:2], group).shape == (3, 2)
            all_reduce_sum(x, group)
            all_reduce_max(x, group)
        all_reduce_max(x, group)
        assert torch.equal(x, torch.full((6,), 3.0))
        return outer.calls, inner.calls, outer.bytes_sent

    for rank, (outer, inner, total) in enumerate(run_on_mesh({"sp": 3}, on_rank)):
        gathered = ("all-gather", 2 * 2 * 4)
        sent = ("all-to-all", (6 - [1, 2, 3][rank]) * 4)
        assert outer == [sent, gathered, ("all-reduce", 2 * 6 * 4), ("all-reduce", 2 * 6 * 4)]
        assert inner == [gathered]
        assert total == sum(bytes_sent for _, bytes_sent in outer)


def test_a_thread_counts_its_own_alone() -> None:
    def on_rank(mesh: DeviceMesh) -> int:
        if mesh.get_rank() == 0:
            with count_collectives() as count:
                all_reduce_sum(torch.ones(1), mesh.get_group())
            return len(count.kinds)
        all_reduce_sum(torch.ones(1), mesh.get_group())
        return 1

    with count_collectives() as outside:
        assert run_on_mesh({"sp": 3}, on_rank) == [1, 1, 1]
    assert outside.kinds == []


def groups(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    found = []
    for axes in (("sp",), ("cp", "sp"), ("dp", "sp"), ("dp", "cp", "sp")):
        group = group_of(mesh, axes)
        assert group_of(mesh, list(axes)) is group
        members = members_of(mesh, axes)
        assert tuple(dist.get_process_group_ranks(group)) == members
        found.append(members)
    return found


def test_a_group_numbers_its_ranks_row_major_over_its_axes() -> None:
    found = run_on_mesh({"dp": 2, "cp": 2, "sp": 2}, groups)
    assert found[0] == [(0, 1), (0, 1, 2, 3), (0, 1, 4, 5), tuple(range(8))]
    assert found[6] == [(6, 7), (4, 5, 6, 7), (2, 3, 6, 7), tuple(range(8))]


def test_rejects_ranks_that_do_not_ascend_on_every_rank() -> None:
    def on_rank() -> None:
        mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [3, 2]]), mesh_dim_names=("dp", "sp"))
        with pytest.raises(
            LayoutError, match=r"mesh: the ranks along sp are \(3, 2\), which do not ascend, and a group"
        ):
            group_of(mesh, ("sp",))
        assert members_of(mesh, ("dp",)) in [(0, 3), (1, 2)]

    run_ranks(4, on_rank)
