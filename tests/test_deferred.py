"""A loss inside the model's forward: computed on shards where it can be, right in any case."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model_zoo import RotaryDecoder, float64, ids_of
from torch import nn

from ulysses_dtensor import UlyssesPlan, bypass, count_collectives, parallelize_module
from ulysses_dtensor.testing import run_on_mesh

VOCABULARY = 11
SHARDED = {
    "view": lambda x, y: F.cross_entropy(x.view(-1, VOCABULARY), y.view(-1)),
    "reshape": lambda x, y: F.cross_entropy(x.reshape(x.shape[0] * x.shape[1], VOCABULARY), y.flatten()),
    "flatten": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=-7),
    "shifted": lambda x, y: F.cross_entropy(x[:, :-1].contiguous().view(-1, VOCABULARY), y[:, 1:].reshape(-1)),
    "shifted, dots": lambda x, y: F.cross_entropy(x[..., 1:-1, :].reshape(-1, VOCABULARY), y[..., 1:-1].reshape(-1)),
    "module": lambda x, y: nn.CrossEntropyLoss()(x.double().view(-1, VOCABULARY), y.view(-1)),
}
GATHERED = {
    "sum": lambda x, y: F.cross_entropy(x.view(-1, VOCABULARY), y.view(-1), reduction="sum"),
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
    with pytest.raises(RuntimeError, match="held in shards until a loss or the end of the model's forward"):
        kept[0].sum()
