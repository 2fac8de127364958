"""Moves between layouts, on many ranks: values, gradients, bytes and kinds of collectives, each against one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gloo import GlooPool
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ulysses_dtensor import Layout, LayoutError, Transition, count_collectives, distribute, redistribute
from ulysses_dtensor.redistribute import layout_of
from ulysses_dtensor.testing import full_value, layouts, local_by_torch_chunk, meshes, run_on_mesh, run_ranks, shapes

PAIR = {"cp": 2, "sp": 2}
NAMES = "b s h"


@st.composite
def cases(draw: st.DrawFn, count: int) -> tuple[dict[str, int], tuple[int, ...], tuple[Layout, ...]]:
    """Draws a mesh of up to 8 ranks, a global shape with sizes from zero up, and `count` layouts."""
    mesh = draw(meshes())
    return mesh, draw(shapes(3)), tuple(draw(layouts(mesh)) for _ in range(count))


def numbers(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Returns whole numbers as float64, whose products and sums are exact: results can be compared bit by bit."""
    return torch.randint(-9, 10, tuple(shape), generator=torch.Generator().manual_seed(seed)).double()


def position(mesh: DeviceMesh) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return tuple(coordinate)


def part(x: torch.Tensor, layout: Layout | str, mesh: DeviceMesh) -> torch.Tensor:
    """Returns the calling rank's part of `x`, cut by torch.chunk."""
    return local_by_torch_chunk(x, layout, mesh, position(mesh))


def place(x: torch.Tensor, layout: Layout | str, mesh: DeviceMesh, *, requires_grad: bool = False) -> DTensor:
    """Returns `x` in `layout` as a leaf, without this library's `distribute`."""
    local = part(x, layout, mesh).clone(memory_format=torch.contiguous_format)
    placements = Layout(str(layout)).placements(mesh, x.ndim)
    held = DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape, stride=x.contiguous().stride())
    held.requires_grad_(requires_grad)
    return held


def gradient_of(y: torch.Tensor, x: DTensor, *weight: DTensor, create_graph: bool = False) -> DTensor:
    """Returns the gradient of `y`, a scalar unless weighted, by `x`."""
    (found,) = torch.autograd.grad(y, x, weight or None, create_graph=create_graph)
    assert isinstance(found, DTensor)
    return found


def assert_holds(held: DTensor, x: torch.Tensor, layout: Layout | str) -> None:
    """Checks shape, placements and the calling rank's part, bit by bit."""
    mesh, local = held.device_mesh, held.to_local()
    assert held.shape == x.shape
    assert held.dtype == local.dtype == x.dtype
    assert held.placements == Layout(str(layout)).placements(mesh, x.ndim)
    expected = part(x, layout, mesh)
    assert local.shape == expected.shape
    assert torch.equal(local, expected)


def test_the_check_itself_fails_on_a_wrong_value_shape_or_placement() -> None:
    x = numbers((2, 5, 3))

    def wrong(mesh: DeviceMesh, held: str, checked: str, change: float) -> None:
        assert_holds(place(x, held, mesh), x + change, checked)

    run_on_mesh({"sp": 2}, wrong, "b (sp s) h", "b (sp s) h", 0)
    for held, checked, change in [
        ("b (sp s) h", "b (sp s) h", 1),
        ("b (sp s) h", "b s (sp h)", 0),
        ("b s h", "b (sp s) h", 0),
    ]:
        with pytest.raises(AssertionError):
            run_on_mesh({"sp": 2}, wrong, held, checked, change)


# Values


def keeps_value(mesh: DeviceMesh, x: torch.Tensor, src: Layout, dst: Layout) -> None:
    moved = redistribute(place(x, src, mesh), dst)
    assert_holds(moved, x, dst)
    assert moved.to_local().is_contiguous()
    assert moved.stride() == x.contiguous().stride()
    assert torch.equal(full_value(moved), x)


@given(cases(2))
def test_any_move_keeps_the_global_value(case: tuple[dict[str, int], tuple[int, ...], tuple[Layout, ...]]) -> None:
    mesh, shape, (src, dst) = case
    run_on_mesh(mesh, keeps_value, numbers(shape), src, dst)


