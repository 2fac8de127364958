"""Who averages which gradient over a sequence group, checked at every forward; what nobody reduces, we do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model_zoo import VOCABULARY, WIDTH, ZOO, Block, ids_of, loss_of, numbers, seeded
from one_device import Run, assert_close, assert_runs_equal, buffers_of, gradients_of, on_one_device, refused, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ulysses_dtensor import UlyssesPlan, count_collectives, parallelize_module
from ulysses_dtensor.gradients import _active_ddp, tie
from ulysses_dtensor.passes import backward_id, in_backward, in_reentrant_recompute
from ulysses_dtensor.testing import full_value, run_on_mesh

IDS = ids_of(2, 9)


def decoder() -> nn.Module:
    return ZOO["rotary decoder"].model()


def result_of(model: nn.Module, logits: torch.Tensor, loss: torch.Tensor) -> Run:
    gradients = {
        name: full_value(gradient) if isinstance(gradient, DTensor) else gradient
        for name, gradient in gradients_of(model).items()
    }
    return Run(loss.detach(), whole(logits), gradients, buffers_of(model))


def once(model: nn.Module, inputs: dict[str, Any]) -> Run:
    logits = model(**inputs)
    loss = loss_of(logits)
    loss.backward()
    return result_of(model, logits, loss)


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.layers:  # type: ignore[union-attr] - a ModuleList
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


# Right


class TwoStates(nn.Module):
    """Attends from `x` to `first`, or to itself and leaves `first` unused."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.uses, self.q, self.kv = uses, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        k, v = self.kv(first if self.uses else x).unflatten(-1, (2, 4, -1)).permute(2, 0, 3, 1, 4)
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        return x + self.mlp(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TwoStatesModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.layers = (
            nn.Linear(3, WIDTH),
            nn.ModuleList([TwoStates(uses) for uses in (False, True, False)]),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](self.linear(x), self.linear(x))
        for layer in list(self.layers)[1:]:
            x = layer(x, first)
        return x


def fsdp_inside_blocks(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr] - a ModuleList
        fully_shard(layer.mlp, mesh=mesh)  # type: ignore[union-attr] - a module
    return sharded(model, mesh)


def backward_hooks(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr] - a ModuleList
        layer.register_full_backward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("wrap", [sharded, fsdp_inside_blocks, backward_hooks])
def test_a_state_that_some_block_leaves_unused(wrap: Callable[[nn.Module, DeviceMesh], nn.Module]) -> None:
    original, inputs = seeded(TwoStatesModel), {"x": numbers(2, 13, 3)}
    expected = once(copy.deepcopy(original), inputs)

    def run(mesh: DeviceMesh) -> Run:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        return once(wrap(model, mesh), inputs)

    for each in run_on_mesh({"sp": 2}, run):
        assert_runs_equal(each, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_given_a_leaf_that_requires_gradients(reentrant: bool) -> None:
    """What is done to a frozen embedding's output before adapters are trained."""

    class Checkpointed(TwoStatesModel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            for layer in self.layers:
                x = checkpoint(layer, x, 2 * x, use_reentrant=reentrant)
            return x

    original, inputs = seeded(Checkpointed), {"x": numbers(2, 13, WIDTH)}
    for p in original.linear.parameters():  # type: ignore[union-attr] - a module
        p.requires_grad_(False)
    expected = once(copy.deepcopy(original), inputs)
    for each in run_on_mesh(
        {"sp": 2}, lambda mesh: once(parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan()), inputs)
    ):
        assert_runs_equal(each, expected)


@pytest.mark.parametrize("order", ["plan first", "FSDP first"])
@pytest.mark.parametrize("name", ["rotary decoder", "experts", "checkpointed"])
def test_fsdp_reduces_over_all_ranks_in_either_order(name: str, order: str) -> None:
    original, inputs = ZOO[name].model(), {"ids": IDS}
    expected = on_one_device(original, inputs)

    def run(mesh: DeviceMesh) -> tuple[Run, list[str]]:
        model, flat = copy.deepcopy(original), DeviceMesh("cpu", list(range(4)), mesh_dim_names=("all",))
        if order == "plan first":
            model = sharded(parallelize_module(model, mesh["sp"], UlyssesPlan()), flat)
        else:
            model = parallelize_module(sharded(model, flat), mesh["sp"], UlyssesPlan())
        with count_collectives() as count:
            return once(model, inputs), count.kinds

    for each, kinds in run_on_mesh({"dp": 2, "sp": 2}, run):
        assert_runs_equal(each, expected)
        assert kinds.count("all-reduce") == 1  # the ranks agree; FSDP's own collectives are not ours


def test_a_replicated_mesh_dimension_reduces_too() -> None:
    original = decoder()
    expected = on_one_device(original, {"ids": IDS})

    def run(mesh: DeviceMesh) -> Run:
        model = parallelize_module(copy.deepcopy(original), mesh["sp"], UlyssesPlan())
        return once(sharded(model, mesh), {"ids": IDS})  # replicated over dp, sharded over sp

    for each in run_on_mesh({"dp": 2, "sp": 2}, run):
        assert_runs_equal(each, expected)


def test_parameters_that_fsdp_leaves_out_are_ours() -> None:
    original = decoder()
    expected = on_one_device(original, {"ids": IDS})

    def run(mesh: DeviceMesh) -> Run:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        fully_shard(model.layers[1], mesh=mesh)  # type: ignore[index, arg-type]
        return once(model, {"ids": IDS})

    for each in run_on_mesh({"sp": 3}, run):
        assert_runs_equal(each, expected)


@pytest.mark.parametrize("names", [["layers.0.attention.q.weight"], None], ids=["one", "all"])
def test_parameters_put_in_place_of_the_models_own(names: list[str] | None) -> None:
    def step(model: nn.Module) -> Run:
        own = dict(model.named_parameters())
        logits = torch.func.functional_call(model, {name: own[name] * 1.5 for name in names or own}, IDS)
        loss = loss_of(logits)
        loss.backward()
        return result_of(model, logits, loss)

    model = decoder()
    expected = step(copy.deepcopy(model))
    runs = run_on_mesh({"sp": 2}, lambda mesh: step(parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())))
    for each in runs:
        assert_runs_equal(each, expected)


def test_gradients_accumulate() -> None:
    original = ZOO["experts"].model()
    batches = [{"ids": ids_of(2, seq_len, seed)} for seed, seq_len in enumerate((9, 13, 2))]

    def accumulate(model: nn.Module, wrap: bool) -> Run:
        logits = loss = torch.zeros(())
        for number, inputs in enumerate(batches):
            if wrap and isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(number == len(batches) - 1)
            logits = model(**inputs)
            loss = loss_of(logits) * (number + 1)
            loss.backward()
        return result_of(model, logits, loss)

    expected = accumulate(copy.deepcopy(original), False)
    for fsdp, wrap in ((False, False), (True, False), (True, True)):

        def run(mesh: DeviceMesh, fsdp: bool = fsdp, wrap: bool = wrap) -> Run:
            model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
            return accumulate(sharded(model, mesh) if fsdp else model, wrap)

        for each in run_on_mesh({"sp": 2}, run):
            assert_runs_equal(each, expected)


def test_one_backward_through_two_forwards_and_two_through_one() -> None:
    original, other = decoder(), ids_of(3, 13, seed=1)

    def both(model: nn.Module) -> Run:
        first, second = model(IDS), model(other)
        loss = loss_of(first) + 2 * loss_of(second)
        loss.backward()
        return result_of(model, first, loss)

    def twice(model: nn.Module) -> Run:
        logits = model(IDS)
        loss = loss_of(logits)
        loss.backward(retain_graph=True)
        (3 * loss).backward()
        return result_of(model, logits, loss)

    for step in (both, twice):
        expected = step(copy.deepcopy(original))
        for each in run_on_mesh(
            {"sp": 2}, lambda mesh, step=step: step(parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan()))
        ):
            assert_runs_equal(each, expected)


