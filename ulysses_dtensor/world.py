"""What a library of models does in ways of its own; plain torch does none of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class World:
    """Plain torch's: a model's forward takes and returns what it says, and a module's forward is its class's."""

    def calls_attention(self, module: nn.Module) -> bool:
        """Whether this module's own forward calls attention in a way that only this library has."""
        return False

    def problems(self, model: nn.Module, blocks: dict[str, tuple[str, ...]]) -> list[str]:
        """Returns what of a model cannot be converted, a line each."""
        return []

    def nothing_found(self, model: nn.Module) -> str:
        """Returns what to say where no attention is found."""
        return (
            "no module's forward calls torch.nn.functional.scaled_dot_product_attention or flex_attention, so nothing matches. "
            "Name the attentions: UlyssesPlan(attention={'layers.*.attn': UlyssesAttention('b h (sp s) d -> b (sp h) s d')})."
        )

    def show_attention(self, model: nn.Module) -> None:
        """Makes this library's own attention calls visible to function modes."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the keywords with which a module that holds blocks is to be called.

        Raises:
            PlanError: it is asked for what cannot be given.
        """
        return kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Returns what a module that holds blocks returns for a call of these arguments, before `before` changed them."""
        return result

    def stays_in_shards(self, result: Any) -> list[Any]:
        """Returns what of a model's result is not gathered."""
        return []

    def checkpoint(self, module: nn.Module) -> Callable[..., Any] | None:
        """Returns the function by which a block's own forward is about to checkpoint itself, None where it does not."""
        return None

    def forward(self, module: nn.Module) -> Callable[..., Any]:
        """Returns the forward of a module's class, without a checkpoint of its own."""
        return partial(type(module).forward, module)

    def recorded(self) -> dict[str, list[Any]] | None:
        """Returns the lists in which hooks now collect what modules inside blocks return, None where none do."""
        return None
