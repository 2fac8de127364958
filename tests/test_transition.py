"""Steps and bytes of a move, from integers: no process group is made in this file."""

import copy
import pickle
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ulysses_dtensor import Layout, LayoutError, Transition
from ulysses_dtensor.testing import layouts, local_by_torch_chunk, meshes, shapes
from ulysses_dtensor.transition import Step, coordinates, peers

PAIR = {"cp": 2, "sp": 2}


@st.composite
def transitions(draw: st.DrawFn, *, max_dims: int = 3) -> Transition:
    mesh = draw(meshes(max_dims=max_dims))
    return Transition(draw(layouts(mesh)), draw(layouts(mesh)), draw(shapes(3)), mesh)


def kinds(transition: Transition) -> list[tuple[str, tuple[str, ...]]]:
    return [(step.kind, step.mesh_axes) for step in transition.steps]


# Which steps


@given(
    st.sampled_from([("b", "s"), ("s", "h"), ("h", "b")]),
    st.dictionaries(st.sampled_from(["dp", "sp", "tp"]), st.integers(2, 3), min_size=1),
    shapes(3),
    st.data(),
)
def test_innermost_mesh_axis_that_moves_is_one_all_to_all_over_it_alone(
    axes: tuple[str, str], mesh: dict[str, int], shape: tuple[int, ...], data: st.DataObject
) -> None:
    away, to = data.draw(st.permutations(axes))
    mesh_axis = list(mesh)[-1]
    others = {name: data.draw(st.sampled_from([away, to, None])) for name in list(mesh)[:-1]}

    def layout(at: str) -> Layout:
        cut = {**others, mesh_axis: at}
        return Layout(" ".join(f"({' '.join([*(m for m in mesh if cut[m] == n), n])})" for n in ("b", "s", "h")))

    assert kinds(Transition(layout(away), layout(to), shape, mesh)) == [("all-to-all", (mesh_axis,))]


def test_innermost_axis_of_two_on_one_dim_leaves_alone() -> None:
    move = Transition("b (cp sp s) h d", "b (cp s) (sp h) d", (1, 9, 4, 2), PAIR)
    assert kinds(move) == [("all-to-all", ("sp",))]
    assert kinds(move.reversed()) == [("all-to-all", ("sp",))]


def test_outer_axis_that_leaves_takes_the_joint_group() -> None:
    move = Transition("b (cp sp s) h d", "b (sp s) (cp h) d", (1, 9, 4, 2), PAIR)
    assert kinds(move) == [("all-to-all", ("cp", "sp"))]
    assert kinds(move.reversed()) == [("all-to-all", ("cp", "sp"))]


def test_outer_axis_that_arrives_takes_the_joint_group() -> None:
    assert kinds(Transition("(cp a) (sp b)", "a (cp sp b)", (4, 9), PAIR)) == [("all-to-all", ("cp", "sp"))]


# https://github.com/meta-pytorch/autoparallel/issues/462: both axes move at once, and nothing goes through a gather.
def test_two_axes_that_move_apart_are_one_all_to_all_each() -> None:
    move = Transition("(cp a) (sp b) c d", "a b (cp c) (sp d)", (4, 5, 6, 7), PAIR)
    assert sorted(kinds(move)) == [("all-to-all", ("cp",)), ("all-to-all", ("sp",))]


def test_two_axes_that_change_places_are_one_all_to_all() -> None:
    assert kinds(Transition("(cp a) (sp b)", "(sp a) (cp b)", (4, 5), PAIR)) == [("all-to-all", ("cp", "sp"))]


def test_dropped_axis_is_gathered_and_a_new_one_sliced() -> None:
    assert kinds(Transition("b (sp s)", "b s", (4, 5), {"sp": 2})) == [("all-gather", ("sp",))]
    assert kinds(Transition("b s", "b (sp s)", (4, 5), {"sp": 2})) == [("slice", ())]
    assert kinds(Transition("(cp b) s", "b (sp s)", (4, 5), PAIR)) == [("slice", ()), ("all-gather", ("cp",))]


def test_nothing_moves_between_equal_layouts_or_over_one_rank() -> None:
    assert kinds(Transition("b (sp s)", "b (sp s)", (4, 5), {"sp": 2})) == []
    assert kinds(Transition("b (sp s) h", "b s (sp h)", (4, 5, 6), {"sp": 1})) == []