@pytest.mark.parametrize("between", ["no gradients", "some frozen"])
def test_a_forward_between_two_backwards(between: str) -> None:
    original, other = decoder(), ids_of(2, 13, seed=1)

    def step(model: nn.Module) -> Run:
        first, second = model(IDS), model(other)
        loss_of(first).backward()
        frozen = list(model.parameters())[:3] if between == "some frozen" else []
        for p in frozen:
            p.requires_grad_(False)
        with torch.set_grad_enabled(between == "some frozen"):
            model(other)
        for p in frozen:
            p.requires_grad_(True)
        loss = loss_of(second)
        loss.backward()
        return result_of(model, second, loss)

    expected = step(copy.deepcopy(original))
    for each in run_on_mesh(
        {"sp": 3}, lambda mesh: step(parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan()))
    ):
        assert_runs_equal(each, expected)


def test_unwrapped_costs_two_all_reduces_at_the_end_of_a_backward() -> None:
    original = decoder()

    def run(mesh: DeviceMesh) -> list[str]:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        loss = loss_of(model(IDS))
        with count_collectives() as count:
            loss.backward()
        return count.kinds

    assert run_on_mesh({"sp": 2}, run) == [[*["all-to-all"] * 4, "all-reduce", "all-reduce"]] * 2


def test_dtypes_of_parameters_are_reduced_apart() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block()])
            self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x + self.bias.double())

    model, inputs = seeded(Mixed), {"x": numbers(2, 9, WIDTH)}
    expected = on_one_device(model, inputs)
    for each in run_on_mesh(
        {"sp": 2}, lambda mesh: once(parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan()), inputs)
    ):
        assert_close(each.gradients.pop("bias"), expected.gradients["bias"], "bias", 1e-6)  # type: ignore[arg-type]
        rest = {name: gradient for name, gradient in expected.gradients.items() if name != "bias"}
        assert_runs_equal(each, Run(expected.loss, expected.outputs, rest, {}))


