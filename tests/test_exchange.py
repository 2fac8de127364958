"""The exchange of plain tensors: any boxes, wanted by any number of ranks, with first and second derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from boxes import inside, moves
from gloo import GlooPool
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ulysses_dtensor import Layout, Transition, count_collectives
from ulysses_dtensor.exchange import _lands_in_order, exchange
from ulysses_dtensor.heads import heads_of
from ulysses_dtensor.layout import Box
from ulysses_dtensor.route import Route, route
from ulysses_dtensor.testing import layouts, run_on_mesh, shapes

Move = tuple[tuple[int, ...], list[Box], list[Box]]
BOXES = st.integers(1, 5).flatmap(lambda ranks: st.lists(moves(ranks), min_size=1, max_size=3))


def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Returns whole numbers as float64, whose products and sums are exact: results can be compared bit by bit."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


def size_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def cubes(parts: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of weighted cubes, by multiplications in a fixed order."""
    return torch.stack([(part * part * part * weight).sum() for part, weight in zip(parts, weights, strict=True)]).sum()


def assert_moves(mesh: DeviceMesh, drawn: list[Move]) -> None:
    """Checks values, first and second derivatives and bytes of one exchange of several tensors, bit by bit."""
    rank, ranks = mesh.get_rank(), mesh.size()
    shapes_drawn, haves, wants = zip(*drawn, strict=True)
    owns = [inside(have[rank]) for have in haves]

    # One device: every rank's loss of what it wants, together.
    wholes = [numbers(shape, seed=index).requires_grad_() for index, shape in enumerate(shapes_drawn)]
    weights = [[numbers(size_of(want[peer]), seed=peer) for want in wants] for peer in range(ranks)]
    tangents = [numbers(shape, seed=index + 10) for index, shape in enumerate(shapes_drawn)]
    losses = [
        cubes([x[inside(want[peer])] for x, want in zip(wholes, wants, strict=True)], weights[peer])
        for peer in range(ranks)
    ]
    first = torch.autograd.grad(losses, wholes, create_graph=True)
    second = torch.autograd.grad(first, wholes, tangents)

    # The exchange.
    routes = [route(have, want, rank) for have, want in zip(haves, wants, strict=True)]
    held = [x.detach()[own].clone().requires_grad_() for x, own in zip(wholes, owns, strict=True)]
    with count_collectives() as forth:
        landed = exchange(held, routes, mesh.get_group())
    with count_collectives() as back:
        gradients = torch.autograd.grad(cubes(landed, weights[rank]), held, create_graph=True)
    doubles = torch.autograd.grad(gradients, held, [x[own] for x, own in zip(tangents, owns, strict=True)])

    for x, part, want in zip(wholes, landed, wants, strict=True):
        assert part.shape == size_of(want[rank])
        assert torch.equal(part, x[inside(want[rank])])
    for got, expected in [(gradients, first), (doubles, second)]:
        for part, x, own in zip(got, expected, owns, strict=True):
            assert torch.equal(part, x[own])
    assert forth.calls == [("all-to-all", 8 * sum(each.elements_sent for each in routes))]
    assert back.calls == [("all-to-all", 8 * sum(each.reversed().elements_sent for each in routes))]


@given(BOXES)
def test_values_derivatives_and_bytes_of_any_exchange(drawn: list[Move]) -> None:
    run_on_mesh({"sp": len(drawn[0][1])}, assert_moves, drawn)


def test_the_check_itself_fails_where_a_piece_comes_from_elsewhere() -> None:
    have: list[Box] = [((0, 2),), ((2, 4),)]

    def swapped(mesh: DeviceMesh) -> None:
        there = route(have, list(reversed(have)), mesh.get_rank())
        held = numbers((4,), seed=0)[inside(have[mesh.get_rank()])]
        (landed,) = exchange([held], [there], mesh.get_group())
        assert torch.equal(landed, held)

    with pytest.raises(AssertionError):
        run_on_mesh({"sp": 2}, swapped)


