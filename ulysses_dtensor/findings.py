"""What two runs of a module say of it: where its tokens are, and whether they stay apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ulysses_dtensor.compare import alike, close
from ulysses_dtensor.operands import Subset, place
from ulysses_dtensor.tokens import Held
from ulysses_dtensor.tryout import Rejected, Run

TAINTED = "it mixes tokens outside attention: NaN or large values in some tokens reached others"
Drop = tuple[int, Held] | None
"""The dim of a dropped tensor's tokens and which these are; None where every rank drops alike."""


def output_dims(whole: Run, part: Run, tokens: int, some: int) -> tuple[int | None, ...]:
    """Returns the token dim of each leaf of the result, None where it has none, from runs on `tokens` and on `some` of them."""
    if whole.spec != part.spec:
        raise Rejected(4, "its result has another structure for fewer tokens")
    dims: list[int | None] = []
    for a, b in zip(whole.outputs, part.outputs, strict=True):
        if not isinstance(a, torch.Tensor):
            if a is not None and not isinstance(a, (bool, int, float, str, torch.dtype, torch.device)):
                raise Rejected(4, f"its result holds a {type(a).__name__}, which cannot be looked into")
            dims.append(None)
            continue
        pairs = list(zip(a.shape, b.shape, strict=False))
        changed = [dim for dim, (m, n) in enumerate(pairs) if m != n]
        if a.ndim != b.ndim or len(changed) > 1 or (changed and pairs[changed[0]] != (tokens, some)):
            raise Rejected(
                4,
                f"an output is {tuple(a.shape)} for {tokens} tokens and {tuple(b.shape)} for {some}: not per token. Return each "
                "sequence on its own, its tokens on a dim of their own",
            )
        dims.append(changed[0] if changed else None)
    return tuple(dims)


def compare(whole: Run, part: Run, at: list[int], dims: tuple[int | None, ...], what: str) -> None:
    """Refuses a module whose run on the tokens `at` is not that part of its run on all of them."""
    if whole.flags != part.flags:
        raise Rejected(
            6,
            f"its attention was called with other arguments for {what}: {_first_difference(part.flags, whole.flags)}. "
            "What it is given beside query, key and value must not depend on the tokens that a rank holds: a mask chosen from "
            "them, as by a sparse indexer, a flag, a scale",
        )
    if whole.drawn != part.drawn:
        name = next(iter((*whole.drawn, *part.drawn)))[0]
        raise Rejected(
            6,
            f"it draws random numbers ({name}) for the tokens at hand: ranks that are seeded alike would draw the same for "
            "different tokens. Draw before the blocks and pass the numbers, or use a dropout of torch.nn.functional",
        )
    for name in whole.buffers.keys() | part.buffers.keys():
        if not close(whole.buffers.get(name), part.buffers.get(name)):
            raise Rejected(6, f"it writes the buffer {name!r} from the tokens at hand, which differ between ranks")
    for name in sorted(whole.attributes.keys() | part.attributes.keys()):
        if not alike(whole.attributes.get(name), part.attributes.get(name)):
            raise Rejected(
                6,
                f"it keeps {name}, made from the tokens at hand, which differ between ranks. Compute it from the "
                "block's result outside the blocks, where the whole sequence is",
            )
    for a, b, dim in zip(whole.outputs, part.outputs, dims, strict=True):
        if not isinstance(a, torch.Tensor):
            if a != b:
                raise Rejected(4, f"it returns {a!r} for all tokens and {b!r} for {what}")
            continue
        expected = a if dim is None else a.index_select(dim, torch.tensor(at, device=a.device))
        if not close(expected, b):
            kind = "a value computed from its tokens" if dim is None else f"another result for {what}"
            raise Rejected(5, f"it mixes tokens outside attention, or counts positions from zero: it gives {kind}")


def compare_taint(whole: Run, tainted: Run, clean: Sequence[int], dims: tuple[int | None, ...]) -> None:
    """Refuses a module in which a taint of the other tokens reached `clean` ones."""
    if whole.flags != tainted.flags:
        raise Rejected(
            6,
            f"its attention's arguments depend on its tokens' values: {_first_difference(tainted.flags, whole.flags)}",
        )
    for a, b, dim in zip(whole.outputs, tainted.outputs, dims, strict=True):
        if isinstance(a, torch.Tensor):
            untainted, dirty = (
                (a, b) if dim is None else (x.index_select(dim, torch.tensor(clean, device=x.device)) for x in (a, b))
            )
            if not close(untainted, dirty):
                raise Rejected(5, TAINTED)


def drops_of(whole: Run, parts: Sequence[tuple[Run, Subset]], held: Sequence[tuple[Held, Held]]) -> tuple[Drop, ...]:
    """Returns which dim of each dropout call's tensor is cut, and what it holds; None for what all ranks drop alike.

    A call that cannot be followed (the tokens of one expert) drops this rank's tokens, if the block has no others.

    Args:
        whole: the run on all tokens.
        parts: runs on some tokens of one argument that is cut, for each of these; the hidden state first.
        held: what the operands of attention calls hold.
    """
    others = len(parts) > 1 or any(each.of is None or each.others != "none" for pair in held for each in pair)
    if any(len(part.dropouts) != len(whole.dropouts) for part, _ in parts):
        if others:
            raise Rejected(
                6, "it drops out another number of times for fewer tokens, beside tokens that every rank holds"
            )
        return ()
    drops: list[Drop] = []
    for number, each in enumerate(whole.dropouts):
        cut = [
            (part.dropouts[number].x, subset) for part, subset in parts if part.dropouts[number].x.shape != each.x.shape
        ]
        found = [drop for x, subset in cut if (drop := _dropped(each.x, x, subset)) is not None]
        if not cut or (len(found) == 1 and found[0][0] >= each.dims):
            drops.append(None)
            continue
        if len(found) != 1 and others:
            raise Rejected(
                5, "it drops out a tensor in which tokens and others, that every rank holds, are not told apart"
            )
        drops.append(found[0] if found else (0, Held(cut[0][1].of)))
    return tuple(drops)


def _dropped(whole: torch.Tensor, part: torch.Tensor, subset: Subset) -> tuple[int, Held] | None:
    for dim in range(min(whole.ndim, part.ndim)):
        where = place(whole, part, dim, subset)
        if where not in (None, "whole"):
            return dim, Held(subset.of, where)
    return None


def _first_difference(a: list[Any], b: list[Any]) -> str:
    for x, y in itertools.zip_longest(a, b):
        if x != y and x is not None and y is not None and len(x) == len(y):
            other = [(ours, theirs) for ours, theirs in zip(x, y, strict=True) if ours != theirs]
            return ", ".join(f"{ours!r} for {theirs!r}" for ours, theirs in other)
        if x != y:
            return f"{x} for {y}"
    return ""