def goes_and_returns(mesh: DeviceMesh, x: torch.Tensor, a: Layout, b: Layout, c: Layout) -> None:
    held = place(x, a, mesh)
    assert_holds(redistribute(redistribute(held, b), a), x, a)
    by_way_of_b, direct = redistribute(redistribute(held, b), c), redistribute(held, c)
    assert by_way_of_b.placements == direct.placements
    assert torch.equal(by_way_of_b.to_local(), direct.to_local())


@given(cases(3))
def test_a_round_trip_is_nothing_and_two_moves_are_one(
    case: tuple[dict[str, int], tuple[int, ...], tuple[Layout, ...]],
) -> None:
    mesh, shape, (a, b, c) = case
    run_on_mesh(mesh, goes_and_returns, numbers(shape), a, b, c)


def distributes(mesh: DeviceMesh, x: torch.Tensor, layout: Layout) -> None:
    whole = x.clone().requires_grad_()
    with count_collectives() as count:
        held = distribute(whole, mesh, layout)
    assert count.kinds == []
    assert_holds(held, x, layout)
    weight = numbers(x.shape, seed=1)
    (held.to_local() * part(weight, layout, mesh)).sum().backward()
    assert whole.grad is not None
    assert torch.equal(whole.grad, weight)


@given(cases(1))
def test_distribute_keeps_the_part_of_each_rank_and_gathers_the_gradient(
    case: tuple[dict[str, int], tuple[int, ...], tuple[Layout, ...]],
) -> None:
    mesh, shape, (layout,) = case
    run_on_mesh(mesh, distributes, numbers(shape), layout)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.int16],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@pytest.mark.parametrize("dst", ["b (sp s) (cp h)", "b s h", "(cp sp b) s h", "b (cp sp s) h", "b (cp s) h"])
def test_any_dtype_moves(dtype: torch.dtype, dst: str) -> None:
    x = numbers((3, 5, 7)).to(dtype)
    run_on_mesh(PAIR, keeps_value, x, Layout("b (cp sp s) h"), Layout(dst))


def moves_from_any_memory_order(mesh: DeviceMesh, x: torch.Tensor, src: Layout, dst: Layout) -> None:
    for order in ((2, 0, 1), (1, 0, 2), (0, 2, 1)):
        back = tuple(order.index(dim) for dim in range(3))
        local = part(x, src, mesh).permute(order).contiguous().permute(back)
        stride = x.permute(order).contiguous().permute(back).stride()
        placements = src.placements(mesh)
        held = DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape, stride=stride)
        assert_holds(redistribute(held, dst), x, dst)
        padded = torch.zeros((*local.shape[:-1], local.shape[-1] + 2), dtype=x.dtype)
        padded[..., :-2] = local
        held = DTensor.from_local(padded[..., :-2], mesh, placements, run_check=False, shape=x.shape, stride=stride)
        assert_holds(redistribute(held, dst), x, dst)


@given(cases(2))
def test_local_tensors_may_lie_in_memory_in_any_order(
    case: tuple[dict[str, int], tuple[int, ...], tuple[Layout, ...]],
) -> None:
    mesh, shape, (src, dst) = case
    run_on_mesh(mesh, moves_from_any_memory_order, numbers(shape), src, dst)


# Gradients


def cube(x: Any, weight: Any) -> Any:
    """A function of each element alone, by multiplications in a fixed order."""
    return (x * x * x) * weight


def has_one_device_gradients(mesh: DeviceMesh, x: torch.Tensor, src: Layout, dst: Layout) -> None:
    weight, tangent = numbers(x.shape, seed=1), numbers(x.shape, seed=2)
    whole = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(cube(whole, weight).sum(), whole, create_graph=True)
    (second,) = torch.autograd.grad((first * tangent).sum(), whole)

    held = place(x, src, mesh, requires_grad=True)
    loss = cube(redistribute(held, dst).to_local(), part(weight, dst, mesh)).sum()
    gradient = gradient_of(loss, held, create_graph=True)
    assert_holds(gradient, first, src)
    loss = (gradient.to_local() * part(tangent, src, mesh)).sum()
    assert_holds(gradient_of(loss, held), second, src)


@given(cases(2))
def test_first_and_second_derivatives_are_those_of_one_device(
    case: tuple[dict[str, int], tuple[int, ...], tuple[Layout, ...]],
) -> None:
    mesh, shape, (src, dst) = case
    run_on_mesh(mesh, has_one_device_gradients, numbers(shape), src, dst)


