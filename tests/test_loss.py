"""A loss over shards is the loss of the whole: every valid token of the group weighs alike, on every rank the same number."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from model_zoo import VOCABULARY, ZOO, RotaryDecoder, ids_of, numbers, seeded
from one_device import assert_close, gradients_of, on_one_device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ulysses_dtensor import UlyssesPlan, count_collectives, distribute, parallelize_module
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.loss import cross_entropy, next_token_labels
from ulysses_dtensor.testing import full_value, run_on_mesh

IGNORED = -100


def labels_of(batch: int, seq_len: int, keep: float, seed: int = 3) -> torch.Tensor:
    labels = ids_of(batch, seq_len, seed)
    return labels.masked_fill(torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed)) >= keep, IGNORED)


def assert_loss_and_gradient(logits: torch.Tensor, labels: torch.Tensor, ranks: int) -> None:
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf.flatten(0, 1), labels.flatten())
    expected.backward()

    def run(mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
        held = distribute(logits, mesh, "b (sp s) v").detach().requires_grad_()
        with count_collectives() as forth:
            loss = cross_entropy(held, labels)
        with count_collectives() as back:
            loss.backward()
        assert forth.kinds == ["all-reduce"]
        assert back.kinds == []
        assert isinstance(held.grad, DTensor)
        return loss.detach(), full_value(held.grad)

    for loss, gradient in run_on_mesh({"sp": ranks}, run):
        assert_close(loss, expected.detach(), "loss", 1e-12)
        assert leaf.grad is not None
        assert_close(gradient, leaf.grad, "gradient", 1e-9)


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_loss_and_gradient_equal_one_device_for_any_labels(batch: int, seq_len: int, ranks: int, keep: float) -> None:
    assert_loss_and_gradient(numbers(batch, seq_len, VOCABULARY), labels_of(batch, seq_len, keep), ranks)


@pytest.mark.parametrize("kept", [[], [0], [7]])
def test_labels_ignored_on_one_rank_and_on_all(kept: list[int]) -> None:  # VeOmni#618
    labels = torch.full((1, 8), IGNORED)
    labels[0, kept] = 3
    assert_loss_and_gradient(numbers(1, 8, VOCABULARY), labels, 4)


def test_a_loss_of_one_for_each_token_is_one() -> None:  # VeOmni#338
    logits = torch.zeros(1, 800, 2, dtype=torch.float64)
    logits[..., 1] = torch.log(torch.tensor(torch.e, dtype=torch.float64) - 1)

    def run(mesh: DeviceMesh) -> float:
        return float(cross_entropy(distribute(logits, mesh, "b (sp s) v"), torch.zeros(1, 800, dtype=torch.int64)))

    assert run_on_mesh({"sp": 8}, run) == [pytest.approx(1.0, rel=1e-12)] * 8


def test_labels_are_shifted_on_the_whole() -> None:  # transformers#31525
    labels = torch.arange(10).view(2, 5)
    assert next_token_labels(labels).tolist() == [[1, 2, 3, 4, IGNORED], [6, 7, 8, 9, IGNORED]]
    assert next_token_labels(labels, ignore_index=-1)[:, -1].tolist() == [-1, -1]
    logits = numbers(2, 8, VOCABULARY)
    ids = ids_of(2, 8)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def run(mesh: DeviceMesh) -> torch.Tensor:
        return cross_entropy(distribute(logits, mesh, "b (sp s) v"), next_token_labels(ids))

    for loss in run_on_mesh({"sp": 4}, run):
        assert_close(loss, expected, "loss", 1e-12)


def test_a_plain_tensor_gives_what_torch_gives() -> None:
    logits, labels = numbers(2, 5, VOCABULARY), labels_of(2, 5, 0.5)
    assert_close(cross_entropy(logits, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "loss", 1e-12)


def sum_of(models: list[nn.Module], ids: list[torch.Tensor], labels: list[torch.Tensor]) -> torch.Tensor:
    total = sum(
        (
            F.cross_entropy(m(i).flatten(0, 1), t.flatten(), reduction="sum")
            for m, i, t in zip(models, ids, labels, strict=True)
        ),
        torch.zeros(()),
    )
    return total / sum(int((t != IGNORED).sum()) for t in labels)


@pytest.mark.parametrize("seq_len", [9, 2])
@pytest.mark.parametrize("sizes", [{"dp": 2, "sp": 2}, {"dp": 3, "sp": 1}, {"dp": 1, "sp": 3}, {"dp": 2, "sp": 3}])
def test_tokens_weigh_alike_over_replicas_with_the_whole_mesh(sizes: dict[str, int], seq_len: int) -> None:  # verl#2857
    original = seeded(RotaryDecoder)
    ids = [ids_of(2, seq_len, seed=dp) for dp in range(sizes["dp"])]
    labels = [labels_of(2, seq_len, keep, seed) for seed, keep in enumerate([0.9, 0.1, 0.5][: sizes["dp"]])]
    model = copy.deepcopy(original)
    expected = sum_of([model] * sizes["dp"], ids, labels)
    expected.backward()
    reference = gradients_of(model)

    def run(mesh: DeviceMesh) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        ours = parallelize_module(copy.deepcopy(original), mesh["sp"], UlyssesPlan(outputs="shard"))
        dp = mesh.get_local_rank("dp")
        loss = cross_entropy(ours(ids[dp]), labels[dp], mesh=mesh)
        loss.backward()
        gradients = gradients_of(ours)
        for gradient in gradients.values():  # what a reducer over dp does; over sp it is done
            assert gradient is not None
            dist.all_reduce(gradient, group=mesh.get_group("dp"))
            gradient /= sizes["dp"]
        return loss.detach(), gradients

    for loss, gradients in run_on_mesh(sizes, run):
        assert_close(loss, expected.detach(), "loss", 1e-9)
        for name, gradient in reference.items():
            assert gradients[name] is not None
            assert_close(gradients[name], gradient, name, 1e-9)  # type: ignore[arg-type] - asserted above


@pytest.mark.parametrize("outputs", ["replicate", "shard"])
@pytest.mark.parametrize("seq_len", [9, 2])
def test_a_model_trained_on_it_has_one_devices_gradients(outputs: str, seq_len: int) -> None:
    sample = ZOO["rotary decoder"]
    original, inputs = sample.model(), sample.inputs(2, seq_len)
    labels = labels_of(2, seq_len, 0.6)
    expected = on_one_device(original, inputs, lambda logits: F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    def run(mesh: DeviceMesh) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        ours = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan(outputs=outputs))  # type: ignore[arg-type]
        loss = cross_entropy(ours(**inputs), labels)
        loss.backward()
        return loss.detach(), gradients_of(ours)

    for loss, gradients in run_on_mesh({"sp": 3}, run):
        assert_close(loss, expected.loss, "loss", 1e-9)
        for name, gradient in expected.gradients.items():
            assert_close(gradients[name], gradient, name, 1e-9)  # type: ignore[arg-type] - both are there


def test_rejects_what_does_not_fit() -> None:
    logits = numbers(2, 8, VOCABULARY)

    def run(mesh: DeviceMesh) -> None:
        for layout, labels, match in (
            ("b (sp s) v", ids_of(2, 7), "cross_entropy: labels (2, 7) do not fit logits (2, 8, 11)."),
            ("b s (sp v)", ids_of(2, 8), "logits are placed (Shard(dim=2),); they must be cut at their tokens"),
            ("b s v", ids_of(2, 8), "logits are placed (Replicate(),); they must be cut at their tokens"),
        ):
            with pytest.raises(PlanError, match=re.escape(match)):
                cross_entropy(distribute(logits, mesh, layout), labels)

    run_on_mesh({"sp": 2}, run)
    with pytest.raises(PlanError, match="do not fit"):
        cross_entropy(logits, ids_of(2, 7))


def test_the_check_itself_fails_on_a_mean_of_means() -> None:
    logits, labels = numbers(1, 8, VOCABULARY), torch.full((1, 8), IGNORED)
    labels[0, :3] = 1
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def run(mesh: DeviceMesh) -> torch.Tensor:
        half = slice(4 * mesh.get_local_rank(), 4 * mesh.get_local_rank() + 4)
        mean = F.cross_entropy(logits[0, half], labels[0, half]).nan_to_num()
        dist.all_reduce(mean)
        return mean / 2

    with pytest.raises(AssertionError, match="loss: relative error"):
        assert_close(run_on_mesh({"sp": 2}, run)[0], expected, "loss", 1e-9)
