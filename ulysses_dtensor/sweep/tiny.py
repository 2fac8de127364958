"""Tiny configurations of any family: sizes by the names that configurations use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

VOCABULARY = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a tiny model. `heads` need not divide by anything but `kv_heads`, in families that have these."""

    layers: int = 2
    heads: int = 6
    kv_heads: int = 2
    head_size: int = 8
    window: int = 5
    seed: int = 0

    @property
    def width(self) -> int:
        """The hidden size."""
        return self.heads * self.head_size


DEFAULT = Sizes()


def _by_name(sizes: Sizes) -> dict[str, Any]:
    """Returns values by the names that configurations have for them."""
    return {
        **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), VOCABULARY),
        **dict.fromkeys(
            ("hidden_size", "n_embd", "d_model", "dim", "n_embed", "embedding_size", "word_embed_proj_dim"), sizes.width
        ),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "encoder_ffn_dim"), 64),
        **dict.fromkeys(("decoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 32),
        **dict.fromkeys(("expert_ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 32),
        **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "block_ff_dim"), 64),
        **dict.fromkeys(
            ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), sizes.layers
        ),
        **dict.fromkeys(
            ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), sizes.heads
        ),
        **dict.fromkeys(("encoder_attention_heads",), sizes.heads),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num"), sizes.kv_heads),
        **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "global_head_dim", "swa_head_dim"), sizes.head_size),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 64),
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
        **dict.fromkeys(
            ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k"), 2
        ),
        **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), sizes.head_size // 2),
        "v_head_dim": sizes.head_size,
        "qk_head_dim": sizes.head_size,
        "index_head_dim": sizes.head_size,
        "index_n_heads": 2,
        "index_topk": 32,
        "sliding_window": sizes.window,
        "attention_chunk_size": sizes.window,
        "rotary_dim": sizes.head_size // 2,
        "hidden_size_per_layer_input": 8,
        "hidden_size_global": sizes.width,
        "first_k_dense_replace": 1,
        "num_dense_layers": 1,
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "mamba_d_state": 8,
        "ssm_state_size": 8,
        "mamba_n_groups": 1,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_nextn_predict_layers": 0,
        "num_kv_shared_layers": max(0, sizes.layers - 2),
        "max_window_layers": sizes.layers,
    }


_FAMILIES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "num_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64, "use_cache": False},
    "falcon_h1": {"mamba_d_ssm": 96},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 12, "head_dim": 8, "n_groups": 1},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "xlm": {"emb_dim": 48},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides, at the usual sizes."""
_ZERO = "dropout _pdrop drop_rate jitter layerdrop layer_drop".split()
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def families() -> list[str]:
    """Returns the names of the library's causal-LM families."""
    return sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})


def config_class(family: str) -> type[PreTrainedConfig]:
    """Returns the configuration class of a family."""
    return next(config for config in MODEL_FOR_CAUSAL_LM_MAPPING if config.model_type == family)


def model_of(family: str, implementation: str, dtype: torch.dtype, sizes: Sizes = DEFAULT) -> nn.Module:
    """Returns a tiny model with random weights, of which a copy had a finite loss on one device.

    Raises:
        Exception: the last error, when none of the configurations tried can be built and run.
    """
    trouble: Exception | None = None
    kind = config_class(family)
    for changes in _changes(sizes):
        try:
            config = _shrunk(kind, sizes, {**changes, **_FAMILIES.get(family, {})})
            _check(_built(config, implementation, dtype, sizes))
            return _built(config, implementation, dtype, sizes)  # some keep a state after a call
        except Exception as error:
            trouble = error
    assert trouble is not None
    raise trouble


def _built(config: PreTrainedConfig, implementation: str, dtype: torch.dtype, sizes: Sizes) -> nn.Module:
    torch.manual_seed(sizes.seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return _with_random_weights(model.to(dtype), sizes.seed + 1).train()


def _check(model: nn.Module) -> None:
    ids = torch.randint(3, VOCABULARY, (1, 7))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    if not loss.isfinite():
        raise ValueError("its loss is not finite")


def _with_random_weights(model: nn.Module, seed: int) -> nn.Module:
    """Makes every weight matter: what starts as zero or one would hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.05 * noise.to(parameter.dtype))
    return model


def _changes(sizes: Sizes) -> tuple[dict[str, Any], ...]:
    """Returns what to change where the usual sizes do not fit a family, to be tried in turn."""
    return (
        {},
        {"num_key_value_heads": sizes.heads, "num_kv_heads": sizes.heads},
        {"head_dim": None},
        {"hidden_size": 64, "num_attention_heads": 4},
        {"num_hidden_layers": 4, "n_layer": 4},
    )


def _shrunk(kind: type[PreTrainedConfig], sizes: Sizes, changes: dict[str, Any]) -> PreTrainedConfig:
    default = kind()
    known = {**default.to_dict()}
    values = {
        name: value for name, value in {**_by_name(sizes), **changes}.items() if name in known and value is not None
    }
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        values["num_key_value_heads"] = values.get(
            "num_attention_heads", sizes.heads
        )  # latent attention has one for each head
    values |= {
        name: 0.0 for name, value in known.items() if isinstance(value, float) and any(part in name for part in _ZERO)
    }
    values |= {name: value for name, value in _TOKENS.items() if name in known}
    layers = next(
        (values[name] for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if name in values),
        sizes.layers,
    )
    for name, value in known.items():
        if isinstance(value, (list, tuple)) and "layer" in name and name not in values and len(value) > layers:
            kinds = list(dict.fromkeys(map(str, value)))
            values[name] = [next(each for each in value if str(each) == kinds[at % len(kinds)]) for at in range(layers)]
    for name in getattr(kind, "sub_configs", {}):
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            values[name] = _shrunk(type(part), sizes, changes)
    return kind(**values)