@given(transitions())
def test_nothing_is_gathered_unless_an_axis_is_dropped(move: Transition) -> None:
    before, after = (layout.dims_of_mesh_axes(move.mesh, 3) for layout in (move.src, move.dst))
    dropped = {name for name in before if before[name] is not None and after[name] is None}
    for step in move.steps:
        assert step.kind != "all-gather" or set(step.mesh_axes) <= dropped
    if not dropped:
        assert "all-gather" not in [kind for kind, _ in kinds(move)]


@given(transitions())
def test_no_more_collectives_than_axes_that_leave_a_dim(move: Transition) -> None:
    before, after = (layout.dims_of_mesh_axes(move.mesh, 3) for layout in (move.src, move.dst))
    sizes = dict(move.mesh)
    left = [name for name in before if before[name] not in (None, after[name]) and sizes[name] > 1]
    entered = [name for name in before if after[name] not in (None, before[name]) and sizes[name] > 1]
    collectives = [step for step in move.steps if step.kind != "slice"]
    assert len(collectives) <= len(left) + len(entered)
    assert bool(collectives) >= bool(left)


@given(transitions())
def test_steps_follow_on_each_other_and_name_what_they_move(move: Transition) -> None:
    layout = {name: dim for name, dim in move.src.dims_of_mesh_axes(move.mesh, 3).items() if dict(move.mesh)[name] > 1}
    for step in move.steps:
        before, after = (side.dims_of_mesh_axes(move.mesh, 3) for side in (step.src, step.dst))
        assert {name: before[name] for name in layout} == layout
        layout = {name: after[name] for name in layout}
        assert tuple(name for name in layout if before[name] != after[name]) == step.moved
        assert set(step.mesh_axes) >= {name for name in step.moved if before[name] is not None}
    end = move.dst.dims_of_mesh_axes(move.mesh, 3)
    assert layout == {name: end[name] for name in layout}


# What moves


@given(transitions())
def test_steps_bring_every_element_to_its_place(move: Transition) -> None:
    x = torch.arange(torch.Size(move.shape).numel()).view(move.shape)
    held = {at: local_by_torch_chunk(x, move.src, dict(move.mesh), at) for at in coordinates(move.mesh)}
    for step in move.steps:
        landed = {}
        for at in held:
            group = peers(move.mesh, step.mesh_axes, at)
            own = move.route(step, at)
            out = torch.full(own.out_shape, -1)
            for index, peer in enumerate(group):
                sent = held[peer][tuple(slice(*b) for b in move.route(step, peer).sends[group.index(at)])]
                if sent.numel():
                    out[tuple(slice(*bounds) for bounds in own.receives[index])] = sent
            landed[at] = out
        held = landed
    for at in held:
        assert torch.equal(held[at], local_by_torch_chunk(x, move.dst, dict(move.mesh), at))


@given(transitions())
def test_bytes_are_those_of_the_routes(move: Transition) -> None:
    for at in coordinates(move.mesh):
        sent = 0
        for step in move.steps:
            if step.kind == "all-to-all":
                sent += move.route(step, at).elements_sent
            elif step.kind == "all-gather":
                group = peers(move.mesh, step.mesh_axes, at)
                largest = max(torch.Size(step.src.local_shape(move.shape, move.mesh, peer)).numel() for peer in group)
                sent += largest * (len(group) - 1)
        assert move.elements_sent(at) == sent
        assert move.bytes_sent(at) == sent * move.itemsize


@given(transitions())
def test_an_all_to_all_sends_no_more_than_it_holds_when_no_axis_is_dropped(move: Transition) -> None:
    for step in move.steps:
        after = step.dst.dims_of_mesh_axes(move.mesh, 3)
        if step.kind == "all-to-all" and all(after[name] is not None for name in step.mesh_axes):
            for at in coordinates(move.mesh):
                held = torch.Size(step.src.local_shape(move.shape, move.mesh, at)).numel()
                assert move.route(step, at).elements_sent <= held


def test_peers_are_row_major_over_the_axes_of_the_group() -> None:
    sizes = (("dp", 2), ("cp", 2), ("sp", 3))
    assert peers(sizes, ("sp",), (1, 0, 2)) == [(1, 0, 0), (1, 0, 1), (1, 0, 2)]
    assert peers(sizes, ("dp", "sp"), (1, 1, 0)) == [(d, 1, s) for d, s in product(range(2), range(3))]
    assert peers(sizes, (), (1, 1, 0)) == [(1, 1, 0)]
    assert list(coordinates(sizes[:2])) == [(0, 0), (0, 1), (1, 0), (1, 1)]


# As text and as a value


