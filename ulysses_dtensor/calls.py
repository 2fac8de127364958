"""How one call of a module is described: which leaf belongs to which argument, what might be the hidden state."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ulysses_dtensor.boundary import dim_of, is_shard_of
from ulysses_dtensor.errors import LayoutError, PlanError
from ulysses_dtensor.layout import Layout
from ulysses_dtensor.trees import TreeSpec, tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Dims = dict[int, int]
"""Leaf number to the dim of its tokens."""


@dataclass(frozen=True, slots=True)
class Option:
    """A candidate for what holds tokens in a call, by leaf number.

    `hidden` holds the tokens that the result is per. `contexts` are other sequences held in shards, of which attention's keys
    are made; `gathered` are such sequences that are gathered first. `is_held`: the hidden state is in shards already.
    """

    hidden: Dims
    contexts: tuple[Dims, ...] = ()
    gathered: Dims = field(default_factory=dict)
    is_held: bool = False


class Call:
    """The leaves of one call, and the token dims that are known of them: shards' own, and declared layouts'."""

    def __init__(
        self,
        module: nn.Module,
        leaves: list[Any],
        spec: TreeSpec,
        inputs: Mapping[str, Layout],
        mesh: DeviceMesh | None,
        axes: Mapping[str, int],
    ) -> None:
        self.leaves = leaves
        self.held = {at: dim_of(x) for at, x in enumerate(leaves) if is_shard_of(x, mesh)}
        self.declared: dict[int, int | None] = {}
        if inputs:
            for at, argument in _arguments(module, len(leaves), spec).items():
                if argument in inputs and isinstance(leaves[at], torch.Tensor) and at not in self.held:
                    self.declared[at] = _token_dim(inputs, argument, leaves[at], axes)

    def seq_len(self, hidden: Mapping[int, int]) -> int:
        """Returns the number of tokens that these dims imply."""
        return next(self.leaves[at].shape[dim] for at, dim in hidden.items())


def declared_length(
    model: nn.Module, args: Any, kwargs: Any, inputs: Mapping[str, Layout], axes: Mapping[str, int]
) -> int | None:
    """Returns the number of tokens that the declared layouts of a model's own inputs imply, None without any.

    Raises:
        PlanError: an input does not have the dims declared, or two of them differ in length.
    """
    leaves, spec = tree_flatten((args, kwargs))
    lengths: dict[str, int] = {}
    for at, argument in _arguments(model, len(leaves), spec).items() if inputs else ():
        if argument in inputs and isinstance(leaves[at], torch.Tensor):
            dim = _token_dim(inputs, argument, leaves[at], axes)
            if dim is not None:
                lengths[argument] = leaves[at].shape[dim]
    if len(set(lengths.values())) > 1:
        raise PlanError(f"UlyssesPlan: the inputs declared as cut have different numbers of tokens: {lengths}.")
    return next(iter(lengths.values()), None)


def _token_dim(inputs: Mapping[str, Layout], argument: str, x: torch.Tensor, axes: Mapping[str, int]) -> int | None:
    try:
        dims = inputs[argument].dims_of_mesh_axes(axes, x.ndim)
    except LayoutError as error:
        raise PlanError(
            f"UlyssesPlan: inputs[{argument!r}] does not fit its tensor of {tuple(x.shape)}: {error}"
        ) from error
    if len(set(dims.values())) > 1:
        raise PlanError(
            f"UlyssesPlan: inputs[{argument!r}]={str(inputs[argument])!r} cuts {' and '.join(dims)} at different dims. "
            f"The tokens are cut over all of them: write ({' '.join(dims)} s)."
        )
    return next(iter(dims.values()))


def hidden_options(call: Call) -> list[Option]:
    """Returns the candidates for the hidden state, likeliest first: what is held, what is declared, floating leaves.

    Sequences of other lengths that are held beside it stay in shards, or are gathered.
    """
    groups: dict[int, Dims] = {}
    for at, dim in call.held.items():
        groups.setdefault(call.seq_len({at: dim}), {})[at] = dim
    options = [
        Option(dims, tuple(other for size, other in groups.items() if size != length), is_held=True)
        for length, dims in groups.items()
    ]
    options += [Option(dims, tuple(groups.values())) for dims in _plain(call)]
    for each in [each for each in options if each.contexts]:
        options.append(
            replace(each, contexts=(), gathered={at: dim for dims in each.contexts for at, dim in dims.items()})
        )
    # Of sequences of one length, too, one may have to be gathered: a memory of which the block takes the mean.
    for at, dim in ((at, dim) for dims in groups.values() if len(dims) > 1 for at, dim in dims.items()):
        others = {other: cut for other, cut in call.held.items() if other != at}
        options.append(Option({at: dim}, gathered=others, is_held=True))
    return options


def _plain(call: Call) -> list[Dims]:
    """Returns what plain leaves could be the hidden state; leaves that are one and the same tensor go together."""
    floating = [
        at
        for at, x in enumerate(call.leaves)
        if isinstance(x, torch.Tensor) and at not in call.held and x.is_floating_point() and x.ndim >= 2
    ]
    options: list[Dims] = []
    for at in floating:
        same = [other for other in floating if call.leaves[other] is call.leaves[at]]
        declared = call.declared.get(at)
        dims: list[int] = [] if declared is None else [declared]
        if at not in call.declared and at == next(other for other in same if other not in call.declared):
            dims = sorted(range(call.leaves[at].ndim - 1), key=lambda dim: (dim == 0, dim))
        for dim in dims:
            options.append({other: dim for other in same if call.declared.get(other, dim) == dim})
    return options


def call_key(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Hashable = None
) -> tuple[Hashable, ...]:
    """Returns what two calls share for which the probe's decision is the same. Can be traced by torch.compile.

    Of sizes it is which are equal and which larger, over all tensors, and which are zero or one.
    """
    training = tuple(part.training for part in module.modules())
    parts = [(argument, value, tree_flatten(value)[0]) for argument, value in (*enumerate(args), *kwargs.items())]
    tensors = [x for _, _, leaves in parts for x in leaves if isinstance(x, torch.Tensor)]
    sizes = sorted({int(size) for x in tensors for size in x.shape})
    order = {size: (at, size if size < 2 else None) for at, size in enumerate(sizes)}
    same = tuple(next(at for at, other in enumerate(tensors) if other is x) for x in tensors)
    described = ((argument, _structure(value), *(_kind(x, order) for x in leaves)) for argument, value, leaves in parts)
    return (name, kind, training, same, *described)


def _structure(value: Any) -> Hashable:
    """Returns how a nested argument is put together: kinds of containers, and keys."""
    if isinstance(value, dict):
        return ("dict", *((key, _structure(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_structure(item) for item in value))
    return None


def nature(module: nn.Module) -> Hashable:
    """Returns what a decision on `module` stands on besides its call: its parts' kinds, switches and hooks."""
    return tuple(
        (
            type(part),
            len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks),
            *(item for item in vars(part).items() if isinstance(item[1], (bool, str))),
        )
        for part in module.modules()
    )


