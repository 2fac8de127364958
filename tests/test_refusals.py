"""What a model may do that no shard can see: refused on every rank, or right."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo import GlooPool
from model_zoo import WIDTH, Block, InnerAttention, RotaryDecoder, float64, ids_of, seeded
from one_device import assert_equals_one_device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

from ulysses_dtensor import PlanError, UlyssesAttention, UlyssesPlan, bypass, parallelize_module
from ulysses_dtensor.testing import run_on_mesh


class Normalized(torch.autograd.Function):
    """Identity whose backward is not linear."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override] - torch types it *Any
        return gradient / gradient.norm()


class Between(RotaryDecoder):
    """A decoder with a step of its own after each block."""

    def __init__(self, step: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.step = step

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = self.step(layer(x))
        return self.head(self.norm(x))


def between(step: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    return seeded(lambda: Between(step))


def changed(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        change(x)
        return x

    return step


def error_of(mesh: DeviceMesh, models: list[nn.Module], run: Callable[[nn.Module], Any]) -> str:
    model = parallelize_module(models[dist.get_rank()], mesh, UlyssesPlan())
    try:
        run(model)
    except (PlanError, RuntimeError) as error:
        return str(error)
    return ""


def errors(model: nn.Module, run: Callable[[nn.Module], Any] = lambda model: model(ids_of(2, 9))) -> str:
    """Returns the message that every rank raises."""
    messages = run_on_mesh({"sp": 2}, error_of, [copy.deepcopy(model) for _ in range(2)], run)
    assert len(set(messages)) == 1
    return messages[0]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (changed(lambda x: x[:, 0].mul_(3)), "changes a hidden state in place"),
        (changed(lambda x: x.transpose(1, 2).mul_(2)), "changes a hidden state in place"),
        (changed(lambda x: x.data.mul_(2)), "data changes a hidden state in place"),
        (Normalized.apply, "custom autograd function Normalized is applied to a hidden state"),
    ],
    ids=["row", "transposed", "data", "function"],
)
def test_rejects_what_writes_or_reaches_past_shards(step: Any, said: str) -> None:
    assert said in errors(between(step))


@pytest.mark.parametrize("step", [lambda x: x.type(x.type()), lambda x: x.type(torch.float64)], ids=["name", "dtype"])
def test_allows_to_ask_for_and_to_set_the_type(step: Any) -> None:
    assert_equals_one_device(between(step), {"ids": ids_of(2, 9)}, 2)


def test_allows_writes_into_what_was_made_of_a_hidden_state() -> None:
    assert_equals_one_device(between(lambda x: (x.flip(1) + 0).mul_(2)), {"ids": ids_of(2, 9)}, 2)


def test_rejects_second_derivatives() -> None:
    def twice(model: nn.Module) -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = model(ids_of(2, 9)).square().sum()
            (gradient,) = torch.autograd.grad(loss, [model.get_parameter("layers.0.norm1.weight")], create_graph=True)
            gradient.square().sum().backward()

    assert "once_differentiable" in errors(seeded(RotaryDecoder), twice)


def test_rejects_hooks_on_parameters_that_nobody_averages() -> None:
    def hooked(model: nn.Module) -> None:
        model.get_parameter("embed.weight").register_hook(lambda gradient: gradient.clamp(-1, 1))
        model(ids_of(2, 9))

    assert "parameter embed.weight has a hook" in errors(seeded(RotaryDecoder), hooked)


def test_parameters_given_to_a_functional_call_are_averaged() -> None:
    def gradients(mesh: DeviceMesh, models: list[nn.Module], parallel: bool) -> dict[str, torch.Tensor]:
        model = parallelize_module(models[dist.get_rank()], mesh, UlyssesPlan())
        given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        if parallel:
            torch.func.functional_call(model, given, (ids_of(2, 9),)).square().mean().backward()
        else:
            with bypass(model):
                torch.func.functional_call(model, given, (ids_of(2, 9),)).square().mean().backward()
        return {name: p.grad for name, p in given.items() if p.grad is not None}

    model = seeded(RotaryDecoder)
    parallel, single = (
        run_on_mesh({"sp": 2}, gradients, [copy.deepcopy(model) for _ in range(2)], way)[0] for way in (True, False)
    )
    torch.testing.assert_close(parallel, single, rtol=1e-9, atol=1e-14)


@dataclasses.dataclass
class State:
    x: torch.Tensor


class StateBlock(Block):
    def forward(self, state: State) -> State:  # type: ignore[override] - another signature on purpose
        return State(super().forward(state.x))


class StateModel(RotaryDecoder):
    def __init__(self) -> None:
        super().__init__(block=StateBlock)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        state = State(self.embed(ids))
        for layer in self.layers:
            state = layer(state)
        return self.head(self.norm(state.x))


def test_rejects_a_hidden_state_in_an_object() -> None:
    assert "is given no tensor that could be the hidden state" in errors(seeded(StateModel))


class Batch(RotaryDecoder):
    def forward(self, batch: State) -> torch.Tensor:  # type: ignore[override] - another signature on purpose
        return super().forward(batch.x)


def test_rejects_objects_whose_tensors_differ_between_ranks() -> None:
    def call(model: nn.Module) -> None:
        model(State(ids_of(2, 9, seed=dist.get_rank())))

    assert "= State: ranks [0] / [1] of the group differ" in errors(seeded(Batch), call)


class Numbered(InnerAttention):
    """Adds a slope for each head, by its number."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        slopes = torch.arange(q.shape[1], dtype=q.dtype)[:, None, None]
        return super().forward(q * (1 + slopes), k, v)


class Declared(Block):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.qkv = inner, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:  # type: ignore[override] - fewer arguments
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + self.inner(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("inner", "said"), [(Numbered, "depends on their numbers"), (InnerAttention, "")])
def test_a_declared_attention_may_not_depend_on_the_number_of_a_head(inner: type[nn.Module], said: str) -> None:
    def convert_and_run(mesh: DeviceMesh, models: list[nn.Module]) -> str:
        style = UlyssesAttention("b h (sp s) d -> b (sp h) s d")
        model = parallelize_module(models[dist.get_rank()], mesh, UlyssesPlan(attention={"layers.*.inner": style}))
        try:
            model(ids_of(2, 9))
        except PlanError as error:
            return str(error)
        return ""

    model = seeded(lambda: RotaryDecoder(block=lambda: Declared(inner())))
    for message in run_on_mesh({"sp": 2}, convert_and_run, [copy.deepcopy(model) for _ in range(2)]):
        assert said in message
        assert bool(said) == bool(message)


class AuxiliaryLoss(torch.autograd.Function):
    """Gives its value a gradient of its own, as trainers attach a router's loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return gradient, torch.ones((), dtype=gradient.dtype)


class Routed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:  # type: ignore[override] - fewer arguments
        share = self.router(x.detach()).softmax(-1).mean((0, 1))
        return AuxiliaryLoss.apply(super().forward(x, *args), share.square().sum())


class Rescaled(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:  # type: ignore[override] - fewer arguments
        x = super().forward(x, *args)
        return x / 2 if bool((x.abs() > 100).any()) else x


@pytest.mark.parametrize(
    ("block", "said"),
    [(Routed, "the gradient of its parameter router"), (Rescaled, "large values in some tokens reached others")],
)
def test_rejects_what_depends_on_the_tokens_at_hand(block: type[nn.Module], said: str) -> None:
    assert said in errors(seeded(lambda: RotaryDecoder(block=block)))


class Switched(Block):
    mixing = False

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:  # type: ignore[override] - fewer arguments
        x = super().forward(x, *args)
        return x + x.mean(1, keepdim=True) if self.mixing else x


def test_a_switch_turned_after_the_first_forward_is_seen() -> None:
    def switch(model: nn.Module) -> None:
        model(ids_of(2, 9))
        model.get_submodule("layers.1").mixing = True  # type: ignore[assignment] - an attribute of its own
        model(ids_of(2, 9))

    assert "layers.1 (Switched): it mixes tokens" in errors(seeded(lambda: RotaryDecoder(block=Switched)), switch)


def test_the_first_forward_under_autocast_is_not_the_probes() -> None:
    """A projection that starts from zero is probed with other values, which autocast must not keep."""

    class ZeroInitialised(Block):
        def __init__(self) -> None:
            super().__init__()
            nn.init.zeros_(self.mlp.w2.weight)
            nn.init.zeros_(self.mlp.w2.bias)

    def logits(mesh: DeviceMesh, models: list[nn.Module]) -> list[torch.Tensor]:
        model = parallelize_module(models[dist.get_rank()], mesh, UlyssesPlan())
        with torch.autocast("cpu", torch.bfloat16):
            first, second = model(ids_of(2, 9)), model(ids_of(2, 9))
        return [first.detach(), second.detach()]

    torch.manual_seed(0)
    model = RotaryDecoder(block=ZeroInitialised)
    first, second = run_on_mesh({"sp": 2}, logits, [copy.deepcopy(model) for _ in range(2)])[0]
    assert torch.equal(first, second)


def test_a_recompute_outside_bypass_says_so() -> None:
    def forward_alone(model: nn.Module) -> None:
        with bypass(model):
            out = model(ids_of(2, 9))
        out.sum().backward()

    assert "run the backward under bypass too" in errors(
        seeded(lambda: RotaryDecoder(checkpointed=True)), forward_alone
    )


def test_a_hook_that_comes_between_forward_and_recompute_changes_nothing() -> None:
    def hooked(model: nn.Module) -> None:
        loss = model(ids_of(2, 9)).square().sum()
        for module in model.modules():
            module.register_forward_hook(lambda *_: None)
        loss.backward()

    assert errors(seeded(lambda: RotaryDecoder(checkpointed=True)), hooked) == ""


def noise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(len(x), 1, 1, dtype=x.dtype)


def random_numbers(step: Any, alike: bool) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
    model = parallelize_module(between(step), mesh, UlyssesPlan())
    torch.manual_seed(0 if alike else dist.get_rank())
    try:
        model(ids_of(2, 9))
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("step", [noise, F.relu, F.dropout], ids=["noise", "none", "dropout"])
def test_ranks_that_draw_must_be_seeded_alike(gloo: GlooPool, step: Any, alike: bool) -> None:
    said = "the model draws random numbers (rand)" if step is noise and not alike else ""
    for message in gloo.run(2, random_numbers, step, alike):
        assert said in message
        assert bool(said) == bool(message)


def under_fsdp1(use_orig_params: bool) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
    with float64():
        model = parallelize_module(RotaryDecoder(), mesh, UlyssesPlan())
    wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    try:
        wrapped(ids_of(2, 9))
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_rejects_fsdp1(gloo: GlooPool, use_orig_params: bool) -> None:
    for message in gloo.run(2, under_fsdp1, use_orig_params):
        assert "FullyShardedDataParallel (FSDP1) is not supported" in message
