"""Hugging Face Transformers on real gloo ranks: FSDP2 by layer, checkpoints, compiled layers, generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from gloo import GlooPool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ulysses_dtensor import UlyssesPlan, bypass, parallelize_module

WORDS = 64
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": WORDS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
library: Any = transformers  # whose configurations take any name


def built(family: str, **options: Any) -> Any:
    """Returns a family's causal language model in float64. Gemma 2 chooses its own eager attention, for its soft caps."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": WORDS} if family == "GPT2" else {**SIZES, **HEADS}
    dropouts = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if family == "GPT2" else {}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(library, f"{family}Config")(**{**sizes, **dropouts, **tokens, **options})
    torch.manual_seed(0)
    return getattr(library, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).double()


def layers_of(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def ids_of(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, WORDS, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def sharded(model: Any, mesh: DeviceMesh) -> Any:
    """Returns the model under FSDP2 by layer, over all ranks."""
    over = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("world",)) if mesh.ndim > 1 else mesh
    for layer in layers_of(model):
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


def worst_gradient(model: nn.Module, reference: nn.Module) -> float:
    """Returns the largest difference, relative to the largest of each parameter, and clears both."""
    worst = 0.0
    expected = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        gradient, right = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad, expected[name].grad
        assert right is not None, name
        worst = max(worst, float((gradient - right).abs().max() / right.abs().max()))
    model.zero_grad()
    reference.zero_grad()
    return worst


def trained(family: str, dp: int, checkpointed: bool, compiled: bool, wrapped: bool) -> list[float]:
    """Returns the errors of losses and gradients at several lengths; replicas have samples of their own."""
    sp = dist.get_world_size() // dp
    mesh = init_device_mesh("cpu", (dp, sp), mesh_dim_names=("dp", "sp"))
    model = built(family, use_cache=False)
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh["sp"], UlyssesPlan())
    if checkpointed:
        model.gradient_checkpointing_enable()
    lengths = [13] if compiled else [13, 12]
    if compiled:
        for tokens in lengths:  # the first forward of a kind is eager: it proves that tokens stay apart
            model(input_ids=ids_of(2, tokens), labels=ids_of(2, tokens))
        for layer in layers_of(model):
            layer.compile(fullgraph=not checkpointed, dynamic=False, backend="aot_eager")
    if wrapped:
        sharded(model, mesh)
    errors = []
    for seed, tokens in enumerate((*lengths, lengths[0])):
        own = [ids_of(2, tokens, 10 * seed + replica) for replica in range(dp)]
        loss = model(input_ids=own[mesh.get_local_rank("dp")], labels=own[mesh.get_local_rank("dp")]).loss
        loss.backward()
        each = [reference(input_ids=ids, labels=ids).loss for ids in own]
        torch.stack(each).mean().backward()
        right = each[mesh.get_local_rank("dp")]
        errors += [float((loss - right).abs() / right), worst_gradient(model, reference)]
    return errors


@pytest.mark.parametrize(
    ("family", "ranks", "dp", "checkpointed", "compiled", "wrapped"),
    [
        pytest.param("Llama", 4, 2, True, False, True, id="checkpoints under FSDP2 on 2 x 2"),
        pytest.param("Llama", 2, 1, False, True, False, id="compiled layers"),
        pytest.param("Gemma2", 2, 1, False, True, False, id="compiled eager attention"),
        pytest.param("GPT2", 2, 1, False, True, True, id="compiled layers under FSDP2"),
        pytest.param("Qwen3", 2, 1, True, True, True, id="compiled layers in checkpoints under FSDP2"),
    ],
)
def test_training(
    gloo: GlooPool, family: str, ranks: int, dp: int, checkpointed: bool, compiled: bool, wrapped: bool
) -> None:
    for errors in gloo.run(ranks, trained, family, dp, checkpointed, compiled, wrapped, timeout=240):
        assert max(errors) < 1e-5  # the library computes losses, norms and rotary tables in float32


def generated() -> tuple[list[list[int]], list[list[int]]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
    model, prompt = built("Llama"), ids_of(2, 5)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = copy.deepcopy(model).generate(prompt, **options)
    parallelize_module(model, mesh, UlyssesPlan())
    sharded(model, mesh)
    model(input_ids=ids_of(2, 9), labels=ids_of(2, 9)).loss.backward()
    with torch.no_grad(), bypass(model):
        found = model.generate(prompt, **options)
    return found.tolist(), expected.tolist()


def test_generation_beside_fsdp(gloo: GlooPool) -> None:
    for found, expected in gloo.run(2, generated):
        assert found == expected
