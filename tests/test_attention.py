"""Attention over sequence shards: any sizes, heads and layouts equal one device's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from model_zoo import numbers
from one_device import assert_close, refused
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

from ulysses_dtensor import LayoutError, PlanError, UlyssesAttention, count_collectives, distribute
from ulysses_dtensor.testing import full_value, run_on_mesh

LAYOUTS = {
    "bshd": "b (sp s) h d -> b s (sp h) d",
    "bhsd": "b h (sp s) d -> b (sp h) s d",
    "sbhd": "(sp s) b h d -> s b (sp h) d",
    "thd": "(sp t) h d -> t (sp h) d",
}
NAMES = ("query", "key", "value")


class Inner(nn.Module):
    """Attention of tensors in some order of dims; sees by itself whether its kv heads are grouped."""

    def __init__(self, order: str, causal: bool) -> None:
        super().__init__()
        self.order, self.causal = order, causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        there = {"bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3), "sbhd": (1, 2, 0, 3), "thd": (1, 0, 2)}[self.order]
        back = [there.index(dim) for dim in range(len(there))]
        q, k, v = (x.permute(there) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=q.shape[-3] != k.shape[-3])
        return out.permute(back)


def tensors_of(order: str, batch: int, seq_len: int, heads: int, kv_heads: int, size: int) -> list[torch.Tensor]:
    sizes = {"b": batch, "s": seq_len, "t": seq_len, "d": size}
    return [
        numbers(*({**sizes, "h": count}[axis] for axis in order), seed=seed)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    ]


def one_device(module: nn.Module, tensors: list[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = module(*leaves)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def sharded(
    mesh: DeviceMesh, module: nn.Module, text: str, tensors: list[torch.Tensor], weights: torch.Tensor
) -> tuple[list[torch.Tensor], list[tuple[str, int]], list[tuple[str, int]]]:
    """Returns whole output and gradients, and what was sent forward and backward."""
    style = UlyssesAttention(text)
    module = type(module)(*(vars(module)[name] for name in ("order", "causal")))
    parallelize_module(module, mesh, style)
    leaves = [distribute(x, mesh, style.src).detach().requires_grad_() for x in tensors]
    with count_collectives() as forth:
        out = module(*leaves)
    assert isinstance(out, DTensor)
    assert out.placements == style.src.placements(mesh)
    local = distribute(weights, mesh, style.src).to_local()
    with count_collectives() as back:
        (out.to_local() * local).sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    assert all(isinstance(gradient, DTensor) for gradient in gradients)
    return [full_value(x) for x in (out, *gradients)], forth.calls, back.calls  # type: ignore[arg-type] - DTensors


def assert_equals_one_device(
    order: str, batch: int, seq_len: int, heads: int, kv_heads: int, ranks: int, *, causal: bool = True, size: int = 3
) -> list[list[tuple[str, int]]]:
    """Checks output and gradients on every rank and returns what each sent forward."""
    tensors, module = tensors_of(order, batch, seq_len, heads, kv_heads, size), Inner(order, causal)
    weights = numbers(*tensors[0].shape, seed=9)
    expected = one_device(module, tensors, weights)
    sent = []
    for got, forth, back in run_on_mesh({"sp": ranks}, sharded, module, LAYOUTS[order], tensors, weights):
        assert [kind for kind, _ in forth] == ["all-to-all"] * 2 * (ranks > 1)
        assert [kind for kind, _ in back] == ["all-to-all"] * 2 * (ranks > 1)
        largest = max(float(x.abs().max()) for x in expected)
        for name, x, reference in zip(("output", *NAMES), got, expected, strict=True):
            assert_close(x, reference, name, 1e-9, floor=1e-4 * largest)
        assert_close(got[0], expected[0], "output", 1e-13)  # on some processors bitwise, on others to rounding
        sent.append(forth)
    return sent


@st.composite
def heads(draw: st.DrawFn) -> tuple[int, int]:
    count = draw(st.integers(1, 12))
    return count, draw(st.sampled_from([kv for kv in range(1, count + 1) if count % kv == 0]))


@pytest.mark.parametrize("order", LAYOUTS)
@given(
    batch=st.sampled_from([1, 3]),
    seq_len=st.integers(1, 40),
    heads=heads(),
    ranks=st.integers(1, 4),
    causal=st.booleans(),
)
def test_output_and_gradients_equal_one_device(
    order: str, batch: int, seq_len: int, heads: tuple[int, int], ranks: int, causal: bool
) -> None:
    assert_equals_one_device(order, batch, seq_len, *heads, ranks, causal=causal)


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    ("batch", "seq_len", "heads", "kv_heads", "ranks"),
    [
        pytest.param(1, 9, 4, 4, 2, id="DeepSpeed#7384"),
        pytest.param(1, 1001, 2, 2, 2, id="DeepSpeed#5177 on 2"),
        pytest.param(1, 1001, 4, 2, 4, id="DeepSpeed#5177 on 4"),
        pytest.param(2, 2, 4, 4, 2, id="DeepSpeed#5808"),
        pytest.param(1, 8, 7, 7, 4, id="DeepSpeed#6392, 7 heads"),
        pytest.param(1, 16, 20, 20, 8, id="DeepSpeed#6392, 20 heads"),
        pytest.param(2, 8, 8, 2, 4, id="VeOmni#162, LlamaFactory#10794"),
        pytest.param(1, 21, 12, 12, 8, id="FastVideo#884"),
        pytest.param(1, 9, 24, 6, 4, id="kv heads divide neither way"),
        pytest.param(1, 3, 3, 1, 6, id="ranks without tokens and without heads"),
    ],
)
def test_sizes_that_failed_elsewhere(
    order: str, batch: int, seq_len: int, heads: int, kv_heads: int, ranks: int
) -> None:
    assert_equals_one_device(order, batch, seq_len, heads, kv_heads, ranks)


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 4, 2), (8, 4, 4), (12, 12, 3)])
def test_elements_sent_when_sizes_divide(order: str, heads: int, kv_heads: int, ranks: int) -> None:
    batch, seq_len, size = 2, 12, 5
    for sent in assert_equals_one_device(order, batch, seq_len, heads, kv_heads, ranks, size=size):
        elements = sum(bytes_sent for _, bytes_sent in sent) // 8
        batch_of = 1 if order == "thd" else batch
        expected = (ranks - 1) * batch_of * (seq_len // ranks) * (2 * heads + 2 * kv_heads) * size // ranks
        assert elements == expected


class Tags(nn.Module):
    """Checks that every number it gets is where its tag says, then returns the query."""

    def __init__(self, heads: range) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        expected = tags(q.shape[0], q.shape[1], len(self.heads), first=self.heads.start)
        assert torch.equal(q, expected)
        assert torch.equal(k, expected + 0.25)
        assert torch.equal(v, expected + 0.5)
        return q


def tags(batch: int, seq_len: int, heads: int, first: int = 0) -> torch.Tensor:
    b, s, h = (torch.arange(float(size)) for size in (batch, seq_len, heads))
    return (10_000 * b[:, None, None] + 100 * s[:, None] + h + first)[..., None]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_every_number_arrives_where_its_tag_says(ranks: int, batch: int) -> None:  # DeepSpeed#5664, DeepSpeed#5808
    def check(mesh: DeviceMesh) -> torch.Tensor:
        share, rank = 12 // ranks, mesh.get_local_rank()
        module = Tags(range(share * rank, share * rank + share))
        parallelize_module(module, mesh, UlyssesAttention(LAYOUTS["bshd"]))
        x = tags(batch, 7, 12)
        return full_value(module(*(distribute(x + at, mesh, "b (sp s) h d") for at in (0, 0.25, 0.5))))

    assert all(torch.equal(out, tags(batch, 7, 12)) for out in run_on_mesh({"sp": ranks}, check))


def test_the_tags_themselves_fail_on_another_order() -> None:
    with pytest.raises(AssertionError):
        Tags(range(4))(tags(2, 3, 4), tags(2, 3, 4).flip(1), tags(2, 3, 4))


@pytest.mark.parametrize("names", [("q", "k", "v"), ("query", "key", "value"), ("xq", "xk", "xv")])
def test_tensors_are_found_by_name(names: tuple[str, str, str]) -> None:
    class Named(nn.Module):
        def forward(self, scale: float = 1.0, **qkv: Any) -> torch.Tensor:
            return F.scaled_dot_product_attention(*(qkv[name] for name in names), scale=scale)

    tensors = tensors_of("bhsd", 2, 7, 4, 4, 3)
    expected = Named()(scale=0.3, **dict(zip(names, tensors, strict=True)))

    def run(mesh: DeviceMesh) -> torch.Tensor:
        module = parallelize_module(Named(), mesh, UlyssesAttention(LAYOUTS["bhsd"]))
        return full_value(
            module(scale=0.3, **{n: distribute(x, mesh, "b h (sp s) d") for n, x in zip(names, tensors, strict=True)})
        )

    assert all(torch.equal(out, expected) for out in run_on_mesh({"sp": 3}, run))


def test_values_may_have_another_size_than_queries() -> None:
    q, k, v = tensors_of("bhsd", 2, 7, 4, 2, 3)
    v = numbers(2, 2, 7, 5, seed=4)
    expected = Inner("bhsd", True)(q, k, v)

    def run(mesh: DeviceMesh) -> torch.Tensor:
        module = parallelize_module(Inner("bhsd", True), mesh, UlyssesAttention(LAYOUTS["bhsd"]))
        return full_value(module(*(distribute(x, mesh, "b h (sp s) d") for x in (q, k, v))))

    assert all(torch.equal(out, expected) for out in run_on_mesh({"sp": 3}, run))


def plain(mesh: DeviceMesh, tensors: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Calls the attention with plain tensors of these lengths on the ranks."""
    module = parallelize_module(Inner("bhsd", True), mesh, UlyssesAttention(LAYOUTS["bhsd"]))
    rank = mesh.get_local_rank()
    start = sum(lengths[:rank])
    return module(*(x[:, :, start : start + lengths[rank]] for x in tensors))


