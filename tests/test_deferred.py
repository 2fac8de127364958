"""A loss inside the model's forward: computed on shards where it can be, right in any case."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model_zoo import WIDTH, RotaryDecoder, float64, ids_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ulysses_dtensor import PlanError, UlyssesPlan, bypass, count_collectives, parallelize_module
from ulysses_dtensor.testing import full_value, run_on_mesh

VOCABULARY = 11
SHARDED = {
    "view": lambda x, y: F.cross_entropy(x.view(-1, VOCABULARY), y.view(-1)),
    "reshape": lambda x, y: F.cross_entropy(x.reshape(x.shape[0] * x.shape[1], VOCABULARY), y.flatten()),
    "flatten": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=-7),
    "shifted": lambda x, y: F.cross_entropy(x[:, :-1].contiguous().view(-1, VOCABULARY), y[:, 1:].reshape(-1)),
    "shifted, dots": lambda x, y: F.cross_entropy(x[..., 1:-1, :].reshape(-1, VOCABULARY), y[..., 1:-1].reshape(-1)),
    "sum": lambda x, y: F.cross_entropy(x.view(-1, VOCABULARY), y.view(-1), reduction="sum"),
    "module": lambda x, y: nn.CrossEntropyLoss()(x.double().view(-1, VOCABULARY), y.view(-1)),
}
GATHERED = {
    "none": lambda x, y: (
        F.cross_entropy(x.view(-1, VOCABULARY), y.view(-1), reduction="none").view(y.shape).square().sum()
    ),
    "weight": lambda x, y: F.cross_entropy(
        x.view(-1, VOCABULARY), y.view(-1), torch.linspace(0.1, 1, VOCABULARY).double()
    ),
    "smoothed": lambda x, y: F.cross_entropy(x.view(-1, VOCABULARY), y.view(-1), label_smoothing=0.1),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "probabilities": lambda x, y: F.cross_entropy(
        x.view(-1, VOCABULARY), F.one_hot(y.view(-1).clamp(min=0), VOCABULARY).double()
    ),
    "by hand": lambda x, y: -F.log_softmax(x.view(-1, VOCABULARY), -1).gather(1, y.clamp(min=0).view(-1, 1)).mean(),
    "strided": lambda x, y: F.cross_entropy(x[:, ::2].reshape(-1, VOCABULARY), y[:, ::2].reshape(-1)),
    "batch slice": lambda x, y: F.cross_entropy(x[:1].reshape(-1, VOCABULARY), y[:1].reshape(-1)),
    "last token": lambda x, y: F.cross_entropy(x[:, -1], y[:, -1].clamp(min=0)),
    "other rows": lambda x, y: x.view(-1, VOCABULARY)[3].square().sum() + x.view(x.shape[0], -1).mean(),
}


class WithLoss(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.decoder, self.loss = RotaryDecoder(), loss

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.decoder(ids), targets)


def both_ways(mesh: Any, models: list[nn.Module], ids: torch.Tensor, targets: torch.Tensor, outputs: Any) -> Any:
    model = parallelize_module(models[dist.get_rank()], mesh, UlyssesPlan(outputs=outputs))
    with count_collectives() as count:
        loss = model(ids, targets)
    loss.backward()
    parallel = {name: p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    with bypass(model):
        expected = model(ids, targets)
        expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0, equal_nan=True)
    expected_gradients = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(parallel, expected_gradients, rtol=1e-9, atol=1e-12, equal_nan=True)
    return count.kinds


def with_loss(loss: Any) -> nn.Module:
    with float64():
        torch.manual_seed(0)
        return WithLoss(loss)


def run(
    name: str, losses: dict[str, Any], *, ranks: int, outputs: str = "replicate", ignored: slice = slice(4, 6)
) -> list[str]:
    model = with_loss(losses[name])
    ids, targets = ids_of(2, 13), ids_of(2, 13, seed=1)
    targets[:, ignored] = -7 if name == "flatten" else -100
    models = [copy.deepcopy(model) for _ in range(ranks)]
    return run_on_mesh({"sp": ranks}, both_ways, models, ids, targets, outputs)[0]


@pytest.mark.parametrize("outputs", ["replicate", "shard"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", SHARDED)
def test_a_mean_cross_entropy_is_computed_on_shards(name: str, ranks: int, outputs: str) -> None:
    assert "all-gather" not in run(name, SHARDED, ranks=ranks, outputs=outputs)


@pytest.mark.parametrize("name", GATHERED)
def test_any_other_use_of_logits_gathers_them_once_and_is_right(name: str) -> None:
    assert run(name, GATHERED, ranks=2).count("all-gather") == 1


def test_all_labels_of_one_rank_ignored() -> None:
    run("view", SHARDED, ranks=2, ignored=slice(0, 7))


def test_all_labels_ignored_gives_what_one_device_gives() -> None:
    run("view", SHARDED, ranks=2, ignored=slice(None))


def test_a_loss_seen_first_without_gradients_still_has_them() -> None:
    def with_accuracy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            accuracy = (x.argmax(-1) == y).double().mean()
        return F.cross_entropy(x.transpose(1, 2), y) + 0 * accuracy

    assert run("hit rate", {"hit rate": with_accuracy}, ranks=2).count("all-gather") == 2


def test_deferred_logits_kept_past_the_forward_raise() -> None:
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept.append(x.view(-1, VOCABULARY))
        return x.sum()

    run_on_mesh({"sp": 2}, both_ways, [with_loss(keep) for _ in range(2)], ids_of(2, 13), ids_of(2, 13), "replicate")
    with pytest.raises(PlanError, match="used where they cannot be followed"):
        kept[0].sum()


# Slices and flattened views where code takes them unseen


class Fused(torch.autograd.Function):
    """A head and its loss in one, as fused kernels have it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = F.cross_entropy(F.linear(x, weight), labels)
            ctx.save_for_backward(*torch.autograd.grad(loss, (x, weight)))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override] - torch types it *Any
        return *(gradient * each for each in ctx.saved_tensors), None


