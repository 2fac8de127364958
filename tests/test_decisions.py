"""A decision holds for calls of its kind and no others, and what a block was not given is not used unseen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_zoo import HEAD_SIZE, HEADS, WIDTH, loss_of, numbers, seeded
from one_device import Run, assert_runs_equal, call, gradients_of, refused, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ulysses_dtensor import PlanError, UlyssesPlan, parallelize_module
from ulysses_dtensor.testing import run_on_mesh


def heads_of(x: torch.Tensor) -> torch.Tensor:
    """(B, S, H * D) -> (B, H, S, D)"""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    """From `x` to `memory`, or to itself, and back to the width."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD_SIZE) for _ in range(3))
        self.out = nn.Linear(HEADS * HEAD_SIZE, WIDTH)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        memory = x if memory is None else memory
        q, k, v = heads_of(self.q(x)), heads_of(self.k(memory)), heads_of(self.v(memory))
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Two attentions and a linear; what is done with them is `forward_of`'s."""

    def __init__(self, forward_of: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.linear = Attention(), Attention(), nn.Linear(WIDTH, WIDTH)
        self.learned = nn.Parameter(torch.randn(1, 2, WIDTH))
        self.forward_of = forward_of
        self.memory: Any = None

    def forward(self, *args: Any) -> Any:
        return self.forward_of(self, *args)


def to_itself(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x + block.a(x)


class Model(nn.Module):
    """An encoder of one block for each of some memories, and a block that is given these and the rest."""

    def __init__(self, forward_of: Callable[..., Any], *, encoders: int = 0, call_of: Any = None) -> None:
        super().__init__()
        self.encoders = nn.ModuleList([nn.ModuleList([Block(to_itself)]) for _ in range(encoders)])
        self.linear, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(forward_of)])
        self.call_of = call_of

    def forward(self, x: torch.Tensor, **others: Any) -> Any:
        for name, encoder in zip(("m", "n"), self.encoders, strict=False):
            others[name] = encoder[0](others[name])  # type: ignore[index] - a ModuleList
        if self.call_of is not None:
            return self.call_of(self, self.blocks[0], x, others)
        return self.blocks[0](x, *others.values())


def assert_calls_equal_one_device(model: nn.Module, calls: list[dict[str, Any]], ranks: int = 3) -> list[Run]:
    """Checks the calls, one after the other on one model, and the gradients that they add up to."""

    def run(ours: nn.Module) -> Run:
        outputs: list[torch.Tensor] = []
        for inputs in calls:
            result = call(ours, inputs)
            loss_of(result).backward()
            outputs += whole(result)
        return Run(torch.zeros(()), outputs, gradients_of(ours), {})

    expected = run(copy.deepcopy(model))
    found = run_on_mesh({"sp": ranks}, lambda mesh: run(parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())))
    for each in found:
        assert_runs_equal(each, expected)
    return found


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return numbers(2, count, WIDTH, seed=seed)


# Calls of another kind are proven anew