def test_plain_tensors_of_equal_length_are_taken_as_shards() -> None:
    tensors = tensors_of("bhsd", 2, 6, 4, 2, 3)
    outs = run_on_mesh({"sp": 3}, plain, tensors, [2, 2, 2])
    assert_close(torch.cat(outs, dim=2), Inner("bhsd", True)(*tensors), "output", 1e-13)


def test_rejects_plain_tensors_of_unequal_length() -> None:
    tensors = tensors_of("bhsd", 2, 5, 4, 2, 3)
    message = refused(2, lambda mesh: plain(mesh, tensors, [3, 2]))
    assert "UlyssesAttention: plain tensors of 2 to 3 tokens on the ranks of" in message
    assert "pass DTensors in the attention's layout." in message


# Refusals


@pytest.mark.parametrize("text", ["b h (sp s) d", "b h (sp s) d -> b (sp h) s d -> b h s d"])
def test_rejects_text_without_two_sides(text: str) -> None:
    with pytest.raises(PlanError, match=r"is not 'source -> destination'\."):
        UlyssesAttention(text)


@pytest.mark.parametrize(
    "text",
    [
        "b h (sp s) d -> b (sp h) s e",
        "b h s d -> b h s d",
        "b h (sp s) d -> b h (sp s) d",
        "b h (sp s) d -> b h s d",
        "b (cp h) (sp s) d -> b (sp h) (cp s) d",
        "... (sp s) d -> ... s (sp d)",
        "b h (sp s) d -> b (cp h) s d",
    ],
)
def test_rejects_sides_that_do_not_move_one_axis(text: str) -> None:
    with pytest.raises(PlanError, match="must name the same tensor axes on both sides and move one mesh axis"):
        UlyssesAttention(text)