def is_its_own_adjoint(mesh: DeviceMesh, x: torch.Tensor, y: torch.Tensor, src: Layout, dst: Layout) -> None:
    held = place(x, src, mesh, requires_grad=True)
    moved = redistribute(held, dst)
    back = gradient_of(moved, held, place(y, dst, mesh))
    assert (full_value(moved) * y).sum() == (x * full_value(back)).sum()


@given(cases(2))
def test_the_gradient_is_the_adjoint(case: tuple[dict[str, int], tuple[int, ...], tuple[Layout, ...]]) -> None:
    mesh, shape, (src, dst) = case
    run_on_mesh(mesh, is_its_own_adjoint, numbers(shape), numbers(shape, seed=1), src, dst)


def sums_partial_gradients(mesh: DeviceMesh, x: torch.Tensor, src: Layout, dst: Layout) -> None:
    whole = x.clone().requires_grad_()
    weight, tangent = numbers(x.shape, seed=1), numbers(x.shape, seed=2)
    replicated = [size for size, at in zip(mesh.shape, dst.placements(mesh), strict=True) if at == Replicate()]
    times = torch.Size(replicated).numel()
    (first,) = torch.autograd.grad(cube(whole, times * weight).sum(), whole, create_graph=True)
    (second,) = torch.autograd.grad((first * tangent).sum(), whole)

    held = place(x, src, mesh, requires_grad=True)
    partial = [Partial() if placement == Replicate() else placement for placement in dst.placements(mesh)]
    moved = redistribute(held, dst).to_local(grad_placements=partial)
    gradient = gradient_of(cube(moved, part(weight, dst, mesh)).sum(), held, create_graph=True)
    assert_holds(gradient, first, src)
    loss = (gradient.to_local() * part(tangent, src, mesh)).sum()
    assert_holds(gradient_of(loss, held), second, src)


@given(cases(2))
def test_partial_gradients_are_summed(case: tuple[dict[str, int], tuple[int, ...], tuple[Layout, ...]]) -> None:
    mesh, shape, (src, dst) = case
    assume(src != dst)  # else the tensor itself is returned, and its gradient is left as it comes
    run_on_mesh(mesh, sums_partial_gradients, numbers(shape), src, dst)


def zeros_come_from_unused(mesh: DeviceMesh, x: torch.Tensor) -> None:
    q, k = (place(x, "b (sp s) h", mesh, requires_grad=True) for _ in range(2))
    used, _ = redistribute((q, k), "b s (sp h)")
    with count_collectives() as count:
        used.to_local().sum().backward()
    assert count.kinds == ["all-to-all"]
    assert isinstance(q.grad, DTensor)
    assert isinstance(k.grad, DTensor)
    assert_holds(q.grad, torch.ones_like(x), "b (sp s) h")
    assert_holds(k.grad, torch.zeros_like(x), "b (sp s) h")


def test_an_output_that_nobody_used_gives_zeros() -> None:
    run_on_mesh({"sp": 4}, zeros_come_from_unused, numbers((2, 5, 3)))


def takes_gradient_in_any_layout(mesh: DeviceMesh, x: torch.Tensor, names: str, src: Layout, held_in: Layout) -> None:
    held = place(x, src, mesh, requires_grad=True)
    weight = numbers(x.shape, seed=1)
    assert_holds(gradient_of(redistribute(held, names), held, place(weight, held_in, mesh)), weight, src)


@given(cases(2), st.sampled_from(["b s h", "b ...", "...", "... h"]))
def test_a_gradient_may_come_in_another_layout_than_the_output(
    case: tuple[dict[str, int], tuple[int, ...], tuple[Layout, ...]], names: str
) -> None:
    mesh, shape, (src, held_in) = case
    assume(src.mesh_axes)
    run_on_mesh(mesh, takes_gradient_in_any_layout, numbers(shape), names, src, held_in)


def whole_numbers_have_no_gradient(mesh: DeviceMesh) -> None:
    x = numbers((2, 5, 3))
    floats = place(x, "b (sp s) h", mesh, requires_grad=True)
    ids = place(x.long(), "b (sp s) h", mesh)
    moved, moved_ids = redistribute((floats, ids), "b s (sp h)")
    assert (moved.requires_grad, moved_ids.requires_grad) == (True, False)
    moved.to_local().sum().backward()
    assert isinstance(floats.grad, DTensor)
    assert_holds(floats.grad, torch.ones_like(x), "b (sp s) h")


