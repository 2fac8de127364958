"""`UlyssesAttention`: the ParallelStyle of a module that is called with query, key and value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from ulysses_dtensor.attend import attend, pair_kv
from ulysses_dtensor.boundary import joined
from ulysses_dtensor.contents import held_hash, held_tensors
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.flex import GlobalHeads, show_flex
from ulysses_dtensor.gradients import tie
from ulysses_dtensor.heads import Heads
from ulysses_dtensor.inside import OwnDraws, declared_attention
from ulysses_dtensor.layout import Layout, chunk
from ulysses_dtensor.meshes import sequence_mesh
from ulysses_dtensor.per_head import Given, PerHead, bind_per_head, call_with_heads, given_per_head, parse_per_head
from ulysses_dtensor.randomness import IDLE, own_kernel_draws
from ulysses_dtensor.tokens import Tokens
from ulysses_dtensor.trees import tree_flatten

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
    Every other argument reaches the module as it is given, whole; what differs by head is named in `per_head`.

    Args:
        text: source and destination layout, for example `"b h (sp s) d -> b (sp h) s d"`: the axis cut on the left is
            the sequence, the one cut on the right the heads.
        per_head: layouts of what has a part for each head, by name: arguments of the module's call, or its own parameters
            and buffers (`"bias.weight"`: a submodule's). `{"sinks": "h -> (sp h)", "bias": "b h q k -> b (sp h) q k"}`: held
            whole on the left, cut at the heads on the right. The module sees the part for the heads it is called with: its
            query heads, or, where the size is that of the key, the kv heads that they read. A parameter stays plain and whole.

    Raises:
        LayoutError: a side breaks the notation.
        PlanError: the two sides do not move one mesh axis from one tensor axis to another, or an entry of `per_head` does
            not cut one axis by it.

    Communication: two all-to-alls forward (query, key and value in one; the output), two backward.

    Example:
        >>> UlyssesAttention("b h (sp s) d -> b (sp h) s d", per_head={"sinks": "h->(sp h)"})
        UlyssesAttention('b h (sp s) d -> b (sp h) s d', per_head={'sinks': 'h -> (sp h)'})

    Reference:
        Jacobs et al., DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509
    """

    text: str
    per_head: Mapping[str, str] | None = field(default=None, kw_only=True)
    src: Layout = field(init=False, compare=False)
    dst: Layout = field(init=False, compare=False)
    entries: tuple[PerHead, ...] = field(init=False, compare=False)

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
        self.entries = () if self.per_head is None else parse_per_head(self.per_head, self.mesh_axis)
        self.per_head = {entry.name: str(entry) for entry in self.entries} or None

    def __repr__(self) -> str:
        per_head = "" if self.per_head is None else f", per_head={self.per_head!r}"
        return f"UlyssesAttention({self.text!r}{per_head})"

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
        declare(module, self, mesh, axes=(self.mesh_axis,), alone=True)
        return module


def declare(
    module: nn.Module, style: UlyssesAttention, mesh: DeviceMesh | OneProcess, *, axes: tuple[str, ...], alone: bool
) -> None:
    """Makes `module` the attention that `style` says; `alone`: outside a plan, where plain tensors are shards.

    On a mesh of two `axes` its heads are cut over the ranks of both.
    """
    if style.mesh_axis not in axes or (alone and mesh.mesh_dim_names != axes):
        raise PlanError(
            f"UlyssesAttention: {style.text!r} moves {style.mesh_axis!r}, the mesh is {mesh.mesh_dim_names}."
        )
    if is_declared(module):
        raise PlanError(f"UlyssesAttention: {type(module).__name__} is converted already. Convert a module once.")
    show_flex(module)
    original = module.__dict__.get("forward")
    per_head = bind_per_head(style.entries, module, _own_forward(module, original))
    module.forward = partial(_attention_forward, module, style, mesh, alone, per_head, original)


