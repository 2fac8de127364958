"""Models on real gloo ranks, with the tools people train with: loss, logits, gradients and weights equal one device's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo import GlooPool
from model_zoo import ZOO, LearnedPositions, RotaryDecoder, ids_of, seeded
from one_device import assert_close, refusal
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from ulysses_dtensor import UlyssesPlan, parallelize_module
from ulysses_dtensor.loss import cross_entropy

SIZES = [(1, 2), (2, 1), (2, 2), (1, 4)]
WRAPS = ["FSDP2", "HSDP", "DDP", "unwrapped"]
BLOCKS = {
    "rotary decoder": "layers",
    "experts": "layers",
    "checkpointed": "layers",
    "learned positions": "transformer.h",
}
IGNORED = -1


def batch_of(name: str, replica: int, seq_len: int = 13) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns a replica's inputs and labels; replicas, and the parts of a sequence, have unequal numbers of valid labels."""
    ids = ids_of(2, seq_len, seed=10 + replica)
    labels = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
    labels[0, : seq_len // 2 + replica] = IGNORED
    return ({"idx": ids, "targets": labels} if name == "learned positions" else {"ids": ids}), labels


def loss_and_logits(
    model: nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    result = model(**inputs)
    if isinstance(result, tuple):  # the model computes its loss
        return result[1], result[0]
    return cross_entropy(result, labels, ignore_index=IGNORED), result


def mesh_of(sizes: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "sp"))


def flat_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("world",))


def wrapped(model: nn.Module, wrap: str, mesh: DeviceMesh, blocks: str, **options: Any) -> nn.Module:
    if wrap in ("FSDP2", "HSDP"):
        over = mesh if wrap == "HSDP" else flat_mesh()
        for block in model.get_submodule(blocks):  # type: ignore[attr-defined] - a ModuleList
            fully_shard(block, mesh=over, **options)
        fully_shard(model, mesh=over, **options)
        return model
    return DistributedDataParallel(model) if wrap == "DDP" else model


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name.removeprefix("module."), p) for name, p in model.named_parameters()]


