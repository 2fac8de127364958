"""What the probe sees of attention calls: which tokens query and keys hold, and that these stay apart on their way there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ulysses_dtensor.compare import close
from ulysses_dtensor.stub import Attention
from ulysses_dtensor.tokens import Held

Place = Literal["none", "before", "after", "whole"]


@dataclass(frozen=True, slots=True)
class Subset:
    """Some of the tokens of an argument: `at` of all `count`, of the leaf numbered `of`."""

    of: int
    at: tuple[int, ...]
    count: int


def place(whole: torch.Tensor, part: torch.Tensor, dim: int, subset: Subset) -> Place | None:
    """Returns where in `whole` the tokens stand of which `part` has only some: alone, before or after others.

    "whole" when the two are equal, None when neither fits: the tokens do not stay apart, or are not at `dim`.
    """
    if whole.shape == part.shape:
        return "whole" if close(whole, part) else None
    others = whole.shape[dim] - subset.count
    if others < 0 or part.shape[dim] - len(subset.at) != others:
        return None
    places: tuple[Place, ...] = ("before", "after") if others else ("none",)
    return next((found for found in places if close(_rows(whole, dim, subset, found), part)), None)


def held_by(whole: Attention, parts: Sequence[tuple[Attention, Subset]]) -> tuple[Held, Held] | None:
    """Returns which tokens the operands of one attention call hold; None where they do not stay apart.

    Args:
        whole: the call when every argument has all its tokens.
        parts: the same call when one argument has some of its tokens, for each argument that is cut.
    """
    found: list[Held] = []
    for name in ("query", "key", "value"):
        held = Held(None)
        for part, subset in parts:
            if part.seq_dim != whole.seq_dim:
                return None
            where = place(getattr(whole, name), getattr(part, name), whole.seq_dim, subset)
            if where is None or (where != "whole" and held.of is not None):
                return None
            if where != "whole":
                held = Held(subset.of, where)
        found.append(held)
    return (found[0], found[1]) if found[1] == found[2] else None


def apart(whole: Attention, part: Attention, held: tuple[Held, Held], subset: Subset) -> bool:
    """Whether a call with some tokens of an argument has those tokens' operands, and the same others."""
    for name, each in zip(("query", "key", "value"), (held[0], held[1], held[1]), strict=True):
        a, b = getattr(whole, name), getattr(part, name)
        expected = _rows(a, whole.seq_dim, subset, each.others) if each.of == subset.of else a
        if not close(expected, b):
            return False
    return True


def untouched(whole: Attention, tainted: Attention, held: tuple[Held, Held], clean: Subset) -> bool:
    """Whether a call in which all but the `clean` tokens were tainted has the same operands for the clean ones."""
    for name, each in zip(("query", "key", "value"), (held[0], held[1], held[1]), strict=True):
        a, b = getattr(whole, name), getattr(tainted, name)
        if each.of == clean.of:
            a, b = (_rows(x, whole.seq_dim, clean, each.others) for x in (a, b))
        if not close(a, b):
            return False
    return True


def _rows(x: torch.Tensor, dim: int, subset: Subset, where: str) -> torch.Tensor:
    start = x.shape[dim] - subset.count if where == "before" else 0
    at = [*range(start), *(start + i for i in subset.at), *range(start + subset.count, x.shape[dim])]
    return x.index_select(dim, torch.tensor(at, device=x.device))
