"""Boxes to move between, for tests of routes and of the exchange."""

from hypothesis import strategies as st

from ulysses_dtensor.layout import Box
from ulysses_dtensor.testing import shapes


@st.composite
def moves(draw: st.DrawFn, ranks: int) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    """Draws a global shape, what each rank has of it (boxes that make up the whole) and what each wants (any boxes)."""
    whole = draw(shapes(3, max_size=5))
    have: list[Box] = [tuple((0, size) for size in whole)]
    while len(have) < ranks:
        box = have.pop(draw(st.integers(0, len(have) - 1)))
        dim = draw(st.integers(0, 2))
        at = draw(st.integers(*box[dim]))
        have += [(*box[:dim], part, *box[dim + 1 :]) for part in ((box[dim][0], at), (at, box[dim][1]))]
    return whole, draw(st.permutations(have)), [tuple(draw(_bounds(size)) for size in whole) for _ in range(ranks)]


def inside(box: Box) -> tuple[slice, ...]:
    """Returns what to index a tensor with to get the part inside `box`."""
    return tuple(slice(start, stop) for start, stop in box)


def _bounds(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda pair: (min(pair), max(pair)))