def test_rejects_what_is_no_layout() -> None:
    with pytest.raises(LayoutError):
        UlyssesAttention("b h (sp s d -> b (sp h) s d")


def test_prints_as_its_constructor() -> None:
    style = UlyssesAttention("b h  (sp s) d->b (sp h) s d")
    assert repr(style) == "UlyssesAttention('b h (sp s) d -> b (sp h) s d')"
    assert (style.mesh_axis, style.seq_dim, style.head_dim) == ("sp", 2, 1)


BHSD = LAYOUTS["bhsd"]


def given_to(module: nn.Module, *qkv: Any, text: str = BHSD, **named: Any) -> Any:
    """Returns an action: the attention is called with these tensors, each as its layout's DTensor where it is a tensor."""

    def action(mesh: DeviceMesh) -> Any:
        converted = parallelize_module(type(module)(*vars(module).get("args", ())), mesh, UlyssesAttention(text))
        src = UlyssesAttention(text).src
        wrap = lambda x: distribute(x, mesh, src) if isinstance(x, torch.Tensor) else x  # noqa: E731
        return converted(*map(wrap, qkv), **{name: wrap(x) for name, x in named.items()})

    return action


class Plain(nn.Module):
    def forward(self, *qkv: Any, **named: Any) -> Any:
        return F.scaled_dot_product_attention(*qkv, **named)


