"""Documents packed into one sequence: attention between the exchanges sees all of them, and the document bounds whole."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gloo import GlooPool
from hypothesis import given
from hypothesis import strategies as st
from model_zoo import HEAD_SIZE, VOCABULARY, WIDTH, FeedForward, Norm, ids_of, rotate, seeded
from one_device import assert_close, assert_equals_one_device, on_one_device, refused_model
from test_gloo_models import full, mesh_of, wrapped
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from ulysses_dtensor import UlyssesAttention, UlyssesPlan, parallelize_module
from ulysses_dtensor.testing import run_on_mesh

HEADS, KV_HEADS = 4, 2
THD = "(sp t) h d -> t (sp h) d"


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> torch.Tensor:
    """Stands in for a varlen kernel: causal, grouped-query, (t, h, d), one document after the other."""
    out = torch.zeros_like(q)
    for start, stop in pairwise(cu_seqlens.tolist()):
        assert stop - start <= max_seqlen
        if stop > start:
            query, key, value = (x[start:stop].transpose(0, 1) for x in (q, k, v))
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            out[start:stop] = attended.transpose(0, 1)
    return out


class Varlen(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **bounds: Any) -> torch.Tensor:
        return varlen_attention(q, k, v, **bounds)


class PackedBlock(nn.Module):
    """Hidden states (t, d) or (1, t, d); positions start anew in each document."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.inner = Norm(), FeedForward(), Varlen()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
        self.out = nn.Linear(HEADS * HEAD_SIZE, WIDTH)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
    ) -> torch.Tensor:
        flat = self.norm(x).view(-1, WIDTH)
        q, k, v = self.qkv(flat).unflatten(-1, (-1, HEAD_SIZE)).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        angles = positions.view(-1, 1, 1) * 100.0 ** -torch.arange(0, 1, 2 / HEAD_SIZE, dtype=x.dtype).repeat(2)
        q, k = (rotate(y, angles.cos(), angles.sin()) for y in (q, k))
        out = self.inner(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        x = x + self.out(out.flatten(1)).view_as(x)
        return x + self.mlp(x)


class PackedDecoder(nn.Module):
    """Takes ids (t,) or (1, t) and the lengths of the documents in them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCABULARY, WIDTH), Norm(), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(PackedBlock() for _ in range(2))

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int()
        positions = torch.cat([torch.arange(int(length)) for length in lengths]).view_as(ids)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, positions, cu_seqlens, int(lengths.max()))
        return self.head(self.norm(x))


def plan_of() -> UlyssesPlan:
    return UlyssesPlan(attention={"layers.*.inner": UlyssesAttention(THD)})


def packed(lengths: list[int], batched: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = ids_of(1, sum(lengths), seed)
    return {"ids": ids if batched else ids[0], "lengths": torch.tensor(lengths)}


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    ranks=st.integers(1, 4),
    batched=st.booleans(),
)
def test_packed_documents_equal_one_device(lengths: list[int], ranks: int, batched: bool) -> None:
    assert_equals_one_device(seeded(PackedDecoder), packed(lengths, batched), ranks, plan=plan_of)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("lengths", "ranks"),
    [
        pytest.param([7], 2, id="TransformerEngine#1930, one document of length 7"),
        pytest.param([7, 7, 7], 2, id="TransformerEngine#1930, documents of length 7"),
        pytest.param([3, 5, 2, 8, 4], 2, id="axolotl#3608, 5 documents"),
        pytest.param([2, 2, 2, 2], 4, id="bounds where the ranks meet"),
        pytest.param([1, 14, 1], 4, id="a document longer than three shards"),
        pytest.param([0, 5, 0, 0, 6, 0], 3, id="empty documents"),
        pytest.param([1] * 9, 3, id="documents of one token"),
        pytest.param([3, 1, 1, 1], 2, id="as many bounds as there are tokens but one"),
        pytest.param([6, 1, 0, 0, 0, 0, 0], 2, id="more bounds than tokens"),
        pytest.param([4, 2, 1, 1, 1, 0, 0, 0], 2, id="as many bounds as tokens"),
    ],
)
def test_documents_that_failed_elsewhere(lengths: list[int], ranks: int, batched: bool) -> None:
    assert_equals_one_device(seeded(PackedDecoder), packed(lengths, batched), ranks, plan=plan_of)


def changed_outside(logits: Any, lengths: list[int]) -> list[int]:
    """Returns, for a change of each token, how many positions changed outside its document, or before it."""
    ids = packed(lengths)["ids"]
    before, counts = logits(ids), []
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for token in range(len(ids)):
        other = ids.clone()
        other[token] = (other[token] + 1) % VOCABULARY
        changed = (logits(other) != before).any(-1).nonzero().flatten().tolist()
        stop = next(stop for stop in bounds if stop > token)
        assert token in changed
        counts.append(sum(not token <= at < stop for at in changed))
    return counts


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_token_changes_nothing_outside_its_document(ranks: int) -> None:  # TRL#6843
    model, lengths = seeded(PackedDecoder), [3, 5, 2, 4]

    def run(mesh: DeviceMesh) -> list[int]:
        ours = parallelize_module(copy.deepcopy(model), mesh, plan_of())
        return changed_outside(lambda ids: ours(ids, torch.tensor(lengths)).detach(), lengths)

    assert run_on_mesh({"sp": ranks}, run) == [[0] * sum(lengths)] * ranks


def test_the_count_itself_sees_documents_run_together() -> None:
    model, lengths = seeded(PackedDecoder), [3, 5]
    assert any(changed_outside(lambda ids: model(ids, torch.tensor([8])).detach(), lengths))


# Bounds that are not of the whole sequence


class LocalBounds(PackedBlock):
    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
    ) -> torch.Tensor:
        tokens = x.numel() // WIDTH
        return super().forward(x, positions, torch.tensor([0, tokens]), tokens)


def test_rejects_bounds_made_from_the_tokens_at_hand() -> None:
    model = seeded(PackedDecoder)
    model.layers = seeded(lambda: nn.ModuleList(LocalBounds() for _ in range(2)))
    message = refused_model(model, packed([4, 5]), 2, plan_of)
    assert "layers.0 (LocalBounds): its attention was called with other arguments for" in message


# On real ranks


def trains(lengths: list[int], wrap: str) -> None:
    original, mesh = seeded(PackedDecoder), mesh_of((1, 2))
    model = wrapped(parallelize_module(copy.deepcopy(original), mesh["sp"], plan_of()), wrap, mesh, "layers")
    for step in range(2):
        inputs = tree_map(partial(torch.roll, shifts=step), packed(lengths, seed=step))
        expected = on_one_device(original, inputs)
        logits = model(**inputs)
        assert_close(logits.detach(), expected.outputs[0], "logits", 1e-9)
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(step), dtype=logits.dtype)
        (logits * weights).sum().backward()
        reference = copy.deepcopy(original)
        (reference(**inputs) * weights).sum().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert_close(full(p.grad), q.grad, f"gradient of {name}", 1e-9, floor=1e-4)
            p.grad = None


@pytest.mark.parametrize("wrap", ["FSDP2", "unwrapped"])
def test_packed_documents_train_as_on_one_device(gloo: GlooPool, wrap: str) -> None:
    gloo.run(2, trains, [3, 5, 2, 8, 4], wrap)