def test_tensors_of_whole_numbers_move_along_without_gradient() -> None:
    run_on_mesh({"sp": 2}, whole_numbers_have_no_gradient)


# Several tensors at once


def moves_several(
    mesh: DeviceMesh, wholes: list[torch.Tensor], srcs: tuple[Layout, ...], dsts: tuple[Layout, ...]
) -> tuple[list[str], list[str]]:
    held = [place(x, src, mesh, requires_grad=True) for x, src in zip(wholes, srcs, strict=True)]
    with count_collectives() as together:
        moved = redistribute(held, dsts)
    weights = [place(numbers(x.shape, seed=3), dst, mesh) for x, dst in zip(wholes, dsts, strict=True)]
    gradients = torch.autograd.grad(moved, held, weights)
    with count_collectives() as apart:
        for index, (tensor, dst) in enumerate(zip(held, dsts, strict=True)):
            alone = redistribute(tensor, dst)
            assert_holds(moved[index], wholes[index], dst)
            assert torch.equal(alone.to_local(), moved[index].to_local())
    for tensor, dst, weight, gradient in zip(held, dsts, weights, gradients, strict=True):
        alone = gradient_of(redistribute(tensor, dst), tensor, weight)
        assert isinstance(gradient, DTensor)
        assert alone.placements == gradient.placements
        assert torch.equal(alone.to_local(), gradient.to_local())
    assert together.bytes_sent == apart.bytes_sent
    return together.kinds, apart.kinds


@st.composite
def several(draw: st.DrawFn) -> tuple[dict[str, int], list[tuple[int, ...]], tuple[Layout, ...], tuple[Layout, ...]]:
    mesh, count = draw(meshes()), draw(st.integers(1, 3))
    drawn = [(draw(shapes(3)), draw(layouts(mesh)), draw(layouts(mesh))) for _ in range(count)]
    return mesh, [shape for shape, _, _ in drawn], tuple(a for _, a, _ in drawn), tuple(b for _, _, b in drawn)


@given(several())
def test_several_tensors_at_once_equal_one_by_one(
    case: tuple[dict[str, int], list[tuple[int, ...]], tuple[Layout, ...], tuple[Layout, ...]],
) -> None:
    mesh, sizes, srcs, dsts = case
    wholes = [numbers(shape, seed=index) for index, shape in enumerate(sizes)]
    for together, apart in run_on_mesh(mesh, moves_several, wholes, srcs, dsts):
        assert len(together) <= len(apart)


def test_several_tensors_share_one_all_to_all() -> None:
    wholes = [numbers((2, 9, heads, 3), seed=heads) for heads in (8, 2, 2)]
    src, dst = Layout("b (sp s) h d"), Layout("b s (sp h) d")
    for together, apart in run_on_mesh({"sp": 4}, moves_several, wholes, (src,) * 3, (dst,) * 3):
        assert (together, apart) == (["all-to-all"], ["all-to-all"] * 3)


def test_each_dtype_has_an_all_to_all_of_its_own() -> None:
    def kinds(mesh: DeviceMesh) -> list[str]:
        held = [place(numbers((2, 9, 4)).to(dtype), "b (sp s) h", mesh) for dtype in (torch.float64, torch.int16)]
        with count_collectives() as count:
            for moved, dtype in zip(
                redistribute([*held, *held], "b s (sp h)"), [torch.float64, torch.int16] * 2, strict=True
            ):
                assert_holds(moved, numbers((2, 9, 4)).to(dtype), "b s (sp h)")
        return count.kinds

    assert run_on_mesh({"sp": 2}, kinds) == [["all-to-all"] * 2] * 2


# What is sent


def sends_what_is_printed(mesh: DeviceMesh, x: torch.Tensor, src: Layout, dst: Layout) -> None:
    move = Transition(src, dst, x.shape, mesh, itemsize=x.element_size())
    held = place(x, src, mesh, requires_grad=True)
    with count_collectives() as forth:
        moved = redistribute(held, dst)
    with count_collectives() as back:
        gradient_of(moved, held, place(x, dst, mesh))
    for count, transition in [(forth, move), (back, move.reversed())]:
        assert count.kinds == [step.kind for step in transition.steps if step.kind != "slice"]
        assert count.bytes_sent == transition.bytes_sent(position(mesh))


