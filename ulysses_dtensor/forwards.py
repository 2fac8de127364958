"""What runs in place of a converted module's forward: an ancestor of blocks, a block, an attention, a module beside them."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ulysses_dtensor import agreement, gradients
from ulysses_dtensor.boundary import enter, holds_unannounced, is_shard_of, leave, local_of, noticed, shard
from ulysses_dtensor.calls import declared_length
from ulysses_dtensor.carried import Carrier, carrier_of
from ulysses_dtensor.decisions import decide, possible_lengths
from ulysses_dtensor.deferred import Deferred
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.inside import UNANNOUNCED, Inside
from ulysses_dtensor.leftovers import tensors_in
from ulysses_dtensor.multihead import NO_WEIGHTS, Withheld, refuse_nested_tensors
from ulysses_dtensor.passes import in_backward
from ulysses_dtensor.probe import Decision
from ulysses_dtensor.recorder import recorder_of
from ulysses_dtensor.region import Region
from ulysses_dtensor.tail import Tail
from ulysses_dtensor.trees import TreeSpec, tree_flatten, tree_map, tree_unflatten


def convert_block(module: nn.Module, region: Region, name: str, attentions: tuple[nn.Module, ...]) -> None:
    """Makes `module` run on this rank's tokens: it takes whole tensors or shards and returns shards."""
    module.forward = partial(_block_forward, module, region, name, attentions, module.__dict__.get("forward"))


def convert_attention(module: nn.Module, region: Region, name: str) -> None:
    """Makes an attention inside a block refuse to be recomputed apart from its block."""
    module.forward = partial(_attention_forward, module, region, name, module.__dict__.get("forward"))


def convert_beside(module: nn.Module, region: Region, name: str, whole: Sequence[str] = ()) -> None:
    """Makes a module outside the blocks keep shards where it keeps tokens apart; else, or if in `whole`, it gets whole tensors."""
    module.forward = partial(_beside_forward, module, region, name, name in whole, module.__dict__.get("forward"))


def convert_ancestor(module: nn.Module, region: Region, name: str) -> None:
    """Makes a module that holds blocks the place where ranks agree and the region's tensors leave."""
    forward = partial(_ancestor_forward, module, region, name, module.__dict__.get("forward"))
    forward.__signature__ = _signature(module)  # type: ignore[attr-defined] - trainers read the arguments' names
    module.forward = forward


def _ancestor_forward(
    module: nn.Module, region: Region, name: str, original: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    call, world, given = _own(module, original), region.world, kwargs
    if region.bypassed:
        return call(*args, **kwargs)
    if region.active:
        region.nested.add(name)
        return _inner_forward(call, module, region, args, kwargs)
    if name in region.nested and in_backward():  # a checkpoint recomputes it alone
        region.active += 1
        try:
            with Tail(region.mesh, region.reducer, seeded_alike=region.seeded_alike):
                return _inner_forward(call, module, region, args, kwargs)
        finally:
            region.active -= 1
    problem = None
    left: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    try:
        refuse_nested_tensors(module, args, kwargs)
        kwargs = world.before(module, args, kwargs)
        _check_inputs(region, args, kwargs)
        region.declared_len = declared_length(module, args, kwargs, region.inputs, region.axes)
        left = gradients.check_reducers(module, region.mesh, args, kwargs)
    except PlanError as error:
        problem = error
    if region.ranks > 1 and (region.check == "always" or not region.agreed):
        facts = (
            ("the plan", region.signature),
            ("what is called, and how", _manner(module, name)),
            ("the exchanges so far", region.history),
            ("parameters and buffers", 0 if region.agreed else agreement.state_hash(gradients.plain_state(module))),
        )
        started = time.perf_counter()
        region.seeded_alike = agreement.agree(
            region.mesh, problem=problem, args=args, kwargs=kwargs, facts=facts, who=region.who
        )
        region.agreed, region.agreement_seconds = True, time.perf_counter() - started
    elif problem is not None:
        raise problem
    region.input_sizes = _sizes(args, kwargs)
    region.reducer.add(*left)
    region.active += 1
    try:
        with Tail(region.mesh, region.reducer, seeded_alike=region.seeded_alike) as tail:
            result = world.after(module, args, given, call(*args, **kwargs))
        tail.check()
    finally:
        region.active -= 1
    kept = [id(x) for x in world.stays_in_shards(result)]
    return tree_map(lambda x: _out(x, region, tail, kept), result)


def _inner_forward(call: Callable[..., Any], module: nn.Module, region: Region, args: Any, kwargs: Any) -> Any:
    refuse_nested_tensors(module, args, kwargs)
    changed = region.world.before(module, args, kwargs)
    return region.world.after(module, args, kwargs, call(*args, **changed))


def _sizes(args: Any, kwargs: Any) -> str:
    """Returns all sizes of a call as text: compiled blocks are compiled anew when it changes.

    Torch itself does not guard the global shape of a DTensor, so that a block compiled for 14 tokens would be run on 13.
    """
    return str([tuple(x.shape) for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)])


