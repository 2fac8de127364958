"""Moves between layouts, on many ranks: values, gradients, bytes and kinds of collectives, each against one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gloo import GlooPool
from hypothesis import assume, given, settings
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
    return held.requires_grad_(requires_grad)


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
    (held * place(weight, layout, mesh)).sum().full_tensor().backward()
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
@settings(max_examples=20)
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
    (gradient,) = torch.autograd.grad(loss, held, create_graph=True)
    assert_holds(gradient.detach(), first.detach(), src)
    loss = (gradient.to_local() * part(tangent, src, mesh)).sum()
    assert_holds(torch.autograd.grad(loss, held)[0], second, src)


@given(cases(2))
def test_first_and_second_derivatives_are_those_of_one_device(
    case: tuple[dict[str, int], tuple[int, ...], tuple[Layout, ...]],
) -> None:
    mesh, shape, (src, dst) = case
    run_on_mesh(mesh, has_one_device_gradients, numbers(shape), src, dst)


def is_its_own_adjoint(mesh: DeviceMesh, x: torch.Tensor, y: torch.Tensor, src: Layout, dst: Layout) -> None:
    held = place(x, src, mesh, requires_grad=True)
    moved = redistribute(held, dst)
    (back,) = torch.autograd.grad(moved, held, place(y, dst, mesh))
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
    (gradient,) = torch.autograd.grad(cube(moved, part(weight, dst, mesh)).sum(), held, create_graph=True)
    assert_holds(gradient.detach(), first.detach(), src)
    loss = (gradient.to_local() * part(tangent, src, mesh)).sum()
    assert_holds(torch.autograd.grad(loss, held)[0], second, src)


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
    assert q.grad is not None
    assert k.grad is not None
    assert_holds(q.grad, torch.ones_like(x), "b (sp s) h")
    assert_holds(k.grad, torch.zeros_like(x), "b (sp s) h")


def test_an_output_that_nobody_used_gives_zeros() -> None:
    run_on_mesh({"sp": 4}, zeros_come_from_unused, numbers((2, 5, 3)))


def takes_gradient_in_any_layout(mesh: DeviceMesh, x: torch.Tensor, names: str, src: Layout, held_in: Layout) -> None:
    held = place(x, src, mesh, requires_grad=True)
    weight = numbers(x.shape, seed=1)
    (gradient,) = torch.autograd.grad(redistribute(held, names), held, place(weight, held_in, mesh))
    assert_holds(gradient, weight, src)


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
    assert floats.grad is not None
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
        (alone,) = torch.autograd.grad(redistribute(tensor, dst), tensor, weight)
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
            for moved, dtype in zip(redistribute([*held, *held], "b s (sp h)"), [torch.float64, torch.int16] * 2, strict=True):
                assert_holds(moved, numbers((2, 9, 4)).to(dtype), "b s (sp h)")
        return count.kinds

    assert run_on_mesh({"sp": 2}, kinds) == [["all-to-all"] * 2] * 2


# What is sent


def sends_what_is_printed(mesh: DeviceMesh, x: torch.Tensor, src: Layout, dst: Layout) -> None:
    move = Transition(src, dst, x.shape, mesh, itemsize=x.element_size())
    held = place(x, src, mesh, requires_grad=True)
    for forth, run in [
        (move, lambda: redistribute(held, dst)),
        (move.reversed(), lambda: torch.autograd.grad(moved, held, place(x, dst, mesh))),
    ]:
        with count_collectives() as count:
            result = run()
        moved = result
        assert count.kinds == [step.kind for step in forth.steps if step.kind != "slice"]
        assert count.bytes_sent == forth.bytes_sent(position(mesh))


@given(cases(2), st.sampled_from([torch.float64, torch.bfloat16, torch.complex64]))
def test_collectives_and_bytes_are_those_of_the_transition(
    case: tuple[dict[str, int], tuple[int, ...], tuple[Layout, ...]], dtype: torch.dtype
) -> None:
    mesh, shape, (src, dst) = case
    run_on_mesh(mesh, sends_what_is_printed, numbers(shape).to(dtype), src, dst)
