"""Mappings that blocks hand on: keys and values that one layer writes and later ones read."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_zoo import HEAD_SIZE, WIDTH, numbers, seeded
from one_device import assert_equals_one_device
from torch import nn
from torch.utils.checkpoint import checkpoint

from ulysses_dtensor import PlanError, UlyssesPlan, parallelize_module
from ulysses_dtensor.testing import run_on_mesh

SEQ_LEN, HEADS = 13, 3
INPUT = {"x": numbers(2, SEQ_LEN, WIDTH)}


class SharingBlock(nn.Module):
    """Writes its keys and values under a name, or reads another block's."""

    def __init__(self, writes: str = "", reads: str = "", clears: bool = False) -> None:
        super().__init__()
        self.writes, self.reads, self.clears = writes, reads, clears
        self.q, self.kv = nn.Linear(WIDTH, HEADS * HEAD_SIZE), nn.Linear(WIDTH, 2 * HEAD_SIZE)
        self.out = nn.Linear(HEADS * HEAD_SIZE, WIDTH)

    def forward(self, x: torch.Tensor, shared: Any) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
        k, v = shared[self.reads] if self.reads else (each[:, None] for each in self.kv(x).chunk(2, -1))
        if self.writes:
            shared[self.writes] = k, v
        if self.clears:
            shared.clear()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


class SharingModel(nn.Module):
    def __init__(self, *blocks: SharingBlock, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared: UserDict[str, Any] = UserDict()
        for at, layer in enumerate(self.layers):
            if self.checkpointed and at > 1:  # those that only read
                x = checkpoint(layer, x, shared, use_reentrant=False)  # type: ignore[assignment] - the layer's result
            else:
                x = layer(x, shared) if at % 2 else layer(x, shared=shared)
        return x


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_later_layers_read_what_earlier_ones_wrote(ranks: int, checkpointed: bool) -> None:
    def model() -> nn.Module:
        blocks = SharingBlock("a"), SharingBlock("b"), SharingBlock(reads="a"), SharingBlock(reads="b")
        return SharingModel(*blocks, checkpointed=checkpointed)

    assert_equals_one_device(seeded(model), INPUT, ranks)


def test_rejects_a_block_that_removes_what_others_wrote() -> None:
    model = seeded(lambda: SharingModel(SharingBlock("a"), SharingBlock(clears=True)))
    with pytest.raises(PlanError, match=r"'a'\] are removed"):
        run_on_mesh({"sp": 2}, lambda mesh: parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())(**INPUT))
