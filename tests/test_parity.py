"""check_parity: passes on what is right, sees what is wrong, and says when it compared nothing."""

from __future__ import annotations

import copy
import dataclasses
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


def over_own_tokens(*args: Any, tokens: Any, group: Any, strategy: Any) -> torch.Tensor:
    return SDPA(*args[:6], scale=args[6], enable_gqa=args[7])


def test_an_attention_over_ones_own_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from ulysses_dtensor import inside

    monkeypatch.setattr(inside, "sharded_sdpa", over_own_tokens)
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


class Wrapped(nn.Module):
    """A decoder whose result is changed by a function, for what results may look like."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.decoder, self.change = decoder(), change

    def forward(self, ids: torch.Tensor) -> Any:
        return self.change(self.decoder(ids))


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


def test_a_result_in_a_dataclass_is_looked_into() -> None:
    report = reports((ids_of(2, 9),), model=Wrapped(Output))[0]
    assert report.passed
    assert len(report.outputs) == 1
    assert report.gradient_error > 0


def test_a_result_without_tensors_does_not_pass() -> None:
    report = reports((ids_of(2, 9),), model=Wrapped(lambda out: "text"))[0]
    assert not report.passed
    assert "nothing was compared" in str(report)


def test_whole_numbers_must_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    from ulysses_dtensor import inside

    monkeypatch.setattr(inside, "sharded_sdpa", over_own_tokens)
    report = reports(
        (ids_of(2, 40),), model=Wrapped(lambda out: out.argsort(-1)), loss_fn=lambda out: out.sum() * torch.ones(())
    )[0]
    assert not report.outputs[0].passed


def test_a_model_that_differs_from_itself_does_not_pass() -> None:
    calls = iter(range(100))
    report = reports((ids_of(2, 9),), model=Wrapped(lambda out: out * (1 + next(calls))))[0]
    assert not report.passed
    assert "one device twice differs already" in str(report)


class KeyBias(nn.Module):
    """The bias of a key shifts all scores of a query alike: its gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([KeyBiasBlock()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.embed(ids))


class KeyBiasBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_gradient_that_is_rounding_of_zero_is_no_difference() -> None:
    with float64():
        torch.manual_seed(0)
        model = KeyBias()
    report = reports((ids_of(2, 9),), model=model)[0]
    bias = next(row for row in report.gradients if row.name.endswith("key.bias"))
    assert bias.largest < 1e-15
    assert report.passed


def test_a_single_number_has_gradients_too() -> None:
    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = RotaryDecoder()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.decoder(ids).square().mean()

    with float64():
        torch.manual_seed(0)
        model = Score()
    for report in reports(ids_of(2, 9), model=model):
        assert report.passed, report
