"""Hashes of contents: of a tensor's bytes, and of what functions and block masks hold."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from enum import Enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

MASK = 2**62 - 1
_MAX_PIECES = 20_000
_OPAQUE = frozenset(
    {"torch", "numpy", "logging", "threading", "_thread", "weakref", "builtins", "concurrent", "multiprocessing"}
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)


@torch.no_grad()
def content_hash(x: torch.Tensor) -> torch.Tensor:
    """Returns a 62-bit hash of a tensor's bytes and their positions, as a scalar on its device."""
    raw = x.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() % 8:
        raw = torch.cat((raw, raw.new_zeros(8 - raw.numel() % 8)))
    words = raw.view(torch.int64)
    words = words + torch.arange(words.numel(), device=x.device) * -7046029254386353131
    words = (words ^ (words >> 31)) * -4658895280553007687
    words = (words ^ (words >> 29)) * -7723592293110705685
    return (words ^ (words >> 32)).sum() & MASK


def text_hash(text: str) -> int:
    """Returns a 62-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") & MASK


def holds_functions(value: Any) -> bool:
    """Whether `value` can be called, or is a block mask, whose function can: what these hold may be tensors."""
    return isinstance(value, BlockMask) or (callable(value) and not isinstance(value, (type, nn.Module, torch.Tensor)))


def held_hash(value: Any) -> int:
    """Returns a hash of the code of a function and of all that it holds: closure, defaults, attributes of plain objects.

    Modules count by their type alone: what they hold is compared elsewhere. So do torch's own objects.
    """
    return text_hash("\n".join(itertools.islice(_pieces(value, set()), _MAX_PIECES)))


def held_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that a function, a block mask or a plain object holds; while torch.compile traces, those of a tuple."""
    if torch.compiler.is_compiling():  # which does not look into closures
        yield from (x for x in value if isinstance(x, torch.Tensor))
        return
    pending, seen = [value], set()
    while pending and len(seen) < _MAX_PIECES:
        current = pending.pop()
        if isinstance(current, torch.Tensor):
            yield current
        elif not isinstance(current, (*_PLAIN, nn.Module)) and id(current) not in seen:
            seen.add(id(current))
            pending += _parts(current)


def _pieces(value: Any, seen: set[int]) -> Iterator[str]:
    yield type(value).__name__
    if isinstance(value, _PLAIN):
        yield repr(value)
        return
    if isinstance(value, torch.Tensor):
        yield f"{tuple(value.shape)} {value.dtype}"
        if not isinstance(value, DTensor):
            yield str(int(content_hash(value)))
        return
    if isinstance(value, (nn.Module, Enum)) or id(value) in seen:
        yield str(getattr(value, "name", ""))
        return
    seen.add(id(value))
    for part in _parts(value):
        yield from _pieces(part, seen)


def _parts(value: Any) -> tuple[Any, ...]:
    if isinstance(value, FunctionType):
        code = value.__code__
        cells = tuple(_contents(cell) for cell in value.__closure__ or ())
        return (code.co_filename, code.co_firstlineno, code.co_name, *cells, value.__defaults__, value.__kwdefaults__)
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if isinstance(value, (tuple, list)):
        return tuple(value)
    if isinstance(value, BlockMask):
        return tuple(vars(value).values())
    if type(value).__module__.split(".")[0] in _OPAQUE:
        return (value.tobytes(),) if hasattr(value, "tobytes") else ()
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    held = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}
    calls = [kind.__dict__["__call__"] for kind in type(value).__mro__ if "__call__" in kind.__dict__]
    return (*held.keys(), *held.values(), *(call for call in calls if isinstance(call, FunctionType)))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
