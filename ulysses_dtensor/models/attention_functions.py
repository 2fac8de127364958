"""Attention functions of Transformers' kind, `function(module, query, key, value, mask, ...)`, run over the whole sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ulysses_dtensor.attend import pair_kv
from ulysses_dtensor.attention import leaves_a_rank_out, on_some_heads
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.flex import mode_is_open
from ulysses_dtensor.gradients import tie
from ulysses_dtensor.heads import Heads
from ulysses_dtensor.inside import declared_attention
from ulysses_dtensor.mods import block_mask_of
from ulysses_dtensor.multihead import withheld
from ulysses_dtensor.region import Region, region_of

_PER_HEAD = {"attention_mask": 1, "position_bias": 1, "head_mask": 1, "s_aux": 0}
"""Arguments that may have a part for each head, and the dim at which."""
_DIMS = {"attention_mask": 4, "position_bias": 4, "head_mask": 4, "s_aux": 1}
_IGNORES_THE_REST = ("sdpa_attention_forward", "flex_attention_forward")


def seen_attention(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls `original`, in a block that runs on a rank's tokens by way of the mode that is open in it."""
    region = region_of(module)
    if region is None or region.bypassed or not region.inside or not mode_is_open():
        return original(module, *args, **kwargs)
    call = FunctionCall(original, module, region, args, kwargs)
    out = declared_attention(call.query, call.key, call.value, call, seq_dim=2, head_dim=1, mesh=None)
    if not call.ran:  # the probe's stand-in does not call the function either
        out = tie(out, call.trained)
    return out.transpose(1, 2).contiguous(), call.weights  # as the library's functions do: models view it


class FunctionCall:
    """One call of an attention function, to be run with the heads of a rank."""

    def __init__(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        region: Region,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.original, self.module, self.region = original, module, region
        named = dict(zip(("query", "key", "value", "attention_mask"), args, strict=False))
        self.rest = args[4:]
        self.given = {**{name: x for name, x in named.items() if name not in kwargs}, **kwargs}
        self.query, self.key, self.value = (self.given.pop(name) for name in ("query", "key", "value"))
        self.given.setdefault("attention_mask", None)
        self.num_heads = self.query.shape[1]
        self.ran = False
        self.weights: Any = None
        self.mask_heads: list[int] = []

    @property
    def others(self) -> list[Any]:
        """What the call is given beside query, key and value, and is read: must not depend on which tokens are at hand."""
        known = inspect.signature(self.original).parameters
        in_file = self.original.__module__ == type(self.module).__module__
        ignores = in_file or self.original.__name__ in _IGNORES_THE_REST
        given = {name: x for name, x in self.given.items() if name in known or not ignores}
        values = (*self.rest, *(given[name] for name in sorted(given)))
        return [x for x in values if x is None or isinstance(x, (torch.Tensor, bool, int, float, str))]

    @property
    def ranks(self) -> int:
        """How many ranks share the heads."""
        return self.region.mesh.size()

    @property
    def leaves_a_rank_out(self) -> bool:
        """Whether some rank has no head to call the function with."""
        return leaves_a_rank_out(self.num_heads, self.region.mesh)

    @property
    def trained(self) -> list[torch.Tensor]:
        """What the function computes with besides query, key and value, where it may have a gradient."""
        given = [x for x in self.given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        return given + list(self.own.values())

    @property
    def own(self) -> dict[str, torch.Tensor]:
        """The module's own tensors with a number for each head, which the function reads from it."""
        names = set(self.original.__code__.co_names) if inspect.isfunction(self.original) else set()
        held = {**dict(self.module.named_parameters(recurse=False)), **dict(self.module.named_buffers(recurse=False))}
        return {name: x for name, x in held.items() if name in names}

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: Heads) -> torch.Tensor:
        """Returns (B, H, S, D) of whole sequences of some heads."""
        self.ran = True
        if heads.num_query == self.num_heads:
            result = self.original(
                self.module, query, key, value, *self._mask_and_rest(self.given), **self._named(self.given)
            )
            self.weights = result[1]
            return result[0].transpose(1, 2)
        key, value = pair_kv(key, value, heads, 1)
        given = {name: self._cut(name, x, heads) for name, x in self.given.items()}
        own: dict[str, Any] = {name: self._cut_own(name, x, heads) for name, x in self.own.items()}
        if hasattr(self.module, "num_key_value_groups"):
            own["num_key_value_groups"] = query.shape[1] // max(1, key.shape[1])
        part = Part(self.module, own)
        with on_some_heads(heads, self.num_heads, query.device, self.region.mesh, self.mask_heads):
            out, weights = self.original(part, query, key, value, *self._mask_and_rest(given), **self._named(given))
        self.weights = None if weights is None else withheld(weights)
        return out.transpose(1, 2)

    def _mask_and_rest(self, given: dict[str, Any]) -> tuple[Any, ...]:
        return (given["attention_mask"], *self.rest)

    def _named(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in given.items() if name != "attention_mask"}

    def _cut(self, name: str, x: Any, heads: Heads) -> Any:
        start, stop = heads.query
        if name == "attention_mask" and hasattr(x, "mask_mod"):
            return block_mask_of(x, heads)
        dim = _PER_HEAD.get(name)
        if (
            dim is None
            or not isinstance(x, torch.Tensor)
            or x.ndim != _DIMS[name]
            or x.shape[dim] == 1 < self.num_heads
        ):
            return x
        if x.shape[dim] != self.num_heads:
            raise PlanError(
                f"{type(self.module).__name__}: {name} is {tuple(x.shape)}, with {x.shape[dim]} at dim {dim} where there are "
                f"{self.num_heads} query heads."
            )
        return x.narrow(dim, start, stop - start)

    def _cut_own(self, name: str, x: torch.Tensor, heads: Heads) -> torch.Tensor:
        dims = [dim for dim, size in enumerate(x.shape) if size == self.num_heads]
        if len(dims) != 1:
            raise PlanError(
                f"{type(self.module).__name__}: its {name} {tuple(x.shape)} is read in attention, and which dim has the "
                f"{self.num_heads} heads cannot be told."
            )
        start, stop = heads.query
        return x.narrow(dims[0], start, stop - start)


class Part:
    """An attention module as its function sees it on one rank: what differs by head is of the rank's heads."""

    def __init__(self, module: nn.Module, own: dict[str, Any]) -> None:
        self.__dict__.update(own)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)