@given(cases(2), st.sampled_from([torch.float64, torch.bfloat16, torch.complex64]))
def test_collectives_and_bytes_are_those_of_the_transition(
    case: tuple[dict[str, int], tuple[int, ...], tuple[Layout, ...]], dtype: torch.dtype
) -> None:
    mesh, shape, (src, dst) = case
    run_on_mesh(mesh, sends_what_is_printed, numbers(shape).to(dtype), src, dst)


# Meshes


def is_exact_on_a_flattened_mesh(mesh: DeviceMesh, shape: tuple[int, ...], layout: Layout) -> None:
    mesh._flatten()
    x = numbers(shape)
    keeps_value(mesh, x, layout, Layout("a b"))
    keeps_value(mesh, x, Layout("a b"), layout)
    has_one_device_gradients(mesh, x, layout, Layout("a b"))
    distributes(mesh, x, layout)


# https://github.com/pytorch/pytorch/issues/194457: where its dims are flattened, torch gathers nested shards wrong.
@pytest.mark.parametrize("size", [pytest.param(5, id="pytorch#194457"), *range(1, 12)])
def test_uneven_nested_shards_are_exact_on_a_flattened_mesh(size: int) -> None:
    for layout, shape in [("(cp sp a) b", (size, 3)), ("a (cp sp b)", (3, size)), ("(cp a) (sp b)", (size, 3))]:
        run_on_mesh(PAIR, is_exact_on_a_flattened_mesh, shape, Layout(layout))


def moves_on_a_slice(world: DeviceMesh, axes: str | tuple[str, ...], x: torch.Tensor, src: str, dst: str) -> None:
    mesh = world[axes]
    keeps_value(mesh, x, Layout(src), Layout(dst))
    has_one_device_gradients(mesh, x, Layout(src), Layout(dst))


@pytest.mark.parametrize(
    ("axes", "src", "dst"),
    [
        ("sp", "b (sp s) h", "b s (sp h)"),
        (("cp", "sp"), "b (cp sp s) h", "b (sp s) (cp h)"),
        (("dp", "sp"), "(dp b) (sp s) h", "b (dp s) (sp h)"),
        (("dp", "sp"), "b (dp sp s) h", "(dp sp b) s h"),
    ],
)
def test_a_slice_of_a_larger_mesh_keeps_its_ranks(axes: str | tuple[str, ...], src: str, dst: str) -> None:
    run_on_mesh({"dp": 2, "cp": 2, "sp": 2}, moves_on_a_slice, axes, numbers((3, 5, 6)), src, dst)


def test_three_mesh_axes_move() -> None:
    x = numbers((5, 7, 6))
    for src, dst in [
        ("(dp b) (cp s) (sp h)", "(sp b) (dp s) (cp h)"),
        ("b (dp cp sp s) h", "(dp b) (cp s) (sp h)"),
        ("(dp cp sp b) s h", "b s (dp cp sp h)"),
        ("b (dp sp s) (cp h)", "(cp b) s h"),
    ]:
        run_on_mesh({"dp": 2, "cp": 2, "sp": 2}, keeps_value, x, Layout(src), Layout(dst))


# The memory of a result


def keeps_apart(mesh: DeviceMesh, src: str, dst: str) -> None:
    x = numbers((4, 6))
    held = place(x, src, mesh)
    redistribute(held, dst).to_local().zero_()
    assert_holds(held, x, src)
    whole = x.clone()
    distribute(whole, mesh, "(sp b) s").to_local().zero_()
    assert torch.equal(whole, x)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("src", "dst"), [("b s", "(sp b) s"), ("b (sp s)", "(sp b) s"), ("b (sp s)", "b s")])
def test_a_result_shares_no_memory_with_what_it_came_from(ranks: int, src: str, dst: str) -> None:
    run_on_mesh({"sp": ranks}, keeps_apart, src, dst)


def is_itself(mesh: DeviceMesh) -> bool:
    held = place(numbers((4, 6)), "b (sp s)", mesh)
    return redistribute(held, "b (sp s)") is held and redistribute([held], "... (sp s)")[0] is held


def test_a_tensor_that_is_placed_so_already_is_returned_itself() -> None:
    assert run_on_mesh({"sp": 2}, is_itself) == [True, True]


