"""`UlyssesAttention`: the ParallelStyle of a module that is called with query, key and value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from ulysses_dtensor.attend import attend, pair_kv
from ulysses_dtensor.boundary import joined
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.flex import GlobalHeads, show_flex
from ulysses_dtensor.heads import Heads
from ulysses_dtensor.inside import declared_attention
from ulysses_dtensor.layout import Layout
from ulysses_dtensor.meshes import sequence_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NAMES = (("q", "query", "xq"), ("k", "key", "xk"), ("v", "value", "xv"))


@dataclass(eq=False, repr=False)  # not frozen: torch sets src_data_rank on every style
class UlyssesAttention(ParallelStyle):
    """Makes an inner attention, a module called with query, key and value, attend over the whole sequence.

    Query, key and value come as sequence shards; around the module's own forward they are exchanged for head shards
    and its output is exchanged back. Any head counts: each rank gets the kv heads that its query heads read. Inside a
    model with a `UlyssesPlan` the tensors are plain; alone, they are DTensors in the
    source layout, and so is the output, or plain tensors of equal length on all ranks (checked by a small all-reduce).

    Args:
        text: source and destination layout, for example `"b h (sp s) d -> b (sp h) s d"`: the axis cut on the left is
            the sequence, the one cut on the right the heads.

    Raises:
        LayoutError: a side breaks the notation.
        PlanError: the two sides do not move one mesh axis from one tensor axis to another.

    Communication: two all-to-alls forward (query, key and value in one; the output), two backward.

    Reference:
        Jacobs et al., DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509
    """

    text: str
    src: Layout = field(init=False, compare=False)
    dst: Layout = field(init=False, compare=False)

    def __post_init__(self) -> None:
        sides = self.text.split("->")
        if len(sides) != 2:
            raise PlanError(f"UlyssesAttention: {self.text!r} is not 'source -> destination'.")
        self.src = Layout(sides[0])
        self.dst = Layout(sides[1])
        self.text = f"{self.src} -> {self.dst}"
        moved = self.src.mesh_axes
        if (
            self.src.names != self.dst.names
            or len(moved) != 1
            or self.dst.mesh_axes != moved
            or self.src == self.dst
            or "..." in self.src.names
        ):
            raise PlanError(
                f"UlyssesAttention: {self.text!r} must name the same tensor axes on both sides and move one mesh axis from "
                "the sequence to the heads, for example 'b h (sp s) d -> b (sp h) s d'."
            )

    def __repr__(self) -> str:
        return f"UlyssesAttention({self.text!r})"

    @property
    def mesh_axis(self) -> str:
        """The mesh axis that moves."""
        return self.src.mesh_axes[0]

    @property
    def seq_dim(self) -> int:
        """The dim of the tokens in query, key, value and output."""
        return next(dim for dim, axis in enumerate(self.src.axes) if axis.mesh_axes)

    @property
    def head_dim(self) -> int:
        """The dim of the heads in query, key, value and output."""
        return next(dim for dim, axis in enumerate(self.dst.axes) if axis.mesh_axes)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = sequence_mesh(device_mesh, "UlyssesAttention")
        declare(module, self, mesh, alone=True)
        return module


def declare(module: nn.Module, style: UlyssesAttention, mesh: DeviceMesh, *, alone: bool) -> None:
    """Makes `module` the attention that `style` says; `alone`: outside a plan, where plain tensors are shards."""
    if mesh.mesh_dim_names != (style.mesh_axis,):
        raise PlanError(
            f"UlyssesAttention: {style.text!r} moves {style.mesh_axis!r}, the mesh is {mesh.mesh_dim_names}."
        )
    if is_declared(module):
        raise PlanError(f"UlyssesAttention: {type(module).__name__} is converted already. Convert a module once.")
    show_flex(module)
    module.forward = partial(_attention_forward, module, style, mesh, alone, module.__dict__.get("forward"))


def is_declared(module: nn.Module) -> bool:
    """Whether a `UlyssesAttention` was applied to this module."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _attention_forward


def _attention_forward(
    module: nn.Module,
    style: UlyssesAttention,
    mesh: DeviceMesh,
    alone: bool,
    original: Callable[..., Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    call = partial(type(module).forward, module) if original is None else original
    (query, key, value), rejoin = _take_qkv(module, args, kwargs)
    num_heads = query.shape[style.head_dim]

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: Heads) -> torch.Tensor:
        key, value = pair_kv(key, value, heads, style.head_dim)
        args, kwargs = rejoin(query, key, value)
        with GlobalHeads(heads, num_heads):
            out = call(*args, **kwargs)
        if not isinstance(out, torch.Tensor):
            raise PlanError(
                f"UlyssesAttention: {type(module).__name__} returned a {type(out).__name__}, not one tensor. "
                "Only an attention that returns its output alone can be exchanged back."
            )
        return out

    dims = {"seq_dim": style.seq_dim, "head_dim": style.head_dim}
    if not any(isinstance(x, DTensor) for x in (query, key, value)):
        return declared_attention(query, key, value, attention, **dims, mesh=mesh if alone else None)
    seq_len = _checked_length(style, mesh, (query, key, value))
    local = (query.to_local(), key.to_local(), value.to_local())
    out = attend(*local, attention, **dims, seq_len=seq_len, group=mesh.get_group())
    return joined(out, mesh, style.seq_dim, seq_len)


def _checked_length(style: UlyssesAttention, mesh: DeviceMesh, tensors: tuple[Any, ...]) -> int:
    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(x, DTensor):
            raise PlanError(f"UlyssesAttention: {name} is a plain tensor beside DTensors. Pass all three as DTensors.")
        placements = style.src.placements(mesh, x.ndim)
        if x.device_mesh != mesh or tuple(x.placements) != placements:
            raise PlanError(
                f"UlyssesAttention: {name} is placed {x.placements} on {x.device_mesh}, the layout {style.src.text!r} says "
                f"{placements} on {mesh}. Redistribute it first."
            )
    lengths = {x.shape[style.seq_dim] for x in tensors}
    if len(lengths) != 1:
        raise PlanError(
            f"UlyssesAttention: query, key and value have {sorted(lengths)} tokens. Cross-attention is not supported yet."
        )
    return lengths.pop()


def _take_qkv(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]]:
    places: list[int | str] = []
    for names in _NAMES:
        given = [name for name in names if isinstance(kwargs.get(name), torch.Tensor)]
        if given:
            places.append(given[0])
        elif len(places) < len(args) and isinstance(args[len(places)], torch.Tensor):
            places.append(len(places))
    if len(places) != 3:
        raise PlanError(
            f"UlyssesAttention: {type(module).__name__} was called without query, key and value: they are its first three "
            "arguments, or named query, key, value (q, k, v; xq, xk, xv)."
        )

    def rejoin(*qkv: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = list(args), dict(kwargs)
        for place, x in zip(places, qkv, strict=True):
            if isinstance(place, int):
                positional[place] = x
            else:
                named[place] = x
        return tuple(positional), named

    return [kwargs[place] if isinstance(place, str) else args[place] for place in places], rejoin
