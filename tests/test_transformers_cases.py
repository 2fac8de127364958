"""What users of other libraries reported about Transformers under sequence parallelism, and masks of every kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from test_transformers import assert_steps_equal, converted, step
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ulysses_dtensor import bypass
from ulysses_dtensor.sweep.judge import compare
from ulysses_dtensor.sweep.tiny import VOCABULARY, Sizes, model_of
from ulysses_dtensor.testing import run_on_mesh

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own, of many kinds

library: Any = transformers  # whose configurations take any name
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}


def built(family: str, **options: Any) -> nn.Module:
    """Returns a family's causal language model in float64: 4 heads, 2 kv heads unless told otherwise."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(library, f"{family}Config")(**{**SIZES, **heads, "use_cache": False, **options})
    torch.manual_seed(0)
    return getattr(library, f"{family}ForCausalLM")(config).double()


def batch_of(tokens: int, rows: int = 1, **more: Any) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
    return {"input_ids": ids, "labels": ids, **more}


def restarting(*lengths: int) -> torch.Tensor:
    """Returns the position ids (1, S) of documents of these lengths."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def assert_equals_one_device(model: nn.Module, batch: dict[str, Any], ranks: int) -> None:
    expected = step(copy.deepcopy(model), batch)
    for found in run_on_mesh({"sp": ranks}, lambda mesh: step(converted(model, mesh), batch)):
        assert_steps_equal(found, expected)


# Packed documents


@pytest.mark.parametrize("lengths", [(5, 2, 7, 1, 6), (3, 3, 3, 3, 3), (1, 1, 9, 1, 5)])
def test_five_packed_documents(lengths: tuple[int, ...]) -> None:  # axolotl#3608
    assert_equals_one_device(built("Llama"), batch_of(sum(lengths), position_ids=restarting(*lengths)), 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_token_changes_nothing_outside_its_document(ranks: int) -> None:  # AReaL#1442, TRL#6843
    model, lengths, changed = built("Qwen2"), (6, 5, 8), 7
    batch = batch_of(sum(lengths), position_ids=restarting(*lengths))
    other = batch["input_ids"].clone()
    other[0, changed] = 3 if other[0, changed] != 3 else 4

    def run(mesh: DeviceMesh) -> list[torch.Tensor]:
        ours = converted(model, mesh)
        positions = batch["position_ids"]
        with torch.no_grad():
            return [ours(input_ids=ids, position_ids=positions).logits for ids in (batch["input_ids"], other)]

    for before, after in run_on_mesh({"sp": ranks}, run):
        differs = (before - after).abs().amax((0, 2)) > 0
        assert differs.nonzero().flatten().tolist() == list(range(changed, 11))


# Which labels count


@pytest.mark.parametrize("kept", [slice(0, 4), slice(12, 13), slice(0, 0)], ids=["first", "last", "none"])
def test_a_rank_without_a_token_that_counts(kept: slice) -> None:  # TorchSpec#93
    model, batch = built("Llama"), batch_of(13)
    labels = torch.full_like(batch["labels"], -100)
    labels[:, kept] = batch["labels"][:, kept]
    batch["labels"] = labels
    expected = step(copy.deepcopy(model), batch)
    assert bool(expected[0].isnan()) is (kept.stop == 0)  # a mean over nothing, on one device too
    for found in run_on_mesh({"sp": 4}, lambda mesh: step(converted(model, mesh), batch)):
        if kept.stop:
            assert_steps_equal(found, expected)
        else:
            assert found[0].isnan()


def test_a_validation_batch_of_another_length() -> None:  # DeepSpeed#7821
    model, other = built("Llama"), batch_of(7, 3)
    expected = copy.deepcopy(model).eval()(**other).loss

    def run(mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
        ours = converted(model, mesh)
        ours(**batch_of(13)).loss.backward()
        ours.eval()
        with torch.no_grad():
            found = ours(**other).loss
            with bypass(ours):
                return found, ours(**other).loss

    for found in run_on_mesh({"sp": 2}, run):
        for loss in found:
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)


# Head counts


@pytest.mark.parametrize("ranks", [2, 8])
def test_71_query_heads_and_one_kv_head(ranks: int) -> None:  # Falcon-7B
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=71 * 2,
        num_attention_heads=71,
        num_hidden_layers=1,
        multi_query=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    assert_equals_one_device(transformers.FalconForCausalLM(config).double(), batch_of(9), ranks)


@pytest.mark.parametrize("ranks", [3, 8])
def test_28_query_heads_and_4_kv_heads(ranks: int) -> None:  # Qwen2.5-7B
    model = built("Qwen2", hidden_size=56, num_attention_heads=28, num_key_value_heads=4, num_hidden_layers=1)
    assert_equals_one_device(model, batch_of(9), ranks)


# Masks


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("tokens", [16, 15, 5])
def test_a_window_as_long_as_a_shard(tokens: int, implementation: str) -> None:  # prime-rl#2418
    model = built("Mistral", sliding_window=4, attn_implementation=implementation)
    windowless = built("Mistral", sliding_window=None, attn_implementation=implementation)
    batch = batch_of(tokens)
    assert float((model(**batch).logits - windowless(**batch).logits).abs().max()) > 1e-3  # it counts
    assert_equals_one_device(model, batch, 4)


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_chunks(padded: bool) -> None:
    """Llama 4: layers that look at their chunk of the sequence alone, beside one that looks at all without positions."""
    model = model_of("llama4_text", "sdpa", torch.float32, Sizes(heads=4, layers=4))
    config: Any = model.config
    assert "chunked_attention" in config.layer_types
    assert config.attention_chunk_size == 5
    more = {"attention_mask": (torch.arange(13) >= torch.tensor([[0], [4]])).long()} if padded else {}
    batch = batch_of(13, 2, **more)
    expected = step(copy.deepcopy(model), batch)
    for found in run_on_mesh({"sp": 3}, lambda mesh: step(converted(model, mesh), batch)):
        assert_steps_equal(found, expected, 1e-3)


def test_a_prefix_that_sees_itself_both_ways() -> None:
    """A mask of four dims: the first tokens see each other, the others look back."""
    see = torch.ones(13, 13, dtype=torch.bool).tril()
    see[:5, :5] = True
    for mask in (see, torch.zeros(13, 13, dtype=torch.float64).masked_fill(~see, -1e9)):
        assert_equals_one_device(built("Llama"), batch_of(13, attention_mask=mask[None, None]), 3)


# Layers that differ


@pytest.mark.parametrize(
    ("family", "checkpointed"), [("gemma4_text", False), ("gemma4_text", True), ("gemma3n_text", True)]
)
def test_layers_that_read_the_keys_of_earlier_ones(family: str, checkpointed: bool) -> None:
    model: Any = model_of(family, "sdpa", torch.float32, Sizes(layers=4))
    assert model.config.num_kv_shared_layers == 2
    if checkpointed:
        model.gradient_checkpointing_enable()
    kind, detail, _ = compare(model, torch.float32, (2,))
    assert kind == "right", detail
