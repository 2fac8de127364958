"""One training run of the demo, on one rank or sequence-parallel under FSDP2: the same steps, the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ulysses_dtensor.collectives import count_collectives
from ulysses_dtensor.demo.model import Decoder
from ulysses_dtensor.loss import cross_entropy
from ulysses_dtensor.plan import UlyssesPlan, parallelize_module


@dataclass(frozen=True, slots=True)
class Settings:
    """What both runs share. `batches` is (steps, dp, B, S + 1)."""

    batches: torch.Tensor
    dp: int
    sp: int
    seed: int = 0
    learning_rate: float = 3e-4


@dataclass(frozen=True, slots=True)
class Step:
    """What one step measured: loss, norm of the gradient before clipping, bytes."""

    loss: float
    gradient_norm: float
    activation_bytes: int
    exchanged_bytes: int


@dataclass(slots=True)
class Activations:
    """Bytes of the distinct tensors that autograd keeps for the backward, parameters apart."""

    storages: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """How many they are in all."""
        return sum(self.storages.values())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Counts what is saved inside the block; all of it is alive at its end, so the sum is the peak."""

        def pack(x: torch.Tensor) -> torch.Tensor:
            local = x.to_local() if isinstance(x, DTensor) else x
            if not isinstance(local, nn.Parameter) and not isinstance(local._base, nn.Parameter):
                storage = local.untyped_storage()
                self.storages[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            yield


def train_single(settings: Settings, report: Callable[[Step], None]) -> list[Step]:
    """Trains on this rank alone; every step takes the batches of all replicas, one after the other."""
    model = _make_model(settings)
    return _train(model, settings, range(settings.dp), report)


def train_parallel(settings: Settings, report: Callable[[Step], None]) -> list[Step]:
    """Trains on all ranks: dp x sp, the plan and FSDP2. Every rank calls it, in an initialised process group."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device, (settings.dp, settings.sp), mesh_dim_names=("dp", "sp"))
    model = _make_model(settings).to(device)
    parallelize_module(model, mesh["sp"], UlyssesPlan(outputs="shard"))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return _train(model, settings, [mesh.get_local_rank("dp")], report)


def _make_model(settings: Settings) -> Decoder:
    torch.manual_seed(settings.seed)
    return Decoder().double()  # float64, so that whatever differs is an error and not rounding


def _train(
    model: nn.Module, settings: Settings, replicas: range | list[int], report: Callable[[Step], None]
) -> list[Step]:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    steps = []
    for batches in settings.batches:
        losses, kept = [], 0
        activations = Activations()
        with count_collectives() as count:
            for replica in replicas:
                tokens, labels = batches[replica, :, :-1].to(device), batches[replica, :, 1:].to(device)
                activations.storages.clear()
                with activations.recording():
                    loss = cross_entropy(model(tokens), labels) / len(replicas)
                kept = activations.bytes
                loss.backward()
                losses.append(loss.detach())
        loss = torch.stack(losses).sum()
        if len(replicas) < settings.dp:  # each replica has its own loss; what is reported is their mean
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        exchanged = sum(sent for kind, sent in count.calls if kind == "all-to-all")
        steps.append(Step(float(loss), float(norm), kept, exchanged))
        report(steps[-1])
    return steps