def repeats_kv_heads(mesh: DeviceMesh, num_heads: int, num_kv_heads: int) -> list[int]:
    ranks, rank = mesh.size(), mesh.get_rank()
    x = torch.arange(float(num_kv_heads)).expand(1, 2 * ranks, num_kv_heads).contiguous()  # (B, S, H_kv)
    table = [heads_of(num_heads, num_kv_heads, ranks, peer) for peer in range(ranks)]
    have: list[Box] = [((0, 1), (2 * peer, 2 * peer + 2), (0, num_kv_heads)) for peer in range(ranks)]
    want: list[Box] = [((0, 1), (0, 2 * ranks), heads.kv) for heads in table]
    held = x[inside(have[rank])].clone().requires_grad_()
    (landed,) = exchange([held], [route(have, want, rank)], mesh.get_group())
    assert torch.equal(landed, x[inside(want[rank])])
    landed.sum().backward()
    readers = [sum(head in range(*heads.kv) for heads in table) for head in range(num_kv_heads)]
    assert held.grad is not None
    assert torch.equal(held.grad, torch.tensor(readers, dtype=held.dtype).expand_as(held))
    return readers


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "ranks", "readers"),
    [
        pytest.param(8, 2, 4, [2, 2], id="LlamaFactory#10794"),
        pytest.param(24, 6, 4, [1, 2, 1, 1, 2, 1], id="divides neither way"),
        pytest.param(7, 7, 4, [1] * 7, id="DeepSpeed#6392"),
        pytest.param(71, 1, 8, [8], id="one kv head for all"),
        pytest.param(4, 2, 8, [2, 2], id="more ranks than heads"),
    ],
)
def test_kv_heads_read_by_several_ranks_sum_their_gradients(
    num_heads: int, num_kv_heads: int, ranks: int, readers: list[int]
) -> None:
    assert run_on_mesh({"sp": ranks}, repeats_kv_heads, num_heads, num_kv_heads) == [readers] * ranks


def mixes_dtypes(mesh: DeviceMesh) -> tuple[list[str], int]:
    have: list[Box] = [((0, 3), (0, 2)), ((3, 5), (0, 2))]
    want: list[Box] = [((0, 5), (0, 1)), ((0, 5), (1, 2))]
    there = route(have, want, mesh.get_rank())
    x = numbers((5, 2), seed=0)
    dtypes = (torch.float64, torch.int64, torch.bfloat16, torch.bool, torch.float64, torch.complex64, torch.int16)
    held = [x.to(dtype)[inside(have[mesh.get_rank()])].clone() for dtype in dtypes]
    for tensor in held:
        tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
    with count_collectives() as count:
        landed = exchange(held, [there] * len(held), mesh.get_group())
    for dtype, before, after in zip(dtypes, held, landed, strict=True):
        assert (after.dtype, after.requires_grad) == (dtype, before.requires_grad)
        assert torch.equal(after, x.to(dtype)[inside(want[mesh.get_rank()])])
    differentiable = [after for after in landed if after.requires_grad]
    torch.autograd.backward(differentiable, [torch.ones_like(after) for after in differentiable])
    for before in held:
        assert (before.grad is not None) == before.requires_grad
        assert before.grad is None or torch.equal(before.grad, torch.ones_like(before))
    return count.kinds, count.bytes_sent


def test_dtypes_travel_apart_and_what_has_no_gradient_gets_none() -> None:
    # One all-to-all for each of six dtypes; rank 0 sends three elements of each tensor, rank 1 two.
    expected = 8 + 8 + 2 + 1 + 8 + 8 + 2
    assert run_on_mesh({"sp": 2}, mixes_dtypes) == [
        (["all-to-all"] * 6, 3 * expected),
        (["all-to-all"] * 6, 2 * expected),
    ]


def moves_strided(mesh: DeviceMesh) -> None:
    have: list[Box] = [((0, 3), (0, 4), (0, 2)), ((0, 3), (4, 5), (0, 2))]
    want: list[Box] = [((0, 2), (0, 5), (0, 2)), ((2, 3), (0, 5), (0, 2))]
    there, x = route(have, want, mesh.get_rank()), numbers((3, 5, 2), seed=0)
    part = x[inside(have[mesh.get_rank()])]
    for held in (part, part.transpose(0, 2).contiguous().transpose(0, 2), part.repeat_interleave(2, dim=2)[..., ::2]):
        assert torch.equal(exchange([held], [there], mesh.get_group())[0], x[inside(want[mesh.get_rank()])])


def test_tensors_may_lie_in_memory_in_any_order() -> None:
    run_on_mesh({"sp": 2}, moves_strided)


def test_refuses_tensor_of_another_shape_than_its_route() -> None:
    there = route([((0, 2),)], [((0, 2),)], 0)
    with pytest.raises(AssertionError, match=r"\(3,\).*in_shape=\(2,\)"):
        run_on_mesh({"sp": 1}, lambda mesh: exchange([torch.zeros(3)], [there], mesh.get_group()))


