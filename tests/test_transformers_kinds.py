"""Models of Transformers beside causal language models: encoders, their heads, encoder-decoders, vision and language."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ulysses_dtensor import PlanError, UlyssesPlan, parallelize_module
from ulysses_dtensor.testing import run_on_mesh

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own, of many kinds

library: Any = transformers  # whose configurations take any name
WORDS, LENGTH, IMAGE = 64, 13, 5
IDS = torch.randint(10, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])).long()
PADDED = {"input_ids": IDS, "attention_mask": MASK}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6}
TEXT = {**SIZES, "num_key_value_heads": 2, "vocab_size": WORDS, **TOKENS}
SEQ2SEQ = {
    "d_model": 48,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 6 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    "vocab_size": WORDS,
    "decoder_start_token_id": 2,
    **TOKENS,
}


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def without_dropout(config: Any) -> Any:
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config


@dataclass(frozen=True)
class Kind:
    """A model's class and configuration, and a call."""

    model: Any
    config: Callable[[], Any]
    batch: dict[str, Any]

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.model(without_dropout(self.config())).double().train()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
        return model


def bert() -> Any:
    return library.BertConfig(**SIZES, vocab_size=WORDS, num_labels=3)


def llama() -> Any:
    return library.LlamaConfig(**TEXT, num_labels=3, classifier_dropout=0.0)


def modern_bert() -> Any:
    special = {**TOKENS, "cls_token_id": 1, "sep_token_id": 2}
    return library.ModernBertConfig(
        **SIZES, vocab_size=WORDS, global_attn_every_n_layers=2, local_attention=4, **special
    )


def vision() -> Any:
    return library.ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=3)


def whisper() -> Any:
    sizes = {"max_target_positions": 32, "max_source_positions": 16, "num_mel_bins": 8}
    return library.WhisperConfig(**SEQ2SEQ, **sizes, suppress_tokens=None, begin_suppress_tokens=None)


def t5() -> Any:
    sizes = {"d_model": 48, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 6, "vocab_size": WORDS}
    return library.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)


def gemma3() -> Any:
    text = {**TEXT, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}
    return library.Gemma3Config(
        text_config={**text, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={**SIZES, "hidden_size": 32, "num_attention_heads": 4, "image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=7,
        eoi_token_index=8,
        **TOKENS,
    )


def qwen2_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    sizes = {"depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 4, "patch_size": 4}
    special = {"image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    return library.Qwen2VLConfig(
        vision_config=sizes, text_config={**TEXT, "rope_parameters": rope}, **special, **TOKENS
    )


def with_image() -> dict[str, Any]:
    """Four tokens of an image in each text of 15."""
    ids = torch.randint(10, WORDS, (2, 15), generator=torch.Generator().manual_seed(2))
    ids[:, 2], ids[:, 3:7], ids[:, 7] = 7, IMAGE, 8
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100)}


SEEN = with_image()
SAID = IDS[:, :7].contiguous()
PIXELS = {"pixel_values": numbers(32, 96), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
ONE_OF_THREE = torch.tensor([0, 2])
KINDS = {
    "masked words": Kind(library.BertForMaskedLM, bert, {**PADDED, "labels": IDS}),
    "classes of tokens": Kind(library.BertForTokenClassification, bert, {**PADDED, "labels": IDS % 3}),
    "class of a text": Kind(library.BertForSequenceClassification, bert, {**PADDED, "labels": ONE_OF_THREE}),
    "a span": Kind(
        library.BertForQuestionAnswering,
        lambda: library.BertConfig(**SIZES, vocab_size=WORDS),
        {**PADDED, "start_positions": torch.tensor([1, 8]), "end_positions": torch.tensor([3, 8])},
    ),
    "decoder, classes of tokens": Kind(library.LlamaForTokenClassification, llama, {**PADDED, "labels": IDS % 3}),
    "decoder, class of a text": Kind(library.LlamaForSequenceClassification, llama, {**PADDED, "labels": ONE_OF_THREE}),
    "local and global": Kind(library.ModernBertForMaskedLM, modern_bert, {**PADDED, "labels": IDS}),
    "vision": Kind(
        library.ViTForImageClassification, vision, {"pixel_values": numbers(2, 3, 16, 16), "labels": ONE_OF_THREE}
    ),
    "encoder and decoder": Kind(
        library.BartForConditionalGeneration,
        lambda: library.BartConfig(**SEQ2SEQ, max_position_embeddings=64, forced_eos_token_id=2),
        {**PADDED, "labels": SAID},
    ),
    "speech": Kind(
        library.WhisperForConditionalGeneration, whisper, {"input_features": numbers(2, 8, 32), "labels": SAID}
    ),
    "prefix of an image": Kind(
        library.Gemma3ForConditionalGeneration,
        gemma3,
        {**SEEN, "pixel_values": numbers(2, 3, 16, 16), "token_type_ids": (SEEN["input_ids"] == IMAGE).long()},
    ),
    "positions of three dims": Kind(library.Qwen2VLForConditionalGeneration, qwen2_vl, {**PADDED, "labels": IDS}),
}


def step(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def in_parallel(mesh: DeviceMesh, model: nn.Module, batch: dict[str, Any], plan: Callable[[], UlyssesPlan]) -> Any:
    return step(parallelize_module(copy.deepcopy(model), mesh, plan()), batch)


def assert_equals_one_device(kind: Kind, ranks: int, plan: Callable[[], UlyssesPlan] = UlyssesPlan) -> None:
    model = kind.build()
    expected = step(copy.deepcopy(model), kind.batch)
    largest = max(float(x.abs().max()) for x in expected.values())
    for found in run_on_mesh({"sp": ranks}, in_parallel, model, kind.batch, plan):
        assert expected.keys() <= found.keys()
        for name, x in expected.items():  # the library computes some losses and norms in float32
            torch.testing.assert_close(
                found[name],
                x,
                rtol=0,
                atol=1e-5 * max(float(x.abs().max()), 1e-4 * largest),
                msg=lambda said, name=name: f"{name}: {said}",
            )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", KINDS)
def test_a_model_equals_one_device(name: str, ranks: int) -> None:
    assert_equals_one_device(KINDS[name], ranks)


def test_a_vision_tower_of_windows_runs_whole() -> None:
    batch = {**SEEN, **PIXELS, "mm_token_type_ids": (SEEN["input_ids"] == IMAGE).int()}
    kind = Kind(library.Qwen2VLForConditionalGeneration, qwen2_vl, batch)
    with pytest.raises(PlanError, match=r"whole=\('model.visual',\)"):
        assert_equals_one_device(kind, 2)
    assert_equals_one_device(kind, 2, lambda: UlyssesPlan(whole=("model.visual",)))


def test_rejects_biases_of_positions_counted_inside() -> None:
    kind = Kind(library.T5ForConditionalGeneration, t5, {**PADDED, "labels": SAID})
    with pytest.raises(PlanError, match="positions counted at the tokens at hand") as error:
        assert_equals_one_device(kind, 2)
    assert "encoder.block.0.layer.0.SelfAttention (T5Attention)" in str(error.value)
