"""Models written in plain torch: which modules call attention, and which modules are the blocks around them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_ATTENTIONS = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
_MAX_FUNCTIONS = 300
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# What wraps one module without being it: activation checkpointing's wrapper, torch.compile's.
_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True, slots=True)
class Found:
    """The modules a plan converts, by name.

    `blocks` map to the names of the attentions inside them. `ancestors` hold blocks; `beside` are the largest modules
    that neither hold nor are blocks.
    """

    attentions: dict[str, nn.Module]
    blocks: dict[str, tuple[str, ...]]
    ancestors: tuple[str, ...]
    beside: tuple[str, ...]


def find(model: nn.Module, declared: dict[str, nn.Module]) -> Found:
    """Returns what to convert in `model`: the attentions declared, or else found by reading what forward calls."""
    attentions = declared or {name: m for name, m in model.named_modules() if calls_attention(m)}
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
    return Found(attentions, {name: tuple(held) for name, held in blocks.items()}, tuple(ancestors), beside)


def calls_attention(module: nn.Module) -> bool:
    """Whether this is torch's attention, or its own forward, with the functions and methods it reaches, names SDPA."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    forward = type(module).forward
    if forward in (nn.Module.forward, *(kind.forward for kind in _CONTAINERS)):
        return False
    if type(module).__module__.startswith("torch.nn."):
        return False
    instance = module.__dict__.get("forward")
    start = [forward] if instance is None else [forward, instance]
    return any(_reaches_attention(function, module) for function in start)


def _reaches_attention(function: Any, module: nn.Module) -> bool:
    pending, seen = [function], set()
    while pending:
        current = _plain_function(pending.pop())
        if current is None or current in seen or len(seen) > _MAX_FUNCTIONS:
            continue
        seen.add(current)
        names = {name for code in _codes(current.__code__) for name in code.co_names}
        if _ATTENTIONS & names:
            return True
        for target in (*_named_targets(current, names, module), *_cell_contents(current)):
            if getattr(target, "__name__", "") in _ATTENTIONS:
                return True
            if isinstance(target, (FunctionType, functools.partial)) and not _is_torch(target):
                pending.append(target)
    return False


def _named_targets(function: FunctionType, names: set[str], module: nn.Module) -> Iterator[Any]:
    """Yields what the names in a function's code stand for: globals, the module's methods and attributes, parents' forwards."""
    for name in names - {"forward"}:
        yield function.__globals__.get(name)
        yield getattr(type(module), name, None)
        yield module.__dict__.get(name)
    if {"super", "forward"} <= names:
        yield from (base.__dict__["forward"] for base in type(module).__mro__ if "forward" in base.__dict__)


def _cell_contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _plain_function(function: Any) -> FunctionType | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    function = getattr(function, "__func__", function)
    return function if isinstance(function, FunctionType) else None


def _is_torch(function: Any) -> bool:
    plain = _plain_function(function)
    return plain is None or plain.__module__ is None or plain.__module__.split(".")[0] == "torch"


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


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
