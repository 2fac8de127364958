"""One file for each world of models: how to find its attentions and its sequence region."""

from __future__ import annotations

import sys

from torch import nn

from ulysses_dtensor.world import World


def world_of(model: nn.Module) -> World:
    """Returns the world that `model` is of; a model that holds one of a library's is of that library's."""
    if "transformers" not in sys.modules:  # then no model can be one of its
        return World()
    from ulysses_dtensor.models.transformers import Transformers, is_transformers

    return Transformers() if any(is_transformers(part) for part in model.modules()) else World()
