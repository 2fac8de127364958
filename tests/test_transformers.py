"""Hugging Face Transformers: models with random weights on simulated ranks against one device, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ulysses_dtensor import PlanError, UlyssesPlan, bypass, count_collectives, parallelize_module
from ulysses_dtensor.sweep.judge import compare, inputs_of
from ulysses_dtensor.sweep.tiny import VOCABULARY, model_of
from ulysses_dtensor.testing import full_value, run_on_mesh

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own, of many kinds

IDS = torch.randint(3, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def llama(**options: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes, **options)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double()


def converted(model: nn.Module, mesh: DeviceMesh) -> Any:
    return parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())


def step(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {name: full_value(g) if isinstance(g, DTensor) else g for name, g in gradients.items()}


def assert_steps_equal(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """The library computes its losses in float32."""
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    assert expected[1].keys() <= found[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=tolerance * float(gradient.abs().max()))


# Families: plain, padded on either side, packed


@pytest.mark.parametrize(
    "family",
    "llama gpt2 gemma3_text falcon opt bert phi3 cohere2 qwen3 glm4 gpt_neox starcoder2 smollm3 ministral3".split(),
)
def test_a_family_in_float64(family: str) -> None:
    kind, detail, _ = compare(model_of(family, "sdpa", torch.float64), torch.float64, (2, 4))
    assert kind == "right", detail


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_family_in_float32(family: str) -> None:
    kind, detail, _ = compare(model_of(family, "sdpa", torch.float32), torch.float32, (2, 4))
    assert kind == "right", detail


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_family_with_eager_attention(family: str) -> None:
    dtype = torch.float32 if family == "gpt_oss" else torch.float64
    kind, detail, _ = compare(model_of(family, "eager", dtype), dtype, (2, 4))
    assert kind == "right", detail


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "zaya"])
def test_names_what_convolves_over_tokens(family: str) -> None:
    _, detail, _ = compare(model_of(family, "sdpa", torch.float32), torch.float32, (2,))
    part = {"bamba": "mamba (BambaMixer)", "falcon_h1": "mamba (FalconH1Mixer)", "zaya": "qkv_proj (ZayaCCAProjection)"}
    assert "these mix tokens outside attention" in detail
    assert part[family] in detail


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba", "minimax", "olmo_hybrid", "bloom"])
def test_rejects_what_mixes_tokens_outside_attention(family: str) -> None:
    model = model_of(family, "eager" if family in ("mamba", "bloom") else "sdpa", torch.float32)
    kind, detail, _ = compare(model, torch.float32, (2,))
    assert kind == "refused", detail


def test_the_comparison_itself_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ulysses_dtensor.gradients.ReduceAtEnd.reduce", lambda self: None)  # nobody averages
    kind, detail, _ = compare(llama(), torch.float64, (2,))
    assert kind == "wrong", detail


# Losses and logits


def test_nothing_of_the_vocabulary_is_gathered_beside_a_loss() -> None:
    model = llama()

    def run(mesh: DeviceMesh) -> tuple[list[str], Any]:
        ours = converted(model, mesh)
        with count_collectives() as count:
            out = ours(**BATCH)
        return count.kinds, (type(out.logits), tuple(out.logits.shape))

    for kinds, logits in run_on_mesh({"sp": 2}, run):
        assert "all-gather" not in kinds
        assert logits == (DTensor, (2, 13, VOCABULARY))


@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": torch.tensor(17)},
        {"logits_to_keep": 3, "labels": IDS[:, -3:]},
        {"labels": None, "shift_labels": None},
        {"position_ids": torch.arange(13)[None] + 2},
        {"inputs_embeds": torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)},
        {"attention_mask": torch.ones(2, 1, 13, 13, dtype=torch.bool).tril()},
    ],
    ids=["num_items", "logits_to_keep", "no labels", "positions", "embeddings", "4-D mask"],
)
def test_what_a_model_is_called_with(more: dict[str, Any]) -> None:
    model, batch = llama(), {**BATCH, **more}
    if "inputs_embeds" in more:
        del batch["input_ids"]

    def run(ours: Any) -> Any:
        out = ours(**{name: x for name, x in batch.items() if x is not None})
        loss = out.logits.square().mean() if out.loss is None else out.loss
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}

    expected = run(copy.deepcopy(model))
    for found in run_on_mesh({"sp": 3}, lambda mesh: run(converted(model, mesh))):
        assert_steps_equal(found, expected)


def test_hidden_states_are_whole() -> None:
    model = llama()
    expected = model(**BATCH, output_hidden_states=True).hidden_states

    def run(mesh: DeviceMesh) -> list[torch.Tensor]:
        return [x.detach() for x in converted(model, mesh)(**BATCH, output_hidden_states=True).hidden_states]

    for found in run_on_mesh({"sp": 2}, run):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_routers_loss_is_over_all_tokens(checkpointed: bool) -> None:
    model = model_of("mixtral", "sdpa", torch.float32)
    if checkpointed:
        model.gradient_checkpointing_enable()  # type: ignore[operator] - a method
    _, padded = list(inputs_of())[1]
    batch = {**padded, "output_router_logits": True}
    expected = step(copy.deepcopy(model), batch)
    without = step(copy.deepcopy(model), padded)
    assert float((expected[0] - without[0]).abs()) > 1e-3  # it counts
    for found in run_on_mesh({"sp": 2}, lambda mesh: step(converted(model, mesh), batch)):
        assert_steps_equal(found, expected, 1e-4)


# What people train with


@pytest.mark.parametrize("wrap", ["checkpointed", "FSDP2", "both"])
def test_under_checkpoints_and_fsdp(wrap: str) -> None:
    model = llama()
    if wrap != "FSDP2":
        model.gradient_checkpointing_enable()  # type: ignore[operator] - a method
    expected = step(copy.deepcopy(model), BATCH)

    def run(mesh: DeviceMesh) -> Any:
        ours = converted(model, mesh)
        if wrap != "checkpointed":
            for layer in ours.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(ours, mesh=mesh)
        return step(ours, BATCH)

    for found in run_on_mesh({"sp": 2}, run):
        assert_steps_equal(found, expected)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters(checkpointed: bool) -> None:
    model: Any = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))  # type: ignore[arg-type]
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    if checkpointed:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    expected = step(copy.deepcopy(model), BATCH)
    assert expected[1]
    for found in run_on_mesh({"sp": 2}, lambda mesh: step(converted(model, mesh), BATCH)):
        assert_steps_equal(found, expected)


def test_two_models_of_one_configuration_do_not_see_each_other() -> None:
    model = llama()
    expected = step(copy.deepcopy(model), BATCH)

    def run(mesh: DeviceMesh) -> Any:
        untouched = copy.deepcopy(model)
        ours = converted(model, mesh)
        return step(untouched, BATCH), step(ours, BATCH)

    for untouched, found in run_on_mesh({"sp": 2}, run):
        assert torch.equal(untouched[0], expected[0])
        assert_steps_equal(found, expected)


@torch.no_grad()
def test_generation_under_bypass() -> None:
    model = llama()
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(IDS, **options)  # type: ignore[operator] - a method

    def run(mesh: DeviceMesh) -> tuple[torch.Tensor, str]:
        ours = converted(model, mesh)
        with pytest.raises(PlanError, match="use_cache=True is not supported") as error:
            ours.generate(IDS, **options)
        with torch.no_grad(), bypass(ours):
            return ours.generate(IDS, **options), str(error.value)

    for found, said in run_on_mesh({"sp": 2}, run):
        assert torch.equal(found, expected)
        assert "bypass(model)" in said


# Refusals


def test_a_cache_that_nobody_asked_for_raises_when_it_is_used() -> None:
    model = llama()

    def run(mesh: DeviceMesh) -> None:
        cache = converted(model, mesh)(**BATCH).cache
        with pytest.raises(PlanError, match="no cache of keys and values"):
            cache.get_seq_length()

    run_on_mesh({"sp": 2}, run)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"output_attentions": True}, "output_attentions=True is not supported"),
        ({"use_cache": True}, "use_cache=True is not supported"),
        ({"position_ids": torch.arange(13)[None] % 7}, "Pass use_cache=False"),
    ],
    ids=["attentions", "cache", "packed beside a cache"],
)
def test_rejects_before_any_exchange(more: dict[str, Any], said: str) -> None:
    model = llama()

    def run(mesh: DeviceMesh) -> list[str]:
        ours = converted(model, mesh)
        with count_collectives() as count, pytest.raises(PlanError, match=said):
            ours(**BATCH, **more)
        return count.kinds

    for kinds in run_on_mesh({"sp": 2}, run):
        assert "all-to-all" not in kinds
