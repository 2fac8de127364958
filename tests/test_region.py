"""Between and around the blocks: what a model's own code, its users and torch's tools may do with a converted model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_zoo import (
    VOCABULARY,
    WIDTH,
    ZOO,
    Block,
    LearnedPositions,
    MixesBetween,
    RotaryDecoder,
    ids_of,
    loss_of,
    numbers,
    seeded,
)
from one_device import (
    Run,
    assert_close,
    assert_equals_one_device,
    assert_runs_equal,
    buffers_of,
    gradients_of,
    on_one_device,
    refused,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointError, checkpoint, create_selective_checkpoint_contexts

from ulysses_dtensor import (
    PlanError,
    UlyssesAttention,
    UlyssesPlan,
    boundary,
    bypass,
    count_collectives,
    distribute,
    parallelize_module,
)
from ulysses_dtensor.region import region_of
from ulysses_dtensor.testing import full_value, run_on_mesh

Between = Callable[[Any, torch.Tensor], Any]


class Stack(nn.Module):
    """Three blocks and some layers; `between` is the model's own code from the embedding on."""

    def __init__(self, between: Between, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.activation = nn.ReLU(inplace=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.positions = nn.Parameter(torch.randn(1, 48, WIDTH))
        self.between = between

    def forward(self, ids: torch.Tensor) -> Any:
        return self.between(self, self.embed(ids))


def stack(between: Between, block: Callable[[], nn.Module] = Block) -> nn.Module:
    return seeded(lambda: Stack(between, block))


def alone(step: Callable[[Any, torch.Tensor], torch.Tensor]) -> Between:
    """A block, one step of the model's own, a block, the head."""
    return lambda model, x: model.head(model.blocks[1](step(model, model.blocks[0](x))))


BETWEEN = {
    "parameter": lambda m, x: x * m.scale,
    "parameter for each token": lambda m, x: x + m.positions[:, : x.shape[1]],
    "number": lambda m, x: 2 - x / 3,
    "tensor": lambda m, x: x * torch.tensor(0.5) + torch.arange(x.shape[1])[:, None],
    "product of hidden states": lambda m, x: x * m.blocks[1](x),
    "embedding of the first token": lambda m, x: x + m.embed.weight[0],
    "detached": lambda m, x: x.detach() * 2 + x,
    "mean": lambda m, x: x + x.mean(1, keepdim=True),
    "gate from the mean": lambda m, x: x * m.linear(x.mean(1)).sigmoid()[:, None],
    "roll": lambda m, x: torch.roll(x, 2, dims=1),
    "flip": lambda m, x: x.flip(1),
    "cumsum": lambda m, x: x.cumsum(1) / 9,
    "softmax over tokens": lambda m, x: x * x.softmax(1),
    "linear attention": lambda m, x: x + x @ (x.transpose(1, 2) @ x) / 99,
    "attention by hand": lambda m, x: x + (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "fourier transform": lambda m, x: torch.fft.fft(x, dim=1).real,
    "convolution": lambda m, x: m.conv(x.transpose(1, 2)).transpose(1, 2),
    "batch norm": lambda m, x: m.batch_norm(x.flatten(0, 1)).view(x.shape),
    "layer norm": lambda m, x: F.layer_norm(m.norm(x), (WIDTH,)),
    "pieces put together": lambda m, x: torch.cat((x[:, :1], m.linear(x[:, 1:])), dim=1),
    "longer": lambda m, x: torch.cat((x, x[:, -1:], m.positions[:, :2].expand(len(x), -1, -1)), dim=1),
    "shorter": lambda m, x: x[:, 2:],
    "halved": lambda m, x: x[:, : x.shape[1] // 2 * 2].unflatten(1, (-1, 2)).mean(2),
    "sorted": lambda m, x: x.sort(dim=1).values,
    "one value decides": lambda m, x: x * 2 if float(x.detach().sum()) > 0 else x * 3,
    "expanded": lambda m, x: x.unsqueeze(0).expand(2, -1, -1, -1).mean(0),
    "masked": lambda m, x: torch.where(torch.arange(x.shape[1])[:, None] % 2 == 0, x, -x),
    "every second": lambda m, x: x[:, ::2],
    "one token": lambda m, x: x[:, 3:4] * x,
    "slice into a linear": lambda m, x: torch.cat((m.linear(x[:, :2]), x[:, 2:]), dim=1),
    "cast and slice": lambda m, x: x.double()[:, 1:].contiguous(),
    "flattened": lambda m, x: m.linear(x.reshape(-1, WIDTH)).view(x.shape),
    "loss of hidden states": lambda m, x: x * F.cross_entropy(x.flatten(0, 1), torch.arange(x[..., 0].numel()) % WIDTH),
    "matrix": lambda m, x: x @ m.linear.weight.t(),
    "einsum": lambda m, x: torch.einsum("bsd,bte->bse", x, x) / 99,
    "numbers of its own": lambda m, x: torch.stack([row * at for at, row in enumerate(x.unbind(1), 1)], dim=1) / 9,
    "gradient of its own": lambda m, x: x + torch.zeros_like(x).requires_grad_(),
    "no gradient": lambda m, x: x + x.detach().mean(1, keepdim=True),
}


@pytest.mark.parametrize("step", BETWEEN.values(), ids=BETWEEN)
def test_a_models_own_code_between_blocks_gives_what_it_gives_on_one_device(step: Any) -> None:
    assert_equals_one_device(stack(alone(step)), {"ids": ids_of(2, 13)}, 3)


def test_shapes_and_facts_between_blocks_are_those_of_the_whole() -> None:
    def between(model: Any, x: torch.Tensor) -> Any:
        x = model.blocks[0](x)
        facts = (
            x.shape,
            x.size(1),
            len(x),
            x.ndim,
            x.dtype,
            x.numel(),
            x.stride(),
            x.is_floating_point(),
            x.is_contiguous(),
        )
        assert str(facts[:3]) == "(torch.Size([2, 13, 16]), 13, 2)"
        assert facts[3:6] == (3, torch.float64, 2 * 13 * 16)
        assert x.requires_grad
        return model.head(x)

    assert_equals_one_device(stack(between), {"ids": ids_of(2, 13)}, 3)


def test_elementwise_code_between_blocks_costs_no_collective() -> None:
    def between(model: Any, x: torch.Tensor) -> Any:
        x0 = x
        for block in model.blocks:
            x = block(x + x0 * model.scale)
        return model.head(model.norm(x))

    run = assert_equals_one_device(stack(between), {"ids": ids_of(2, 9)}, 3)
    assert run.forward == ("all-reduce", *["all-to-all"] * 6, "all-gather")


def test_the_check_itself_fails_when_nothing_multiplies_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ulysses_dtensor.boundary._Shard.backward",
        staticmethod(lambda ctx, g: (boundary._local_gradient(g, ctx.mesh, ctx.dim), *[None] * 5)),
    )
    with pytest.raises(AssertionError, match="gradient of"):
        assert_equals_one_device(stack(alone(lambda m, x: x)), {"ids": ids_of(2, 9)}, 2)


@dataclass
class Result:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    loss: torch.Tensor | None = None


@pytest.mark.parametrize("outputs", ["replicate", "shard"])
def test_results_in_a_dataclass(outputs: str) -> None:
    def between(model: Any, x: torch.Tensor) -> Any:
        x = model.blocks[0](x)
        return Result(model.head(x), [x])

    model, inputs = stack(between), {"ids": ids_of(2, 9)}
    flat = lambda result: (result.logits, result.hidden)  # noqa: E731
    reference = copy.deepcopy(model)
    expected = flat(reference(**inputs))
    loss_of(expected).backward()

    def run(mesh: DeviceMesh) -> None:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan(outputs=outputs))  # type: ignore[arg-type]
        got = flat(ours(**inputs))
        assert isinstance(got[0], DTensor) == (outputs == "shard")
        from one_device import loss_of_shards

        (loss_of_shards(got) if outputs == "shard" else loss_of(got)).backward()
        for x, y in zip(whole(got), whole(expected), strict=True):
            assert_close(x, y, "output", 1e-9)
        for name, p in ours.named_parameters():
            q = reference.get_parameter(name)
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None and q.grad is not None:
                assert_close(p.grad, q.grad, name, 1e-9, floor=1e-4)

    run_on_mesh({"sp": 2}, run)


def test_rejects_results_that_hide_shards() -> None:
    def between(model: Any, x: torch.Tensor) -> Any:
        return SimpleNamespace(logits=model.head(model.blocks[0](x)))

    model = stack(between)

    def run(mesh: DeviceMesh) -> None:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        with pytest.raises(PlanError, match="forward returns a SimpleNamespace that holds a hidden state in shards"):
            ours(ids_of(2, 9))

    run_on_mesh({"sp": 2}, run)


IN_PLACE = {
    "add_": (lambda m, x: x.add_(1), "add_ changes a hidden state in place"),
    "+=": (lambda m, x: x.__iadd__(1), "add_ changes a hidden state in place"),
    "item": (lambda m, x: (x.__setitem__((0, 0), 0.0), x)[1], "__setitem__ changes a hidden state in place"),
    "out": (lambda m, x: torch.add(x, 1, out=x), "add changes a hidden state in place"),
    "masked_fill_": (lambda m, x: x.masked_fill_(x > 0, 0), "masked_fill_ changes a hidden state in place"),
    "module": (lambda m, x: x + m.activation(x), "activation changes what it is given in place"),
    "hook": (lambda m, x: (x.register_hook(lambda g: g / g.norm()), x)[1], "register_hook on a hidden state"),
}


@pytest.mark.parametrize(
    ("name", "gradients"),
    [(name, gradients) for name in IN_PLACE for gradients in (True, False) if gradients or name != "hook"],
)
def test_rejects_changes_in_place_between_blocks(name: str, gradients: bool) -> None:
    step, match = IN_PLACE[name]
    model = stack(alone(step))

    def run(mesh: DeviceMesh) -> None:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        with torch.set_grad_enabled(gradients), pytest.raises(PlanError) as raised:
            ours(ids_of(2, 9))
        assert match in str(raised.value)

    run_on_mesh({"sp": 2}, run)


@pytest.mark.parametrize("gradients", [True, False])
def test_functions_in_place_between_blocks_raise_or_are_right(gradients: bool) -> None:
    model, ids = stack(alone(lambda m, x: F.relu(x, inplace=True) + x)), ids_of(2, 9)
    expected = copy.deepcopy(model)(ids).detach()

    def run(mesh: DeviceMesh) -> None:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        with torch.set_grad_enabled(gradients):
            try:
                out = ours(ids)
            except (PlanError, RuntimeError):
                return
            assert_close(out.detach(), expected, "output", 1e-9)
            assert not gradients

    run_on_mesh({"sp": 2}, run)


# Inputs


def test_a_gradient_of_an_input_is_p_times_the_ranks_own_part() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model, x = seeded(Embedded), numbers(2, 9, WIDTH)
    reference = x.clone().requires_grad_()
    loss_of(copy.deepcopy(model)(reference)).backward()

    def run(mesh: DeviceMesh) -> torch.Tensor:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        mine = x.clone().requires_grad_()
        loss_of(ours(mine)).backward()
        assert mine.grad is not None
        return mine.grad

    parts = run_on_mesh({"sp": 2}, run)
    assert reference.grad is not None
    torch.testing.assert_close(parts[0][:, :5] / 2, reference.grad[:, :5], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(parts[1][:, 5:] / 2, reference.grad[:, 5:], rtol=1e-10, atol=1e-12)
    assert not parts[0][:, 5:].any()
    assert not parts[1][:, :5].any()


class FromHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_hidden_state_that_is_cut_already_is_taken_as_it_is() -> None:  # vllm-omni#6841
    model, x = seeded(FromHidden), numbers(2, 9, WIDTH)
    expected = on_one_device(model, {"x": x})

    def run(mesh: DeviceMesh) -> Run:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        logits = ours(distribute(x, mesh, "b (sp s) d"))
        loss = loss_of(logits)
        loss.backward()
        return Run(loss.detach(), whole(logits), gradients_of(ours), buffers_of(ours))

    for each in run_on_mesh({"sp": 2}, run):
        assert_runs_equal(each, expected)


@pytest.mark.parametrize(
    ("layout", "value", "match"),
    [
        ("b (sp s)", ids_of(2, 9), "an input of torch.int64 is cut already (placements (Shard(dim=1),))"),
        ("b s d", numbers(2, 9, WIDTH), "an input is a DTensor placed (Replicate(),)"),
    ],
)
def test_rejects_inputs_that_are_placed_otherwise(
    layout: str, value: torch.Tensor, match: str
) -> None:  # vllm-omni#6841
    model = ZOO["rotary decoder"].model() if value.dtype == torch.int64 else seeded(FromHidden)

    def run(mesh: DeviceMesh) -> None:
        parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())(distribute(value, mesh, layout))

    assert match in refused(2, run)


def test_rejects_an_input_on_another_mesh() -> None:
    model, x = seeded(FromHidden), numbers(2, 9, WIDTH)

    def run(mesh: DeviceMesh) -> None:
        other = distribute(x, mesh["cp"], "b (cp s) d")
        parallelize_module(copy.deepcopy(model), mesh["sp"], UlyssesPlan())(other)

    assert "an input is a DTensor placed (Shard(dim=1),) on" in refused(4, run, sizes={"cp": 2, "sp": 2})


class Hidden(nn.Module):
    """Two blocks on a hidden state, which is a leaf or another model's result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("outputs", ["replicate", "shard"])
def test_a_result_may_be_fed_back(outputs: str, ranks: int) -> None:
    model, x = seeded(Hidden), numbers(2, 11, WIDTH)

    def twice(ours: nn.Module) -> Run:
        out = ours(ours(x))
        loss = out.pow(2).sum() / out.numel()
        loss.backward()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return Run(loss.detach(), whole(out), gradients_of(ours), buffers_of(ours))

    def run(mesh: DeviceMesh) -> Run:
        plan = UlyssesPlan(outputs=outputs)  # type: ignore[arg-type]
        return twice(parallelize_module(copy.deepcopy(model), mesh, plan))

    for each in run_on_mesh({"sp": ranks}, run):
        assert_runs_equal(each, twice(copy.deepcopy(model)))


# Hidden states that someone kept

Loss = Callable[[torch.Tensor, list[Any]], torch.Tensor]


def of_kept_alone(out: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    return kept[0].pow(2).mean()


def of_kept_gathered_by_torch(out: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    aux = [x.pow(2).mean() for x in kept]
    return loss_of(out) + sum(x.full_tensor() if isinstance(x, DTensor) else x for x in aux)


def of_local_tokens(out: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    """Every rank's loss is its tokens' part of the kept one, and all of the main one."""
    return loss_of(out) + sum((x.to_local() if isinstance(x, DTensor) else x).pow(2).sum() / x.numel() for x in kept)


def unwrapped(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return model


def by_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 notices a backward where a gradient reaches a wrapped module's output."""
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("wrap", [unwrapped, by_fsdp])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("loss_fn", [of_kept_alone, of_kept_gathered_by_torch, of_local_tokens])
def test_a_loss_of_hidden_states_that_hooks_kept(loss_fn: Loss, ranks: int, wrap: Callable[..., nn.Module]) -> None:
    model, ids = seeded(RotaryDecoder), ids_of(2, 11)

    def gradients(ours: nn.Module) -> dict[str, torch.Tensor | None]:
        kept: list[Any] = []
        for layer in ours.layers:  # type: ignore[union-attr]
            layer.register_forward_hook(lambda _module, _args, output: kept.append(output))
        loss_fn(ours(ids), kept).backward()
        return {
            name: g.full_tensor() if isinstance(g, DTensor) else g
            for name, g in gradients_of(ours).items()
            if g is not None
        }

    expected = gradients(copy.deepcopy(model))
    found = run_on_mesh(
        {"sp": ranks},
        lambda mesh: gradients(wrap(parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan()), mesh)),
    )
    for each in found:
        for name, g in each.items():
            reference = expected.get(name, torch.zeros_like(g))  # type: ignore[arg-type]
            assert_close(g, reference, f"gradient of {name}", 1e-9, floor=1e-9)  # type: ignore[arg-type]
        assert expected.keys() <= each.keys()


# Blocks by themselves


def test_rejects_a_block_called_by_itself() -> None:
    model = ZOO["skips"].model()

    def run(mesh: DeviceMesh) -> None:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        ours.blocks[1](numbers(2, 9, WIDTH))  # type: ignore[index, operator] - a ModuleList

    message = refused(2, run)
    assert message == (
        "UlyssesPlan: block blocks.1 was called by itself. Call the converted model, or run the block under bypass."
    )


# Bypass


def test_bypass_gives_bitwise_what_the_model_gave() -> None:
    model, inputs = ZOO["experts"].model(), {"ids": ids_of(2, 9)}
    expected = on_one_device(model, inputs)

    def run(mesh: DeviceMesh) -> None:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        with bypass(ours), count_collectives() as count:
            logits = ours(**inputs)
            loss_of(logits).backward()
            with bypass(ours):
                ours.layers[0](numbers(2, 9, WIDTH))  # type: ignore[index, operator]
        assert count.kinds == []
        assert torch.equal(logits, expected.outputs[0])
        for name, p in ours.named_parameters():
            assert p.grad is None or torch.equal(p.grad, expected.gradients[name])  # type: ignore[arg-type]
        ours.zero_grad()
        with count_collectives() as count:
            ours(**inputs)
        assert "all-to-all" in count.kinds

    run_on_mesh({"sp": 2}, run)


DECLARED = "b h (sp s) d -> b (sp h) s d"


def test_declared_attentions_are_plain_wherever_no_block_runs_in_shards() -> None:
    class Direct(nn.Module):
        """Calls an attention of a block in its own code, on tokens that it has shuffled."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = ZOO["whole table"].build()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            inner: Any = self.inner
            x = inner.tok_embeddings(tokens)
            for layer in inner.layers.values():
                x = layer(x, inner.freqs_cis)
            x = x.flip(1)
            return inner.output(x + inner.layers["0"].attention(inner.norm(x), inner.freqs_cis))

    plan = lambda: UlyssesPlan(attention={"*.attention.inner": UlyssesAttention(DECLARED)})  # noqa: E731
    assert_equals_one_device(seeded(Direct), {"tokens": ids_of(2, 9)}, 2, plan=plan)
    sample = ZOO["whole table"]
    for ranks, seq_len in ((1, 5), (3, 2), (4, 9)):  # one rank, and short sequences
        assert_equals_one_device(sample.model(), sample.inputs(2, seq_len), ranks, plan=plan)
    model = sample.model()
    expected = model(ids_of(2, 9)).detach()

    def bypassed(mesh: DeviceMesh) -> torch.Tensor:
        ours = parallelize_module(copy.deepcopy(model), mesh, plan())
        with bypass(ours):
            return ours(ids_of(2, 9)).detach()

    assert all(torch.equal(logits, expected) for logits in run_on_mesh({"sp": 2}, bypassed))


def test_bypass_ends_with_an_error_too_and_needs_a_converted_model() -> None:
    model = ZOO["rotary decoder"].model()
    with (
        pytest.raises(PlanError, match=r"bypass: RotaryDecoder is not converted\. Call parallelize_module first\."),
        bypass(model),
    ):
        pass

    def run(mesh: DeviceMesh) -> None:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        region = region_of(ours)
        assert region is not None
        with pytest.raises(IndexError), bypass(ours):
            ours(torch.tensor([[99]]))
        assert region.bypassed == region.active == region.inside == 0

    run_on_mesh({"sp": 2}, run)


def test_a_checkpointed_forward_under_bypass_is_not_recomputed_in_shards() -> None:
    model, inputs = ZOO["checkpointed"].model(), {"ids": ids_of(2, 9)}
    expected = on_one_device(model, inputs)

    def run(mesh: DeviceMesh) -> None:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        with bypass(ours):
            loss_of(ours(**inputs)).backward()
        assert_runs_equal(
            Run(expected.loss, [], gradients_of(ours), {}), Run(expected.loss, [], expected.gradients, {})
        )
        with bypass(ours):
            loss = loss_of(ours(**inputs))
        with pytest.raises((PlanError, CheckpointError)):
            loss.backward()

    run_on_mesh({"sp": 2}, run)


def test_a_forward_that_fails_leaves_the_model_usable() -> None:
    def between(model: Any, x: torch.Tensor) -> Any:
        x = model.blocks[0](x)
        if x.shape[1] == 10:
            raise KeyError("in the middle")
        return model.head(x)

    original = stack(between)
    expected = on_one_device(original, {"ids": ids_of(2, 9)})

    def run(mesh: DeviceMesh) -> Run:
        ours = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        with pytest.raises(KeyError):
            ours(ids_of(2, 10))
        logits = ours(ids_of(2, 9))
        loss = loss_of(logits)
        loss.backward()
        return Run(loss.detach(), whole(logits), gradients_of(ours), buffers_of(ours))

    for each in run_on_mesh({"sp": 2}, run):
        assert_runs_equal(each, expected)


# Copies


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_runs_its_own_weights(duplicate: Any) -> None:
    model, inputs = ZOO["whole table"].model(), {"tokens": ids_of(2, 9)}
    doubled = copy.deepcopy(model)
    with torch.no_grad():
        for p in doubled.parameters():
            p.mul_(1.5)
    expected = on_one_device(doubled, inputs)

    def run(mesh: DeviceMesh) -> Run:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        ours(**inputs)
        if duplicate is copy.deepcopy:
            twin = duplicate(ours)
        else:  # a mesh does not travel by pickle between simulated ranks: the parts that are ours do
            for module in ours.modules():
                assert "lambda" not in repr(vars(module).get("forward"))
            twin = copy.deepcopy(ours)
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(1.5)
        assert region_of(twin) is not region_of(ours)
        assert region_of(twin) is not None
        logits = twin(**inputs)
        loss = loss_of(logits)
        loss.backward()
        assert all(p.grad is None for p in ours.parameters())
        return Run(loss.detach(), whole(logits), gradients_of(twin), buffers_of(twin))

    for each in run_on_mesh({"sp": 2}, run):
        assert_runs_equal(each, expected)


# Two of them


def test_two_models_on_two_meshes_do_not_see_each_other() -> None:
    first, second = ZOO["rotary decoder"].model(), ZOO["whole table"].model()
    expected = [on_one_device(first, {"ids": ids_of(2, 9)}), on_one_device(second, {"tokens": ids_of(3, 13)})]

    def run(mesh: DeviceMesh) -> list[Run]:
        ours = parallelize_module(copy.deepcopy(first), mesh["sp"], UlyssesPlan())
        other = parallelize_module(copy.deepcopy(second), mesh["cp"], UlyssesPlan())
        logits, more = ours(ids_of(2, 9)), other(ids_of(3, 13))
        losses = loss_of(logits), loss_of(more)
        sum(losses).backward()  # type: ignore[union-attr] - a tensor
        return [
            Run(loss.detach(), whole(out), gradients_of(model), buffers_of(model))
            for loss, out, model in zip(losses, (logits, more), (ours, other), strict=True)
        ]

    for runs in run_on_mesh({"cp": 2, "sp": 2}, run):
        for each, reference in zip(runs, expected, strict=True):
            assert_runs_equal(each, reference)


def test_a_model_inside_another_ones_forward() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = RotaryDecoder(), RotaryDecoder()
            self.teacher.requires_grad_(False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.teacher(ids).softmax(-1)
            return -(target * self.student(ids).log_softmax(-1)).sum(-1).mean()

    model, inputs = seeded(Teacher), {"ids": ids_of(2, 9)}
    assert_equals_one_device(model, inputs, 2)
    expected = on_one_device(model, inputs)

    def apart(mesh: DeviceMesh) -> Run:
        ours = copy.deepcopy(model)
        parallelize_module(ours, mesh, {"student": UlyssesPlan(), "teacher": UlyssesPlan()})
        loss = ours(**inputs)
        loss.backward()
        return Run(loss.detach(), whole(loss), gradients_of(ours), buffers_of(ours))

    for each in run_on_mesh({"sp": 2}, apart):
        assert_runs_equal(each, expected)


@pytest.mark.parametrize("lengths", [(9, 13), (9, 2), (3, 14)])
def test_two_lengths_in_flight_under_checkpointing(lengths: tuple[int, int]) -> None:
    model = ZOO["checkpointed"].model()

    def both(ours: nn.Module) -> Run:
        outs = [ours(ids_of(2, seq_len)) for seq_len in lengths]
        loss = sum((loss_of(out) for out in outs), torch.zeros(()))
        loss.backward()
        return Run(loss.detach(), whole(outs), gradients_of(ours), buffers_of(ours))

    expected = both(copy.deepcopy(model))
    for each in run_on_mesh(
        {"sp": 3}, lambda mesh: both(parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan()))
    ):
        assert_runs_equal(each, expected)


# Checkpointing


def around_two(model: Any, x: torch.Tensor) -> torch.Tensor:
    def part(x: torch.Tensor) -> torch.Tensor:
        return model.blocks[1](model.blocks[0](x))

    return model.head(model.blocks[2](checkpoint(part, x, use_reentrant=False)))


def around_each_reentrant(model: Any, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return model.head(x)


def around_code_between(model: Any, x: torch.Tensor) -> torch.Tensor:
    def part(x: torch.Tensor) -> torch.Tensor:
        x = model.blocks[0](x)
        return model.blocks[1](x + x.mean(1, keepdim=True))

    return model.head(checkpoint(part, x, use_reentrant=False))


def around_code_after(model: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: model.head(model.norm(model.blocks[0](x)).flip(1)), x, use_reentrant=False)


def around_code_after_reentrant(model: Any, x: torch.Tensor) -> torch.Tensor:
    def part(x: torch.Tensor) -> torch.Tensor:
        x = model.blocks[0](x)
        return model.blocks[1](x * x.mean(1, keepdim=True))

    return model.head(checkpoint(part, x, use_reentrant=True))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(
    ("between", "right"),
    [
        (around_two, True),
        (around_each_reentrant, True),
        (around_code_between, False),
        (around_code_after, False),
        (around_code_after_reentrant, False),
    ],
)
def test_checkpoints_around_any_part_are_right_or_raise(between: Between, right: bool) -> None:
    model, inputs = stack(between), {"ids": ids_of(2, 9)}
    try:
        assert_equals_one_device(model, inputs, 2)
    except (PlanError, RuntimeError, CheckpointError):
        assert not right


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_a_block_behind_code_that_gathered(reentrant: bool) -> None:
    def between(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(model.blocks[0], x, use_reentrant=reentrant).roll(1, dims=1)
        return model.head(checkpoint(model.blocks[1], x, use_reentrant=reentrant))

    assert_equals_one_device(stack(between), {"ids": ids_of(2, 9)}, 2)


class Stages(nn.Module):
    """Blocks in stages of two; each stage is checkpointed, or all of them as one."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.each = each
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 5)
        self.stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
        self.all = nn.Sequential(*self.stages)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for stage in self.stages if self.each else [self.all]:
            x = checkpoint(stage, x, use_reentrant=False)  # type: ignore[assignment] - the stage's result
        return self.head(x)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_checkpoints_around_containers_of_blocks(each: bool, ranks: int) -> None:
    assert_equals_one_device(seeded(lambda: Stages(each)), {"ids": ids_of(2, 9)}, ranks)


