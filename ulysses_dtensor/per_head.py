"""Tensors with a number for each head, cut to the heads of a rank: a call's arguments, a module's parameters and buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.heads import Heads
from ulysses_dtensor.layout import Layout

WHO = "UlyssesAttention: per_head"


@dataclass(frozen=True, slots=True)
class PerHead:
    """A name, of an argument or of a module's own tensor, with the layout of this tensor cut at its heads."""

    name: str
    src: Layout
    dst: Layout

    def head_dim(self, x: torch.Tensor) -> int:
        """Returns the dim of the heads in `x`."""
        return next(dim for dim, axis in enumerate(self.dst.expand(x.ndim)) if axis.mesh_axes)

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst}"


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """A whole per-head tensor of one call: an argument, by position or keyword, or (None) the module's own."""

    entry: PerHead
    at: int | str | None
    x: torch.Tensor
    dim: int
    of_kv: bool

    def cut(self, heads: Heads) -> torch.Tensor:
        """Returns the part for the query heads of a rank, or for the kv heads that they read."""
        start, stop = heads.kv if self.of_kv else heads.query
        x = self.x.narrow(self.dim, start, stop - start)
        if self.of_kv and heads.kv_of_query is not None:  # as `pair_kv` does with key and value
            x = x.index_select(self.dim, torch.tensor(heads.kv_of_query, device=x.device))
        return x


def parse_per_head(per_head: Mapping[str, str], mesh_axis: str) -> tuple[PerHead, ...]:
    """Returns the entries of a style's `per_head`.

    Raises:
        LayoutError: a side breaks the notation.
        PlanError: an entry does not say which one axis `mesh_axis` cuts.
    """
    if not isinstance(per_head, Mapping):
        raise PlanError(f"{WHO}={per_head!r} is a {type(per_head).__name__}. Pass a mapping of names to layouts.")
    entries = []
    for name, text in per_head.items():
        if not isinstance(name, str) or not all(part.isidentifier() or part.isdecimal() for part in name.split(".")):
            raise PlanError(
                f"{WHO}: {name!r} names neither an argument nor a parameter. Write for example 'sinks' or 'bias.weight'."
            )
        sides = text.split("->") if isinstance(text, str) else []
        src, dst = (Layout(side) for side in sides) if len(sides) == 2 else (None, None)
        if src is None or dst is None or src.names != dst.names or src.mesh_axes or dst.mesh_axes != (mesh_axis,):
            raise PlanError(
                f"{WHO}[{name!r}]={text!r} must name the same axes on both sides and cut one of them, the heads, by "
                f"{mesh_axis!r} on the right, for example 'h -> ({mesh_axis} h)'."
            )
        entries.append(PerHead(name, src, dst))
    return tuple(entries)


def bind_per_head(
    entries: Sequence[PerHead], module: nn.Module, forward: Callable[..., Any]
) -> tuple[tuple[PerHead, int | None], ...]:
    """Returns each entry with the position at which `forward` takes an argument of its name, None without one.

    Raises:
        PlanError: the module has neither such an argument nor such a parameter or buffer.
    """
    if not entries:
        return ()
    parameters = inspect.signature(forward).parameters
    positional = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    own = dict(_own_tensors(module))
    for entry in entries:
        if entry.name not in parameters and entry.name not in own and (not named or "." in entry.name):
            raise PlanError(
                f"{WHO}[{entry.name!r}]: {type(module).__name__} has no such argument, parameter or buffer, only "
                f"{', '.join([*parameters, *own])}."
            )
    return tuple((entry, positional.index(entry.name) if entry.name in positional else None) for entry in entries)


def given_per_head(
    bound: Sequence[tuple[PerHead, int | None]],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Given, ...]:
    """Returns the per-head tensors of one call, each checked to have as many heads as query or key.

    Raises:
        PlanError: one is no plain tensor, has other dims than its layout, or another number of heads.
    """
    found = []
    own = dict(_own_tensors(module)) if bound else {}
    for entry, position in bound:
        values: list[tuple[int | str | None, Any]] = []
        if entry.name in kwargs:
            values.append((entry.name, kwargs[entry.name]))
        elif position is not None and position < len(args):
            values.append((position, args[position]))
        if entry.name in own:
            values.append((None, own[entry.name]))
        if not values and position is None:
            raise PlanError(
                f"{WHO}[{entry.name!r}]: {type(module).__name__} was called without it, and it has no such parameter or buffer."
            )
        for at, x in values:
            if x is not None:
                found.append(_checked(entry, at, x, num_heads, num_kv_heads))
    return tuple(found)


def _checked(entry: PerHead, at: int | str | None, x: Any, num_heads: int, num_kv_heads: int) -> Given:
    who = f"{WHO}[{entry.name!r}]"
    if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
        raise PlanError(
            f"{who} is a {type(x).__name__}. Give the whole plain tensor on every rank; each takes what belongs to its heads."
        )
    if (x.ndim != len(entry.dst.axes) and "..." not in entry.dst.names) or x.ndim < len(entry.dst.axes) - 1:
        raise PlanError(f"{who} has {x.ndim} dims, its layout {str(entry)!r} names {len(entry.dst.axes)}.")
    dim = entry.head_dim(x)
    if x.shape[dim] not in (num_heads, num_kv_heads):
        kv = "" if num_kv_heads == num_heads else f" and {num_kv_heads} kv heads"
        raise PlanError(
            f"{who} is {tuple(x.shape)}: {x.shape[dim]} heads at dim {dim}, where the attention has {num_heads} query heads{kv}. "
            f"Its layout {str(entry)!r} says that this dim holds the heads."
        )
    return Given(entry, at, x, dim, of_kv=x.shape[dim] != num_heads)


def call_with_heads(
    call: Callable[..., Any],
    module: nn.Module,
    given: Sequence[Given],
    heads: Heads,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Returns what `call`, the module's forward, returns when it sees of each per-head tensor what belongs to `heads`."""
    positional, named = list(args), dict(kwargs)
    own: dict[str, torch.Tensor] = {}
    for each in given:
        if isinstance(each.at, int):
            positional[each.at] = each.cut(heads)
        elif each.at is not None:
            named[each.at] = each.cut(heads)
        else:
            own[f"module.{each.entry.name}"] = each.cut(heads)
    if not own:
        return call(*positional, **named)
    return functional_call(_Forward(module, call), own, tuple(positional), named)


class _Forward(nn.Module):
    """A module's own forward without its hooks, in the form in which torch swaps parameters for the time of a call."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
