"""Which tokens an attention's query, or its keys and values, hold: integers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.layout import chunk


@dataclass(frozen=True, slots=True)
class Tokens:
    """A sequence of which `cut` tokens are shared out over the group, as `torch.chunk` cuts.

    Every rank holds the `before` tokens in front of these, and the `after` ones behind them: a text prompt joined to
    image tokens, a learned key, a whole other sequence (`cut` is zero then).
    """

    cut: int
    before: int = 0
    after: int = 0

    @property
    def total(self) -> int:
        """Tokens of the whole sequence, in the model's order."""
        return self.before + self.cut + self.after

    def local(self, ranks: int, rank: int) -> int:
        """Returns how many tokens `rank` of `ranks` holds."""
        start, stop = chunk(0, self.cut, ranks, rank)
        return self.before + stop - start + self.after


@dataclass(frozen=True, slots=True)
class Held:
    """What the probe found of an attention operand's tokens: those of which argument are cut, and where others stand.

    `of` is the number of the argument leaf whose tokens are cut, None when every rank holds all of the operand. `count` are
    the tokens that every rank held in the probe, `like` (leaf, dim) of an argument with so many.
    """

    of: int | None
    others: Literal["none", "before", "after"] = "none"
    count: int = field(default=0, compare=False)
    like: tuple[int, int] | None = field(default=None, compare=False)

    def tokens(
        self, local: int, lengths: Mapping[int, int], sizes: Sequence[Sequence[int]], ranks: int, rank: int
    ) -> Tokens:
        """Returns the operand's tokens, given how many this rank holds.

        Args:
            local: tokens at hand on this rank.
            lengths: whole lengths of the cut arguments, by leaf number.
            sizes: global sizes of all arguments, by leaf number.
            ranks: size of the group.
            rank: position in it.

        Raises:
            PlanError: there are other tokens where the probe saw none, or another number than those of their argument.
        """
        if self.of is None:
            self._check(local, sizes)
            return Tokens(0, local)
        start, stop = chunk(0, lengths[self.of], ranks, rank)
        others = local - (stop - start)
        if others < 0 or (others and self.others == "none"):
            raise PlanError(
                f"attention: {local} tokens where this rank's share of {lengths[self.of]} is {stop - start}, unlike when the "
                "block was proven. Attention's tokens must be the block's, or others in front of or behind them all."
            )
        self._check(others, sizes)
        return Tokens(lengths[self.of], *((others, 0) if self.others == "before" else (0, others)))

    def _check(self, others: int, sizes: Sequence[Sequence[int]]) -> None:
        if self.like is None or others == self.count:
            return
        leaf, dim = self.like
        if others != sizes[leaf][dim]:
            raise PlanError(
                f"attention: {others} tokens that every rank should hold, where the argument that they came from when the block "
                f"was proven has {sizes[leaf][dim]}. The module's own switches or arguments of Python must decide which tokens an "
                "attention gets, not a tensor's value."
            )
