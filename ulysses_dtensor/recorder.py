"""What hooks record of modules inside a block (a router's logits), made a result of the block: proven, and whole in shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ulysses_dtensor.boundary import dim_of
from ulysses_dtensor.deferred import flat_rows
from ulysses_dtensor.region import Region
from ulysses_dtensor.trees import tree_flatten


def recorder_of(region: Region) -> Recorder | None:
    """Returns what looks after the hooks that record now, None where none do."""
    lists = region.world.recorded()
    return None if lists is None else Recorder(lists, region.reducer)


class Recorder:
    """Takes what one call of a block leaves in the lists out of them, as a result, and puts it back whole in shape.

    Rows of tokens (B * S, ...), as routers give them, are (B, S, ...) on the way.
    """

    def __init__(self, lists: dict[str, list[Any]], on_backward: Callable[[], None]) -> None:
        self.lists, self.on_backward = lists, on_backward
        self.flat: dict[str, list[bool]] = {}

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `call` with what it leaves in the lists beside its result."""
        return _Recorded(self, call)

    def put(self, result: tuple[Any, dict[str, list[Any]]]) -> Any:
        """Returns the block's own result; the rest goes into the lists."""
        own, taken = result
        for name, values in taken.items():
            for x, flat in zip(values, self.flat[name], strict=True):
                self.lists[name].append(_as_recorded(x, self.on_backward) if flat else x)
        return own


class _Recorded:
    def __init__(self, recorder: Recorder, call: Callable[..., Any]) -> None:
        self.recorder, self.call = recorder, call
        self.kind: Hashable = ("records", *sorted(recorder.lists), getattr(call, "kind", None))

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, list[Any]]]:
        lists = self.recorder.lists
        before = {name: len(values) for name, values in lists.items()}
        taken: dict[str, list[Any]] = {}
        try:
            result = self.call(*args, **kwargs)
        finally:
            for name, values in lists.items():
                taken[name] = values[before[name] :]
                del values[before[name] :]
        rows = _rows(args, kwargs)
        flat = {name: [_is_flat(x, rows) for x in values] for name, values in taken.items()}
        self.recorder.flat = flat
        return result, {
            name: [x.unflatten(0, rows) if is_flat else x for x, is_flat in zip(values, flat[name], strict=True)]
            for name, values in taken.items()
        }


def _rows(args: Any, kwargs: Any) -> tuple[int, int]:
    """Returns batch and tokens of the hidden state, the first floating tensor of three dims; (0, 0) without one."""
    for x in tree_flatten((args, kwargs))[0]:
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim == 3:
            return x.shape[0], x.shape[1]
    return 0, 0


def _is_flat(x: Any, rows: tuple[int, int]) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim == 2 and x.shape[0] == rows[0] * rows[1] > 0


def _as_recorded(x: Any, on_backward: Callable[[], None]) -> Any:
    if isinstance(x, DTensor) and dim_of(x) == 1:
        return flat_rows(x, on_backward)
    return x.flatten(0, 1)