@pytest.mark.parametrize(
    ("move", "text"),
    [
        (
            Transition("b (sp s) h d", "b s (sp h) d", (1, 8, 4, 2), {"sp": 2}),
            """\
b (sp s) h d -> b s (sp h) d, global shape (1, 8, 4, 2) on sp=2
  all-to-all over sp (2 ranks): (1, 4, 4, 2) -> (1, 8, 2, 2), 64 bytes sent per rank""",
        ),
        (
            Transition("b (sp s) h d", "b s (sp h) d", (1, 9, 7, 2), {"sp": 2}, itemsize=2),
            """\
b (sp s) h d -> b s (sp h) d, global shape (1, 9, 7, 2) on sp=2
  all-to-all over sp (2 ranks): (1, 5, 7, 2) -> (1, 9, 4, 2), 60 to 64 bytes sent per rank""",
        ),
        (
            Transition("(cp b) s h", "b (sp s) h", (4, 6, 1), {"cp": 2, "sp": 2}),
            """\
(cp b) s h -> b (sp s) h, global shape (4, 6, 1) on cp=2, sp=2
  slice sp: (2, 6, 1) -> (2, 3, 1), nothing sent
  all-gather over cp (2 ranks): (2, 3, 1) -> (4, 3, 1), 24 bytes sent per rank""",
        ),
        (
            Transition("b (cp sp s) h d", "b (sp s) (cp h) d", (1, 8, 4, 1), {"cp": 2, "sp": 2}),
            """\
b (cp sp s) h d -> b (sp s) (cp h) d, global shape (1, 8, 4, 1) on cp=2, sp=2
  all-to-all over cp x sp (4 ranks): (1, 2, 4, 1) -> (1, 4, 2, 1), 16 to 32 bytes sent per rank""",
        ),
        (
            Transition("b (sp s)", "b (sp s)", (1, 8), {"sp": 2}),
            "b (sp s) -> b (sp s), global shape (1, 8) on sp=2\n  nothing moves",
        ),
    ],
)
def test_prints_steps_shapes_and_bytes(move: Transition, text: str) -> None:
    assert str(move) == text


def test_a_thousand_ranks_print_without_process_group() -> None:
    lines = str(Transition("b (sp s) h d", "b s (sp h) d", (1, 2**20, 1024, 128), {"sp": 1024}, itemsize=2))
    assert "(1024 ranks): (1, 1024, 1024, 128) -> (1, 1048576, 1, 128), 268173312 bytes sent per rank" in lines
    lines = str(Transition("b (cp sp s) h d", "b (sp s) (cp h) d", (1, 99_999, 96, 1), {"cp": 32, "sp": 32}))
    assert "all-to-all over cp x sp (1024 ranks): (1, 98, 96, 1) -> (1, 3125, 3, 1)" in lines
    assert not torch.distributed.is_initialized()


@given(transitions())
def test_a_transition_is_a_value(move: Transition) -> None:
    assert eval(repr(move)) == move
    for same in (pickle.loads(pickle.dumps(move)), copy.deepcopy(move), move.reversed().reversed()):
        assert (same, hash(same), same.steps) == (move, hash(move), move.steps)
    assert move.reversed() == Transition(move.dst, move.src, move.shape, move.mesh)


def test_step_is_a_value() -> None:
    step = Transition("b (sp s)", "b s", (4, 5), {"sp": 2}).steps[0]
    assert eval(repr(step)) == step == Step("all-gather", ("sp",), ("sp",), Layout("b (sp s)"), Layout("b s"))


# Refusals


@pytest.mark.parametrize("dst", ["b h (sp s)", "b (sp s) d", "(sp s) b h"])
def test_rejects_other_tensor_axes(dst: str) -> None:
    with pytest.raises(
        LayoutError, match=r"do not name the same tensor axes in the same order. A transition moves mesh"
    ):
        Transition("b (sp s) h", dst, (2, 4, 3), {"sp": 2})


def test_rejects_what_does_not_bind() -> None:
    with pytest.raises(LayoutError, match=r"'ps' in \(ps h\) is no dimension of the mesh"):
        Transition("b (sp s) h", "b s (ps h)", (2, 4, 3), {"sp": 2})
    with pytest.raises(LayoutError, match=r"names 3 axes, the tensor has 2 dims"):
        Transition("b (sp s) h", "b s (sp h)", (2, 4), {"sp": 2})
    with pytest.raises(LayoutError, match=r"says size 1 at dim 0, the tensor has 2"):
        Transition("1 (sp s)", "1 s", (2, 4), {"sp": 2})