class Pair(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v), None


class Flat(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


Q = numbers(2, 4, 6, 3)


@pytest.mark.parametrize(
    ("action", "match"),
    [
        pytest.param(given_to(Plain(), Q, Q), "Plain was called without query, key and value", id="two tensors"),
        pytest.param(
            given_to(Plain(), Q, Q, numbers(2, 4, 7, 3)), "key has 6 tokens, value 7. They must agree", id="lengths"
        ),
        pytest.param(
            given_to(Plain(), Q, Q, Q.float()), "value is torch.float32, the query torch.float64", id="dtypes"
        ),
        pytest.param(given_to(Plain(), Q, Q, Q[:, :2]), "key has 4 heads, value 2. They must agree.", id="kv heads"),
        pytest.param(
            given_to(Plain(), Q, Q[:, :3], Q[:, :3]), "num_heads=4 is no multiple of num_kv_heads=3", id="groups"
        ),
    ],
)
def test_rejects_tensors_that_do_not_fit(action: Any, match: str) -> None:
    message = refused(2, action)
    assert re.search(match, message), message


@pytest.mark.parametrize(
    ("module", "match"),
    [
        pytest.param(Pair(), "UlyssesAttention: Pair returned a tuple, not one tensor.", id="tuple"),
        pytest.param(Flat(), "attention: the output is (2, 6, 6) for a query of (2, 2, 6, 3)", id="shape"),
    ],
)
def test_rejects_results_that_cannot_be_exchanged_back(module: nn.Module, match: str) -> None:
    def run(mesh: DeviceMesh) -> None:
        with pytest.raises(PlanError) as raised:
            given_to(module, Q, Q, Q)(mesh)
        assert match in str(raised.value)

    run_on_mesh({"sp": 2}, run)


def test_rejects_placements_other_than_its_layout() -> None:
    def elsewhere(mesh: DeviceMesh) -> None:
        module = parallelize_module(Plain(), mesh, UlyssesAttention(BHSD))
        x = DTensor.from_local(Q, mesh, [Replicate()], run_check=False)
        module(x, x, x)

    assert "UlyssesAttention: query is placed (Replicate(),) on" in refused(2, elsewhere)

    def mixed(mesh: DeviceMesh) -> None:
        module = parallelize_module(Plain(), mesh, UlyssesAttention(BHSD))
        x = distribute(Q, mesh, "b h (sp s) d")
        module(x, Q, x)

    assert "UlyssesAttention: key is a plain tensor beside DTensors. Pass all three as DTensors." in refused(2, mixed)


def test_rejects_another_mesh_and_a_second_conversion() -> None:
    message = refused(2, lambda mesh: parallelize_module(Plain(), mesh, UlyssesAttention(BHSD)), sizes={"cp": 2})
    assert "moves 'sp', the mesh is ('cp',)." in message

    def twice(mesh: DeviceMesh) -> None:
        module = parallelize_module(Plain(), mesh, UlyssesAttention(BHSD))
        parallelize_module(module, mesh, UlyssesAttention(BHSD))

    assert "UlyssesAttention: Plain is converted already. Convert a module once." in refused(2, twice)
    message = refused(
        4, lambda mesh: parallelize_module(Plain(), mesh, UlyssesAttention(BHSD)), sizes={"dp": 2, "sp": 2}
    )
    assert "has 2 dimensions. Pass the sequence dimension alone, for example mesh['sp']." in message


def test_tensors_of_different_dims_are_rejected() -> None:
    def run(mesh: DeviceMesh) -> None:
        parallelize_module(module := Plain(), mesh, UlyssesAttention("(sp t) h d -> t (sp h) d"))
        x = numbers(4, 4, 3)
        module(x, x[None], x)

    assert "attention: key has 4 dims, the query 3. Give all the same dims." in refused(2, run)


def test_the_check_itself_fails_on_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    import ulysses_dtensor.exchange as exchange

    monkeypatch.setattr(
        exchange._ExchangeBack,
        "forward",
        staticmethod(
            lambda ctx, group, routes, *tensors: tuple(
                x * 1.0001 for x in exchange.move(tensors, routes, group, add=True)
            )
        ),
    )
    with pytest.raises(AssertionError, match="relative error"):
        assert_equals_one_device("bshd", 1, 8, 4, 4, 2)
