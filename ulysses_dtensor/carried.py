"""Mappings that blocks hand on and write to (keys and values of one layer, read by later ones), made a result of the block.

Plain dictionaries are not looked at: FSDP2 copies them at every module that it wraps, so that what is written is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from typing import Any

from ulysses_dtensor.errors import PlanError


def carrier_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carrier | None:
    """Returns what looks after the mappings among the arguments of a block's call, None where there are none."""
    found = {at: x for at, x in (*enumerate(args), *kwargs.items()) if _is_carried(x)}
    return Carrier(found) if found else None


class Carrier:
    """Gives a block's call mappings of its own tensors, and takes what it writes to them out, as a result."""

    def __init__(self, mappings: dict[int | str, MutableMapping[Any, Any]]) -> None:
        self.mappings = mappings

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with plain dictionaries in place of the mappings: what these hold are arguments too."""
        return (
            tuple(dict(x) if at in self.mappings else x for at, x in enumerate(args)),
            {name: dict(x) if name in self.mappings else x for name, x in kwargs.items()},
        )

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `call` for arguments with plain dictionaries, with what it writes beside its result."""
        return _Carried(call, {at: type(x) for at, x in self.mappings.items()})

    def put(self, result: tuple[Any, dict[int | str, dict[Any, Any]]]) -> Any:
        """Returns the block's own result; what it wrote goes into the mappings."""
        own, written = result
        for at, entries in written.items():
            self.mappings[at].update(entries)
        return own


class _Carried:
    def __init__(self, call: Callable[..., Any], kinds: dict[int | str, type]) -> None:
        self.call, self.kinds = call, kinds
        self.kind: Hashable = ("carries", *kinds)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[int | str, dict[Any, Any]]]:
        made = {at: kind(args[at] if isinstance(at, int) else kwargs[at]) for at, kind in self.kinds.items()}
        before = {at: dict(x) for at, x in made.items()}
        args = tuple(made.get(at, x) for at, x in enumerate(args))
        result = self.call(*args, **{name: made.get(name, x) for name, x in kwargs.items()})
        for at, x in made.items():
            if gone := before[at].keys() - x.keys():
                raise PlanError(
                    f"UlyssesPlan: {sorted(map(str, gone))} are removed from what a block is given as {at}."
                )
        return result, {
            at: {key: value for key, value in x.items() if key not in before[at] or before[at][key] is not value}
            for at, x in made.items()
        }


def _is_carried(x: Any) -> bool:
    return isinstance(x, MutableMapping) and not isinstance(x, dict)
