"""What a module's forward reaches, found by reading its code: the names, and the values behind references to them."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_MAX_FUNCTIONS = 300
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class Reference:
    """One value that a function refers to, and how to put another in its place; None where nothing can be put."""

    target: Any
    put: Callable[[Any], object] | None


@dataclass(frozen=True, slots=True)
class Reading:
    """One function that a forward reaches: the names in its code, and what those and its closure refer to."""

    names: frozenset[str]
    references: tuple[Reference, ...]


def readings(module: nn.Module) -> Iterator[Reading]:
    """Yields what a module's own forward reaches, functions and methods that it names included; torch's own apart."""
    forward = type(module).forward
    if forward in (nn.Module.forward, *(kind.forward for kind in _CONTAINERS)):
        return
    if type(module).__module__.startswith("torch.nn."):
        return
    instance = module.__dict__.get("forward")
    pending: list[Any] = [forward] if instance is None else [forward, instance]
    seen: set[FunctionType] = set()
    while pending:
        current = _plain_function(pending.pop())
        if current is None or current in seen or len(seen) > _MAX_FUNCTIONS:
            continue
        seen.add(current)
        names = frozenset(name for code in _codes(current.__code__) for name in code.co_names)
        references = (*_named(current, names, module), *_closed_over(current))
        yield Reading(names, references)
        pending += [
            each.target
            for each in references
            if isinstance(each.target, (FunctionType, functools.partial)) and not _is_torch(each.target)
        ]


def _named(function: FunctionType, names: frozenset[str], module: nn.Module) -> Iterator[Reference]:
    """Yields what the names in a function's code stand for: globals, the module's methods and attributes, parents' forwards."""
    for name in sorted(names - {"forward"}):
        if name in function.__globals__:
            yield _entry(function.__globals__, name)
        owner = next((base for base in type(module).__mro__ if name in base.__dict__), None)
        if owner is not None:
            yield Reference(getattr(type(module), name, None), functools.partial(_put_on_class, owner, name))
        if name in module.__dict__:
            yield _entry(module.__dict__, name)
    if {"super", "forward"} <= names:
        yield from (
            Reference(base.__dict__["forward"], None) for base in type(module).__mro__ if "forward" in base.__dict__
        )


def _closed_over(function: FunctionType) -> Iterator[Reference]:
    for cell in function.__closure__ or ():
        try:
            yield Reference(cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))
        except ValueError:  # an empty cell
            continue


def _entry(holder: dict[str, Any], name: str) -> Reference:
    return Reference(holder[name], functools.partial(operator.setitem, holder, name))


def _put_on_class(owner: type, name: str, value: Any) -> None:
    setattr(owner, name, staticmethod(value))  # what is put is called without the instance, as what was there


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