class Sliced(nn.Module):
    """Drops the first two tokens after the blocks, and goes on in one of some ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.decoder = how, RotaryDecoder()
        self.decoder._modules["head"] = nn.Identity()
        self.late, self.norm = nn.ModuleList([copy.deepcopy(self.decoder.layers[0])]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.decoder(ids)
        if self.how == "fused":
            return Fused.apply(x[:, 2:].flatten(0, 1), self.head.weight, targets[:, 2:].flatten())
        x = self.norm(x[:, 2:]) if self.how == "norm" else self.late[0](x[:, 2:])
        return F.cross_entropy(self.head(x).flatten(0, 1), targets[:, 2:].flatten())


def wrapped(model: nn.Module, wrap: str, mesh: DeviceMesh) -> nn.Module:
    parts = [model.norm, model.late[0]]  # type: ignore[index] - a ModuleList
    for part in parts if wrap else []:
        if wrap == "hooks":
            part.register_full_backward_hook(lambda *_: None)  # type: ignore[union-attr] - a module
        else:
            fully_shard(part, mesh=mesh)  # type: ignore[arg-type] - a module
    if wrap == "FSDP":
        fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("wrap", ["", "hooks", "FSDP"])
@pytest.mark.parametrize("how", ["fused", "norm", "block"])
def test_slices_given_to_what_takes_them_unseen(how: str, wrap: str) -> None:
    with float64():
        torch.manual_seed(0)
        original = Sliced(how)
    ids, targets = ids_of(2, 13), ids_of(2, 13, seed=1)

    def step(model: nn.Module) -> dict[str, torch.Tensor]:
        model(ids, targets).backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: full_value(grad) if isinstance(grad, DTensor) else grad for name, grad in found.items()}

    expected = step(copy.deepcopy(original))

    def run(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        return step(wrapped(parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan()), wrap, mesh))

    for found in run_on_mesh({"sp": 2}, run):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def test_rejects_hooks_on_slices() -> None:
    def hook(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[:, 2:].register_hook(lambda gradient: 2 * gradient)
        return x.sum()

    model = with_loss(hook)

    def run(mesh: DeviceMesh) -> None:
        with pytest.raises(PlanError, match="register_hook on a hidden state"):
            parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())(ids_of(2, 13), ids_of(2, 13))

    run_on_mesh({"sp": 2}, run)