def compiles() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
    group, rank = mesh.get_group(), mesh.get_rank()
    have: list[Box] = [((0, 1), (0, 3), (0, 3)), ((0, 1), (3, 5), (0, 3))]
    want: list[Box] = [((0, 1), (0, 5), (0, 2)), ((0, 1), (0, 5), (1, 3))]  # the head in the middle is sent twice
    there = route(have, want, rank)
    held = numbers((1, 5, 3), seed=0)[inside(have[rank])].clone().requires_grad_()
    ids = torch.arange(15).view(1, 5, 3)[inside(have[rank])]

    def step(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, moved = exchange((x * 2, x * 3, ids), (there,) * 3, group)
        (alone,) = exchange((x,), (there,), group)
        return (q * k * alone).sum(), moved

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    loss, moved = step(held, ids)
    (gradient,) = torch.autograd.grad(loss, held)
    for _ in range(2):
        compiled_loss, compiled_moved = compiled(held, ids)
        assert torch.equal(loss, compiled_loss)
        assert torch.equal(moved, compiled_moved)
        assert torch.equal(gradient, torch.autograd.grad(compiled_loss, held)[0])


def test_it_compiles_into_one_graph(gloo: GlooPool) -> None:
    gloo.run(2, compiles, timeout=120)


# Landing without a copy


def received(x: torch.Tensor, want: Box, own: Route) -> torch.Tensor:
    """Returns what arrives at a rank that wants `want`, in the order of the peers."""
    target = x[inside(want)]
    return torch.cat([target[inside(box)].flatten() for box in own.receives])


def test_two_pieces_that_are_said_to_land_in_order_do() -> None:
    said = 0
    for whole in product(range(1, 4), repeat=3):
        x = torch.arange(torch.Size(whole).numel()).view(whole)
        want: Box = tuple((0, size) for size in whole)
        for dim, first in [(dim, first) for dim, size in enumerate(whole) for first in range(size + 1)]:
            low, high = ((*want[:dim], part, *want[dim + 1 :]) for part in ((0, first), (first, whole[dim])))
            for have in ([low, high], [high, low]):
                own = route(have, [want, want], 0)
                lies_in_order = torch.equal(received(x, want, own).view(whole), x)
                assert _lands_in_order(own) <= lies_in_order, own
                said += _lands_in_order(own)
    assert said > 100


@given(st.integers(1, 5).flatmap(moves))
def test_pieces_that_are_said_to_land_in_order_do(drawn: Move) -> None:
    shape, have, want = drawn
    x = numbers(shape, seed=0)
    for rank, box in enumerate(want):
        own = route(have, want, rank)
        if _lands_in_order(own):
            assert torch.equal(received(x, box, own).view(own.out_shape), x[inside(box)])


@given(layouts({"sp": 3}), layouts({"sp": 3}), shapes(3))
def test_pieces_of_a_transition_that_are_said_to_land_in_order_do(
    src: Layout, dst: Layout, shape: tuple[int, ...]
) -> None:
    move = Transition(src, dst, shape, {"sp": 3})
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    for step in move.steps:
        for rank in range(3):
            own, want = move.route(step, (rank,)), dst.local_box(shape, move.mesh, (rank,))
            if step.kind == "all-to-all" and _lands_in_order(own):
                assert torch.equal(received(x, want, own).view(own.out_shape), x[inside(want)])


@pytest.mark.parametrize(
    ("src", "dst", "shape", "in_order"),
    [
        pytest.param("b (sp s) h d", "b s (sp h) d", (1, 9, 4, 2), True, id="batch of one"),
        pytest.param("(sp s) b h d", "s b (sp h) d", (9, 3, 4, 2), True, id="sequence first"),
        pytest.param("b (sp s) h d", "b s (sp h) d", (2, 9, 4, 2), False, id="batch of two"),
        pytest.param("b s (sp h) d", "b (sp s) h d", (1, 9, 4, 2), False, id="heads to sequence"),
        pytest.param("b h (sp s) d", "b (sp h) s d", (1, 4, 9, 2), False, id="heads first"),
        pytest.param("b (sp h) s d", "b h (sp s) d", (1, 4, 9, 2), True, id="heads first, to sequence"),
    ],
)
def test_which_moves_land_without_a_copy(src: str, dst: str, shape: tuple[int, ...], in_order: bool) -> None:
    move = Transition(src, dst, shape, {"sp": 2})
    assert [_lands_in_order(move.route(move.steps[0], (rank,))) for rank in range(2)] == [in_order] * 2
