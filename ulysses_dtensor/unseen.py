"""Running a module unseen: random state, hooks on all modules, and what is saved for backward stay as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def unseen(gradients: bool) -> Iterator[None]:
    """Keeps random state, and keeps what the probe saves for backward out of a checkpoint around the module."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    saving = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.set_grad_enabled(gradients), torch.random.fork_rng(devices), _without_global_hooks(), saving:
        yield


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Hides modes that see every operation: selective checkpointing would keep the probe's results for the recompute."""
    # Private; torch has no public name for it. If torch moves it, tests/test_probe.py says so first.
    with _disable_current_modes():
        yield


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Hides hooks on all modules (profilers, trackers): they would count the probe as the model's own forward."""
    # Private; torch has no switch for them. If torch moves them, tests/test_probe.py says so first.
    hooks = [
        getattr(nn.modules.module, f"_global_{name}_hooks")
        for name in ("backward_pre", "backward", "forward_pre", "forward")
    ]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, saved in zip(hooks, kept, strict=True):
            each.update(saved)
