"""Routes as integers: what all ranks send is what all ranks receive, and every element comes to where it belongs."""

import numpy as np
import pytest
import torch
from boxes import inside, moves
from hypothesis import given
from hypothesis import strategies as st

from ulysses_dtensor.layout import Box
from ulysses_dtensor.route import Route, intersect, route, shape, volume


def assert_arrives(whole: tuple[int, ...], want: list[Box], parts: list[np.ndarray], routes: list[Route]) -> None:
    """Moves numpy arrays along the routes and checks what each rank then has."""
    x = np.arange(np.prod(whole, dtype=int)).reshape(whole)
    for rank, own in enumerate(routes):
        out = np.full(own.out_shape, -1)
        for peer, other in enumerate(routes):
            piece = parts[peer][inside(other.sends[rank])]
            assert piece.size == volume(own.receives[peer])
            if piece.size:
                out[inside(own.receives[peer])] = piece
        np.testing.assert_array_equal(out, x[inside(want[rank])])


@given(st.integers(1, 5).flatmap(moves))
def test_every_element_comes_to_where_it_is_wanted(move: tuple[tuple[int, ...], list[Box], list[Box]]) -> None:
    whole, have, want = move
    x = np.arange(np.prod(whole, dtype=int)).reshape(whole)
    routes = [route(have, want, rank) for rank in range(len(have))]
    assert_arrives(whole, want, [x[inside(box)] for box in have], routes)
    for rank, own in enumerate(routes):
        assert (own.rank, own.in_shape, own.out_shape) == (rank, shape(have[rank]), shape(want[rank]))
        assert [other.out_splits[rank] for other in routes] == own.in_splits
        assert own.elements_sent == sum(own.in_splits) - own.in_splits[rank]
        assert own.reversed().reversed() == own
        assert (own.reversed().in_splits, own.reversed().out_splits) == (own.out_splits, own.in_splits)


def test_the_check_itself_fails_on_a_wrong_route() -> None:
    have, want = [((0, 1),), ((1, 2),)], [((1, 2),), ((0, 1),)]
    routes = [route(have, want, rank) for rank in range(2)]
    with pytest.raises(AssertionError):
        assert_arrives((2,), [((0, 1),), ((1, 2),)], [np.array([0]), np.array([1])], routes)


def test_a_piece_wanted_twice_is_sent_twice() -> None:
    have, want = [((0, 4),), ((4, 6),)], [((2, 5),), ((3, 6),)]
    assert route(have, want, 0) == Route(0, (4,), (3,), (((2, 4),), ((3, 4),)), (((0, 2),), ((2, 3),)))
    assert route(have, want, 0).elements_sent == 1
    assert route(have, want, 1).elements_sent == 1


def test_empty_piece_has_no_elements_in_any_dim() -> None:
    assert intersect(((0, 3), (0, 2)), ((3, 5), (0, 2))) == ((0, 0), (0, 0))
    assert volume(intersect(((2, 2), (0, 2)), ((0, 5), (0, 2)))) == 0
    assert intersect(((0, 3), (0, 2)), ((1, 5), (0, 2))) == ((1, 3), (0, 2))


@pytest.mark.parametrize(
    "have", [pytest.param([((0, 2),), ((3, 4),)], id="a gap"), pytest.param([((0, 3),), ((2, 4),)], id="an overlap")]
)
def test_refuses_boxes_that_do_not_make_up_what_is_wanted(have: list[Box]) -> None:
    with pytest.raises(AssertionError, match="the boxes of `have` overlap or do not cover"):
        route(have, [((0, 4),), ((0, 4),)], 0)


def test_thousand_ranks_are_integers_alone() -> None:
    have: list[Box] = [((4 * rank, 4 * rank + 4), (0, 1024)) for rank in range(1024)]
    want: list[Box] = [((0, 4096), (rank, rank + 1)) for rank in range(1024)]
    found = route(have, want, 1023)
    assert (found.elements_sent, set(found.in_splits), set(found.out_splits)) == (4 * 1023, {4}, {4})
    assert not torch.distributed.is_initialized()