def trains_as_one_device(sizes: tuple[int, int], wrap: str, name: str, outputs: str, steps: int = 2) -> None:
    """Checks loss, logits, every gradient, the clipped norm and the weights of some steps against one device."""
    original, mesh = ZOO[name].model(), mesh_of(sizes)
    replicas = sizes[0]
    model = parallelize_module(copy.deepcopy(original), mesh["sp"], UlyssesPlan(outputs=outputs))  # type: ignore[arg-type]
    model = wrapped(model, wrap, mesh, BLOCKS[name])
    reference = copy.deepcopy(original)
    # An expert that no token chose has a gradient of zeros here and none there, which AdamW takes for different things.
    kind = torch.optim.SGD if name == "experts" else torch.optim.AdamW
    optimizers = [kind(each.parameters(), lr=0.05) for each in (model, reference)]
    for step in range(steps):
        inputs, labels = batch_of(name, mesh.get_local_rank("dp"), 13 - step)
        loss, logits = loss_and_logits(model, inputs, labels)
        loss.backward()
        if wrap == "unwrapped":  # over dp nobody reduces: what data parallelism would do
            for _, p in named(model):
                dist.all_reduce(p.grad, group=mesh.get_group("dp"))
                p.grad /= replicas  # type: ignore[operator] - it has one
        expected = [loss_and_logits(reference, *batch_of(name, dp, 13 - step)) for dp in range(replicas)]
        (sum(each for each, _ in expected) / replicas).backward()  # type: ignore[union-attr] - a tensor
        own_loss, own_logits = expected[mesh.get_local_rank("dp")]
        assert_close(loss.detach(), own_loss.detach(), "loss", 1e-9)
        assert_close(full(logits.detach()), own_logits.detach(), "logits", 1e-9)
        for (key, p), (_, q) in zip(named(model), named(reference), strict=True):
            assert p.grad is not None, f"{key} has no gradient"
            expected_gradient = torch.zeros_like(q) if q.grad is None else q.grad
            assert_close(full(p.grad), expected_gradient, f"gradient of {key}", 1e-9, floor=1e-4)
        norms = [clip_grad_norm_(each.parameters(), 0.1) for each in (model, reference)]
        assert_close(full(norms[0]), norms[1], "gradient norm", 1e-9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (key, p), (_, q) in zip(named(model), named(reference), strict=True):
        # AdamW divides by the gradient's size: rounding of those near zero grows.
        assert_close(full(p.detach()), q.detach(), f"weights of {key}", 1e-6)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_training_equals_one_device(gloo: GlooPool, sizes: tuple[int, int], wrap: str) -> None:
    # DeepSpeed#5555: the gradient norm at every (dp, sp); VeOmni#1059: DDP over a world that is one sequence group.
    gloo.run(sizes[0] * sizes[1], trains_as_one_device, sizes, wrap, "rotary decoder", "replicate")


@pytest.mark.parametrize(
    ("sizes", "wrap", "name", "outputs"),
    [
        ((2, 2), "FSDP2", "learned positions", "replicate"),
        ((1, 4), "DDP", "learned positions", "replicate"),
        ((1, 4), "unwrapped", "learned positions", "shard"),
        ((1, 4), "FSDP2", "experts", "shard"),
        ((2, 2), "DDP", "experts", "replicate"),
        ((1, 4), "unwrapped", "experts", "replicate"),
        ((2, 2), "FSDP2", "checkpointed", "shard"),
        ((1, 4), "HSDP", "checkpointed", "replicate"),
        ((1, 2), "DDP", "checkpointed", "replicate"),
        ((2, 2), "FSDP2", "rotary decoder", "shard"),
    ],
)
def test_training_of_other_kinds_equals_one_device(
    gloo: GlooPool, sizes: tuple[int, int], wrap: str, name: str, outputs: str
) -> None:
    # prime-rl#3195, Neuron_SP#81: checkpointing, FSDP2 and exchanges in one order; experts without a token on a rank.
    gloo.run(sizes[0] * sizes[1], trains_as_one_device, sizes, wrap, name, outputs)


def fails_without_the_plan(sizes: tuple[int, int]) -> None:
    original, mesh = ZOO["rotary decoder"].model(), mesh_of(sizes)
    model = wrapped(copy.deepcopy(original), "FSDP2", mesh, "layers")
    inputs, labels = batch_of("rotary decoder", 0)
    part = {"ids": inputs["ids"].tensor_split(sizes[1], dim=1)[mesh.get_local_rank("sp")]}
    loss, _ = loss_and_logits(model, part, labels.tensor_split(sizes[1], dim=1)[mesh.get_local_rank("sp")])
    loss.backward()
    expected, _ = loss_and_logits(original, inputs, labels)
    expected.backward()
    for (key, p), (_, q) in zip(named(model), named(original), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert_close(full(p.grad), q.grad, f"gradient of {key}", 1e-9)


def test_the_check_itself_fails_on_a_model_that_was_not_converted(gloo: GlooPool) -> None:
    with pytest.raises(AssertionError, match=r"gradient of .*: relative error"):
        gloo.run(2, fails_without_the_plan, (1, 2))


# Accumulation and weighing


def micro_batches_weigh_by_tokens(wrap: str) -> None:
    original, mesh = seeded(RotaryDecoder), mesh_of((1, 2))
    ids = [ids_of(1, 101, seed) for seed in (1, 2)]
    labels = [torch.where(torch.arange(101) < valid, each, IGNORED) for each, valid in zip(ids, (10, 90), strict=True)]
    labels = [each.view(1, 101) for each in labels]
    model = wrapped(
        parallelize_module(copy.deepcopy(original), mesh["sp"], UlyssesPlan(outputs="shard")), wrap, mesh, "layers"
    )
    total = sum(int((each != IGNORED).sum()) for each in labels)
    assert total == 100
    loss = torch.zeros(())
    for number, (inputs, targets) in enumerate(zip(ids, labels, strict=True)):
        if wrap == "FSDP2":
            model.set_requires_gradient_sync(number == 1)  # type: ignore[operator] - FSDP's
        share = cross_entropy(model(inputs), targets, ignore_index=IGNORED) * int((targets != IGNORED).sum()) / total
        share.backward()
        loss = loss + share.detach()
    logits = torch.cat([original(each)[0] for each in ids])
    expected = F.cross_entropy(logits, torch.cat([each[0] for each in labels]), ignore_index=IGNORED)
    expected.backward()
    assert_close(loss, expected.detach(), "loss", 1e-9)
    for (key, p), (_, q) in zip(named(model), named(original), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert_close(full(p.grad), q.grad, f"gradient of {key}", 1e-9)


@pytest.mark.parametrize("wrap", ["FSDP2", "unwrapped"])
def test_micro_batches_of_10_and_90_tokens_weigh_by_tokens(gloo: GlooPool, wrap: str) -> None:  # verl#2857
    gloo.run(2, micro_batches_weigh_by_tokens, wrap)


def one_rank_has_no_label(sizes: tuple[int, int], kept: int) -> None:
    """Labels on the first rank's tokens alone, or nowhere."""
    original, mesh = seeded(RotaryDecoder), mesh_of(sizes)
    ids = ids_of(2, 12)
    labels = ids.masked_fill(torch.arange(12) >= kept, IGNORED)
    model = wrapped(
        parallelize_module(copy.deepcopy(original), mesh["sp"], UlyssesPlan(outputs="shard")), "FSDP2", mesh, "layers"
    )
    loss, _ = loss_and_logits(model, {"ids": ids}, labels)
    loss.backward()
    expected = F.cross_entropy(original(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    expected.backward()
    assert_close(loss.detach(), expected.detach(), "loss", 1e-9)
    for (key, p), (_, q) in zip(named(model), named(original), strict=True):
        assert_close(full(p.grad), q.grad, f"gradient of {key}", 1e-9)  # type: ignore[arg-type] - both have one


@pytest.mark.parametrize("kept", [0, 2])
def test_labels_ignored_on_one_rank_and_on_all(gloo: GlooPool, kept: int) -> None:  # VeOmni#618
    gloo.run(4, one_rank_has_no_label, (1, 4), kept)


# Precision


def in_bfloat16(sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Returns loss, logits and gradients under FSDP2's bf16 policy; replicas have one batch."""
    mesh = mesh_of(sizes)
    model = seeded(RotaryDecoder).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrapped(parallelize_module(model, mesh["sp"], UlyssesPlan()), "FSDP2", mesh, "layers", mp_policy=policy)
    inputs, labels = batch_of("rotary decoder", 0, 16)
    logits = model(**inputs)
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    assert logits.dtype == torch.bfloat16
    return {"loss": loss.detach(), "logits": logits.detach().float()} | {
        key: full(p.grad) for key, p in named(model) if p.grad is not None
    }


def exactly() -> dict[str, torch.Tensor]:
    model = seeded(RotaryDecoder)
    inputs, labels = batch_of("rotary decoder", 0, 16)
    logits = model(**inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    gradients = {key: p.grad for key, p in named(model) if p.grad is not None}
    return {"loss": loss.detach(), "logits": logits.detach(), **gradients}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Returns the mean over all tensors of their relative distance."""
    return sum(float((a[name] - b[name]).norm() / b[name].norm()) for name in b) / len(b)


@pytest.mark.parametrize("sizes", [(1, 2), (1, 4), (2, 2)], ids=str)
def test_bfloat16_is_as_near_as_its_rounding(gloo: GlooPool, sizes: tuple[int, int]) -> None:
    world = sizes[0] * sizes[1]
    alone, exact = gloo.run(world, in_bfloat16, (world, 1))[0], exactly()
    for got in gloo.run(world, in_bfloat16, sizes):
        assert got.keys() == alone.keys() == exact.keys()
        for name, x in got.items():
            error = float((x - alone[name]).norm() / alone[name].norm())
            assert error <= 2**-6, f"{name}: {error:.1e}"  # four times the 2**-8 of one rounding
        assert distance(got, exact) <= 1.1 * distance(alone, exact)


# Random numbers


def drops_the_same_again() -> None:
    mesh = mesh_of((1, 2))
    original = seeded(lambda: LearnedPositions(dropout=0.3))
    inputs, _ = batch_of("learned positions", 0)
    seen = []
    for recompute in (False, True):
        model = parallelize_module(copy.deepcopy(original), mesh["sp"], UlyssesPlan())
        if recompute:
            for block in model.get_submodule("transformer.h"):  # type: ignore[attr-defined]
                block.forward = Recomputed(block.forward)
        torch.manual_seed(5)
        model(**inputs)[1].backward()
        seen.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in seen[0].items():
        assert gradient is not None
        assert torch.equal(gradient, seen[1][name]), name  # type: ignore[arg-type]


class Recomputed:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any) -> Any:
        return checkpoint(self.forward, *args, use_reentrant=False)


def test_dropout_comes_back_in_a_recompute(gloo: GlooPool) -> None:
    gloo.run(2, drops_the_same_again)


# Collectives


def counts(name: str) -> tuple[dict[str, int], dict[str, int]]:
    mesh = mesh_of((1, 4))
    model = parallelize_module(ZOO[name].model(), mesh["sp"], UlyssesPlan(outputs="shard"))
    inputs, labels = batch_of(name, 0)
    model(**inputs)  # agreement at first compares parameters too
    with CommDebugMode() as forth:
        loss, _ = loss_and_logits(model, inputs, labels)
    with CommDebugMode() as back:
        loss.backward()
    return tuple({str(kind): n for kind, n in mode.get_comm_counts().items()} for mode in (forth, back))  # type: ignore[return-value]


def test_two_exchanges_an_attention_each_way_and_no_gather(gloo: GlooPool) -> None:
    for forth, back in gloo.run(4, counts, "rotary decoder"):
        assert {kind: n for kind, n in forth.items() if "reduce" not in kind} == {"c10d.alltoall_base_": 4}
        assert {kind: n for kind, n in back.items() if "reduce" not in kind} == {"c10d.alltoall_base_": 4}
        assert sum(forth.values()) == 4 + 2  # agreement, and the loss
        assert sum(back.values()) == 4 + 2  # which gradients there are, and their sum


# Checkpoints of the weights


def saves(sizes: tuple[int, int], path: str) -> torch.Tensor:
    mesh = mesh_of(sizes)
    model = parallelize_module(seeded(RotaryDecoder), mesh["sp"], UlyssesPlan())
    model = wrapped(model, "FSDP2", mesh, "layers")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs, labels = batch_of("rotary decoder", 0)
    loss_and_logits(model, inputs, labels)[0].backward()
    optimizer.step()
    save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    return loss_and_logits(model, inputs, labels)[0].detach()


def loads(sizes: tuple[int, int], path: str) -> tuple[torch.Tensor, list[str]]:
    mesh = mesh_of(sizes)
    model = parallelize_module(seeded(RotaryDecoder), mesh["sp"], UlyssesPlan())
    model = wrapped(model, "FSDP2", mesh, "layers")
    state = {"model": get_model_state_dict(model)}
    load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    return loss_and_logits(model, *batch_of("rotary decoder", 0))[0].detach(), sorted(state["model"])


@pytest.mark.parametrize(("src", "dst"), [((2, 2), (1, 2)), ((1, 2), (1, 4)), ((2, 1), (1, 2))], ids=str)
def test_weights_saved_at_one_size_load_at_another(
    gloo: GlooPool, tmp_path: Path, src: tuple[int, int], dst: tuple[int, int]
) -> None:
    saved = gloo.run(src[0] * src[1], saves, src, str(tmp_path))[0]
    for loss, names in gloo.run(dst[0] * dst[1], loads, dst, str(tmp_path)):
        assert_close(loss, saved, "loss", 1e-9)
        assert names == sorted(seeded(RotaryDecoder).state_dict())


# Refusals


def refuses(how: str) -> tuple[str, list[str]] | None:
    mesh = mesh_of((2, 2))
    model = seeded(RotaryDecoder)

    def run(mesh: DeviceMesh) -> None:
        ours = parallelize_module(model, mesh["sp"], UlyssesPlan())
        inputs = ids_of(2, 9, seed=mesh.get_local_rank("dp"))
        if how == "dp alone":
            for block in ours.layers:  # type: ignore[union-attr]
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(ours, mesh=mesh["dp"])
        elif how == "DDP over dp":
            ours = DistributedDataParallel(ours, process_group=mesh.get_group("dp"))
        else:
            fully_shard(ours, mesh=mesh)
            ours(inputs).sum().backward()
        if how == "length":
            inputs = ids_of(2, 9 + mesh.get_local_rank("sp"))
        elif how == "batch":
            inputs = ids_of(2, 9, seed=dist.get_rank())
        elif how == "dtype":
            inputs = inputs.int() if mesh.get_local_rank("sp") else inputs
        ours(inputs)

    return refusal(mesh, run)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("dp alone", "Call fully_shard with the whole mesh (dp x sp), not with mesh['dp']."),
        ("DDP over dp", "Give it a process group of all dp x sp ranks."),
        ("length", "the inputs' structure: ranks [0] / [1] of the group differ"),
        ("batch", "(2, 9) torch.int64: ranks [0] / [1] of the group differ"),
        ("dtype", "the inputs' structure: ranks [0] / [1] of the group differ"),
    ],
)
def test_rejects_on_every_rank_before_an_exchange(gloo: GlooPool, how: str, match: str) -> None:
    # Open-Sora#721, DeepSpeed#7484, accelerate#3092: each rank its own batch, at the second forward here.
    for each in gloo.run(4, refuses, how):
        assert each is not None, "not refused"
        message, kinds = each
        assert match in message
        assert how in ("dp alone", "DDP over dp") or kinds[-2:] == ["all-reduce", "all-gather"]
        assert how not in ("dp alone", "DDP over dp") or "all-to-all" not in kinds


# Copies by pickle, where a mesh can travel


def pickled_whole() -> None:
    import io

    mesh = mesh_of((1, 2))
    model = parallelize_module(ZOO["whole table"].model(), mesh["sp"], UlyssesPlan())
    tokens = ids_of(2, 9)
    expected = model(tokens).detach()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twin = torch.load(buffer, weights_only=False)
    assert twin is not model
    assert torch.equal(twin(tokens).detach(), expected)


def test_a_converted_model_can_be_saved_whole(gloo: GlooPool) -> None:
    gloo.run(2, pickled_whole)


# Memory


def saved_elements(ranks: int) -> int:
    mesh = mesh_of((1, ranks))
    model = parallelize_module(ZOO["learned positions"].model(), mesh["sp"], UlyssesPlan(outputs="shard"))
    idx = ids_of(1, 48)
    saved = 0

    def pack(x: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += 0 if isinstance(x, nn.Parameter) else x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(idx)
    return saved


def test_activations_fall_with_the_ranks(gloo: GlooPool) -> None:  # verl#7476
    alone = gloo.run(1, saved_elements, 1)[0]
    for each in gloo.run(4, saved_elements, 4):
        assert each < 0.45 * alone  # embeddings and positions come before the region
