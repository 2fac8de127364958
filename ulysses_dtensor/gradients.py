"""Who averages which parameter's gradient over the sequence group: FSDP, DDP, or we when nobody does."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from ulysses_dtensor.collectives import all_reduce_max, all_reduce_sum
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.passes import backward_id, graph_nodes
from ulysses_dtensor.trees import tree_flatten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_BUCKET_ELEMENTS = 2**24


def check_reducers(
    model: nn.Module, mesh: DeviceMesh, args: Any, kwargs: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the trainable parameters of `model` that have nobody who averages their gradients over `mesh`, and DDP's.

    Raises:
        PlanError: FSDP or DDP average over ranks that leave part of the sequence group out, FSDP divides by a factor of
            its own, or an input depends on trainable parameters that are not the model's.
    """
    if not torch.is_grad_enabled():
        return [], []
    ranks = set(dist.get_process_group_ranks(mesh.get_group()))
    managed, problems = _fsdp_managed(model, ranks)
    if any(_is_flattened(module) for module in model.modules()):
        problems.append(
            "FullyShardedDataParallel (FSDP1) is not supported: it flattens parameters. Use fully_shard (FSDP2)."
        )
    left: list[torch.Tensor] = []
    reduced: list[torch.Tensor] = []
    for name, p in model.named_parameters():
        if not p.requires_grad or id(p) in managed:
            continue
        if not isinstance(p, DTensor):
            left += _leaves_behind(p)
        elif not ranks <= _ranks_of(p.device_mesh):
            problems.append(_misses(name, p.device_mesh, ranks))
        elif not any(isinstance(placement, Shard) for placement in p.placements):
            problems.append(f"parameter {name} is a DTensor placed {p.placements}: nobody averages its gradient.")
    left = list({id(p): p for p in left if id(p) not in managed}.values())
    ddp = _active_ddp(model)
    if ddp is not None and left:
        ddp_ranks = set(dist.get_process_group_ranks(ddp.process_group))
        if not ranks <= ddp_ranks:
            problems.append(
                f"DistributedDataParallel averages over ranks {sorted(ddp_ranks)}, the sequence group is {sorted(ranks)}. "
                "Give it a process group of all dp x sp ranks."
            )
        left, reduced = [], left
    names = {id(p): name for name, p in model.named_parameters()}
    hooked = [p for p in left if _has_hooks(p)]
    if hooked:
        problems.append(
            f"parameter {names.get(id(hooked[0]), 'behind a parameter')} has a hook, which would see its gradient before it is "
            "averaged over the sequence group. Work on gradients after the backward, or wrap the model in FSDP2 or DDP."
        )
    foreign = _foreign_parameters(model, managed, args, kwargs)
    if foreign:
        problems.append(
            f"an input depends on {foreign} trainable parameters outside the model, whose gradients nobody would average. "
            "Convert the module that holds them too, or detach the input."
        )
    if problems:
        raise PlanError("UlyssesPlan: gradients would be wrong.\n  " + "\n  ".join(dict.fromkeys(problems)))
    return left, reduced


def _is_flattened(module: nn.Module) -> bool:
    """Whether FSDP1 keeps this module's parameters: in a flat one, or as plain tensors that hide its own."""
    flat = isinstance(module, FullyShardedDataParallel) or "_flat_param" in module._parameters
    return flat or any(isinstance(vars(module).get(name), torch.Tensor) for name in module._parameters)


def _leaves_behind(p: torch.Tensor) -> list[torch.Tensor]:
    """Returns a parameter, or what one is computed from that `torch.func.functional_call` put in its place.

    A gradient that reaches those through parameters alone is averaged as theirs; one by another way is equal on all ranks.
    """
    if p.is_leaf:
        return [p]
    behind = (getattr(node, "variable", None) for node in graph_nodes([p]))
    return [x for x in behind if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]


def _has_hooks(p: torch.Tensor) -> bool:
    return bool(p._backward_hooks) or bool(p._post_accumulate_grad_hooks)


def plain_state(model: nn.Module) -> list[torch.Tensor]:
    """Returns the parameters and buffers of which every rank of a sequence group must hold the same values."""
    managed, _ = _fsdp_managed(model, set())
    state = (*model.parameters(), *model.buffers())
    return [x for x in state if not isinstance(x, DTensor) and id(x) not in managed and x.device.type != "meta"]