@pytest.mark.parametrize("tokens", [22, 9])  # a share of 22 is as many as the probe makes up
@pytest.mark.parametrize("saved", [torch.ops.aten.addmm.default, torch.ops.aten.native_layer_norm.default])
def test_selective_checkpoints_keep_nothing_of_the_probe(saved: Any, tokens: int) -> None:
    contexts = partial(create_selective_checkpoint_contexts, [saved])

    def between(model: Any, x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)  # type: ignore[assignment]
        return model.head(x)

    assert_equals_one_device(stack(between), {"ids": ids_of(2, tokens)}, 2)


def test_a_model_checkpointed_as_a_whole() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = RotaryDecoder()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, ids, use_reentrant=False)

    model, inputs = seeded(Outer), {"ids": ids_of(2, 9)}
    expected = on_one_device(model, inputs)
    assert_equals_one_device(model, inputs, 2)

    def inside(mesh: DeviceMesh) -> Run:
        ours = copy.deepcopy(model)
        parallelize_module(ours.inner, mesh, UlyssesPlan())  # type: ignore[arg-type] - a module
        logits = ours(**inputs)
        loss = loss_of(logits)
        loss.backward()
        return Run(loss.detach(), whole(logits), gradients_of(ours), buffers_of(ours))

    for each in run_on_mesh({"sp": 2}, inside):
        assert_runs_equal(each, expected)