def _manner(module: nn.Module, name: str) -> tuple[object, ...]:
    """Returns what besides its inputs decides which collectives a call makes."""
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return (name, module.training, torch.is_grad_enabled(), *autocast)


def _out(x: Any, region: Region, tail: Tail, kept: list[int]) -> Any:
    if isinstance(x, Deferred):
        return x.whole(tail.whole)
    if isinstance(x, Withheld):
        raise PlanError(f"{region.who}: {NO_WEIGHTS}.")
    if is_shard_of(x, region.mesh):
        gathered = region.outputs == "replicate" and id(x) not in kept
        return tail.whole(x) if gathered else noticed(x, region.reducer)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):  # a result that torch cannot look into
        for part in dataclasses.fields(x):
            value = tree_map(lambda each: _out(each, region, tail, kept), getattr(x, part.name, None))
            object.__setattr__(x, part.name, value)
    elif any(is_shard_of(held, region.mesh) or isinstance(held, Deferred) for held in tensors_in(x)):
        raise PlanError(
            f"{region.who}: forward returns a {type(x).__name__} that holds a hidden state in shards. "
            "Return tensors, tuples, lists, dictionaries or dataclasses of them."
        )
    return x


def _gathered_slices(region: Region, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments with some of a hidden state's tokens, which are no shards any more, as plain tensors."""
    if not any(isinstance(x, Deferred) for x in tree_flatten((args, kwargs))[0]):
        return args, kwargs
    return tree_map(
        lambda x: x.whole(lambda base: leave(base, region.reducer)) if isinstance(x, Deferred) else x,
        (args, kwargs),
    )


def _block_forward(
    module: nn.Module,
    region: Region,
    name: str,
    attentions: tuple[nn.Module, ...],
    original: Callable[..., Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if region.bypassed:
        return _own(module, original)(*args, **kwargs)
    carrier = carrier_of(args, kwargs)
    if carrier is not None:  # before a checkpoint: a recompute is given what the forward was given
        args, kwargs = carrier.open(args, kwargs)
    checkpoint = region.world.checkpoint(module)
    proven = partial(_proven_block, module, region, name, attentions, original, carrier)
    result = proven(*args, **kwargs) if checkpoint is None else checkpoint(partial(proven, **kwargs), *args)
    return result if carrier is None else carrier.put(result)


def _proven_block(
    module: nn.Module,
    region: Region,
    name: str,
    attentions: tuple[nn.Module, ...],
    original: Callable[..., Any] | None,
    carrier: Carrier | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    call = region.world.forward(module) if original is None else original
    if carrier is not None:
        call = carrier.around(call)
    recorder = recorder_of(region)
    if recorder is not None:
        return recorder.put(_block_on_tokens(recorder.around(call), module, region, name, attentions, args, kwargs))
    return _block_on_tokens(call, module, region, name, attentions, args, kwargs)


def _block_on_tokens(
    call: Callable[..., Any],
    module: nn.Module,
    region: Region,
    name: str,
    attentions: tuple[nn.Module, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    args, kwargs = _gathered_slices(region, args, kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    if not any(is_shard_of(x, region.mesh) for x in leaves):
        if not (torch.compiler.is_compiling() or region.active or in_backward()):
            raise PlanError(
                f"UlyssesPlan: block {name} was called by itself. Call the converted model, or run the block under bypass."
            )
        lengths = possible_lengths(module, region, leaves, spec)
        if not lengths:
            raise PlanError(
                f"UlyssesPlan: {name} ({type(module).__name__}) is given no tensor that could be the hidden state. Pass it as an "
                "argument, or in a tuple, list or dictionary, not in an object of one's own."
            )
        if all(region.is_short(seq_len) for seq_len in lengths):
            return _run_whole(call, region, args, kwargs)
    found = decide(call, module, region, name, leaves, spec, attentions, kind=getattr(call, "kind", None))
    assert found is not None  # a block that mixes raised
    hidden = dict(found.hidden)
    seq_len = next(leaves[at].shape[dim] for at, dim in hidden.items())
    if not any(is_shard_of(leaves[at], region.mesh) for at in hidden) and region.is_short(seq_len):
        args, kwargs = tree_unflatten([_gathered(x, region) for x in leaves], spec)
        return _run_whole(call, region, args, kwargs)
    return _run_local(call, module, region, name, found, leaves, spec, seq_len)


def _attention_forward(
    module: nn.Module, region: Region, name: str, original: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    call = _own(module, original)
    if torch.compiler.is_compiling() or region.bypassed or region.inside or not in_backward():
        return call(*args, **kwargs)
    raise PlanError(
        f"UlyssesPlan: {name} is recomputed apart from its block, so it cannot know the whole sequence. "
        "Checkpoint whole blocks, not parts of them."
    )


def _beside_forward(
    module: nn.Module,
    region: Region,
    name: str,
    whole: bool,
    original: Callable[..., Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    call = _own(module, original)
    if region.bypassed:
        return call(*args, **kwargs)
    args, kwargs = _gathered_slices(region, args, kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    if not any(is_shard_of(x, region.mesh) for x in leaves):
        return call(*args, **kwargs)
    found = None if whole else decide(call, module, region, name, leaves, spec, None)
    if found is None:
        leaves = [_gathered(x, region) for x in leaves]
        versions = [x._version if isinstance(x, torch.Tensor) and not x.is_inference() else 0 for x in leaves]
        args, kwargs = tree_unflatten(leaves, spec)
        result = call(*args, **kwargs)
        after = tree_flatten((args, kwargs))[0]
        if len(after) != len(leaves) or any(
            a is not b or (isinstance(a, torch.Tensor) and not a.is_inference() and a._version != version)
            for a, b, version in zip(after, leaves, versions, strict=True)
        ):
            raise PlanError(
                f"UlyssesPlan: {name} changes what it is given in place, where it is held in shards. Write it out of place."
            )
        return result
    seq_len = next(leaves[at].shape[dim] for at, dim in found.hidden)
    return _run_local(call, module, region, name, found, leaves, spec, seq_len)


def _gathered(x: Any, region: Region) -> Any:
    return leave(x, region.reducer) if is_shard_of(x, region.mesh) else x


def _run_local(
    call: Callable[..., Any],
    module: nn.Module,
    region: Region,
    name: str,
    found: Decision,
    leaves: list[Any],
    spec: TreeSpec,
    seq_len: int,
) -> Any:
    dims = dict((*found.hidden, *found.sliced))
    lengths = {at: leaves[at].shape[dim] for at, dim in (*found.hidden, *found.contexts)}
    local: list[Any] = []
    made: dict[tuple[int, int | None], Any] = {}  # what is one tensor stays one: modules look whether key is value
    for at, x in enumerate(leaves):
        key = (id(x), dims.get(at))
        if key not in made and at in found.gathered:
            made[key] = enter(_gathered(x, region), region.mesh, None, seq_len)
        elif key not in made and is_shard_of(x, region.mesh):
            made[key] = local_of(x)
        elif key not in made and isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
            made[key] = enter(x, region.mesh, dims.get(at), seq_len)
        local.append(made.get(key, x))
    args, kwargs = tree_unflatten(local, spec)
    if not torch.compiler.is_compiling():
        region.history = agreement.roll(region.history, f"{name} {seq_len}")
    inside = Inside(
        region.mesh.get_group(),
        found.attentions,
        found.dropouts,
        lengths,
        [x.shape if isinstance(x, torch.Tensor) else () for x in leaves],
        strategy=region.strategy,
        seeded_alike=region.seeded_alike,
    )
    with inside, region.running():
        result = call(*args, **kwargs)
    inside.check()
    outputs, out_spec = tree_flatten(result)
    spare = [p for key, p in module.named_parameters() if key in found.spare and not isinstance(p, DTensor)]
    # A state that this block leaves unused has no gradient from it: FSDP and hooks would make plain zeros of that.
    spare += [local[at] for at, x in enumerate(leaves) if is_shard_of(x, region.mesh) and at in found.unused]
    out_dims = (
        found.outputs[: len(outputs)] if in_backward() else found.outputs
    )  # a recompute records nothing, last of all
    for at, (x, dim) in enumerate(zip(outputs, out_dims, strict=True)):
        if isinstance(x, torch.Tensor) and holds_unannounced(x):
            raise PlanError(UNANNOUNCED)
        if dim is None and isinstance(x, torch.Tensor):
            outputs[at] = noticed(gradients.tie(x, spare) if x.requires_grad else x, region.reducer)
        if dim is not None:
            outputs[at] = shard(gradients.tie(x, spare), region.mesh, dim, seq_len, region.reducer)
    return tree_unflatten(outputs, out_spec)


def _run_whole(call: Callable[..., Any], region: Region, args: Any, kwargs: Any) -> Any:
    with region.running():
        return call(*args, **kwargs)


def _check_inputs(region: Region, args: Any, kwargs: Any) -> None:
    for x in tree_flatten((args, kwargs))[0]:
        if not isinstance(x, DTensor):
            continue
        if not is_shard_of(x, region.mesh):
            raise PlanError(
                f"{region.who}: an input is a DTensor placed {x.placements} on {x.device_mesh}. Pass the whole plain tensor, "
                f"or a hidden state cut at its tokens over {region.mesh}."
            )
        if not x.is_floating_point():
            raise PlanError(
                f"{region.who}: an input of {x.dtype} is cut already (placements {x.placements}). An embedding with a plain "
                "weight cannot take it, and positions would count from each shard's start. Pass the whole tensor on every "
                "rank; the plan cuts it."
            )


def _own(module: nn.Module, original: Callable[..., Any] | None) -> Callable[..., Any]:
    return partial(type(module).forward, module) if original is None else original


def _signature(module: nn.Module) -> Any:
    return inspect.signature(module.forward)