# Names


def reads_layout(mesh: DeviceMesh) -> list[str]:
    held = place(numbers((4, 1, 6)), "(cp b) (sp s) h", mesh)
    return [str(layout_of(held, names)) for names in ("b s h", "x y z", "b 1 h", "...", "b ...", "... dim0")]


def test_the_layout_held_is_read_from_the_placements() -> None:
    read = ["(cp b) (sp s) h", "(cp x) (sp y) z", "(cp b) (sp dim1) h"]
    read += ["(cp dim0) (sp dim1) dim2", "(cp b) (sp dim1) dim2", "(cp dim0x) (sp dim1) dim0"]
    assert run_on_mesh(PAIR, reads_layout) == [read] * 4


def moves_unnamed(mesh: DeviceMesh) -> None:
    x = numbers((1, 5, 6))
    assert_holds(redistribute(place(x, "b (sp s) h", mesh), "b ... (sp h)"), x, "b s (sp h)")
    assert_holds(redistribute(place(x, "(sp b) s h", mesh), "1 ... (sp h)"), x, "b s (sp h)")
    assert_holds(redistribute(place(x, "(sp b) s h", mesh), "..."), x, "b s h")


def test_axes_that_are_not_named_may_be_cut_before() -> None:
    run_on_mesh({"sp": 2}, moves_unnamed)


def test_tensors_without_dims_and_no_tensors_at_all() -> None:
    def nothing(mesh: DeviceMesh) -> None:
        assert redistribute([], "b s") == ()
        assert_holds(redistribute(distribute(torch.tensor(3.0), mesh, ""), ""), torch.tensor(3.0), "")

    run_on_mesh({"sp": 2}, nothing)


# The cases of public reports


def tagged(shape: tuple[int, int, int]) -> torch.Tensor:
    """Returns (B, S, H, 3), the last dim saying batch, position and head."""
    return torch.stack(torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij"), dim=-1)


def brings_tags_home(mesh: DeviceMesh, shape: tuple[int, int, int]) -> None:
    x = tagged(shape)
    batch, seq_len, _ = shape
    by_heads = redistribute(place(x, "b (sp s) h d", mesh), "b s (sp h) d").to_local()
    first = Layout("b s (sp h) d").local_box(x.shape, mesh)[2][0]
    for b in range(batch):
        for s in range(seq_len):
            for h in range(by_heads.shape[2]):
                assert by_heads[b, s, h].tolist() == [b, s, first + h]
    keeps_value(mesh, x, Layout("b (sp s) h d"), Layout("b s (sp h) d"))
    keeps_value(mesh, x, Layout("b s (sp h) d"), Layout("b (sp s) h d"))
    has_one_device_gradients(mesh, x.double(), Layout("b (sp s) h d"), Layout("b s (sp h) d"))
    transposed = x.transpose(1, 2)  # heads before the sequence
    keeps_value(mesh, transposed, Layout("b h (sp s) d"), Layout("b (sp h) s d"))


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        pytest.param((2, 8, 4), 2, id="DeepSpeed#5664 on 2"),
        pytest.param((2, 8, 4), 4, id="DeepSpeed#5664 on 4"),
        pytest.param((2, 2, 4), 2, id="DeepSpeed#5808"),
        pytest.param((1, 8, 7), 4, id="DeepSpeed#6392, 7 heads on 4"),
        pytest.param((1, 16, 20), 8, id="DeepSpeed#6392, 20 heads on 8"),
        pytest.param((2, 8, 2), 4, id="LlamaFactory#10794, 2 kv heads on 4"),
        pytest.param((1, 21, 12), 8, id="FastVideo#884, 21 frames and 12 heads on 8"),
        pytest.param((1, 769, 12), 8, id="FastVideo#884, 769 text tokens and 12 heads on 8"),
    ],
)
def test_every_tag_comes_to_where_it_belongs(shape: tuple[int, int, int], ranks: int) -> None:
    run_on_mesh({"sp": ranks}, brings_tags_home, shape)


# https://github.com/meta-pytorch/autoparallel/issues/462
def test_two_mesh_axes_move_at_once_without_a_replicated_state() -> None:
    def kinds(mesh: DeviceMesh) -> list[str]:
        x = numbers((3, 5, 6, 7))
        held = place(x, "(cp a) (sp b) c d", mesh)
        with count_collectives() as count:
            moved = redistribute(held, "a b (cp c) (sp d)")
        assert_holds(moved, x, "a b (cp c) (sp d)")
        return count.kinds

    assert run_on_mesh(PAIR, kinds) == [["all-to-all", "all-to-all"]] * 4