# Modes


def test_no_gradients_and_inference_mode() -> None:
    model, ids = ZOO["rotary decoder"].model(), ids_of(2, 9)
    expected = on_one_device(model, {"ids": ids})

    def run(mesh: DeviceMesh) -> Run:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                assert_close(ours(ids), expected.outputs[0], "output", 1e-9)
        logits = ours(ids)  # what was decided without gradients serves with them
        loss = loss_of(logits)
        loss.backward()
        return Run(loss.detach(), whole(logits), gradients_of(ours), buffers_of(ours))

    for each in run_on_mesh({"sp": 2}, run):
        assert_runs_equal(each, expected)


def test_a_frozen_part_stays_without_gradient() -> None:
    def build() -> nn.Module:
        model = RotaryDecoder()
        model.embed.requires_grad_(False)
        model.layers[0].requires_grad_(False)  # type: ignore[union-attr]
        return model

    run = assert_equals_one_device(seeded(build), {"ids": ids_of(2, 9)}, 2)
    assert run.gradients["layers.0.mlp.w1.weight"] is None
    assert run.gradients["layers.1.mlp.w1.weight"] is not None


def test_hooks_between_blocks_see_the_whole() -> None:
    seen: list[tuple[int, ...]] = []

    def between(model: Any, x: torch.Tensor) -> Any:
        handles = [
            model.blocks[0].register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape))),
            model.blocks[1].register_forward_hook(lambda module, args, out: out + out.mean(1, keepdim=True)),
            model.blocks[2].register_forward_pre_hook(lambda module, args: (args[0].flip(1),)),
        ]
        for block in model.blocks:
            x = block(x)
        for handle in handles:
            handle.remove()
        return model.head(x)

    assert_equals_one_device(stack(between), {"ids": ids_of(2, 9)}, 2)
    assert set(seen) == {(2, 9, WIDTH)}


