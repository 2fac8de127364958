"""Backward passes: whether one runs, which, and the graph that it would walk."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch


def in_backward() -> bool:
    """Whether the calling thread runs inside a backward pass, as a recompute of activation checkpointing does.

    Not while torch.compile traces, which cannot know.
    """
    return not torch.compiler.is_compiling() and backward_id() != -1


def in_reentrant_recompute() -> bool:
    """Whether a reentrant checkpoint recomputes on the calling thread: from copies of its inputs that are leaves."""
    # Private; the one way to learn which node runs. If torch moves it, tests/test_gradients.py says so first.
    node = torch._C._current_autograd_node() if in_backward() else None
    return node is not None and node.name() == "CheckpointFunctionBackward"


def backward_id() -> int:
    """Returns a number of the backward pass that the calling thread runs in, -1 outside of one."""
    # Private; torch's own checkpointing stands on it. If torch moves it, tests/test_gradients.py says so first.
    return torch._C._current_graph_task_id()


def graph_nodes(values: Iterable[Any], until: Container[str] = ()) -> Iterator[Any]:
    """Yields the nodes of the graph behind the tensors among some values, each once; not past those named in `until`."""
    pending = [x.grad_fn for x in values if isinstance(x, torch.Tensor)]
    seen = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            if node.name() not in until:
                pending.extend(following for following, _ in node.next_functions)
