"""What a block may do with its tokens: everything that keeps them apart is right, everything else is refused.

Each model's blocks do one thing of their own. A refusal comes from every rank, before the first exchange.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_zoo import (
    HEAD_SIZE,
    HEADS,
    LONGEST,
    VOCABULARY,
    WIDTH,
    ZOO,
    Block,
    FeedForward,
    Norm,
    SelfAttention,
    ids_of,
    numbers,
    seeded,
)
from one_device import assert_equals_one_device, refused_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ulysses_dtensor import PlanError, UlyssesPlan, parallelize_module
from ulysses_dtensor.region import region_of
from ulysses_dtensor.testing import run_on_mesh
from ulysses_dtensor.unseen import without_dispatch_modes

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Doing(Block):
    """A block that does something to its hidden state before it attends; modules it needs are made for it."""

    def __init__(self, do: Forward, make: Callable[[], nn.Module] | None) -> None:
        super().__init__()
        self.do = do
        self.part = None if make is None else make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override] - fewer arguments
        return super().forward(self.do(self, x))


class Model(nn.Module):
    """An embedding, blocks, a head; `between` calls the blocks where a plain chain will not do."""

    def __init__(
        self, block: Callable[[], nn.Module], between: Callable[[nn.Module, torch.Tensor], Any] | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.between = between

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        if self.between is not None:
            return self.between(self, x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def doing(do: Forward, make: Callable[[], nn.Module] | None = None) -> nn.Module:
    return seeded(lambda: Model(lambda: Doing(do, make)))


def refused(model: nn.Module, seq_len: int = 15) -> str:
    return refused_model(model, {"ids": ids_of(2, seq_len)})


# What mixes


def linear_attention(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    keys = F.elu(x) + 1
    return x + keys @ (keys.transpose(1, 2) @ x) / 99


def by_hand(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    scores = (x @ x.transpose(1, 2)).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
    return x + scores.softmax(-1) @ x


def expert_choice(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten(0, 1)
    rows = flat[:, 0].topk(max(1, len(flat) // 2)).indices
    return x + torch.zeros_like(flat).index_add(0, rows, flat[rows]).view_as(x)


def capacity(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten(0, 1)
    chosen = (flat[:, 0] > 0).long()
    place = F.one_hot(chosen, 2).cumsum(0)[torch.arange(len(flat)), chosen]
    return x + (flat * (place <= max(1, len(flat) // 3))[:, None]).view_as(x)


def gru(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + self.part(x)[0]  # type: ignore[operator, misc] - a module


def conv(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + self.part(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[operator, misc]


def on_flat(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.part(x.flatten(0, 1)).view_as(x)  # type: ignore[operator, misc]


def positions(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 9


def local_mask(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q = x.unflatten(-1, (HEADS, HEAD_SIZE)).transpose(1, 2)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return x + F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)


def causal_when_long(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q = x.unflatten(-1, (HEADS, HEAD_SIZE)).transpose(1, 2)
    return x + F.scaled_dot_product_attention(q, q, q, is_causal=q.shape[2] > 1).transpose(1, 2).flatten(2)


def scaled_by_length(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q = x.unflatten(-1, (HEADS, HEAD_SIZE)).transpose(1, 2)
    return x + F.scaled_dot_product_attention(q, q, q, scale=1 / q.shape[2]).transpose(1, 2).flatten(2)


class Running(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(dim=(0, 1)))
        return x


MIXED = r"it mixes tokens outside attention"
MIXING = {
    "cumsum": (lambda self, x: x.cumsum(1) / 9, None, MIXED),
    "roll": (lambda self, x: x + x.roll(1, dims=1), None, MIXED),
    "shift": (lambda self, x: x + F.pad(x, (0, 0, 1, 0))[:, :-1], None, MIXED),
    "difference": (lambda self, x: x - torch.cat((x[:, :1], x[:, :-1]), dim=1), None, MIXED),
    "sort": (lambda self, x: x.sort(dim=1).values, None, MIXED),
    "flip": (lambda self, x: x.flip(1), None, MIXED),
    "softmax over tokens": (lambda self, x: x * x.softmax(dim=1), None, MIXED),
    "mean over tokens": (lambda self, x: x + x.mean(dim=1, keepdim=True), None, MIXED),
    "largest of the tokens": (lambda self, x: x - x.amax(dim=1, keepdim=True), None, MIXED),
    "norm over tokens": (lambda self, x: x / x.norm(dim=1, keepdim=True), None, MIXED),
    "norm of the whole": (lambda self, x: x / x.norm(), None, MIXED),
    "instance norm": (lambda self, x: F.instance_norm(x.transpose(1, 2)).transpose(1, 2), None, MIXED),
    "group norm": (lambda self, x: F.group_norm(x.transpose(1, 2), 4).transpose(1, 2), None, MIXED),
    "batch norm in training": (on_flat, lambda: nn.BatchNorm1d(WIDTH), "it writes the buffer|" + MIXED),
    "batch norm without statistics": (
        on_flat,
        lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
        "it failed on 1 tokens|" + MIXED,
    ),
    "convolution": (conv, lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1), MIXED),
    "causal convolution of each channel": (
        lambda self, x: x + self.part(F.pad(x, (0, 0, 3, 0)).transpose(1, 2)).transpose(1, 2),
        lambda: nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH),
        MIXED,
    ),
    "pooling": (lambda self, x: x + F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2), None, MIXED),
    "recurrence": (gru, lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), MIXED),
    "linear attention": (linear_attention, None, MIXED),
    "attention by hand": (by_hand, None, MIXED),
    "fourier transform": (lambda self, x: x + torch.fft.fft2(x, dim=(1, 2)).real / 9, None, MIXED),
    "expert choice": (expert_choice, None, MIXED),
    "capacity": (capacity, None, MIXED),
    "positions from zero": (positions, None, "counts positions from zero"),
    "division by the length": (lambda self, x: x + 1.0 / x.shape[1], None, MIXED),
    "mask of the local length": (
        local_mask,
        None,
        r"its attention mask \(11, 11\) is made from the tokens at hand \(11\)",
    ),
    "causal only when long": (
        causal_when_long,
        None,
        "its attention was called with other arguments for a single token",
    ),
    "scale of the local length": (scaled_by_length, None, "its attention was called with other arguments"),
    "running statistic": (
        lambda self, x: self.part(x),
        Running,
        "it writes the buffer 'part.mean' from the tokens at hand",
    ),
    "conv so small that rounding hides it": (
        lambda self, x: x + 1e-6 * self.part(x.transpose(1, 2)).transpose(1, 2),
        lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
        MIXED,
    ),
    "second half on the first": (lambda self, x: x + x[:, : x.shape[1] // 2].sum(1, keepdim=True), None, MIXED),
    "last token": (lambda self, x: x + x[:, -1:], None, MIXED),
    "first token": (lambda self, x: x + x[:, :1], None, MIXED),
    "covariance": (lambda self, x: x @ (x.transpose(1, 2) @ x) / 99, None, MIXED),
    "median": (lambda self, x: x - x.median(dim=1, keepdim=True).values, None, MIXED),
    "quantization by the largest": (
        lambda self, x: (x / x.abs().amax() * 127).round() * x.abs().amax() / 127,
        None,
        MIXED,
    ),
    "chosen by the largest": (lambda self, x: x * (x == x.amax(dim=1, keepdim=True)), None, MIXED),
    "batch and tokens swapped": (
        lambda self, x: x + x.reshape(x.shape[1], x.shape[0], WIDTH).transpose(0, 1),
        None,
        MIXED,
    ),
}


@pytest.mark.parametrize(("do", "make", "match"), MIXING.values(), ids=MIXING)
def test_rejects_blocks_that_mix_tokens(do: Forward, make: Callable[[], nn.Module] | None, match: str) -> None:
    message = refused(doing(do, make))
    assert message.startswith("UlyssesPlan: layers.0 (Doing): it")
    assert re.search(match, message), message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 1e-12])
def test_rejects_mixing_too_small_to_see_in_values(size: float, dtype: torch.dtype) -> None:
    model = doing(lambda self, x: x + size * x.mean(dim=1, keepdim=True)).to(dtype)
    assert MIXED in refused(model)


def test_rejects_positions_of_a_size_that_float32_holds() -> None:
    model = doing(lambda self, x: x + 1e-4 * torch.arange(x.shape[1], dtype=x.dtype)[:, None]).float()
    assert "counts positions from zero" in refused(model)


def test_rejects_a_loss_of_its_router() -> None:
    class Routed(Block):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x), x.softmax(-1).mean(dim=(0, 1)).square().sum()

    def between(model: nn.Module, x: torch.Tensor) -> Any:
        losses = []
        for layer in model.layers:  # type: ignore[union-attr] - a ModuleList
            x, loss = layer(x)
            losses.append(loss)
        return model.head(x), sum(losses)  # type: ignore[operator] - a module

    assert "it gives a value computed from its tokens" in refused(seeded(lambda: Model(Routed, between)))


# What passes


def test_a_convolution_of_one_token_passes() -> None:
    model = doing(conv, lambda: nn.Conv1d(WIDTH, WIDTH, 1))
    assert_equals_one_device(model, {"ids": ids_of(2, 9)}, 3)


def test_batch_norm_in_evaluation_passes() -> None:
    model = doing(on_flat, lambda: nn.BatchNorm1d(WIDTH)).eval()
    assert_equals_one_device(model, {"ids": ids_of(2, 9)}, 2)


def test_a_constant_buffer_written_anew_passes() -> None:
    class Counter(nn.Module):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.python_calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.python_calls += 1
            return x * self.python_calls

    model = doing(lambda self, x: self.part(x), Counter)  # type: ignore[operator, misc]
    assert_equals_one_device(model, {"ids": ids_of(2, 9)}, 2)


def test_a_value_that_is_no_token_s_passes() -> None:
    class WithConstant(Block):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x), self.norm1.weight.square().sum(), "a name", 3

    def between(model: nn.Module, x: torch.Tensor) -> Any:
        x, first, *_ = model.layers[0](x)  # type: ignore[index]
        x, second, *_ = model.layers[1](x)  # type: ignore[index]
        return model.head(x) + 0 * (first + second).detach()  # type: ignore[operator]

    assert_equals_one_device(seeded(lambda: Model(WithConstant, between)), {"ids": ids_of(2, 9)}, 2)


# What leaves by another way than the result


def keeps_loss(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    self.loss = x.square().mean()  # type: ignore[assignment] - no module
    return x


def keeps_tokens(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    self.attention.last = x  # type: ignore[union-attr]
    return x


def keeps_length(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    self.length = x.shape[1]  # type: ignore[assignment]
    return x


@pytest.mark.parametrize(
    ("do", "kept"),
    [(keeps_loss, "Doing.loss"), (keeps_tokens, "attention.last"), (keeps_length, "Doing.length")],
)
def test_rejects_attributes_made_from_the_tokens_at_hand(do: Forward, kept: str) -> None:
    message = refused(doing(do))
    assert (
        f"it {'keeps'} {kept.replace('Doing', 'Doing')}, made from the tokens at hand, which differ between ranks"
        in message
    )


def test_rejects_losses_gathered_in_a_list_of_the_block() -> None:
    class Collecting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            self.losses.append(x.square().mean())
            return super().forward(x)

    assert "it keeps Collecting.losses[0], made from the tokens at hand" in refused(seeded(lambda: Model(Collecting)))


class Giving(Block):
    """Writes to what it is given besides its hidden state."""

    def __init__(self, write: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:  # type: ignore[override]
        self.write(state, x)
        return super().forward(x)


def append(state: Any, x: torch.Tensor) -> None:
    state.append(x.square().mean())


def set_item(state: Any, x: torch.Tensor) -> None:
    state["count"] += 1


def set_attribute(state: Any, x: torch.Tensor) -> None:
    state.loss = state.loss + x.square().mean()


def add_in_place(state: Any, x: torch.Tensor) -> None:
    state.add_(1.0)


def add_tokens_in_place(state: Any, x: torch.Tensor) -> None:
    state += x.detach()


@pytest.mark.parametrize(
    ("write", "state", "match"),
    [
        pytest.param(append, list, "it writes to what it is given as argument 1. Return the values instead", id="list"),
        pytest.param(set_item, lambda: {"count": 0}, "it writes to what it is given as argument 1", id="dictionary"),
        pytest.param(
            set_attribute, lambda: SimpleNamespace(loss=0.0), "it writes to what it is given as argument 1", id="object"
        ),
        pytest.param(add_in_place, lambda: torch.zeros(3), "it changes an argument in place", id="tensor"),
        pytest.param(
            add_tokens_in_place, lambda: torch.zeros(2, 15, WIDTH), "it changes an argument in place", id="tokens"
        ),
    ],
)
def test_rejects_blocks_that_write_to_their_arguments(
    write: Callable[[Any, torch.Tensor], None], state: Callable[[], Any], match: str
) -> None:
    def between(model: nn.Module, x: torch.Tensor) -> Any:
        shared = state()
        for layer in model.layers:  # type: ignore[union-attr]
            x = layer(x, shared)
        return model.head(x)  # type: ignore[operator]

    assert match in refused(seeded(lambda: Model(lambda: Giving(write), between)))


def test_rejects_a_hidden_state_changed_in_place() -> None:
    class InPlace(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x += self.attention(x)
            return x

    with torch.no_grad():
        message = refused(seeded(lambda: Model(InPlace)))
    assert "it changes an argument in place, which is a shard of the caller's. Write it out of place" in message


def test_the_probe_leaves_no_trace() -> None:
    class Busy(Block):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(3))
            self.calls, self.seen, self.options = 0, ["start"], {"a": 1}
            self.cached: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            self.calls += 1
            self.seen.append("call")
            self.options["b"] = self.calls
            self.table += 1
            if self.cached is None:
                self.cached = torch.ones(WIDTH)
            return super().forward(x * self.cached * self.table[0] + torch.zeros(()))

    model, inputs = seeded(lambda: Model(Busy)), {"ids": ids_of(2, 9)}
    assert_equals_one_device(model, inputs, 2)

    def run(mesh: DeviceMesh) -> tuple[Any, ...]:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        state = torch.random.get_rng_state() if mesh.get_rank() == 0 else None
        ours(**inputs)
        if state is not None:
            assert torch.equal(torch.random.get_rng_state(), state)
        block = ours.layers[0]  # type: ignore[index]
        return block.calls, block.seen, block.options, block.table.tolist()  # type: ignore[union-attr]

    assert run_on_mesh({"sp": 2}, run)[0] == (1, ["start", "call"], {"a": 1, "b": 1}, [1.0] * 3)


# What is constant as initialised


def zeroed(sample: str, *names: str) -> nn.Module:
    model = ZOO[sample].model()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if any(part in name for part in names):
                p.zero_()
    return model


def test_projections_that_start_at_zero_do_not_hide_positions() -> None:
    model = zeroed("whole table", "wo.weight", "w2.weight")
    assert_equals_one_device(model, ZOO["whole table"].inputs(2, 21), 2)


class TableBlock(Block):
    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + table[: x.shape[1]])


class TableModel(Model):
    def __init__(self, value: float) -> None:
        super().__init__(TableBlock)
        self.table = nn.Parameter(torch.full((LONGEST, WIDTH), value))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.table)
        return self.head(x)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_table_of_one_value_is_cut_where_the_block_cuts_it(value: float) -> None:
    assert_equals_one_device(seeded(lambda: TableModel(value)), {"ids": ids_of(2, 21)}, 2)


@pytest.mark.parametrize("size", [0.0, 1e-6, 0.02, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rejects_positions_of_its_own_of_any_size(size: float, dtype: torch.dtype) -> None:
    class Positions(Block):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(size * torch.randn(LONGEST, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x + self.positions[: x.shape[1]])

    assert "counts positions from zero" in refused(seeded(lambda: Model(Positions)).to(dtype))


def test_a_gate_that_starts_at_zero_does_not_hide_what_it_gates() -> None:
    class Gated(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) + self.gate * positions(self, x)

    assert "counts positions from zero" in refused(seeded(lambda: Model(Gated)))


def test_constant_parameters_are_as_before_after_the_probe() -> None:
    original = zeroed("whole table", "wo.weight")

    def run(mesh: DeviceMesh) -> bool:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        model(ids_of(2, 9))
        pairs = zip(model.parameters(), original.parameters(), strict=True)
        return all(torch.equal(p, q) and p._version == 0 for p, q in pairs)

    assert run_on_mesh({"sp": 2}, run) == [True, True]


@pytest.mark.parametrize("first", [torch.ones(2, 21), torch.ones(2, 21, dtype=torch.bool), torch.zeros(2, 21)])
def test_a_first_call_with_constant_arguments_decides_rightly_for_later_ones(first: torch.Tensor) -> None:
    class Keeping(Block):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * keep[:, : x.shape[1], None]

    later = (numbers(2, 21) > 0).to(first.dtype)

    def between(model: nn.Module, x: torch.Tensor) -> Any:
        for keep in (first, later):
            for layer in model.layers:  # type: ignore[union-attr]
                x = layer(x, keep)
        return model.head(x)  # type: ignore[operator]

    assert_equals_one_device(seeded(lambda: Model(Keeping, between)), {"ids": ids_of(2, 21)}, 2)


# A decision is made anew where a call differs


def test_rejects_a_number_that_makes_a_later_call_mix() -> None:
    class Shifted(Block):
        def forward(self, x: torch.Tensor, shift: int) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x.roll(shift, dims=1))

    def between(model: nn.Module, x: torch.Tensor) -> Any:
        for shift in (0, 0, 3):
            x = model.layers[0](x, shift)  # type: ignore[index]
        return model.head(x)  # type: ignore[operator]

    raises_later(seeded(lambda: Model(Shifted, between)), MIXED)


def test_rejects_a_part_that_was_switched_to_training() -> None:
    def between(model: nn.Module, x: torch.Tensor) -> Any:
        for training in (False, False, True):
            model.layers[0].part.train(training)  # type: ignore[index, union-attr]
            x = model.layers[0](x)  # type: ignore[index]
        return model.head(x)  # type: ignore[operator]

    make = lambda: Doing(on_flat, lambda: nn.BatchNorm1d(WIDTH))  # noqa: E731
    raises_later(seeded(lambda: Model(make, between)), "it writes the buffer")


def raises_later(model: nn.Module, match: str) -> None:
    """Checks an error of every rank that cannot come before the first exchange of the forward."""

    def run(mesh: DeviceMesh) -> None:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        with pytest.raises(PlanError, match=match):
            ours(ids_of(2, 9))

    run_on_mesh({"sp": 2}, run)


def test_each_way_of_calling_is_probed_once() -> None:
    original = ZOO["rotary decoder"].model()

    def run(mesh: DeviceMesh) -> list[int]:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        region = region_of(model)
        assert region is not None
        counts = []
        for seq_len in (9, 9, 12, 13):
            model(ids_of(2, seq_len))
            counts.append(len(region.decisions))
        model.eval()(ids_of(2, 9))
        return [*counts, len(region.decisions)]

    assert run_on_mesh({"sp": 2}, run) == [[4, 4, 4, 4, 8]] * 2  # two blocks, norm and head


# Backward


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override] - torch types it *Any
        return gradient / gradient.norm()


def hooked(hook: Callable[[torch.Tensor], torch.Tensor]) -> Forward:
    def do(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(hook)
        return x

    return do


@pytest.mark.parametrize(
    "do",
    [
        pytest.param(lambda self, x: Normalised.apply(x), id="function"),
        pytest.param(hooked(lambda gradient: gradient / gradient.norm()), id="hook that divides by the norm"),
        pytest.param(hooked(lambda gradient: gradient.clamp(-1e-1, 1e-1)), id="hook that clips"),
        pytest.param(hooked(lambda gradient: gradient - gradient.mean(dim=1, keepdim=True)), id="hook that centres"),
    ],
)
def test_rejects_a_backward_that_mixes_or_does_not_scale(do: Forward) -> None:
    assert "its backward mixes tokens, or does not scale with the gradient" in refused(doing(do))


def test_a_backward_of_each_token_s_own_passes() -> None:
    model = doing(hooked(lambda gradient: -0.5 * gradient))
    assert_equals_one_device(model, {"ids": ids_of(2, 9)}, 2)


# Which arguments are per token


@pytest.mark.parametrize("seq_len", [3, 4, 5, 11, 16, LONGEST])
@pytest.mark.parametrize(
    "name", ["whole table", "rotary decoder", "diffusion", "additive mask of heads", "sequence first"]
)
def test_arguments_are_told_apart_where_sizes_coincide(name: str, seq_len: int) -> None:
    sample = ZOO[name]  # batch 3, and head size, heads, width, the probe's own length and the table's as lengths
    assert_equals_one_device(sample.model(), sample.inputs(3, seq_len), 2)


def test_arguments_that_cannot_be_told_are_declared() -> None:
    class Either(Block):
        """Uses its argument whole, though it has the length of the tokens; cut, it would run too."""

        def forward(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x + codes.mean(dim=0))

    def between(model: nn.Module, x: torch.Tensor) -> Any:
        codes = x[0].detach()
        for layer in model.layers:  # type: ignore[union-attr]
            x = layer(x, codes)
        return model.head(x)  # type: ignore[operator]

    model, inputs = seeded(lambda: Model(Either, between)), {"ids": ids_of(2, 9)}
    assert_equals_one_device(model, inputs, 2)
    assert_equals_one_device(model, inputs, 2, plan=lambda: UlyssesPlan(inputs={"codes": "s d"}))
    message = refused_model(model, inputs, plan=lambda: UlyssesPlan(inputs={"codes": "(sp s) d"}))
    assert MIXED in message


def test_rejects_a_mask_that_is_used_for_tokens_and_for_attention() -> None:
    class Both(Block):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x * keep[..., None], mask=keep[:, None, None, :])

    def between(model: nn.Module, x: torch.Tensor) -> Any:
        keep = torch.ones(x.shape[:2], dtype=torch.bool)
        for layer in model.layers:  # type: ignore[union-attr]
            x = layer(x, keep)
        return model.head(x)  # type: ignore[operator]

    assert "is made from the tokens at hand" in refused(seeded(lambda: Model(Both, between)))


def test_rejects_results_that_cannot_be_looked_into() -> None:
    class Opaque(Block):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return SimpleNamespace(hidden=super().forward(x))

    def between(model: nn.Module, x: torch.Tensor) -> Any:
        return model.head(model.layers[0](x).hidden)  # type: ignore[index, operator]

    message = refused(seeded(lambda: Model(Opaque, between)))
    assert "its result holds a SimpleNamespace, which cannot be looked into" in message


def test_rejects_windows() -> None:
    class Windowed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            padded = F.pad(x, (0, 0, 0, -x.shape[1] % 4))
            return super().forward(padded.unflatten(1, (-1, 4)).flatten(0, 1)).view(padded.shape)[:, : x.shape[1]]

    message = refused(seeded(lambda: Model(Windowed)))
    assert "its attention saw [4] tokens where 11 were given" in message


NO_GRADIENT = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # in the probe


@NO_GRADIENT
def test_rejects_an_attention_given_to_a_reentrant_checkpoint() -> None:
    class Part(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = x + checkpoint(self.attention, self.norm1(x), use_reentrant=True)
            return x + self.mlp(self.norm2(x))

    original = seeded(lambda: Model(Part))

    def run(mesh: DeviceMesh) -> None:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan())
        loss = model(ids_of(2, 9)).square().mean()
        with pytest.raises(PlanError, match="is recomputed apart from its block"):
            loss.backward()

    run_on_mesh({"sp": 2}, run)


@NO_GRADIENT
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_feed_forward_under_a_checkpoint_of_its_own(reentrant: bool) -> None:
    class Part(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = x + self.attention(self.norm1(x))
            return x + checkpoint(self.mlp, self.norm2(x), use_reentrant=reentrant)

    assert_equals_one_device(seeded(lambda: Model(Part)), {"ids": ids_of(2, 9)}, 2)


def test_the_probe_hides_from_global_hooks() -> None:
    calls = []
    model = ZOO["rotary decoder"].model()
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: calls.append(type(module)))
    try:
        run_on_mesh({"sp": 1}, lambda mesh: parallelize_module(model, mesh, UlyssesPlan())(ids_of(2, 9)))
    finally:
        hook.remove()
    assert calls.count(FeedForward) == calls.count(SelfAttention) == 2
    assert calls.count(Norm) == 5


def test_the_probe_hides_from_dispatch_modes() -> None:
    """If torch moves `_disable_current_modes`: in ulysses_dtensor/unseen.py, pop every mode of this thread and push it back.

    Without it a selective checkpoint around a block keeps results of the probe's operations, and hands them to the
    recompute of the step's own.
    """

    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(3)
    with Counting() as mode:
        with without_dispatch_modes():
            x.neg()
        assert mode.seen == 0
        x.neg()
    assert mode.seen == 1
