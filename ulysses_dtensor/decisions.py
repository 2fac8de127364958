"""How a module may be called on shards: what the probe decided at the first call of a kind, kept for those after it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from ulysses_dtensor.boundary import is_shard_of
from ulysses_dtensor.calls import Call, call_key, hidden_options, nature
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.passes import in_backward
from ulysses_dtensor.probe import Decision, Mixes, probe
from ulysses_dtensor.region import Region
from ulysses_dtensor.trees import TreeSpec, tree_unflatten


def decide(
    call: Callable[..., Any],
    module: nn.Module,
    region: Region,
    name: str,
    leaves: list[Any],
    spec: TreeSpec,
    attentions: tuple[nn.Module, ...] | None,
    *,
    kind: Hashable = None,
) -> Decision | None:
    """Returns the probe's decision on a call like this one, made at the first; None: a module beside the blocks mixes.

    `kind` is what besides its arguments decides what a call returns.
    """
    args, kwargs = tree_unflatten(leaves, spec)
    key = call_key(name, module, args, kwargs, kind)
    if torch.compiler.is_compiling() and region.input_sizes == "":  # read here, so that it is guarded
        raise PlanError(f"UlyssesPlan: {name} is compiled outside a forward of its model.")
    if in_backward() and key not in region.decisions:  # what recorded in the forward may not record in the recompute
        key = next((each for each in region.decisions if (each[0], *each[2:]) == (key[0], *key[2:])), key)
    # A recompute goes the way that its forward went, whatever hooks have come since.
    now = None if torch.compiler.is_compiling() or in_backward() else nature(module)
    if key in region.decisions and (now is None or region.natures[key] == now):
        return region.decisions[key]
    if torch.compiler.is_compiling():
        raise PlanError(
            f"UlyssesPlan: {name} is called in a new way while it is compiled. Run the model once eagerly with such inputs "
            "(torch.compiler.set_stance('force_eager')), so that its tokens can be proven to stay apart."
        )
    if in_backward() and attentions is not None:
        raise PlanError(
            f"UlyssesPlan: {name} is recomputed as its forward did not run. Checkpoint whole blocks, without code between them; "
            "after a forward under bypass, run the backward under bypass too."
        )
    described = Call(module, leaves, spec, region.inputs, region.mesh, region.axes)
    made = {id(x): torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in leaves if is_shard_of(x, region.mesh)}
    stand_ins = [made.get(id(x), x) for x in leaves]
    try:
        with region.running():
            found: Decision | None = probe(
                call,
                module,
                stand_ins,
                spec,
                hidden_options(described),
                seq_len=described.seq_len,
                fixed=described.declared,
                attentions=attentions or (),
                who=f"UlyssesPlan: {name} ({type(module).__name__})",
            )
    except Mixes as error:
        if attentions is not None and name in region.parts:
            part = region.parts[name]
            raise Mixes(
                f"{error} If {part} need not be cut, have every rank run it whole: whole=({part!r},)."
            ) from None
        if attentions is not None:
            raise
        found = None
    region.decisions[key], region.natures[key] = found, now
    return found


def possible_lengths(module: nn.Module, region: Region, leaves: list[Any], spec: TreeSpec) -> list[int]:
    """Returns how many tokens a call may be of, one number for each candidate for its hidden state."""
    described = Call(module, leaves, spec, region.inputs, region.mesh, region.axes)
    return [described.seq_len(option.hidden) for option in hidden_options(described)]
