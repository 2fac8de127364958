"""Layouts against three oracles: einops where sizes divide, torch.chunk for all sizes, DTensor's own placements."""

import copy
import pickle
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from ulysses_dtensor import Layout, LayoutError
from ulysses_dtensor.layout import as_layout, chunk, mesh_sizes
from ulysses_dtensor.testing import layouts, local_by_torch_chunk, meshes, run_on_mesh, run_ranks, shapes

MESHES_AND_LAYOUTS = meshes(max_ranks=12, max_dims=3).flatmap(lambda mesh: st.tuples(st.just(mesh), layouts(mesh)))


def positions(mesh: dict[str, int]) -> Iterator[tuple[int, ...]]:
    return product(*(range(size) for size in mesh.values()))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor of `shape` in which every element is another number."""
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


# Values


@given(MESHES_AND_LAYOUTS, st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)))
def test_local_part_is_what_einops_cuts_when_sizes_divide(
    case: tuple[dict[str, int], Layout], times: tuple[int, ...]
) -> None:
    mesh, layout = case
    factors = [torch.Size([mesh[name] for name in axis.mesh_axes]).numel() for axis in layout.axes]
    x = numbered(tuple(factor * time for factor, time in zip(factors, times, strict=True)))
    pattern = f"{layout} -> {' '.join((*layout.mesh_axes, *layout.names))}"
    cut = rearrange(x, pattern, **{name: mesh[name] for name in layout.mesh_axes})
    for at in positions(mesh):
        where = dict(zip(mesh, at, strict=True))
        expected = cut[tuple(where[name] for name in layout.mesh_axes)]
        box = tuple(slice(*bounds) for bounds in layout.local_box(x.shape, mesh, at))
        assert torch.equal(x[box], expected)
        assert layout.local_shape(x.shape, mesh, at) == tuple(expected.shape)


@given(MESHES_AND_LAYOUTS, shapes(3))
def test_local_part_is_what_torch_chunk_cuts_for_any_size(
    case: tuple[dict[str, int], Layout], shape: tuple[int, ...]
) -> None:
    mesh, layout = case
    x = numbered(shape)
    for at in positions(mesh):
        box = tuple(slice(*bounds) for bounds in layout.local_box(shape, mesh, at))
        assert torch.equal(x[box], local_by_torch_chunk(x, layout, mesh, at))
        assert layout.local_shape(shape, mesh, at) == tuple(x[box].shape)


@given(st.integers(0, 40), st.integers(1, 12))
def test_chunk_is_torch_chunk(size: int, parts: int) -> None:
    pieces = [tuple(piece.tolist()) for piece in torch.arange(size).chunk(parts)]
    ours = [tuple(range(*chunk(0, size, parts, index))) for index in range(parts)]
    assert ours == pieces + [()] * (parts - len(pieces))


def assert_dtensor_holds(mesh: DeviceMesh, placements: tuple[Placement, ...], layout: Layout, x: torch.Tensor) -> None:
    local = distribute_tensor(x, mesh, placements, src_data_rank=None).to_local()
    assert tuple(local.shape) == layout.local_shape(x.shape, mesh)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    assert torch.equal(local, local_by_torch_chunk(x, layout, mesh, coordinate))


@settings(max_examples=20)
@given(meshes().flatmap(lambda mesh: st.tuples(st.just(mesh), layouts(mesh))), shapes(3))
def test_placements_make_dtensor_hold_the_same_part(
    case: tuple[dict[str, int], Layout], shape: tuple[int, ...]
) -> None:
    mesh, layout = case
    run_on_mesh(mesh, assert_dtensor_holds, layout.placements(mesh, 3), layout, numbered(shape))


@pytest.mark.parametrize(
    ("text", "placements", "local_shape"),
    [
        ("b (sp s) h d", (Shard(1),), (2, 3, 7, 8)),
        ("b s (sp h) d", (Shard(2),), (2, 9, 2, 8)),
        ("b s h d", (Replicate(),), (2, 9, 7, 8)),
        ("(sp b) ...", (Shard(0),), (1, 9, 7, 8)),
    ],
)
def test_placements_and_shapes_of_the_common_layouts(
    text: str, placements: tuple[Any, ...], local_shape: tuple[int, ...]
) -> None:
    assert Layout(text).placements({"sp": 4}) == placements
    assert Layout(text).local_shape((2, 9, 7, 8), {"sp": 4}, (0,)) == local_shape


def test_two_mesh_axes_on_one_dim_nest_in_the_order_of_the_mesh() -> None:
    layout, mesh = Layout("b (cp sp s) h d"), {"cp": 2, "sp": 2}
    assert layout.placements(mesh) == (Shard(1), Shard(1))
    assert [layout.local_shape((1, 5, 1, 1), mesh, at)[1] for at in positions(mesh)] == [2, 1, 1, 1]
    assert [layout.local_box((1, 6, 1, 1), mesh, at)[1] for at in positions(mesh)] == [(0, 2), (2, 3), (3, 5), (5, 6)]


def test_ellipsis_stands_for_any_number_of_axes() -> None:
    layout = Layout("b ... (sp d)")
    for ndim in (2, 3, 5):
        assert layout.placements({"sp": 2}, ndim) == (Shard(ndim - 1),)
        assert layout.local_shape((3,) * ndim, {"sp": 2}, (1,)) == (*(3,) * (ndim - 1), 1)
    assert layout.dim("d", 5) == 4
    assert layout.dims_of_mesh_axes({"dp": 2, "sp": 2}, 3) == {"dp": None, "sp": 2}


# The cases of public reports, as far as they are about sizes


@pytest.mark.parametrize(
    ("layout", "shape", "ranks", "held"),
    [
        pytest.param("b s (sp h) d", (1, 1, 7, 1), 4, [2, 2, 2, 1], id="DeepSpeed#6392, 7 heads on 4"),
        pytest.param("b s (sp h) d", (1, 1, 20, 1), 8, [3, 3, 3, 3, 3, 3, 2, 0], id="DeepSpeed#6392, 20 heads on 8"),
        pytest.param("b s (sp h) d", (1, 1, 2, 1), 4, [1, 1, 0, 0], id="LlamaFactory#10794, 2 heads on 4"),
        pytest.param("b (sp t) h d", (1, 21, 1, 1), 8, [3, 3, 3, 3, 3, 3, 3, 0], id="FastVideo#884, 21 frames on 8"),
        pytest.param("b (sp s) h d", (1, 769, 1, 1), 8, [97] * 7 + [90], id="FastVideo#884, 769 tokens on 8"),
        pytest.param("b s (sp h) d", (1, 1, 12, 1), 8, [2] * 6 + [0, 0], id="FastVideo#884, 12 heads on 8"),
    ],
)
def test_sizes_that_do_not_divide_are_shared_out(
    layout: str, shape: tuple[int, ...], ranks: int, held: list[int]
) -> None:
    shares = [Layout(layout).local_shape(shape, {"sp": ranks}, (rank,)) for rank in range(ranks)]
    assert [torch.Size(share).numel() for share in shares] == held


# The value


@given(MESHES_AND_LAYOUTS)
def test_a_layout_is_a_value(case: tuple[dict[str, int], Layout]) -> None:
    layout = case[1]
    assert eval(repr(layout)) == layout
    for same in (Layout(str(layout)), pickle.loads(pickle.dumps(layout)), copy.copy(layout), copy.deepcopy(layout)):
        assert (same, hash(same), same.axes) == (layout, hash(layout), layout.axes)


def test_text_is_kept_in_one_spelling() -> None:
    assert str(Layout(" b  ( sp s )\n(h) d ")) == "b (sp s) h d"
    assert repr(Layout("b  (sp s)")) == "Layout('b (sp s)')"
    assert Layout("b (sp s)") == Layout("b ( sp s )")
    assert Layout("b (sp s)") != Layout("b (sp t)")
    assert as_layout("b  s") == as_layout(Layout("b s"))


def test_a_layout_does_not_change() -> None:
    with pytest.raises(AttributeError):
        Layout("b s").text = "b (sp s)"  # pyright: ignore[reportAttributeAccessIssue] - that it is refused is the test


def test_names_from_left_to_right() -> None:
    layout = Layout("1 (cp b) ... (sp s)")
    assert (layout.mesh_axes, layout.names) == (("cp", "sp"), ("1", "b", "...", "s"))


def test_mesh_axis_moves_to_another_tensor_axis() -> None:
    layout = Layout("b (cp sp s) h d")
    assert str(layout.move("sp", to="h")) == "b (cp s) (sp h) d"
    assert str(layout.move("cp", to=None)) == "b (sp s) h d"
    assert str(layout.move("sp", to="s")) == "b (cp sp s) h d"
    assert str(layout.move("cp", to="h").move("sp", to="h")) == "b s (cp sp h) d"


# Meshes


def own_part(mesh: DeviceMesh) -> tuple[Any, ...]:
    layout = Layout("(cp sp s) h")
    return mesh_sizes(mesh), layout.local_box((5, 2), mesh), layout.local_shape((5, 2), mesh, (0, 0))


def test_a_device_mesh_gives_its_sizes_and_the_rank_its_own_part() -> None:
    parts = run_on_mesh({"cp": 2, "sp": 2}, own_part)
    assert [part[1][0] for part in parts] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert {part[0] for part in parts} == {(("cp", 2), ("sp", 2))}
    assert {part[2] for part in parts} == {(2, 2)}


def test_rejects_mesh_without_names() -> None:
    with pytest.raises(LayoutError, match=r"the mesh has no dimension names. Pass mesh_dim_names to init_device_mesh."):
        run_ranks(2, lambda: Layout("(sp s)").placements(init_device_mesh("cpu", (2,))))


def test_rejects_rank_outside_the_mesh() -> None:
    def on_two_of_three() -> None:
        Layout("(sp s)").local_shape((4,), DeviceMesh("cpu", [0, 1], mesh_dim_names=("sp",)))

    with pytest.raises(LayoutError, match=r"this rank has no coordinate on the mesh. Pass coordinate."):
        run_ranks(3, on_two_of_three)


def test_rejects_sizes_without_coordinate() -> None:
    for mesh in ({"sp": 2}, (("sp", 2),)):
        with pytest.raises(LayoutError, match=r"this rank has no coordinate on the mesh. Pass coordinate."):
            Layout("(sp s)").local_shape((4,), mesh)


@pytest.mark.parametrize("coordinate", [(), (2,), (-1,), (0, 0)])
def test_rejects_coordinate_off_the_mesh(coordinate: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"coordinate=\(.*\) is no position on the mesh \{'sp': 2\}"):
        Layout("(sp s)").local_shape((4,), {"sp": 2}, coordinate)


# What does not bind


@pytest.mark.parametrize(
    ("text", "reason", "position"),
    [
        (
            "b (s sp) h",
            "(s sp) has the mesh axis 'sp' on the right, which would interleave the elements; no placement does that. "
            "Write (sp s).",
            5,
        ),
        (
            "b (cp s sp) h",
            "(cp s sp) has the mesh axis 'sp' on the right, which would interleave the elements; no placement does "
            "that. Write (cp sp s).",
            8,
        ),
        (
            "b sp h",
            "'sp' is a dimension of the mesh {'cp': 2, 'sp': 4} and cannot name a tensor axis. Write (sp x), or rename "
            "one of the two.",
            2,
        ),
        (
            "b (ps s) h",
            "'ps' in (ps s) is no dimension of the mesh {'cp': 2, 'sp': 4}. Left of a tensor axis write mesh "
            "dimensions alone.",
            3,
        ),
        (
            "b s (sp h d)",
            "'h' in (sp h d) is no dimension of the mesh {'cp': 2, 'sp': 4}. Left of a tensor axis write mesh "
            "dimensions alone.",
            8,
        ),
        (
            "b (sp cp s) h",
            "(sp cp s) nests against the order of the mesh {'cp': 2, 'sp': 4}, which has no placement. Write "
            "(cp sp s).",
            3,
        ),
    ],
)
def test_rejects_what_does_not_bind_to_the_mesh_and_points_at_it(text: str, reason: str, position: int) -> None:
    mesh = {"cp": 2, "sp": 4}
    for bind in (
        lambda: Layout(text).placements(mesh),
        lambda: Layout(text).local_shape((8, 8, 8), mesh, (0, 0)),
    ):
        with pytest.raises(LayoutError) as raised:
            bind()
        assert str(raised.value) == f"Layout: {reason}\n    {text}\n    {' ' * position}^"


def test_rejects_tensor_of_another_number_of_dims() -> None:
    with pytest.raises(LayoutError, match=r"'b \(sp s\)' names 2 axes, the tensor has 3 dims."):
        Layout("b (sp s)").local_shape((2, 4, 3), {"sp": 2}, (0,))
    with pytest.raises(LayoutError, match=r"'b \.\.\. \(sp s\)' needs at least 2 dims, the tensor has 1."):
        Layout("b ... (sp s)").local_shape((2,), {"sp": 2}, (0,))


def test_rejects_cut_right_of_ellipsis_without_ndim() -> None:
    with pytest.raises(
        LayoutError, match=r"cuts an axis right of '\.\.\.', whose dim depends on the tensor. Pass ndim."
    ):
        Layout("b ... (sp d)").placements({"sp": 2})
    assert Layout("(sp b) ... d").placements({"sp": 2}) == (Shard(0),)


def test_rejects_one_where_the_size_is_another() -> None:
    assert Layout("1 (sp s)").local_shape((1, 4), {"sp": 2}, (0,)) == (1, 2)
    with pytest.raises(LayoutError, match=r"'1 \(sp s\)' says size 1 at dim 0, the tensor has 2."):
        Layout("1 (sp s)").local_shape((2, 4), {"sp": 2}, (0,))


def test_rejects_name_that_the_layout_does_not_have() -> None:
    with pytest.raises(LayoutError, match=r"'b \(sp s\)' has no tensor axis 'h', only b, s."):
        Layout("b (sp s)").dim("h", 2)


def test_rejects_move_of_or_to_what_is_not_there() -> None:
    layout = Layout("b (sp s) ... 1")
    with pytest.raises(LayoutError, match=r"Layout.move: 'b \(sp s\) \.\.\. 1' has no mesh axis 'cp'."):
        layout.move("cp", to="b")
    for to in ("h", "1", "..."):
        with pytest.raises(LayoutError, match=r"has no tensor axis '.*' to move 'sp' to."):
            layout.move("sp", to=to)


def test_rejects_what_is_neither_layout_nor_text() -> None:
    with pytest.raises(LayoutError, match=r"Shard\(dim=1\) is a Shard. Pass a Layout or its text"):
        as_layout(Shard(1))  # pyright: ignore[reportArgumentType] - that it is refused is the test


# The oracles themselves


def test_the_oracles_fail_where_the_layout_is_another() -> None:
    x = numbered((2, 6, 2))
    with pytest.raises(AssertionError):
        assert torch.equal(local_by_torch_chunk(x, "b (sp s) h", {"sp": 2}, (1,)), x[:, :3])
    with pytest.raises(AssertionError):
        run_on_mesh({"sp": 2}, assert_dtensor_holds, (Shard(2),), Layout("b (sp s) h"), x)
    with pytest.raises(AssertionError):
        run_on_mesh({"sp": 2}, assert_dtensor_holds, (Replicate(),), Layout("(sp b) s h"), x)