def test_experts_that_no_token_of_a_rank_chose_have_a_gradient_on_every_rank() -> None:
    original = ZOO["experts"].model()

    def run(mesh: DeviceMesh) -> dict[str, torch.Tensor | None]:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        loss_of(model(ids_of(1, 5))).backward()
        return gradients_of(model)

    first, *others = run_on_mesh({"sp": 3}, run)
    assert all(gradient is not None for gradient in first.values())
    for other in others:
        assert all(torch.equal(other[name], gradient) for name, gradient in first.items())  # type: ignore[arg-type]


class FromHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


def test_an_input_that_depends_on_nothing_trainable_may_require_gradients() -> None:
    original, embed = seeded(FromHidden), seeded(lambda: nn.Embedding(VOCABULARY, WIDTH))

    def detached(mesh: DeviceMesh) -> None:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        loss_of(model(embed(IDS).detach().requires_grad_() * 2)).backward()

    run_on_mesh({"sp": 2}, detached)

    def attached(mesh: DeviceMesh) -> None:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        model(embed(IDS))

    message = refused(2, attached)
    assert (
        "UlyssesPlan: gradients would be wrong.\n  an input depends on 1 trainable parameters outside the model"
        in message
    )
    assert "Convert the module that holds them too, or detach the input." in message


def test_a_part_that_was_called_first_does_not_keep_the_rest_from_being_reduced() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner = nn.Embedding(VOCABULARY, WIDTH), FromHidden()
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(self.embed(ids)))

    original = seeded(Outer)
    expected = on_one_device(original, {"ids": IDS})

    def run(mesh: DeviceMesh) -> Run:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        loss_of(model.inner(numbers(2, 9, WIDTH))).backward()  # type: ignore[operator] - a module
        model.zero_grad()
        return once(model, {"ids": IDS})

    for each in run_on_mesh({"sp": 2}, run):
        assert_runs_equal(each, expected)


# Refused


