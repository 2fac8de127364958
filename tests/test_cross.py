"""Attention to other tokens than the block's own: another sequence, whole or in shards, or others joined to its tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo import GlooPool
from hypothesis import given
from hypothesis import strategies as st
from model_zoo import HEAD_SIZE, HEADS, VOCABULARY, WIDTH, FeedForward, Norm, ids_of, loss_of, numbers, seeded
from one_device import Run, assert_equals_one_device, assert_runs_equal, on_one_device, refused
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ulysses_dtensor import UlyssesPlan, parallelize_module


def heads_of(x: torch.Tensor, heads: int = HEADS) -> torch.Tensor:
    """(B, S, H * D) -> (B, H, S, D)"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Attention(nn.Module):
    """From `x` to `memory`, or to itself; `kv_heads` divide HEADS."""

    def __init__(self, *, causal: bool = False, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, HEADS * HEAD_SIZE), nn.Linear(HEADS * HEAD_SIZE, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, kv_heads * HEAD_SIZE), nn.Linear(WIDTH, kv_heads * HEAD_SIZE)
        self.causal, self.kv_heads = causal, kv_heads

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        memory = x if memory is None else memory
        out = F.scaled_dot_product_attention(
            heads_of(self.q(x)),
            heads_of(self.k(memory), self.kv_heads),
            heads_of(self.v(memory), self.kv_heads),
            attn_mask=mask,
            is_causal=self.causal,
            enable_gqa=self.kv_heads != HEADS,
        )
        return self.out(out.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = Norm(), Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class DecoderBlock(nn.Module):
    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = Norm(), Norm(), Norm()
        self.attention, self.cross = Attention(causal=True), Attention(kv_heads=kv_heads)
        self.mlp = FeedForward()

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.cross(self.norm2(x), self.norm3(memory), mask)
        return x + self.mlp(x)


class Translator(nn.Module):
    """Encoder and decoder, each a stack of blocks; the memory is the encoder's, or plain embeddings."""

    def __init__(self, *, encoder: bool = True, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList([EncoderBlock(), EncoderBlock()] if encoder else [])
        self.decoder = nn.ModuleList([DecoderBlock(kv_heads), DecoderBlock(kv_heads)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        memory, x = self.embed(source), self.embed(target)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory, mask)
        return self.head(x)


lengths = st.integers(1, 19)


@given(
    source=lengths, target=lengths, ranks=st.integers(2, 4), encoder=st.booleans(), kv_heads=st.sampled_from([1, 2, 4])
)
def test_decoders_attend_to_a_memory_of_any_length(
    source: int, target: int, ranks: int, encoder: bool, kv_heads: int
) -> None:
    model = seeded(lambda: Translator(encoder=encoder, kv_heads=kv_heads))
    inputs = {"source": ids_of(2, source), "target": ids_of(2, target)}
    assert_equals_one_device(model, inputs, ranks)


@pytest.mark.parametrize("encoder", [True, False])
@pytest.mark.parametrize("shape", [(11, 7), (1, 7), (2, 1, 1, 7), (HEADS, 11, 7), (2, HEADS, 11, 7), (2, HEADS, 1, 1)])
def test_a_mask_between_two_sequences(shape: tuple[int, ...], encoder: bool) -> None:
    mask = numbers(*shape) > -1
    inputs = {"source": ids_of(2, 7), "target": ids_of(2, 11), "mask": mask}
    assert_equals_one_device(seeded(lambda: Translator(encoder=encoder)), inputs, 3)


class Joint(nn.Module):
    """Two streams in one attention, each with weights of its own; `order` is how the model joins them."""

    def __init__(self, order: str, *, last: bool = False) -> None:
        super().__init__()
        self.order, self.last = order, last
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * HEADS * HEAD_SIZE) for _ in range(2)])
        self.outs = nn.ModuleList([nn.Linear(HEADS * HEAD_SIZE, WIDTH) for _ in range(2)])
        self.mlps = nn.ModuleList([FeedForward(), FeedForward()])

    def forward(self, image: torch.Tensor, text: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        streams = (image, text)
        image_qkv, text_qkv = (
            qkv(norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            for qkv, norm, x in zip(self.qkv, self.norms, streams, strict=True)
        )
        joined = (text_qkv, image_qkv) if self.order == "text first" else (image_qkv, text_qkv)
        q, k, v = torch.cat(joined, dim=3)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        count = text.shape[1]
        of_image, of_text = (
            (out[:, count:], out[:, :count])
            if self.order == "text first"
            else (out[:, : out.shape[1] - count], out[:, out.shape[1] - count :])
        )
        image = image + self.outs[0](of_image)
        text = text + self.outs[1](of_text)
        return image + self.mlps[0](image), text + self.mlps[1](text)


class Painter(nn.Module):
    """Image and text through joint blocks; the text is used in the end, or not."""

    def __init__(self, order: str, *, text_used: bool = True, text_returned: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.text_used, self.text_returned = text_used, text_returned
        self.embed, self.patch = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Joint(order) for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, pixels: torch.Tensor, prompt: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        image, text = self.patch(pixels), self.embed(prompt)
        for block in self.blocks:
            image, text = block(image, text, mask)
        out = self.head(image)
        if self.text_returned:
            return out, text
        return out * text.mean(1, keepdim=True)[..., :1] if self.text_used else out


@given(
    image=st.integers(1, 19),
    ranks=st.integers(2, 4),
    order=st.sampled_from(["text first", "image first"]),
    text=st.integers(1, 9),
    use=st.sampled_from([{"text_used": False}, {"text_used": True}, {"text_returned": True}]),
    outputs=st.sampled_from(["replicate", "shard"]),
)
def test_text_and_image_joined_in_one_attention(
    image: int, text: int, ranks: int, order: str, use: dict[str, bool], outputs: Any
) -> None:
    model = seeded(lambda: Painter(order, **use))
    inputs = {"pixels": numbers(2, image, 3), "prompt": ids_of(2, text)}
    assert_equals_one_device(model, inputs, ranks, plan=lambda: UlyssesPlan(outputs=outputs))


def test_collectives_of_each_kind() -> None:
    """Two all-to-alls an attention and way, one all-gather to leave; a whole memory costs nothing, one in shards is moved."""
    ids = {"source": ids_of(2, 13), "target": ids_of(2, 9)}
    for encoder, attentions in ((True, 6), (False, 4)):
        run = assert_equals_one_device(seeded(lambda e=encoder: Translator(encoder=e)), ids, 3)  # type: ignore[misc]
        assert run.forward == ("all-reduce", *["all-to-all"] * 2 * attentions, "all-gather")
        assert run.backward == (*["all-to-all"] * 2 * attentions, "all-reduce", "all-reduce")
    model = seeded(lambda: Painter("text first", blocks=3))
    run = assert_equals_one_device(model, {"pixels": numbers(2, 13, 3), "prompt": ids_of(2, 4)}, 3)
    assert run.forward == ("all-reduce", *["all-to-all"] * 6, "all-gather")
    assert run.backward == (*["all-to-all"] * 6, "all-reduce", "all-reduce")


@pytest.mark.parametrize("order", ["text first", "image first"])
def test_a_mask_over_the_text_in_the_models_order(order: str) -> None:
    """diffusers#13756: 8 text and 4 image tokens, 2 ranks, a mask over the text."""
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    text = slice(0, 8) if order == "text first" else slice(4, 12)
    mask[..., text] = torch.arange(8) < 5
    inputs = {"pixels": numbers(2, 4, 3), "prompt": ids_of(2, 8), "mask": mask}
    assert_equals_one_device(seeded(lambda: Painter(order)), inputs, 2)


class Registers(nn.Module):
    """Learned keys and values in front of or behind the tokens' own."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * HEAD_SIZE), nn.Linear(HEADS * HEAD_SIZE, WIDTH)
        self.learned = nn.Parameter(torch.randn(2, 1, HEADS, 3, HEAD_SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        learned = self.learned.expand(-1, x.shape[0], -1, -1, -1)
        parts = [
            (mine, own) if self.where == "before" else (own, mine) for mine, own in zip(learned, (k, v), strict=True)
        ]
        k, v = (torch.cat(part, dim=2) for part in parts)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Latents(nn.Module):
    """Learned queries read the tokens, and the tokens read these."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.read, self.write = Attention(), Attention(kv_heads=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        latents = latents + self.read(latents, x)
        return x + self.write(x, latents)


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([block(), block()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


BLOCKS = {
    "registers before": lambda: Registers("before"),
    "registers after": lambda: Registers("after"),
    "latents": Latents,
}


@pytest.mark.parametrize("kind", BLOCKS)
@given(length=lengths, ranks=st.integers(2, 5))
def test_learned_tokens_in_attention(kind: str, length: int, ranks: int) -> None:
    assert_equals_one_device(seeded(lambda: Stack(BLOCKS[kind])), {"ids": ids_of(2, length)}, ranks)


def test_tensorrt_15303_query_and_key_lengths() -> None:
    """TRT-LLM#15303: 126 queries, 6300 keys; here in parallel, seen by its all-to-alls."""
    inputs = {"source": ids_of(1, 6300), "target": ids_of(1, 126)}
    run = assert_equals_one_device(seeded(lambda: Translator(encoder=False)), inputs, 2)
    assert run.forward.count("all-to-all") == 2 * 2 * 2


class Interleaved(nn.Module):
    """Joins other tokens in the middle of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * HEAD_SIZE), nn.Linear(HEADS * HEAD_SIZE, WIDTH)
        self.learned = nn.Parameter(torch.randn(1, 2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        joined = torch.cat((x[:, :half], self.learned.expand(x.shape[0], -1, -1), x[:, half:]), dim=1)
        k, v = (heads_of(y) for y in self.qkv(joined).chunk(3, -1)[1:])
        q = heads_of(self.qkv(x).chunk(3, -1)[0])
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_rejects_tokens_joined_among_its_own() -> None:
    model = seeded(lambda: Stack(Interleaved))

    def run(mesh: DeviceMesh) -> None:
        parallelize_module(model, mesh, UlyssesPlan())(ids_of(2, 9))

    assert "others stand among them" in refused(1, run)


def on_real_ranks(build: str, wrap: str) -> None:
    """Runs a model of this file on gloo ranks; gradients under whatever reduces them, blocks checkpointed or not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
    model, inputs = {
        "memory in shards": lambda: (seeded(Translator), {"source": ids_of(2, 13), "target": ids_of(2, 9)}),
        "whole memory": lambda: (
            seeded(lambda: Translator(encoder=False)),
            {"source": ids_of(2, 13), "target": ids_of(2, 9)},
        ),
        "joint": lambda: (
            seeded(lambda: Painter("text first", blocks=3)),
            {"pixels": numbers(2, 13, 3), "prompt": ids_of(2, 4)},
        ),
        "latents": lambda: (seeded(lambda: Stack(Latents)), {"ids": ids_of(2, 11)}),
    }[build]()
    reference = on_one_device(model, inputs)
    ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
    for stack in (m for m in ours.modules() if isinstance(m, nn.ModuleList)):
        for name, block in stack.named_children():
            if wrap == "fsdp and checkpoints" and type(block) in (Joint, Latents, DecoderBlock):
                setattr(stack, name, checkpoint_wrapper(block))
                fully_shard(block)
    if wrap != "nothing":
        fully_shard(ours)
    loss = loss_of(ours(**inputs))
    loss.backward()
    gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): g.full_tensor() if isinstance(g, DTensor) else g
        for name, g in ((name, p.grad) for name, p in ours.named_parameters())
    }
    assert_runs_equal(Run(loss.detach(), reference.outputs, gradients, {}), reference)


@pytest.mark.parametrize("build", ["memory in shards", "whole memory", "joint", "latents"])
@pytest.mark.parametrize("wrap", ["nothing", "fsdp", "fsdp and checkpoints"])
def test_real_ranks(gloo: GlooPool, build: str, wrap: str) -> None:
    gloo.run(3, on_real_ranks, build, wrap)
