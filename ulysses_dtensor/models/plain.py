"""Models written in plain torch: which modules call attention, and which modules are the blocks around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ulysses_dtensor.flex import calls_flex
from ulysses_dtensor.reading import readings
from ulysses_dtensor.world import World

_ATTENTIONS = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# What wraps one module without being it: activation checkpointing's wrapper, torch.compile's.
_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True, slots=True)
class Found:
    """The modules a plan converts, by name.

    `blocks` map to the names of the attentions inside them. `ancestors` hold blocks; `beside` are the largest modules
    that neither hold nor are blocks; of these, `whole` hold attentions that are not to be converted.
    """

    attentions: dict[str, nn.Module]
    blocks: dict[str, tuple[str, ...]]
    ancestors: tuple[str, ...]
    beside: tuple[str, ...]
    whole: tuple[str, ...] = ()

    def part_of(self, block: str) -> str | None:
        """Returns the largest module around the stack of a block that holds no other stack, None where there is no other."""
        stacks = {name: name.rpartition(".")[0] for name in self.blocks}
        around = [
            a for a in _ancestors(block) if {stacks[b] for b in self.blocks if _within(b, (a,))} == {stacks[block]}
        ]
        return around[0] if around and len(set(stacks.values())) > 1 else None


def find(model: nn.Module, declared: dict[str, nn.Module], world: World, whole: Sequence[str] = ()) -> Found:
    """Returns what to convert in `model`: the attentions declared, or else found by reading what forward calls.

    What lies in the modules named in `whole` is left out.
    """
    all_attentions = declared or {
        name: module
        for name, module in model.named_modules()
        if calls_attention(module) or world.calls_attention(module)
    }
    attentions = {name: module for name, module in all_attentions.items() if not _within(name, whole)}
    blocks: dict[str, list[str]] = {}
    for name in attentions:
        blocks.setdefault(_block_of(model, name), []).append(name)
    stacks = {name.rpartition(".")[0] for name in blocks}
    for stack in stacks:  # every member of a stack is a block, with an attention or without
        if isinstance(model.get_submodule(stack), _CONTAINERS):
            for child, module in model.get_submodule(stack).named_children():
                wrapped = _unwrapped(f"{stack}.{child}" if stack else child, module)
                if not isinstance(model.get_submodule(stack), nn.Sequential) and not _holds(wrapped, blocks):
                    blocks.setdefault(wrapped, [])
    ancestors = sorted({a for name in blocks for a in _ancestors(name)})
    beside = tuple(_beside(model, "", set(blocks), set(ancestors)))
    left_out = [name for name in all_attentions if name not in attentions]
    return Found(
        attentions,
        {name: tuple(held) for name, held in blocks.items()},
        tuple(ancestors),
        beside,
        tuple(name for name in beside if any(_within(each, (name,)) for each in left_out)),
    )


def _within(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def calls_attention(module: nn.Module) -> bool:
    """Whether this is torch's attention, or its own forward, with all that it reaches, names SDPA or FlexAttention."""
    return isinstance(module, nn.MultiheadAttention) or any(
        _ATTENTIONS & reading.names
        or any(getattr(each.target, "__name__", "") in _ATTENTIONS for each in reading.references)
        or calls_flex(reading)
        for reading in readings(module)
    )


def _block_of(model: nn.Module, name: str) -> str:
    """Returns the name of the block around an attention: the member of the innermost container on its path.

    Without a container the attention is its own block. A `Sequential` counts when its member is more than the attention.
    """
    parts = name.split(".")
    for at in range(len(parts) - 1, -1, -1):
        parent = model.get_submodule(".".join(parts[:at]))
        if isinstance(parent, _CONTAINERS):
            child = ".".join(parts[: at + 1])
            return _unwrapped(child, model.get_submodule(child))
    return name


def _unwrapped(name: str, module: nn.Module) -> str:
    for attribute in _WRAPPED:
        inner = module._modules.get(attribute)
        if inner is not None:
            return _unwrapped(f"{name}.{attribute}", inner)
    return name


def _holds(name: str, blocks: dict[str, Any]) -> bool:
    return any(block == name or block.startswith(f"{name}.") for block in blocks)


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:at]) for at in range(len(parts))] if name else []


def _beside(model: nn.Module, name: str, blocks: set[str], ancestors: set[str]) -> Iterator[str]:
    """Yields the largest modules outside the blocks, and outside what holds them."""
    for child, module in model.get_submodule(name).named_children():
        full = f"{name}.{child}" if name else child
        if full in blocks or full in ancestors:
            if full in ancestors:
                yield from _beside(model, full, blocks, ancestors)
            continue
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield full
        else:
            yield from _beside(model, full, blocks, ancestors)
