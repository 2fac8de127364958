"""One file for each world of models: how to find its attentions and its sequence region."""

from __future__ import annotations

from torch import nn

from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.world import World


def world_of(model: nn.Module) -> World:
    """Returns the world that `model` is of; a model that holds one of a library's is of that library's.

    Raises:
        PlanError: the library is older than what this one is written for.
    """
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    if not any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in kinds):
        return World()
    try:
        from ulysses_dtensor.models.transformers import Transformers
    except ImportError as error:
        raise PlanError(
            f"UlyssesPlan: {type(model).__name__} holds a model of transformers, of a version that is not supported ({error}). "
            "Install the extra: pip install 'ulysses_dtensor[transformers]'."
        ) from error
    return Transformers()
