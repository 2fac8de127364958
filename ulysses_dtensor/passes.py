"""Whether a backward pass runs, and which."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether the calling thread runs inside a backward pass, as a recompute of activation checkpointing does."""
    return backward_id() != -1


def backward_id() -> int:
    """Returns a number of the backward pass that the calling thread runs in, -1 outside of one."""
    # Private; torch's own checkpointing stands on it. If torch moves it, tests/test_gradients.py says so first.
    return torch._C._current_graph_task_id()