def misses_sp(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    return sharded(parallelize_module(model, mesh["sp"], UlyssesPlan()), mesh["dp"])


def misses_sp_in_part(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    parallelize_module(model, mesh["sp"], UlyssesPlan())
    fully_shard(model.layers[0], mesh=mesh["dp"])  # type: ignore[index, arg-type]
    return model


def own_factor(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    sharded(parallelize_module(model, mesh["sp"], UlyssesPlan()), mesh)
    model.set_gradient_divide_factor(1.0)  # type: ignore[operator] - FSDP's
    return model


def steps_in_backward(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    parallelize_module(model, mesh["sp"], UlyssesPlan())
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    return model


def replicated(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    parallelize_module(model, mesh["sp"], UlyssesPlan())
    weight = model.norm.weight.detach()  # type: ignore[union-attr]
    model.norm.weight = nn.Parameter(DTensor.from_local(weight, mesh["sp"], [Replicate()], run_check=False))  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(
    ("wrap", "match"),
    [
        pytest.param(
            misses_sp, r"is sharded over ranks \[., .\], which leaves out part of the sequence group", id="dp alone"
        ),
        pytest.param(misses_sp_in_part, r"layers\.0 is sharded over ranks", id="dp alone, one block"),
        pytest.param(own_factor, r"FSDP divides gradients by 1\.0, not by the number of ranks", id="factor"),
        pytest.param(steps_in_backward, r"parameter embed\.weight has a hook", id="step in backward"),
        pytest.param(replicated, r"parameter norm\.weight is a DTensor placed .*: nobody averages", id="replicated"),
    ],
)
def test_rejects_reducers_that_would_be_wrong(wrap: Callable[[DeviceMesh, nn.Module], nn.Module], match: str) -> None:
    original = decoder()

    def run(mesh: DeviceMesh) -> None:
        wrap(mesh, copy.deepcopy(original))(IDS)

    from one_device import refusal

    for each in run_on_mesh({"dp": 2, "sp": 2}, refusal, run):
        assert each is not None
        message, kinds = each
        assert message.startswith("UlyssesPlan: gradients would be wrong.\n")
        assert re.search(match, message), message
        assert "all-to-all" not in kinds


def test_a_mesh_that_leaves_ranks_out_names_the_remedy_and_serves_inference() -> None:
    original = decoder()
    expected = original(IDS).detach()

    def run(mesh: DeviceMesh) -> None:
        misses_sp(mesh, copy.deepcopy(original))(IDS)

    from one_device import refusal

    (message, _), *_ = run_on_mesh({"dp": 2, "sp": 2}, refusal, run)  # type: ignore[misc]
    assert "Call fully_shard with the whole mesh (dp x sp), not with mesh['dp']." in message

    def infer(mesh: DeviceMesh) -> torch.Tensor:
        with torch.no_grad():
            return misses_sp(mesh, copy.deepcopy(original))(IDS)

    for logits in run_on_mesh({"dp": 2, "sp": 2}, infer):
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_rejects_sparse_gradients_at_the_end_of_the_backward() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
            self.blocks = nn.ModuleList([Block()])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](self.embed(ids))

    original = seeded(Sparse)

    def run(mesh: DeviceMesh) -> None:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        loss = loss_of(model(IDS))
        with pytest.raises(Exception, match=r"a gradient is sparse\. Use dense embeddings, or FSDP or DDP"):
            loss.backward()

    run_on_mesh({"sp": 2}, run)


# The parts


def test_a_tied_parameter_has_a_gradient_of_zeros() -> None:
    output, used, spare = numbers(3).requires_grad_(), nn.Parameter(numbers(2)), nn.Parameter(numbers(4))
    frozen = nn.Parameter(numbers(4), requires_grad=False)
    tied = tie(output * used.sum(), [spare, frozen])
    assert torch.equal(tied, output * used.sum())
    tied.sum().backward()
    assert spare.grad is not None
    assert not spare.grad.any()
    assert frozen.grad is None
    assert tie(output, []) is output
    assert tie(torch.arange(3), [spare]).grad_fn is None
    with torch.no_grad():
        assert tie(output, [spare]) is output


def test_what_torch_keeps_to_itself_is_where_it_was() -> None:
    """Fails first when a new torch moves what this library reads."""
    assert backward_id() == -1
    assert not in_backward()
    assert not in_reentrant_recompute()
    x = numbers(3).requires_grad_()
    seen = []
    x.register_hook(lambda gradient: seen.append(in_backward()))
    x.sum().backward()
    assert seen == [True]
    inside: list[bool] = []
    for reentrant in (False, True):
        doubled = checkpoint(
            lambda x: inside.append(in_reentrant_recompute()) or (2 * x).sin(), x, use_reentrant=reentrant
        )
        doubled.sum().backward()
    assert inside == [False, False, False, True]

    def run(mesh: DeviceMesh) -> list[bool]:
        inside = []

        class Looks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                inside.append(_active_ddp(self) is not None)
                return x * self.weight

        module = Looks()
        module(torch.ones(2))
        DistributedDataParallel(module)(torch.ones(2))
        sharded_linear = fully_shard(nn.Linear(2, 2), mesh=mesh)
        (group,) = sharded_linear._get_fsdp_state()._fsdp_param_groups
        inside.append([param._module_info.param_name for param in group.fsdp_params] == ["weight", "bias"])
        inside.append(group.gradient_divide_factor is None and group.mesh_info.mesh is not None)
        return inside

    assert run_on_mesh({"sp": 1}, run) == [[False, True, True, True]]


def test_the_check_itself_fails_when_nobody_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ulysses_dtensor.gradients.ReduceAtEnd.reduce", lambda self: None)
    original = decoder()
    expected = on_one_device(original, {"ids": IDS})
    runs = run_on_mesh(
        {"sp": 2}, lambda mesh: once(parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan()), {"ids": IDS})
    )
    with pytest.raises(AssertionError, match="gradient of"):
        assert_runs_equal(runs[0], expected)
    total = {name: gradient.clone() for name, gradient in runs[0].gradients.items() if gradient is not None}
    for name, gradient in total.items():  # and each rank holds P times its own tokens' part, as reducers expect it
        other = runs[1].gradients[name]
        assert other is not None
        assert_close((gradient + other) / 2, expected.gradients[name], name, 1e-9)  # type: ignore[arg-type]


def test_groups_of_a_world_with_replicas_are_the_right_ones() -> None:  # DeepSpeed#7672
    original = decoder()
    expected = [on_one_device(original, {"ids": ids_of(2, 9, seed=dp)}) for dp in range(2)]

    def run(mesh: DeviceMesh) -> Run:
        model = parallelize_module(copy.deepcopy(original), mesh["sp"], UlyssesPlan())
        return once(model, {"ids": ids_of(2, 9, seed=mesh.get_local_rank("dp"))})

    for rank, each in enumerate(run_on_mesh({"dp": 2, "sp": 2}, run)):
        assert_runs_equal(each, expected[rank // 2])
    assert not dist.is_initialized()