# Processes


def on_processes(sizes: dict[str, int]) -> None:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    last = list(sizes)[-1]
    every = " ".join(sizes)
    for src, dst in [
        (f"b ({every} s) h", f"b s ({every} h)"),
        (f"({every} b) s h", f"b ({last} s) h"),
        (f"b s ({every} h)", "b s h"),
        (f"({last} b) s h", f"b ({every} s) h"),
    ]:
        for shape in [(2, 5, 3), (4, 8, 8), (1, 1, 0)]:
            x = numbers(shape)
            has_one_device_gradients(mesh, x, Layout(src), Layout(dst))
            sends_what_is_printed(mesh, x, Layout(src), Layout(dst))
            for dtype in (torch.bool, torch.int16, torch.complex64, torch.bfloat16):
                keeps_value(mesh, x.to(dtype), Layout(src), Layout(dst))
    if len(sizes) == 2:
        is_exact_on_a_flattened_mesh(mesh, (5, 3), Layout("(cp sp a) b"))
        sums_partial_gradients(mesh, numbers((2, 5, 3)), Layout("b (cp sp s) h"), Layout("b (sp s) h"))


@pytest.mark.parametrize("sizes", [{"sp": 2}, {"sp": 4}, PAIR], ids=str)
def test_processes_hold_the_same_as_simulated_ranks(gloo: GlooPool, sizes: dict[str, int]) -> None:
    gloo.run(torch.Size(sizes.values()).numel(), on_processes, sizes)


# Refusals


def refused(act: Callable[[DeviceMesh], Any], match: str, *, sizes: dict[str, int] | None = None) -> None:
    """Checks that every rank refuses before anything is sent."""

    def on_rank(mesh: DeviceMesh) -> None:
        with count_collectives() as count, pytest.raises(LayoutError, match=match):
            act(mesh)
        assert count.kinds == []

    run_on_mesh(sizes or {"sp": 2}, on_rank)


def from_local(mesh: DeviceMesh, *placements: Any) -> DTensor:
    return DTensor.from_local(torch.zeros(2, 4), mesh, placements, run_check=False)


def test_rejects_partial() -> None:
    refused(
        lambda mesh: redistribute(from_local(mesh, Partial()), "b s"),
        r"redistribute: to 'b s', global shape \(2, 4\), placements \(Partial\(sum\),\): layout_of: x is placed "
        r"Partial\(sum\) on 'sp', which no layout can say. Reduce it first.",
    )


def test_rejects_strided_shard() -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    refused(
        lambda mesh: redistribute(from_local(mesh, _StridedShard(0, split_factor=2), Shard(0)), "b s"),
        r"x is placed _StridedShard\(.*\) on 'cp', which no layout can say. Bring it to Shard or Replicate first.",
        sizes=PAIR,
    )


def test_rejects_mesh_without_names() -> None:
    def unnamed() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for act in (
            lambda: redistribute(from_local(mesh, Shard(0)), "b s"),
            lambda: distribute(torch.zeros(2, 4), mesh, "b s"),
        ):
            with pytest.raises(LayoutError, match=r"the mesh has no dimension names. Pass mesh_dim_names"):
                act()

    run_ranks(2, unnamed)


def test_rejects_what_torch_chunk_would_not_give() -> None:
    def held(mesh: DeviceMesh) -> DTensor:
        local = torch.zeros(4 if mesh.get_rank() == 0 else 1)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,))

    refused(
        lambda mesh: redistribute(held(mesh), "s"),
        r"this rank holds \([41],\) of global shape \(5,\), torch.chunk gives it \([32],\). Cut the tensor with "
        r"distribute, or give from_local pieces as torch.chunk makes them.",
    )


@pytest.mark.parametrize("plain", [torch.zeros(2, 4), torch.zeros(0, 4), torch.zeros(()), [torch.zeros(2, 4)]], ids=str)
def test_rejects_plain_tensor(plain: Any) -> None:
    refused(
        lambda _: redistribute(plain, "b s"),
        r"x is a Tensor, not a DTensor. Place it with distribute, or with from_local.",
    )