def test_a_loss_inside_forward_equals_one_outside() -> None:
    model, inputs = seeded(LearnedPositions), ZOO["learned positions"].inputs(2, 9)
    run = assert_equals_one_device(model, inputs, 2, loss_fn=lambda result: result[1])
    assert run.loss > 1


def test_mixing_between_blocks_leaves_and_enters_the_region_again() -> None:
    run = assert_equals_one_device(seeded(lambda: MixesBetween("roll")), {"ids": ids_of(2, 9)}, 2)
    # Once around each roll, the last of which is followed by the head.
    assert run.forward.count("all-gather") == 3
    assert run.forward.count("all-to-all") == 6


def test_a_short_sequence_runs_whole_without_an_exchange() -> None:
    for seq_len, ranks in ((1, 2), (2, 3), (4, 3), (6, 4), (9, 4)):
        run = assert_equals_one_device(ZOO["rotary decoder"].model(), {"ids": ids_of(2, seq_len)}, ranks)
        short = -(-seq_len // ranks) * (ranks - 1) >= seq_len
        assert ("all-to-all" not in run.forward) == short, (seq_len, ranks)
        assert "all-gather" not in run.forward or not short


def test_a_short_sequence_returns_a_plain_tensor_whatever_outputs_says() -> None:
    model = ZOO["rotary decoder"].model()

    def run(mesh: DeviceMesh) -> torch.Tensor:
        logits = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan(outputs="shard"))(ids_of(2, 2))
        assert not isinstance(logits, DTensor)
        return logits.detach()

    expected = model(ids_of(2, 2)).detach()
    for logits in run_on_mesh({"sp": 3}, run):
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_memory_falls_with_the_ranks() -> None:  # verl#7476
    """Counts the largest tensor that any function makes inside the blocks: activations, not parameters."""
    model, ids = ZOO["rotary decoder"].model(), ids_of(1, 40)

    def run(mesh: DeviceMesh) -> int:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan(outputs="shard"))
        ours(ids)
        saved = 0

        def pack(x: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += 0 if isinstance(x, nn.Parameter) else x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            ours(ids)
        return saved

    alone, *_ = run_on_mesh({"sp": 1}, run)
    for each in run_on_mesh({"sp": 4}, run):
        assert each < 0.4 * alone  # rotary tables are whole on every rank


def test_full_value_of_a_sharded_result_is_the_whole() -> None:
    model = ZOO["rotary decoder"].model()
    expected = model(ids_of(2, 13)).detach()

    def run(mesh: DeviceMesh) -> torch.Tensor:
        logits = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan(outputs="shard"))(ids_of(2, 13))
        assert torch.equal(logits.full_tensor(), full_value(logits))
        return full_value(logits)

    for logits in run_on_mesh({"sp": 4}, run):
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