class ReduceAtEnd:
    """Called during a backward, averages plain parameters' gradients over a mesh at its end."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.backward = mesh, -1
        self.parameters: dict[int, weakref.ref[torch.Tensor]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ReduceAtEnd, (self.mesh,)  # a copy's model has parameters of its own

    def add(self, parameters: Sequence[torch.Tensor], reduced: Sequence[torch.Tensor] = ()) -> None:
        """Adds what a forward used, and takes out what another has `reduced` since.

        The rest stays, whatever forwards come between: of several backwards each needs all that its forward used, and an
        average of what is averaged already changes nothing.
        """
        for p in reduced:
            self.parameters.pop(id(p), None)
        self.parameters.update({id(p): weakref.ref(p) for p in parameters})

    def __call__(self) -> None:
        """Asks for the reduction at the end of the backward that runs."""
        if self.backward != backward_id():
            self.backward = backward_id()
            torch.autograd.Variable._execution_engine.queue_callback(self.reduce)

    @torch.no_grad()
    def reduce(self) -> None:
        """Averages the gradients; where some ranks have one and others none, those count as zero."""
        self.backward = -1
        self.parameters = {key: each for key, each in self.parameters.items() if each() is not None}
        params = [p for each in self.parameters.values() if (p := each()) is not None and p.requires_grad]
        if not params:
            return
        group = self.mesh.get_group()
        present = torch.tensor([p.grad is not None for p in params], dtype=torch.int64, device=params[0].device)
        all_reduce_max(present, group)
        gradients = []
        for p, has in zip(params, present.tolist(), strict=True):
            if has:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                if p.grad.is_sparse:
                    raise PlanError("UlyssesPlan: a gradient is sparse. Use dense embeddings, or FSDP or DDP.")
                gradients.append(p.grad)
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            all_reduce_sum(flat, group)
            flat /= self.mesh.size()
            for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(mean.view(gradient.shape))


def tie(output: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns `output`, to which `parameters` are tied with zero gradients: every rank then has one for each."""
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable or not torch.is_grad_enabled() or not (output.is_floating_point() or output.is_complex()):
        return output
    return _Tie.apply(output, *trainable)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override] - torch types it *Any
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def _active_ddp(model: nn.Module) -> DistributedDataParallel | None:
    # Private; set while a DDP forward runs. If torch moves it, tests/test_gradients.py says so first.
    active = DistributedDataParallel._active_ddp_module
    return active if active is not None and any(module is model for module in active.modules()) else None


def _fsdp_managed(model: nn.Module, ranks: set[int]) -> tuple[set[int], list[str]]:
    """Returns the ids of the parameters that FSDP2 manages, sharded or not just now, and what is wrong with its meshes."""
    # Private: FSDP2 says nowhere else whose a parameter is while it is unsharded. tests/test_gradients.py says if it moves.
    managed: set[int] = set()
    problems: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            mesh = group.mesh_info.mesh
            if not ranks <= _ranks_of(mesh):
                problems.append(_misses(name or "the model", mesh, ranks))
            if group.gradient_divide_factor is not None:
                problems.append(
                    f"{name or 'the model'}: FSDP divides gradients by {group.gradient_divide_factor}, not by the number of "
                    "ranks. Leave set_gradient_divide_factor out and scale the loss."
                )
            for param in group.fsdp_params:
                info = param._module_info
                managed.add(id(getattr(info.module, info.param_name)))
    return managed, problems


def _misses(name: str, mesh: DeviceMesh, ranks: set[int]) -> str:
    return (
        f"{name} is sharded over ranks {sorted(_ranks_of(mesh))}, which leaves out part of the sequence group {sorted(ranks)}: "
        "its replicas would drift apart. Call fully_shard with the whole mesh (dp x sp), not with mesh['dp']."
    )


def _ranks_of(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _foreign_parameters(model: nn.Module, managed: set[int], args: Any, kwargs: Any) -> int:
    own = {id(p) for p in model.parameters()} | managed
    reached = (getattr(node, "variable", None) for node in graph_nodes(tree_flatten((args, kwargs))[0]))
    foreign = {id(variable) for variable in reached if isinstance(variable, nn.Parameter) and id(variable) not in own}
    return len(foreign)


def _buckets(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: dict[Any, list[list[torch.Tensor]]] = {}
    for gradient in gradients:
        alike = buckets.setdefault((gradient.dtype, gradient.device), [[]])
        if sum(g.numel() for g in alike[-1]) > _BUCKET_ELEMENTS:
            alike.append([])
        alike[-1].append(gradient)
    return [bucket for alike in buckets.values() for bucket in alike if bucket]
