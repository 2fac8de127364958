"""What a call leaves behind besides its result: attributes, containers and arguments that it writes, and putting them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

_MODULES_OWN = frozenset(vars(nn.Module())) | {"forward"}
_MAX_CONTAINERS = 10_000
_MISSING = object()


class Watch:
    """The attributes of a module and what can be reached from its arguments, as they were before a call."""

    def __init__(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        self._seen: dict[int, tuple[str, Any, Any]] = {}
        for name, part in module.named_modules():
            if any(not kind.__module__.startswith(("torch.", "builtins")) for kind in type(part).__mro__):
                self._look(f"{name or type(module).__name__}.", vars(part), own=_MODULES_OWN)
        self._attributes = len(self._seen)
        for name, value in arguments.items():
            self._look(name, value)

    def put_back(self) -> tuple[dict[str, Any], list[str]]:
        """Returns attributes written (by name, with their new values) and names in the arguments written; undoes both."""
        attributes: dict[str, Any] = {}
        arguments: list[str] = []
        for number, (name, container, before) in enumerate(self._seen.values()):
            after = _entries(container)
            for key in before.keys() | after.keys():
                old, new = before.get(key, _MISSING), after.get(key, _MISSING)
                if old is new or (isinstance(old, (bool, int, float, str)) and type(old) is type(new) and old == new):
                    continue
                where = f"{name}{key}" if name.endswith(".") else f"{name}[{key!r}]"
                if number < self._attributes:
                    attributes[where] = None if new is _MISSING else new
                else:
                    arguments.append(name.split(".")[0])
            _restore(container, before)
        return attributes, sorted(set(arguments))

    def _look(self, name: str, value: Any, own: frozenset[str] = frozenset()) -> None:
        container = _container_of(value)
        if container is None or id(container) in self._seen or len(self._seen) >= _MAX_CONTAINERS:
            if isinstance(value, tuple):
                for at, item in enumerate(value):
                    self._look(f"{name}[{at}]", item)
            return
        before = {key: item for key, item in _entries(container).items() if key not in own}
        self._seen[id(container)] = (name if container is value else f"{name.rstrip('.')}.", container, before)
        for key, item in before.items():
            self._look(f"{name}{key}" if name.endswith(".") else f"{name}[{key!r}]", item)


def _container_of(value: Any) -> Any:
    """Returns what can be written of a value: itself, or the dictionary of a plain object's attributes."""
    if isinstance(value, (dict, list, set)):
        return value
    if isinstance(value, (type, nn.Module, torch.Tensor, Enum)) or callable(value):
        return None
    return vars(value) if hasattr(value, "__dict__") and not type(value).__module__.startswith("torch.") else None


def _entries(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return {key: value for key, value in container.items() if key not in _MODULES_OWN}
    return dict(enumerate(container)) if isinstance(container, list) else {item: item for item in container}


def _restore(container: Any, before: dict[Any, Any]) -> None:
    if isinstance(container, dict):
        for key in _entries(container).keys() - before.keys():
            del container[key]
        for key, value in before.items():
            if container.get(key, _MISSING) is not value:
                container[key] = value
    elif isinstance(container, list):
        if len(container) != len(before) or any(a is not b for a, b in zip(container, before.values(), strict=True)):
            container[:] = before.values()
    elif container != before.keys():
        container.clear()
        container.update(before)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value, in containers and attributes of plain objects too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)
    else:
        container = _container_of(value)
        for item in () if container is None else _entries(container).values():
            yield from tensors_in(item)