def _kind(x: Any, order: Mapping[int, Hashable]) -> Hashable:
    if isinstance(x, torch.Tensor):
        relations = tuple(order[int(size)] for size in x.shape)
        cut = getattr(x.placements[0], "dim", None) if isinstance(x, DTensor) else None
        flag = x.dtype == torch.bool and x.numel() == 1 and x.device.type == "cpu" and not torch.compiler.is_compiling()
        return (isinstance(x, DTensor), cut, x.ndim, x.dtype, relations, bool(x) if flag else None)
    if x is None or isinstance(x, (bool, int, float, str)):
        return (type(x).__name__, x)
    return type(x).__name__


def _arguments(module: nn.Module, count: int, spec: TreeSpec) -> dict[int, str]:
    """Returns the name of the argument that each leaf belongs to."""
    args, kwargs = tree_unflatten(list(range(count)), spec)
    try:
        bound = inspect.signature(type(module).forward).bind(None, *args, **kwargs)
    except TypeError:
        return {}
    names: dict[int, str] = {}
    for name, value in bound.arguments.items():
        groups = value.items() if isinstance(value, dict) and set(value) <= set(kwargs) else [(name, value)]
        for argument, part in groups:
            names.update({leaf: argument for leaf in tree_flatten(part)[0] if isinstance(leaf, int)})
    return names