def to_two_memories(block: Block, x: torch.Tensor, m: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    x = x + block.a(x, m)
    return x + block.b(x, n)


@pytest.mark.parametrize("lengths", [[(6, 6), (5, 7)], [(5, 7), (6, 6)], [(13, 6), (6, 13)]])
def test_memories_equal_and_unequal_in_length(lengths: list[tuple[int, int]]) -> None:
    calls = [{"x": tokens(13), "m": tokens(m, 1), "n": tokens(n, 2)} for m, n in lengths]
    assert_calls_equal_one_device(seeded(lambda: Model(to_two_memories, encoders=2)), calls)


@pytest.mark.parametrize("lengths", [(13, 7), (7, 13)])
def test_a_condition_in_front_of_tokens_and_memory(lengths: tuple[int, int]) -> None:
    def conditioned(model: Model, block: nn.Module, x: torch.Tensor, others: dict[str, Any]) -> Any:
        return block(others["t"], x, others["m"])

    def forward(block: Block, t: torch.Tensor, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        x = x + block.a(x)
        return (x + block.b(x, m)) * (1 + block.linear(t)[:, None])

    calls = [{"x": tokens(13), "m": tokens(n, 1), "t": numbers(2, WIDTH, seed=4)} for n in lengths]
    assert_calls_equal_one_device(seeded(lambda: Model(forward, encoders=1, call_of=conditioned)), calls)


@pytest.mark.parametrize("counts", [(0, 1), (3, 0), (1, 0)])
def test_an_empty_prompt_and_another(counts: tuple[int, int]) -> None:
    def forward(block: Block, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return x + block.a(x, torch.cat((text, x), 1))

    calls = [{"x": tokens(13), "text": tokens(count, 1)} for count in counts]
    assert_calls_equal_one_device(seeded(lambda: Model(forward)), calls)


@pytest.mark.parametrize("keys", [("add", "pool"), ("pool", "add")])
def test_the_keys_of_a_dictionary(keys: tuple[str, str]) -> None:
    def forward(block: Block, x: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
        x = x + block.a(x)
        if "add" in extra:
            return x + block.linear(extra["add"])
        return x + block.linear(extra["pool"].mean(1, keepdim=True))

    calls = [{"x": tokens(13), "extra": {key: tokens(13, 1)}} for key in keys]
    assert_calls_equal_one_device(seeded(lambda: Model(forward)), calls)


def skipping(block: Block, x: torch.Tensor, text: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    if keep.item():
        x = x + block.a(x, torch.cat((x, block.learned.expand(len(x), -1, -1)), 1))
    return x + block.b(x, torch.cat((text, x), 1))


@pytest.mark.parametrize("keeps", [(True, False), (False, True), (False,)])
def test_an_attention_that_a_flag_skips(keeps: tuple[bool, ...]) -> None:
    calls = [{"x": tokens(13), "text": tokens(2, 1), "keep": torch.tensor(keep)} for keep in keeps]
    assert_calls_equal_one_device(seeded(lambda: Model(skipping)), calls)


@pytest.mark.parametrize("keep", [0, 0.0, 2, 0.5])
def test_a_single_value_decides_in_the_probe_as_in_the_call(keep: float) -> None:
    calls = [{"x": tokens(13), "text": tokens(2, 1), "keep": torch.tensor(keep)}]
    assert_calls_equal_one_device(seeded(lambda: Model(skipping)), calls)


def test_rejects_fewer_attentions_than_were_proven() -> None:
    """A number that decides is not part of a call's kind; what ran may have been taken for another attention."""
    model = seeded(lambda: Model(skipping))

    def run(mesh: DeviceMesh) -> list[str]:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        said = []
        for keep in (1.0, 0.0):
            try:
                ours(tokens(13), text=tokens(2, 1), keep=torch.tensor(keep))
                said.append("")
            except Exception as error:
                said.append(str(error))
        return said

    for first, second in run_on_mesh({"sp": 2}, run):
        assert first == ""
        assert "attention was called 1 times, 2 when the block was proven" in second


def given_by_mask(block: Block, x: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x + block.a(x, text if mask.any() else x)


def joined_by_mask(block: Block, x: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x + block.a(x, torch.cat((text, x), 1) if mask.any() else x)


@pytest.mark.parametrize("forward", [given_by_mask, joined_by_mask])
def test_rejects_keys_chosen_by_the_values_of_a_mask(forward: Any) -> None:
    """The probe gives a mask that is all zeros other values, which take another way."""
    model, mask = seeded(lambda: Model(forward)), torch.zeros(2, 5, dtype=torch.bool)
    inputs = {"x": tokens(13), "text": tokens(5, 1), "mask": mask}
    message = refused(2, lambda mesh: call(parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan()), inputs))
    assert "which tokens its attention gets depends on the values of an argument" in message
    assert_calls_equal_one_device(model, [{**inputs, "mask": ~mask}])

    def later(mesh: DeviceMesh) -> str:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        call(ours, {**inputs, "mask": ~mask})
        with pytest.raises(PlanError) as error:
            call(ours, inputs)
        return str(error.value)

    for said in run_on_mesh({"sp": 2}, later):
        assert "tokens that every rank should hold" in said


@pytest.mark.parametrize("empty", ["any", "max"])
def test_rejects_an_attention_that_tokens_values_skip(empty: str) -> None:
    """Ranks whose tokens are padding alone would leave the others waiting."""

    def forward(block: Block, x: torch.Tensor) -> torch.Tensor:
        skipped = not x.any() if empty == "any" else x.abs().max() == 0
        return x if skipped else x + block.a(x)

    x = tokens(12)
    x[:, 6:] = 0
    model = seeded(lambda: Model(forward))
    message = refused(2, lambda mesh: parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())(x))
    assert "whether its attention runs depends on its tokens' values" in message


# What is used whole beside what is cut


@pytest.mark.parametrize(("length", "ranks"), [(2, 2), (12, 2), (13, 4), (3, 2)])
def test_a_mask_made_from_a_memory_in_shards(length: int, ranks: int) -> None:
    """With one token on a rank its mask would broadcast."""

    def forward(block: Block, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return x + block.a(x, m, (m.abs().sum(-1) < m.abs().sum(-1).mean())[:, None, None])

    calls = [{"x": tokens(13), "m": tokens(length, 1)}]
    assert_calls_equal_one_device(seeded(lambda: Model(forward, encoders=1)), calls, ranks)


@pytest.mark.parametrize("length", [12, 13, 14])
def test_a_memory_in_shards_of_which_the_mean_is_taken(length: int) -> None:
    def forward(block: Block, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return (x + block.a(x, m)) * (1 + block.linear(m.mean(1, keepdim=True)))

    calls = [{"x": tokens(13), "m": tokens(length, 1)}]
    assert_calls_equal_one_device(seeded(lambda: Model(forward, encoders=1)), calls)


def test_a_memory_as_long_as_the_hidden_state_of_which_the_mean_is_taken() -> None:
    """Behind an encoder each: both are in shards then."""

    def forward(block: Block, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return (x + block.a(x, m)) * (1 + block.linear(m.mean(1, keepdim=True)))

    def both_encoded(model: Model, block: nn.Module, x: torch.Tensor, others: dict[str, Any]) -> Any:
        return block(others["m"], others["n"])

    calls = [{"x": tokens(13), "m": tokens(13, 1), "n": tokens(13, 2)}]
    assert_calls_equal_one_device(seeded(lambda: Model(forward, encoders=2, call_of=both_encoded)), calls)


@pytest.mark.parametrize("length", [12, 13])
def test_a_memory_zeroed_and_masked_by_one_mask(length: int) -> None:
    def forward(block: Block, x: torch.Tensor, m: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return x + block.a(x, m * pad[..., None], pad[:, None, None])

    pad = torch.arange(length) < torch.tensor([[length], [7]])
    calls = [{"x": tokens(13), "m": tokens(length, 1), "pad": pad}]
    assert_calls_equal_one_device(seeded(lambda: Model(forward, encoders=1)), calls)


def joint(block: Block, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = block.a(torch.cat((x, y), 1))
    return x + out[:, : x.shape[1]], y + out[:, x.shape[1] :]


def learned_queries(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.a(block.learned.expand(len(x), -1, -1), x)


@pytest.mark.parametrize("kind", ["text of a joint block", "learned queries"])
def test_a_loss_of_what_every_rank_holds_alone(kind: str) -> None:
    """Its gradient passes no tokens in shards on the way to what embeds them, and is averaged all the same."""

    def call_of(model: Model, block: nn.Module, x: torch.Tensor, others: dict[str, Any]) -> Any:
        x = model.linear(x)
        return block(x) if kind == "learned queries" else block(x, others["text"])[1]

    forward = learned_queries if kind == "learned queries" else joint
    assert_calls_equal_one_device(
        seeded(lambda: Model(forward, call_of=call_of)), [{"x": tokens(13), "text": tokens(3, 1)}]
    )


@pytest.mark.parametrize("sizes", [(3, 24), (24, 3)])
def test_of_two_streams_the_longer_is_cut(sizes: tuple[int, int]) -> None:
    seen: list[tuple[int, int]] = []

    def forward(block: Block, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((x.shape[1], y.shape[1]))
        return joint(block, x, y)

    model, inputs = seeded(lambda: Model(forward)), (tokens(sizes[0]), tokens(sizes[1], 1))

    def run(mesh: DeviceMesh) -> None:
        parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())(inputs[0], text=inputs[1])

    run_on_mesh({"sp": 2}, run)
    assert seen[-1] == tuple(12 if size == 24 else size for size in sizes)


def per_token(block: Block, x: torch.Tensor, kinds: Any) -> torch.Tensor:
    kinds = kinds.kinds if isinstance(kinds, SimpleNamespace) else kinds
    return x * kinds[:, : x.shape[1], None] + block.a(x)


PADDED = torch.ones(2, 23, dtype=torch.bool)
PADDED[1, 21:] = False


@pytest.mark.parametrize(
    "kinds",
    [
        [torch.zeros(2, 23, dtype=torch.long), torch.arange(46).view(2, 23) % 3],
        [PADDED],
        [torch.ones(2, 23, dtype=torch.bool), PADDED],
        [(torch.arange(23) // 12).expand(2, -1), torch.arange(46).view(2, 23) % 3],
    ],
    ids=["zeros at first", "two padded", "none padded at first", "segments"],
)
def test_an_argument_cut_to_the_tokens_at_hand_whose_first_values_tell_little(kinds: list[torch.Tensor]) -> None:
    calls = [{"x": tokens(23), "kinds": each} for each in kinds]
    assert_calls_equal_one_device(seeded(lambda: Model(per_token)), calls, 2)


def test_rejects_the_same_in_an_object() -> None:
    model, kept = seeded(lambda: Model(per_token)), []

    def run(mesh: DeviceMesh) -> None:
        kinds = SimpleNamespace(
            kinds=torch.ones(2, 23, dtype=torch.bool)
        )  # a rank's own: the probe gives it other values
        kept.append(kinds)
        parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())(tokens(23), kinds=kinds)

    assert "another result for a slice of its tokens" in refused(2, run)
    assert all(bool(each.kinds.all()) for each in kept)  # and has put its values back


# What a block was not given


def gated(block: Block, x: torch.Tensor, held: Any = None) -> torch.Tensor:
    held = block.memory if held is None else held
    return (
        x
        + block.a(x) * (held.gate if hasattr(held, "gate") else 1)
        + (block.b(x, held.memory) if hasattr(held, "memory") else 0)
    )


def in_object(model: Model, block: nn.Module, x: torch.Tensor, others: dict[str, Any]) -> Any:
    return block(x, SimpleNamespace(memory=others["m"]))


def joined_in_object(model: Model, block: nn.Module, x: torch.Tensor, others: dict[str, Any]) -> Any:
    return block(x, SimpleNamespace(memory=others["m"], gate=others["m"].mean(1, keepdim=True)))


def on_attribute(model: Model, block: nn.Module, x: torch.Tensor, others: dict[str, Any]) -> Any:
    block.__dict__["memory"] = SimpleNamespace(memory=others["m"])
    return block(x)


def left_before(model: Model, block: nn.Module, x: torch.Tensor, others: dict[str, Any]) -> Any:
    return block(x, SimpleNamespace(gate=model.linear(others["m"].mean(1, keepdim=True))))


def assert_unannounced(model: nn.Module, *, gradients: bool = False) -> None:
    """Checks that all ranks refuse the block alike; the encoder in front of it has made its exchanges then."""

    def run(mesh: DeviceMesh) -> str:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        with (
            torch.set_grad_enabled(gradients),
            pytest.raises(PlanError, match="uses a hidden state that it was not given as an argument") as error,
        ):
            ours(tokens(13), m=tokens(7, 1))
        return str(error.value)

    assert len(set(run_on_mesh({"sp": 2}, run))) == 1


@pytest.mark.parametrize("call_of", [in_object, joined_in_object, on_attribute, left_before])
def test_rejects_hidden_states_that_are_no_arguments(call_of: Any) -> None:
    assert_unannounced(seeded(lambda: Model(gated, encoders=1, call_of=call_of)), gradients=True)


def test_rejects_a_number_read_from_a_hidden_state_that_is_no_argument() -> None:
    """Without gradients nothing of the result shows that it was used."""

    def forward(block: Block, x: torch.Tensor, held: Any) -> torch.Tensor:
        return (x + block.a(x)) * held.memory.mean().item()

    model = seeded(lambda: Model(forward, encoders=1, call_of=in_object))

    assert_unannounced(model)


def test_plain_values_in_an_object_are_no_hidden_states() -> None:
    def call_of(model: Model, block: nn.Module, x: torch.Tensor, others: dict[str, Any]) -> Any:
        return block(x, SimpleNamespace(gate=model.linear(others["m"].mean(1, keepdim=True))))

    calls = [{"x": tokens(13), "m": tokens(7, 1)}]
    assert_calls_equal_one_device(seeded(lambda: Model(gated, call_of=call_of)), calls)


def test_a_mask_used_for_each_token_too_has_to_be_passed_twice() -> None:
    def once(block: Block, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return x + block.a(x * pad[..., None], None, pad[:, None, None])

    def twice(block: Block, x: torch.Tensor, pad: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + block.a(x * pad[..., None], None, mask[:, None, None])

    pad = torch.arange(11) < torch.tensor([[11], [7]])
    model = seeded(lambda: Model(once))
    message = refused(
        2, lambda mesh: parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())(tokens(11), pad=pad)
    )
    assert "pass it twice where the block uses it for each token too" in message
    calls = [{"x": tokens(11), "pad": pad, "mask": pad.clone()}]
    assert_calls_equal_one_device(seeded(lambda: Model(twice)), calls)