class OneProcess:
    """Stands for a mesh of so many ranks where one process looks at what they would do: nothing is sent."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.mesh_dim_names = tuple(sizes)
        self.sizes = tuple(sizes.values())

    def size(self) -> int:
        """Returns the number of ranks."""
        return math.prod(self.sizes)

    def get_group(self) -> Any:
        """Returns None, the default group: it is asked for where numbers are drawn alone."""


@contextmanager
def declared_in(model: nn.Module, styles: Mapping[str, Any], sizes: Mapping[str, int]) -> Iterator[None]:
    """Runs the block with the modules of these names declared; `sizes` are those of the mesh's axes."""
    with ExitStack() as stack:
        for name, style in styles.items():
            if isinstance(style, UlyssesAttention):
                module = model.get_submodule(name)
                own = {"forward": module.forward} if "forward" in vars(module) else {}
                stack.callback(_put_back, module, own)
                declare(module, style, OneProcess(sizes), axes=tuple(sizes), alone=False)
        yield


def _put_back(module: nn.Module, own: dict[str, Any]) -> None:
    del module.forward
    module.__dict__.update(own)


def is_declared(module: nn.Module) -> bool:
    """Whether a `UlyssesAttention` was applied to this module."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _attention_forward


def _own_forward(module: nn.Module, original: Callable[..., Any] | None) -> Callable[..., Any]:
    return partial(type(module).forward, module) if original is None else original


def _attention_forward(
    module: nn.Module,
    style: UlyssesAttention,
    mesh: Any,
    alone: bool,
    per_head: tuple[tuple[PerHead, int | None], ...],
    original: Callable[..., Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    query, key, value = (args[at] if isinstance(at, int) else kwargs[at] for at in _places(module, args, kwargs))
    num_heads, num_kv_heads = query.shape[style.head_dim], key.shape[style.head_dim]
    given = given_per_head(per_head, module, args, kwargs, num_heads, num_kv_heads)
    call = _Call(module, style, mesh, given, num_heads, _own_forward(module, original), args, kwargs)
    plain = not any(isinstance(x, DTensor) for x in (query, key, value))
    tokens = None if plain else _checked_tokens(style, mesh, (query, key, value))
    if not plain:
        query, key, value = (x.to_local() for x in (query, key, value))
    seq_dim, head_dim = style.seq_dim, style.head_dim
    if tokens is None:
        own = mesh if alone else None
        out = declared_attention(query, key, value, call, seq_dim=seq_dim, head_dim=head_dim, mesh=own)
        return out if call.ran else tie(out, call.trained)  # the probe's stand-in does not call the module either
    out = attend(
        query,
        key,
        value,
        call,
        seq_dim=seq_dim,
        head_dim=head_dim,
        tokens=tokens,
        group=mesh.get_group(),
        trained=call.trained,
    )
    return joined(out, mesh, seq_dim, tokens[0].cut)


class _Call:
    """One call of a declared attention, to be run with the heads of a rank."""

    def __init__(
        self,
        module: nn.Module,
        style: UlyssesAttention,
        mesh: DeviceMesh | OneProcess,
        given: tuple[Given, ...],
        num_heads: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.module, self.style, self.mesh, self.given, self.num_heads = module, style, mesh, given, num_heads
        self.forward, self.args, self.kwargs = forward, args, kwargs
        self.ran = False
        self.mask_heads: list[int] = []

    @property
    def others(self) -> list[Any]:
        """What the call is given beside query, key and value: must not depend on which tokens are at hand."""
        places = _places(self.module, self.args, self.kwargs)
        args = [x for at, x in enumerate(self.args) if at not in places]
        leaves = tree_flatten((args, {name: x for name, x in self.kwargs.items() if name not in places}))[0]
        simple = (torch.Tensor, bool, int, float, str, type(None))
        return [x if isinstance(x, simple) else f"{type(x).__name__} that holds ({held_hash(x):x})" for x in leaves]

    @property
    def ranks(self) -> int:
        """How many ranks share the heads."""
        return self.mesh.size()

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: Heads) -> torch.Tensor:
        self.ran = True
        key, value = pair_kv(key, value, heads, self.style.head_dim)
        args, kwargs = list(self.args), dict(self.kwargs)
        for at, x in zip(_places(self.module, self.args, self.kwargs), (query, key, value), strict=True):
            if isinstance(at, int):
                args[at] = x
            else:
                kwargs[at] = x
        if heads.num_query == self.num_heads:
            with GlobalHeads(heads, self.num_heads, self.mask_heads):
                out = self.forward(*args, **kwargs)
        else:
            with on_some_heads(heads, self.num_heads, query.device, self.mesh, self.mask_heads):
                out = call_with_heads(self.forward, self.module, self.given, heads, tuple(args), kwargs)
        if not isinstance(out, torch.Tensor):
            raise PlanError(
                f"UlyssesAttention: {type(self.module).__name__} returned a {type(out).__name__}, not one tensor. "
                "Only an attention that returns its output alone can be exchanged back."
            )
        return out

    @property
    def leaves_a_rank_out(self) -> bool:
        """Whether some rank has no head to call the module with."""
        return leaves_a_rank_out(self.num_heads, self.mesh)

    @property
    def trained(self) -> list[torch.Tensor]:
        """What the module computes with besides query, key and value, where it may have a gradient."""
        own = [p for p in self.module.parameters() if not isinstance(p, DTensor)]
        places = _places(self.module, self.args, self.kwargs)
        given = [x for at, x in (*enumerate(self.args), *self.kwargs.items()) if at not in places]
        return own + [x for x in held_tensors(tuple(given)) if x.requires_grad]


def leaves_a_rank_out(num_heads: int, mesh: DeviceMesh | OneProcess) -> bool:
    """Whether some rank of `mesh` has none of so many heads."""
    start, stop = chunk(0, num_heads, mesh.size(), mesh.size() - 1)
    return start == stop


@contextmanager
def on_some_heads(
    heads: Heads, num_heads: int, device: torch.device, mesh: DeviceMesh | OneProcess, mask_heads: list[int]
) -> Iterator[None]:
    """Runs an attention with a rank's heads of `num_heads`: what it draws is the rank's own, FlexAttention numbers globally."""
    own, all_draw = (device, mesh.get_group()), not leaves_a_rank_out(num_heads, mesh)
    own_draws = OwnDraws(*own, refused="" if all_draw else IDLE)
    with own_draws, own_kernel_draws(*own, all_draw=all_draw), GlobalHeads(heads, num_heads, mask_heads):
        yield


def _checked_tokens(style: UlyssesAttention, mesh: DeviceMesh, tensors: tuple[Any, ...]) -> tuple[Tokens, Tokens]:
    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(x, DTensor):
            raise PlanError(f"UlyssesAttention: {name} is a plain tensor beside DTensors. Pass all three as DTensors.")
        placements = style.src.placements(mesh, x.ndim)
        if x.device_mesh != mesh or tuple(x.placements) != placements:
            raise PlanError(
                f"UlyssesAttention: {name} is placed {x.placements} on {x.device_mesh}, the layout {style.src.text!r} says "
                f"{placements} on {mesh}. Redistribute it first."
            )
    query, key, value = (Tokens(x.shape[style.seq_dim]) for x in tensors)
    if key != value:
        raise PlanError(f"UlyssesAttention: key has {key.total} tokens, value {value.total}. They must agree.")
    return query, key


def _places(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | str]:
    """Returns where query, key and value are in a call: positions, or keywords."""
    places: list[int | str] = []
    for names in _NAMES:
        named = [name for name in names if isinstance(kwargs.get(name), torch.Tensor)]
        if named:
            places.append(named[0])
        elif len(places) < len(args) and isinstance(args[len(places)], torch.Tensor):
            places.append(len(places))
    if len(places) != 3:
        raise PlanError(
            f"UlyssesAttention: {type(module).__name__} was called without query, key and value: they are its first three "
            "arguments, or named query, key, value (q, k, v; xq, xk, xv)."
        )
    return places
