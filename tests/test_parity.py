"""check_parity: passes on what is right, sees what is wrong, and says when it compared nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import RotaryDecoder, float64, ids_of
from torch import nn

from ulysses_dtensor import ParityReport, PlanError, UlyssesPlan, check_parity, parallelize_module
from ulysses_dtensor.testing import run_on_mesh


def decoder() -> nn.Module:
    with float64():
        torch.manual_seed(0)
        return RotaryDecoder()


def check(mesh: Any, models: list[nn.Module], inputs: Any, plan: Any, loss_fn: Any = None) -> ParityReport:
    return check_parity(parallelize_module(models[dist.get_rank()], mesh, plan()), inputs, loss_fn)


def reports(
    inputs: Any, *, ranks: int = 2, plan: Any = UlyssesPlan, loss_fn: Any = None, model: nn.Module | None = None
) -> list[ParityReport]:
    models = [copy.deepcopy(model or decoder()) for _ in range(ranks)]
    return run_on_mesh({"sp": ranks}, check, models, inputs, plan, loss_fn)


@pytest.mark.parametrize(
    "inputs", [(ids_of(2, 9),), {"ids": ids_of(2, 9)}, ids_of(2, 9)], ids=["tuple", "mapping", "tensor"]
)
@pytest.mark.parametrize("outputs", ["replicate", "shard"])
def test_a_converted_model_passes(inputs: Any, outputs: Any) -> None:
    for report in reports(inputs, plan=lambda: UlyssesPlan(outputs=outputs)):
        assert report.passed
        assert report.output_error < 1e-12
        assert 0 < report.gradient_error < 1e-12
        assert "parity passed" in str(report)
        assert {row.name for row in report.gradients} == {name for name, _ in decoder().named_parameters()}


def test_a_loss_of_ones_own() -> None:
    report = reports((ids_of(2, 9),), loss_fn=lambda out: out.square().mean())[0]
    assert report.passed
    assert report.outputs[-1].name == "loss"


def test_a_wrong_factor_of_gradients_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from ulysses_dtensor import boundary

    right = boundary._Leave.backward

    def wrong(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return right(ctx, gradient / 2)

    monkeypatch.setattr(boundary._Leave, "backward", staticmethod(wrong))
    report = reports((ids_of(2, 9),))[0]
    assert not report.passed
    assert report.output_error < 1e-12
    assert report.gradient_error > 0.1
    assert "parity FAILED" in str(report)
    assert "DIFFERS" in str(report)


def test_an_attention_over_ones_own_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from ulysses_dtensor import inside

    monkeypatch.setattr(inside, "sharded_sdpa", lambda *args, seq_len, group, **kwargs: SDPA(*args, **kwargs))
    report = reports((ids_of(2, 9),))[0]
    assert not report.passed
    assert report.output_error > 1e-3


SDPA = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize(("ranks", "seq_len"), [(1, 9), (4, 3)])
def test_a_run_without_exchanges_does_not_pass(ranks: int, seq_len: int) -> None:
    report = reports((ids_of(2, seq_len),), ranks=ranks)[0]
    assert not report.passed
    assert "nothing ran in parallel" in str(report)


def test_a_loss_that_depends_on_nothing_does_not_pass() -> None:
    report = reports((ids_of(2, 9),), loss_fn=lambda out: (out * 0).sum())[0]
    assert not report.passed
    assert "every gradient is zero" in report.problems[0]


def test_gradients_and_buffers_are_put_back() -> None:
    def keep(mesh: Any, models: list[nn.Module]) -> None:
        model = parallelize_module(models[dist.get_rank()], mesh, UlyssesPlan())
        first = next(model.parameters())
        first.grad = torch.full_like(first, 3.0)
        check_parity(model, (ids_of(1, 9),))
        assert bool((first.grad == 3).all())
        assert [p.grad is None for p in model.parameters()].count(False) == 1

    run_on_mesh({"sp": 2}, keep, [decoder() for _ in range(2)])


def test_rejects_a_model_that_is_not_converted() -> None:
    with pytest.raises(PlanError, match=r"is not converted\. Call parallelize_module first"):
        check_parity(decoder(), (ids_of(1, 9),))


def test_rejects_dropout() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.drop = decoder(), nn.Dropout(0.5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.drop(self.decoder(ids))

    with pytest.raises(PlanError, match=r"drop drops at random .* Call model.eval\(\) first"):
        reports((ids_of(1, 9),), model=Dropping())
