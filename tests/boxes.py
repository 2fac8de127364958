"""Boxes to move between, for tests of routes and of the exchange."""

from hypothesis import strategies as st

from ulysses_dtensor.layout import Box
from ulysses_dtensor.testing import shapes


@st.composite
def moves(draw: st.DrawFn, ranks: int) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    """Draws a global shape, what each rank has of it (slabs along one dim) and what each wants (any boxes)."""
    whole = draw(shapes(3, max_size=5))
    dim = draw(st.integers(0, 2))
    cuts = sorted(draw(st.lists(st.integers(0, whole[dim]), min_size=ranks - 1, max_size=ranks - 1)))
    edges = [0, *cuts, whole[dim]]
    have: list[Box] = [
        tuple((edges[rank], edges[rank + 1]) if at == dim else (0, size) for at, size in enumerate(whole))
        for rank in range(ranks)
    ]
    return whole, have, [tuple(draw(_bounds(size)) for size in whole) for _ in range(ranks)]


def inside(box: Box) -> tuple[slice, ...]:
    """Returns what to index a tensor with to get the part inside `box`."""
    return tuple(slice(start, stop) for start, stop in box)


def _bounds(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda pair: (min(pair), max(pair)))
