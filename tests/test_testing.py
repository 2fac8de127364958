"""Many ranks in one process, and the strategies that tests draw from."""

from __future__ import annotations

import importlib.util
import sys
import time
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from hypothesis import find, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ulysses_dtensor import Layout, distribute, testing
from ulysses_dtensor.testing import full_value, layouts, local_by_torch_chunk, meshes, run_on_mesh, run_ranks, shapes

# Ranks


def test_every_rank_returns_its_own_and_rank_zero_comes_first() -> None:
    assert run_ranks(5, lambda factor: (dist.get_rank() * factor, dist.get_world_size()), 3) == [
        (3 * rank, 5) for rank in range(5)
    ]
    assert not dist.is_initialized()


def test_ranks_of_a_mesh_are_row_major() -> None:
    seen = run_on_mesh({"cp": 2, "sp": 3}, lambda mesh, tag: (mesh.mesh_dim_names, mesh.get_coordinate(), tag), "x")
    assert [(names, tuple(at), tag) for names, at, tag in seen] == [
        (("cp", "sp"), (cp, sp), "x") for cp in range(2) for sp in range(3)
    ]


def test_collectives_work_and_gradients_pass() -> None:
    def summed(mesh: DeviceMesh) -> float:
        x = torch.tensor([float(mesh.get_rank() + 1)], requires_grad=True)
        dist.all_reduce(total := x.detach().clone())
        (x * total).sum().backward()
        assert x.grad is not None
        return x.grad.item()

    assert run_on_mesh({"sp": 3}, summed) == [6.0] * 3


@pytest.mark.parametrize("failing", range(3))
def test_first_failing_rank_gives_the_error_and_ends_the_others(failing: int) -> None:
    ended = []

    def fails_on_one() -> None:
        if dist.get_rank() == failing:
            raise KeyError("only here")
        try:
            dist.barrier()
        finally:
            ended.append(dist.get_rank())

    start = time.monotonic()
    with pytest.raises(KeyError, match="only here") as raised:
        run_ranks(3, fails_on_one)
    assert raised.value.__notes__ == [f"raised on simulated rank {failing} of 3"]
    assert sorted(ended) == [rank for rank in range(3) if rank != failing]
    assert time.monotonic() - start < 5
    assert run_ranks(2, dist.get_rank) == [0, 1]


@pytest.mark.parametrize("skipping", range(2))
def test_a_rank_that_skips_a_collective_is_a_timeout(skipping: int) -> None:
    def skips() -> None:
        if dist.get_rank() != skipping:
            dist.all_reduce(torch.ones(1))

    match = rf"run_ranks: rank {1 - skipping} of 2 did not end in 0.2 s; did a rank skip a collective?"
    with pytest.raises(TimeoutError, match=match):
        run_ranks(2, skips, timeout=0.2)
    assert run_ranks(2, dist.get_rank) == [0, 1]


def exchange_splits(sends: list[list[int]], receives: list[list[int]]) -> None:
    rank = dist.get_rank()
    received = torch.empty(sum(receives[rank]))
    dist.all_to_all_single(received, torch.ones(sum(sends[rank])), receives[rank], sends[rank])
    assert torch.equal(received, torch.ones(sum(receives[rank])))


def test_a_wrong_split_is_caught() -> None:
    run_ranks(2, exchange_splits, [[1, 2], [3, 4]], [[1, 3], [2, 4]])
    match = r"all-to-all: rank 0 sends 2 elements to rank 1, which expects 1"
    with pytest.raises(RuntimeError, match=match):
        run_ranks(2, exchange_splits, [[1, 2], [3, 4]], [[1, 3], [1, 4]])


def test_a_wrong_even_split_is_caught() -> None:
    def even() -> None:
        length = 4 if dist.get_rank() == 0 else 2
        dist.all_to_all_single(torch.empty(4), torch.ones(length))

    with pytest.raises(RuntimeError, match=r"all-to-all: rank 1 sends 1 elements to rank 0, which expects 2"):
        run_ranks(2, even)


def test_whole_value_is_seen_on_every_rank() -> None:
    x = torch.arange(10.0).view(2, 5)

    def whole(mesh: DeviceMesh) -> torch.Tensor:
        held = distribute(x.clone().requires_grad_(), mesh, "(cp a) (sp b)")
        full = full_value(held)
        assert not full.requires_grad
        full_value(distribute(x, mesh, "a b")).zero_()
        return full

    assert all(torch.equal(seen, x) for seen in run_on_mesh({"cp": 2, "sp": 2}, whole))


def test_whole_value_differs_where_a_part_is_wrong() -> None:
    def wrong(mesh: DeviceMesh) -> torch.Tensor:
        local = torch.full((2,), float(mesh.get_rank()))
        return full_value(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))

    assert all(torch.equal(seen, torch.tensor([0.0, 0, 1, 1])) for seen in run_on_mesh({"sp": 2}, wrong))


# Strategies


@given(st.integers(1, 9), st.integers(1, 3), st.data())
def test_meshes_keep_their_bounds(max_ranks: int, max_dims: int, data: st.DataObject) -> None:
    mesh = data.draw(meshes(max_ranks=max_ranks, max_dims=max_dims))
    assert 1 <= torch.Size(mesh.values()).numel() <= max_ranks
    assert tuple(mesh) in [("sp",), ("cp", "sp"), ("cp", "sp", "tp")][:max_dims]


def test_meshes_of_every_kind_are_drawn() -> None:
    assert find(meshes(), lambda mesh: len(mesh) == 2 and min(mesh.values()) > 1) == {"cp": 2, "sp": 2}
    assert find(meshes(), lambda _: True) == {"sp": 1}
    assert find(meshes(), lambda mesh: mesh.get("sp") == 8) == {"sp": 8}
    three = find(meshes(max_dims=3), lambda mesh: min(mesh.values()) > 1 and len(mesh) == 3)
    assert three == {"cp": 2, "sp": 2, "tp": 2}


@given(st.integers(0, 4), st.data())
def test_shapes_have_sizes_from_zero_up(ndim: int, data: st.DataObject) -> None:
    shape = data.draw(shapes(ndim, max_size=3))
    assert len(shape) == ndim
    assert all(0 <= size <= 3 for size in shape)


@given(meshes(max_dims=3).flatmap(lambda mesh: st.tuples(st.just(mesh), layouts(mesh, ("x", "y")))))
def test_layouts_bind_to_their_mesh(case: tuple[dict[str, int], Layout]) -> None:
    mesh, layout = case
    assert layout.names == ("x", "y")
    assert set(layout.dims_of_mesh_axes(mesh)) == set(mesh)


def test_layouts_of_every_kind_are_drawn() -> None:
    both = layouts({"cp": 2, "sp": 2})
    for text in ("b s h", "b (cp sp s) h", "(sp b) s (cp h)", "b (sp s) h"):
        assert find(both, lambda layout, text=text: str(layout) == text) == Layout(text)


def test_oracle_gives_nothing_to_ranks_that_torch_chunk_leaves_out() -> None:
    x = torch.arange(5)
    assert [local_by_torch_chunk(x, "(sp s)", {"sp": 4}, (rank,)).tolist() for rank in range(4)] == [
        [0, 1],
        [2, 3],
        [4],
        [],
    ]


# The module


def load_again() -> ModuleType:
    assert testing.__file__ is not None
    spec = importlib.util.spec_from_file_location("testing_again", testing.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_import_without_hypothesis_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_again().run_ranks(1, dist.get_rank) == [0]
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(
        ImportError, match=r"needs hypothesis. Install the extra: pip install 'ulysses_dtensor\[test\]'"
    ):
        load_again()