def test_rejects_distribution_of_what_is_distributed() -> None:
    refused(
        lambda mesh: distribute(from_local(mesh, Shard(0)), mesh, "b s"),
        r"distribute: x is a DTensor already, placed \(Shard\(dim=0\),\). Use redistribute.",
    )


def test_rejects_tensors_of_two_meshes() -> None:
    refused(
        lambda mesh: redistribute([from_local(mesh["cp"], Shard(0)), from_local(mesh["sp"], Shard(0))], "b s"),
        r"redistribute: tensor 1 is on DeviceMesh.*, tensor 0 on DeviceMesh.*. Move them apart.",
        sizes=PAIR,
    )


def test_rejects_another_number_of_layouts() -> None:
    refused(
        lambda mesh: redistribute([from_local(mesh, Shard(0))], ["b s", "b s"]),
        r"redistribute: 1 tensors and 2 layouts. Pass one layout, or one for each.",
    )


def test_rejects_placements_for_a_layout() -> None:
    refused(
        lambda mesh: redistribute(from_local(mesh, Shard(0)), [Shard(1)]),  # pyright: ignore[reportArgumentType, reportCallIssue] - that it is refused is the test
        r"Shard\(dim=1\) is a Shard. Pass a Layout or its text",
    )


def test_rejects_layout_that_does_not_fit_and_says_tensor_and_mesh() -> None:
    refused(
        lambda mesh: redistribute(from_local(mesh, Shard(0)), "b (ps s)"),
        r"redistribute: to 'b \(ps s\)', global shape \(4, 4\), placements \(Shard\(dim=0\),\): Layout: 'ps' in "
        r"\(ps s\) is no dimension of the mesh \{'sp': 2\}",
    )
    refused(lambda mesh: redistribute(from_local(mesh, Shard(0)), "b s h"), r"names 3 axes, the tensor has 2 dims.")
    refused(
        lambda mesh: redistribute(from_local(mesh, Shard(0)), "1 (sp s)"), r"says size 1 at dim 0, the tensor has 4."
    )
    refused(lambda mesh: distribute(torch.zeros(2), mesh, "b (sp s)"), r"names 2 axes, the tensor has 1 dims.")


def test_rejects_rank_outside_the_mesh() -> None:
    def on_three() -> None:
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("sp",))
        held = DTensor.from_local(torch.zeros(1, 4), mesh, [Shard(0)], run_check=False)
        if mesh.get_coordinate() is None:
            with pytest.raises(
                LayoutError, match=r"this rank is not part of DeviceMesh.*. Call it on the mesh's ranks"
            ):
                redistribute(held, "b s")
            with pytest.raises(LayoutError, match=r"this rank has no coordinate on the mesh"):
                distribute(torch.zeros(2, 4), mesh, "b s")

    run_ranks(3, on_three)


def test_rejects_gradient_that_is_no_sum() -> None:
    def act(mesh: DeviceMesh) -> None:
        held = place(numbers((2, 4)), "b (sp s)", mesh, requires_grad=True)
        whole = redistribute(held, "b s")
        with count_collectives() as count:
            with pytest.raises(
                LayoutError, match=r"a gradient is placed Partial\(avg\); only sums can be reduced on the"
            ):
                whole.to_local(grad_placements=[Partial("avg")]).sum().backward()
            assert count.kinds == []

    run_on_mesh({"sp": 2}, act)


@pytest.mark.parametrize(
    ("ranks", "names", "dst"),
    [
        ([1, 0], ("sp",), "b (sp s)"),
        ([[0, 2], [1, 3]], ("cp", "sp"), "b (cp sp s)"),
        ([[0, 1], [3, 2]], ("cp", "sp"), "b (sp s)"),
    ],
    ids=str,
)
def test_rejects_mesh_whose_ranks_do_not_ascend(ranks: list[Any], names: tuple[str, ...], dst: str) -> None:
    def act() -> None:
        mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)
        held = place(numbers((4, 4)), f"({' '.join(names)} b) s", mesh)
        with count_collectives() as count:
            with pytest.raises(LayoutError, match=r"mesh: the ranks along .* are \(.*\), which do not ascend"):
                redistribute(held, dst)
            assert count.kinds == []

    run_ranks(torch.tensor(ranks).numel(), act)
