"""Attention functions of Transformers' kind: flash attention's documented signature, FlexAttention, and functions of one's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask, flex_attention_mask

from ulysses_dtensor import UlyssesPlan, parallelize_module
from ulysses_dtensor.sweep.tiny import VOCABULARY
from ulysses_dtensor.testing import run_on_mesh

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own, of many kinds

STAND_IN = "dense_stand_in"  # with "flash" in its name the library would ask for a kernel
DENSE_FLEX = "dense_flex"
IDS = torch.randint(3, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(0))


def flash_stand_in(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes densely what flash attention's function is documented to: a stand-in for the CUDA kernel, of its signature."""
    length = query.shape[2]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    at = torch.arange(length)
    seen = torch.ones(length, length, dtype=torch.bool)
    if module.is_causal if is_causal is None else is_causal:
        seen = seen.tril()
    if sliding_window is not None:
        seen = seen & (at[:, None] - at < sliding_window)
    seen = seen.expand(query.shape[0], 1, length, length)
    if attention_mask is not None:
        assert attention_mask.shape == (query.shape[0], length)
        seen = seen & attention_mask.bool()[:, None, None]
    elif cu_seq_lens_q is not None:
        assert int(cu_seq_lens_q[-1]) == length
        document = torch.bucketize(at, cu_seq_lens_q, right=True)
        seen = seen & (document[:, None] == document)
    elif position_ids is not None:
        assert position_ids.shape[-1] == length
        document = (position_ids == 0).cumsum(-1)
        seen = seen & (document[:, None, :, None] == document[:, None, None])
    scores = scores.masked_fill(~seen, -1e30)
    if s_aux is not None:
        assert s_aux.shape == (query.shape[1],)
        sink = s_aux[:, None, None].expand(*scores.shape[:-1], 1).to(scores.dtype)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def dense_flex(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockMask,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes densely what FlexAttention's function does, with a backward."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    seen = create_mask(attention_mask.mask_mod, *scores.shape, device="cpu")
    return (scores.masked_fill(~seen, -1e30).softmax(-1) @ value).transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    for name, function, mask in (
        (STAND_IN, flash_stand_in, flash_attention_mask),
        (DENSE_FLEX, dense_flex, flex_attention_mask),
    ):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)
    yield
    for name in (STAND_IN, DENSE_FLEX):
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


def built(kind: str, implementation: str, **options: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(
        kind,
        **{
            "hidden_size": 48,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "vocab_size": VOCABULARY,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            **options,
        },
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double()


def step(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def assert_equals_one_device(model: nn.Module, batch: dict[str, Any], ranks: int) -> None:
    expected = step(copy.deepcopy(model), batch)

    def run(mesh: DeviceMesh) -> Any:
        return step(parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan()), batch)

    for found in run_on_mesh({"sp": ranks}, run):
        assert expected.keys() <= found.keys()
        for name, x in expected.items():  # the library computes its losses in float32
            torch.testing.assert_close(found[name], x, rtol=0, atol=1e-5 * float(x.abs().max()))


FIRST = torch.arange(13) < 8
PACKED = torch.where(FIRST, torch.arange(13), torch.arange(13) - 8)[None]
BATCHES = {
    "plain": {"input_ids": IDS, "labels": IDS},
    "padded left": {
        "input_ids": IDS,
        "labels": IDS,
        "attention_mask": (torch.arange(13) >= torch.tensor([[0], [4]])).long(),
    },
    "padded right": {
        "input_ids": IDS,
        "labels": IDS,
        "attention_mask": (torch.arange(13) < torch.tensor([[9], [13]])).long(),
    },
    "packed by positions": {"input_ids": IDS[:1], "labels": IDS[:1], "position_ids": PACKED},
    "packed by lengths": {
        "input_ids": IDS[:1],
        "labels": IDS[:1],
        "position_ids": PACKED,
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 8, 13], dtype=torch.int32)),
        **dict.fromkeys(("max_length_q", "max_length_k"), 8),
    },
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("batch", BATCHES)
def test_flash_attentions_function(batch: str, ranks: int) -> None:
    assert_equals_one_device(built("llama", STAND_IN), BATCHES[batch], ranks)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 8}),
        ("gpt_oss", {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3", {}),
    ],
    ids=["windows and soft caps", "sinks", "norms of queries and keys"],
)
def test_flash_attentions_arguments(kind: str, options: dict[str, Any]) -> None:
    model = built(kind, STAND_IN, **options)
    if kind == "gpt_oss":
        model = model.float()
        for layer in model.model.layers:  # type: ignore[union-attr]
            nn.init.normal_(layer.self_attn.sinks)
    assert_equals_one_device(model, BATCHES["plain"], 3)


def test_the_packed_lengths_matter() -> None:
    one = built("llama", STAND_IN)
    loss = [step(copy.deepcopy(one), BATCHES[name])["loss"] for name in ("packed by positions", "packed by lengths")]
    torch.testing.assert_close(loss[0], loss[1])
    unpacked = {**BATCHES["packed by positions"], "position_ids": torch.arange(13)[None]}
    assert float((step(one, unpacked)["loss"] - loss[0]).abs()) > 1e-4


# FlexAttention: its own function forward only, as torch 2.13 gives it no backward on a CPU; gradients with a dense one


@torch.no_grad()
@pytest.mark.parametrize("batch", ["plain", "padded left", "padded right", "packed by positions"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", {}), ("gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 8})],
    ids=["llama", "windows and soft caps"],
)
def test_flex_attention(kind: str, options: dict[str, Any], batch: str) -> None:
    model = built(kind, "flex_attention", **options).float().eval()
    inputs = {**BATCHES[batch], "use_cache": False}
    expected = uncompiled(model, inputs)
    for found in run_on_mesh({"sp": 2}, flex_in_parallel, model, inputs):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch", ["plain", "padded left", "packed by positions"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_gradients_beside_block_masks(kind: str, batch: str) -> None:
    options = {"sliding_window": 5, "query_pre_attn_scalar": 8} if kind == "gemma2" else {}
    assert_equals_one_device(built(kind, DENSE_FLEX, **options), {**BATCHES[batch], "use_cache": False}, 4)


def uncompiled(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The library compiles FlexAttention by itself, which simulated ranks, threads of one process, cannot do at once."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = model(**inputs).logits
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def flex_in_parallel(mesh: DeviceMesh, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return uncompiled(parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan()), inputs)
