"""`Route`: which piece of one tensor goes to which rank of a group, as integer boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ulysses_dtensor.layout import Box


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank sends to and receives from each rank of a group, for one tensor.

    Boxes are in local coordinates: `sends[i]` is cut from the tensor the rank holds and goes to peer `i`,
    `receives[i]` is where the piece from peer `i` lands. An empty piece has zero elements.
    """

    rank: int
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    sends: tuple[Box, ...]
    receives: tuple[Box, ...]

    @property
    def in_splits(self) -> list[int]:
        """Elements sent to each peer."""
        return [volume(box) for box in self.sends]

    @property
    def out_splits(self) -> list[int]:
        """Elements received from each peer."""
        return [volume(box) for box in self.receives]

    @property
    def elements_sent(self) -> int:
        """Elements that leave the rank; what it keeps for itself is not counted."""
        return sum(volume(box) for peer, box in enumerate(self.sends) if peer != self.rank)

    def reversed(self) -> Route:
        """Returns the way back: every piece returns to where it came from."""
        return Route(self.rank, self.out_shape, self.in_shape, self.receives, self.sends)


def route(have: Sequence[Box], want: Sequence[Box], rank: int) -> Route:
    """Returns the route by which `rank` goes from its box of `have` to its box of `want`.

    Args:
        have: for each rank of the group, the box of the global tensor that it holds. The boxes do not overlap.
        want: for each rank, the box that it shall hold; the boxes of `have` cover it. They may overlap: a piece
            wanted twice is sent twice.
        rank: position in the group.
    """
    found = Route(
        rank=rank,
        in_shape=shape(have[rank]),
        out_shape=shape(want[rank]),
        sends=tuple(_local(intersect(have[rank], box), have[rank]) for box in want),
        receives=tuple(_local(intersect(box, want[rank]), want[rank]) for box in have),
    )
    assert sum(found.out_splits) == prod(found.out_shape), "the boxes of `have` overlap or do not cover `want[rank]`"
    return found


def shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    return prod(shape(box))


def intersect(a: Box, b: Box) -> Box:
    """Returns the common part of two boxes; every dim of an empty one is empty."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    if any(start >= stop for start, stop in common):
        return tuple((x[0], x[0]) for x in a)
    return common


def _local(box: Box, origin: Box) -> Box:
    if volume(box) == 0:
        return tuple((0, 0) for _ in box)
    return tuple((start - at, stop - at) for (start, stop), (at, _) in zip(box, origin, strict=True))
