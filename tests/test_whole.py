"""Parts of a model that every rank runs whole: a vision tower whose windows are no sequence, beside a long text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_zoo import HEAD_SIZE, WIDTH, numbers, seeded
from one_device import assert_equals_one_device, refused_model
from torch import nn

from ulysses_dtensor import PlanError, UlyssesPlan, explain

INPUT = {"text": numbers(2, 13, WIDTH), "image": numbers(2, 12, WIDTH)}


class Block(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.qkv, self.out = nn.Linear(WIDTH, 9 * HEAD_SIZE), nn.Linear(3 * HEAD_SIZE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (9, HEAD_SIZE)).transpose(1, 2).chunk(3, 1)
        if self.window is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            parts = zip(*(each.split(self.window, 2) for each in (q, k, v)), strict=True)
            out = torch.cat([F.scaled_dot_product_attention(*each) for each in parts], 2)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Tower(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(window) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Reader(nn.Module):
    """A text in which the image's tokens stand for some: `after` reads the text's hidden state, whole."""

    def __init__(self, after: bool = False) -> None:
        super().__init__()
        self.visual, self.text = Tower(4), Tower(None)
        self.after = Tower(4) if after else None

    def forward(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        seen = self.visual(image)[:, :3]
        text = torch.cat((text[:, :2], seen, text[:, 5:]), 1)
        text = self.text(text)
        return text if self.after is None else self.after(text)


def plan(*whole: str) -> Callable[[], UlyssesPlan]:
    return lambda: UlyssesPlan(whole=whole)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("whole", ["visual", "visual.blocks", "vis*"])
def test_a_tower_runs_whole_on_every_rank(whole: str, ranks: int) -> None:
    assert_equals_one_device(seeded(Reader), INPUT, ranks, plan=plan(whole))


def test_what_follows_the_blocks_may_run_whole_too() -> None:
    assert_equals_one_device(seeded(lambda: Reader(after=True)), INPUT, 2, plan=plan("visual", "after"))


def test_a_tower_that_cannot_be_cut_is_refused_with_what_to_write() -> None:
    message = refused_model(seeded(Reader), INPUT)
    assert "visual.blocks.0 (Block)" in message
    assert "If visual need not be cut, have every rank run it whole: whole=('visual',)." in message


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        (("vision",), "whole='vision' matches no module."),
        (("visual", "text"), "whole=('visual', 'text') leaves no attention to convert."),
        (("text.blocks.0",), "whole names text.blocks.0, which lies in a stack of blocks that are converted."),
        (("text.blocks.0.qkv",), "whole names text.blocks.0.qkv, which lies in a stack"),
    ],
)
def test_rejects_what_cannot_be_whole(whole: tuple[str, ...], said: str) -> None:
    assert said in refused_model(seeded(Reader), INPUT, 2, plan(*whole))


def test_rejects_a_text_for_names() -> None:
    with pytest.raises(PlanError, match="is a text, not a sequence of names"):
        UlyssesPlan(whole="visual")


def test_explain_says_what_runs_whole() -> None:
    model: Any = seeded(Reader)
    assert "every rank runs all of it" in str(
        explain(model, {"sp": 2}, UlyssesPlan(whole=("visual",)), tuple(INPUT.values()))
    )
