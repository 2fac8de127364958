"""FlexAttention in converted models: global numbers of heads, masks cut to heads, every kind of reference to it."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from functools import partial
from typing import Any

import flex_models
import pytest
import torch
from flex_models import (
    COMPILED,
    DENSE,
    MASKS,
    SIZE,
    ByName,
    CompiledByName,
    FlexBlock,
    FlexModel,
    ImportedInside,
    InAClosure,
    OnTheClass,
    Static,
    ThroughItsModule,
    block_mask,
    causal,
    dense_flex,
    flex_model,
    window_of_head,
)
from gloo import GlooPool
from hypothesis import given
from hypothesis import strategies as st
from model_zoo import WIDTH, float64, ids_of, numbers
from one_device import assert_close, assert_equals_one_device, refused, refused_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from ulysses_dtensor import (
    PlanError,
    UlyssesAttention,
    UlyssesPlan,
    bypass,
    check_parity,
    count_collectives,
    distribute,
    explain,
    parallelize_module,
)
from ulysses_dtensor.certificate import certify
from ulysses_dtensor.flex import seen_flex
from ulysses_dtensor.heads import Heads
from ulysses_dtensor.mods import block_mask_of, score_mod_of
from ulysses_dtensor.testing import full_value, run_on_mesh

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning"),
]

SCORES = ["none", "number of the head", "slopes", "learned"]


@st.composite
def heads(draw: st.DrawFn) -> tuple[int, int]:
    count = draw(st.integers(1, 8))
    return count, draw(st.sampled_from([kv for kv in range(1, count + 1) if count % kv == 0]))


# Equal to one device


@given(
    mask=st.sampled_from(list(MASKS)),
    score=st.sampled_from(SCORES),
    heads=heads(),
    ranks=st.integers(2, 4),
    seq_len=st.integers(5, 23),
    batch=st.integers(1, 2),
)
def test_outputs_and_gradients_equal_one_device(
    mask: str, score: str, heads: tuple[int, int], ranks: int, seq_len: int, batch: int
) -> None:
    assert_equals_one_device(flex_model(mask, score, *heads), {"ids": ids_of(batch, seq_len)}, ranks)


def test_the_exchanges_are_those_of_any_attention() -> None:
    run = assert_equals_one_device(flex_model("window of each head"), {"ids": ids_of(2, 13)}, 2)
    assert run.forward.count("all-to-all") == 4
    assert run.backward.count("all-to-all") == 4


@pytest.mark.parametrize(
    "options",
    [
        {"return_lse": True},
        {"return_aux": AuxRequest(lse=True)},
        {"return_aux": AuxRequest(max_scores=True)},
        {"return_aux": AuxRequest(lse=True, max_scores=True)},
        {"return_aux": AuxRequest()},
        {"scale": 0.3},
        {"kernel_options": {"BLOCK_M": 32}},
    ],
    ids=str,
)
@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 2, 2), (6, 3, 4), (3, 1, 4)])
def test_options_and_what_is_returned_beside(options: Any, heads: int, kv_heads: int, ranks: int) -> None:
    model = flex_model("causal", "slopes", heads, kv_heads, **options)
    assert_equals_one_device(model, {"ids": ids_of(2, 13)}, ranks)


def forward_on_real_ranks(block: Any, flex: str, mask: str, score: str, ranks: int, single: bool) -> float:
    """Returns how far the output is from one device's; without gradients, which torch does not have on a CPU."""
    warnings.simplefilter("ignore")  # torch's own, in a process of its own
    options = {} if block is not FlexBlock else {"flex": REFERENCES[flex]()}
    model, ids = flex_model(mask, score, 6, 2, block=block, **options), ids_of(2, 21)
    model = model.float() if single else model
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("sp",))
    converted = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
    with torch.no_grad():
        expected = model(ids)
        with count_collectives() as count:
            out = converted(ids)
    assert count.kinds.count("all-to-all") == 4
    return float((out - expected).abs().max() / expected.abs().max())


REFERENCES = {
    "plain": lambda: flex_attention,
    "bound": lambda: partial(flex_attention, scale=0.3),
    "compiled": lambda: torch.compile(flex_attention, backend="aot_eager"),
    "Inductor": lambda: torch.compile(flex_attention),
}


@pytest.mark.parametrize("block", [ByName, CompiledByName, OnTheClass, Static, InAClosure])
@pytest.mark.parametrize(("mask", "score"), [("window of each head", "slopes"), ("documents", "number of the head")])
def test_torchs_own_function_by_every_kind_of_reference(gloo: GlooPool, block: Any, mask: str, score: str) -> None:
    for error in gloo.run(4, forward_on_real_ranks, block, "", mask, score, 4, False, timeout=120):
        assert error < 1e-12


@pytest.mark.parametrize("flex", REFERENCES)
def test_torchs_own_function_on_an_instance(gloo: GlooPool, flex: str) -> None:
    single = flex == "Inductor"  # which takes no float64
    timeout = 280 if single else 120
    for error in gloo.run(
        2, forward_on_real_ranks, FlexBlock, flex, "window of each head", "slopes", 2, single, timeout=timeout
    ):
        assert error < (1e-5 if single else 1e-12)


def test_the_dense_function_is_torchs() -> None:
    q, kv = numbers(2, 4, 13, SIZE), numbers(2, 2, 13, SIZE, seed=1)
    for name in MASKS:
        options = {
            "score_mod": lambda s, b, h, q, k: s * (1 + h) - (q - k).abs(),
            "block_mask": MASKS[name](ids_of(2, 13), 4),
            "enable_gqa": True,
            "return_aux": AuxRequest(lse=True),
        }
        out, aux = dense_flex(q, kv, kv + 1, **options)
        expected, expected_aux = flex_attention(q, kv, kv + 1, **options)
        assert_close(out, expected, name, 1e-12)
        assert_close(aux.lse, expected_aux.lse, name, 1e-12)


# The stand-in


def test_outside_converted_modules_nothing_changes() -> None:
    ids, untouched = ids_of(2, 13), flex_model(block=ByName)
    with torch.no_grad():
        expected = untouched(ids)

        def run(mesh: DeviceMesh) -> None:
            converted = parallelize_module(flex_model(block=ByName), mesh, UlyssesPlan())
            stand_in = flex_models.flex_attention
            assert isinstance(stand_in, partial)
            assert stand_in.func is seen_flex
            parallelize_module(flex_model(block=ByName), mesh, UlyssesPlan())
            assert flex_models.flex_attention is stand_in
            assert stand_in.args == (flex_attention,)
            with torch.no_grad(), bypass(converted):
                assert torch.equal(converted(ids), expected)
            with torch.no_grad():
                assert torch.equal(untouched(ids), expected)

        run_on_mesh({"sp": 1}, run)
        assert torch.equal(untouched(ids), expected)


@pytest.mark.parametrize("flex", [flex_attention, partial(flex_attention, scale=0.3)], ids=["plain", "bound"])
def test_converted_models_are_copied_and_pickled(flex: Any) -> None:
    ids, model = ids_of(2, 13), flex_model(flex=flex)

    def run(mesh: DeviceMesh) -> None:
        converted = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        with torch.no_grad():
            expected = converted(ids)
            assert torch.equal(copy.deepcopy(converted)(ids), expected)
        block = converted.layers[0]  # type: ignore[index] - a ModuleList
        assert isinstance(block, FlexBlock)
        back = pickle.loads(pickle.dumps(block.flex))
        assert (back.func, back.args, back.keywords) == (block.flex.func, block.flex.args, block.flex.keywords)

    run_on_mesh({"sp": 1}, run)  # torch compiles inside, and more threads than one would see that


def test_models_with_flex_are_saved_whole() -> None:
    model = flex_model(flex=flex_attention)
    certify(model, (ids_of(1, 13),), {"sp": 2})
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        assert torch.equal(torch.load(file, weights_only=False)(ids_of(1, 9)), model(ids_of(1, 9)))


def test_torch_still_names_what_it_compiled() -> None:
    """If this fails, give `flex._uncompiled` torch's new way from what torch.compile returns to what it was given."""
    assert COMPILED._torchdynamo_orig_callable is flex_attention  # type: ignore[attr-defined] - torch's own


def test_another_tensor_class_sees_what_it_saw_before() -> None:
    class Ours(torch.Tensor):
        pass

    q = numbers(1, 2, 5, SIZE).as_subclass(Ours)
    assert type(DENSE(q, q, q)) is type(dense_flex(q, q, q))


# Global numbers of heads


@given(first=st.integers(0, 5), count=st.integers(1, 3))
def test_mods_of_some_heads_are_those_of_the_whole(first: int, count: int) -> None:
    part, several = Heads((first, first + count), (0, 0), None), block_mask(window_of_head, None, 8, 13)
    score = lambda s, b, h, q, k: s * h + q  # noqa: E731
    shifted, cut = score_mod_of(score, part), block_mask_of(several, part)
    assert shifted is not None
    assert cut is not None
    assert cut.shape == (1, count, 13, 13)
    assert torch.equal(cut.to_dense(), several.to_dense()[:, first : first + count])
    assert several.mask_mod is window_of_head
    for h in range(count):
        assert shifted(2.0, 0, h, 3, 4) == score(2.0, 0, h + first, 3, 4)  # type: ignore[arg-type] - numbers do as well
        assert cut.mask_mod(*(torch.tensor(x) for x in (0, h, 9, 3))) == (2 * (h + first) >= 9 - 3)


# Declared by layout


class Inner(nn.Module):
    """An attention called with q, k and v that numbers its heads."""

    def __init__(self, heads: int, flex: Any = DENSE, mask: BlockMask | None = None) -> None:
        super().__init__()
        self.heads, self.flex, self.mask = heads, flex, mask
        self.register_buffer("slopes", 0.7 ** torch.arange(heads))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        slopes = self.slopes
        alibi = lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()  # noqa: E731  # type: ignore[index]
        return self.flex(q, k, v, score_mod=alibi, block_mask=self.mask, enable_gqa=q.shape[1] != k.shape[1])


class DeclaredBlock(nn.Module):
    def __init__(self, inner: nn.Module, heads: int) -> None:
        super().__init__()
        self.heads, self.inner = heads, inner
        self.qkv, self.out = nn.Linear(WIDTH, 3 * heads * SIZE), nn.Linear(heads * SIZE, WIDTH)

    def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, SIZE).permute(2, 0, 3, 1, 4)
        return x + self.out(self.inner(q, k, v).transpose(1, 2).reshape(batch, tokens, -1))


def declared() -> UlyssesPlan:
    return UlyssesPlan(attention={"*inner": UlyssesAttention("b h (sp s) d -> b (sp h) s d")})


@given(
    mask=st.sampled_from(["none", "causal", "window of each head"]), heads=st.integers(1, 7), ranks=st.integers(2, 4)
)
def test_declared_attentions_number_heads_globally(mask: str, heads: int, ranks: int) -> None:
    ids = ids_of(2, 13)
    with float64():
        torch.manual_seed(0)
        made = MASKS[mask](ids, heads)
        model = FlexModel("none", lambda: DeclaredBlock(Inner(heads, mask=made), heads))
    assert_equals_one_device(model, {"ids": ids}, ranks, plan=declared)


def test_an_attention_declared_alone_numbers_heads_globally() -> None:
    q, kv = numbers(2, 6, 13, SIZE), numbers(2, 2, 13, SIZE, seed=1)
    made = block_mask(window_of_head, None, 6, 13)
    expected = Inner(6, mask=made)(q, kv, kv + 1)

    def run(mesh: DeviceMesh) -> torch.Tensor:
        style = UlyssesAttention("b h (sp s) d -> b (sp h) s d")
        module = parallelize_module(Inner(6, mask=made), mesh, style)
        return full_value(module(*(distribute(x, mesh, style.src) for x in (q, kv, kv + 1))))

    for out in run_on_mesh({"sp": 4}, run):
        assert_close(out, expected, "output", 1e-12)


# Refusals


IDS = {"ids": ids_of(2, 13)}


def with_attend(attend: Any, **options: Any) -> FlexModel:
    class Changed(FlexBlock):
        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
            return attend(self, q, k, v, options)

    return flex_model(block=Changed, **options)


def local_mask(self: Any, q: Any, k: Any, v: Any, options: Any) -> Any:
    tokens = q.shape[2]
    return DENSE(q, k, v, **{**options, "block_mask": create_block_mask(causal, None, None, tokens, tokens, "cpu")})


class OfLength:
    """A score_mod with the number of tokens at hand in an object."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s / self.tokens

    def method(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s / self.tokens


def object_of_length(self: Any, q: Any, k: Any, v: Any, options: Any) -> Any:
    return DENSE(q, k, v, **{**options, "score_mod": OfLength(q.shape[2])})


def method_of_length(self: Any, q: Any, k: Any, v: Any, options: Any) -> Any:
    return DENSE(q, k, v, **{**options, "score_mod": OfLength(q.shape[2]).method})


def closure_over_length(self: Any, q: Any, k: Any, v: Any, options: Any) -> Any:
    held = OfLength(q.shape[2])
    return DENSE(q, k, v, **{**options, "score_mod": lambda s, b, h, i, j: s / held.tokens})


def gate_of_tokens(self: Any, q: Any, k: Any, v: Any, options: Any) -> Any:
    gate = q.sum(-1)

    def gated(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + gate[b, h, i]

    return DENSE(q, k, v, **{**options, "score_mod": gated})


def length_in_a_closure(self: Any, q: Any, k: Any, v: Any, options: Any) -> Any:
    length = q.shape[2]
    return DENSE(q, k, v, **{**options, "score_mod": lambda s, b, h, i, j: s + (j - i) / length})


def scale_of_tokens(self: Any, q: Any, k: Any, v: Any, options: Any) -> Any:
    return DENSE(q, k, v, **options, scale=1.0 / q.shape[2])


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (with_attend(local_mask), "is made from the tokens at hand"),
        (with_attend(gate_of_tokens), "its attention was called with other arguments"),
        (with_attend(object_of_length), "its attention was called with other arguments"),
        (with_attend(method_of_length), "its attention was called with other arguments"),
        (with_attend(closure_over_length), "its attention was called with other arguments"),
        (with_attend(length_in_a_closure), "its attention was called with other arguments"),
        (with_attend(scale_of_tokens), "its attention was called with other arguments"),
        (with_attend(lambda self, q, k, v, o: DENSE(q, k, v, o["score_mod"])), "Pass enable_gqa=True, or repeat"),
        (with_attend(lambda self, q, k, v, o: DENSE(q[0], k[0], v[0], **o)), "query has 3 dims"),
        (flex_model(block=ByName), "FlexAttention does not support backward on CPU"),
    ],
    ids=["mask of tokens", "gate", "object", "method", "closure", "length", "scale", "gqa", "dims", "backward"],
)
def test_refuses_before_any_exchange(model: nn.Module, match: str) -> None:
    message = refused_model(model, IDS)
    assert match in message, message


@pytest.mark.parametrize("mask", ["causal", "none"])
@pytest.mark.parametrize("block", [ThroughItsModule, ImportedInside])
def test_refuses_calls_that_it_cannot_see(block: Any, mask: str) -> None:
    message = refused_model(flex_model(mask, block=block), IDS, 1)
    assert "import it by name at the top of the file, or declare the module that calls it" in message, message


def other_masks() -> dict[str, tuple[BlockMask, str]]:
    of_three = create_block_mask(window_of_head, None, 3, 13, 13, "cpu")
    ordered = create_block_mask(window_of_head, None, 4, 13, 13, "cpu")
    ordered.dq_kv_order = torch.zeros(1, 4, 1, dtype=torch.int32)
    return {
        "length": (
            create_block_mask(causal, None, None, 12, 12, "cpu"),
            "(12, 12) tokens, the whole sequence of (13, 13)",
        ),
        "heads": (of_three, "is of batch and heads (1, 3), the query of (2, 4)"),
        "batch": (create_block_mask(causal, 3, None, 13, 13, "cpu"), "is of batch and heads (3, 1)"),
        "sliced": (create_block_mask(causal, None, 4, 13, 13, "cpu")[:, :1], "was sliced, and has lost its mask_mod"),
        "order": (ordered, "a tensor dq_kv_order, with which torch cannot cut it"),
    }


@pytest.mark.parametrize("name", other_masks())
def test_refuses_block_masks_that_do_not_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, match = other_masks()[name]
    monkeypatch.setitem(MASKS, name, lambda ids, heads: made)
    message = refused_model(flex_model(name), IDS)
    assert match in message, message


def test_refuses_a_declared_attention_that_makes_other_heads() -> None:
    class Doubled(Inner):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return super().forward(*(x.unflatten(-1, (2, -1)).flatten(1, 2) for x in (q, k, v))).view(q.shape)

    with float64():
        model = FlexModel("none", lambda: DeclaredBlock(Doubled(8), 4))
    assert "cannot tell which heads these are" in refused_model(model, IDS, plan=declared)


class TakesMask(FlexModel):
    def forward(self, ids: torch.Tensor, mask: BlockMask) -> torch.Tensor:  # type: ignore[override]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


@pytest.mark.parametrize("differ", [False, True])
def test_ranks_must_be_given_equal_block_masks(differ: bool) -> None:
    with float64():
        model = TakesMask("none", lambda: FlexBlock(4, 2, "slopes"))

    def forward(mesh: DeviceMesh) -> Any:
        documents = torch.arange(13).expand(2, 13) // (3 + differ * mesh.get_local_rank())
        mask = block_mask(flex_models.made_of(documents), 2, None, 13, size=16)
        return parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())(IDS["ids"], mask)

    if differ:
        assert "input 1 = BlockMask: ranks [0] / [1] of the group differ" in refused(2, forward)
    else:
        run_on_mesh({"sp": 2}, forward)


# What else looks at attentions


@pytest.mark.parametrize("block", [FlexBlock, ByName])
def test_explain_and_the_certificate_show_calls(block: Any) -> None:
    model = flex_model("window of each head", heads=4, kv_heads=2, block=block, return_aux=AuxRequest(lse=True))
    text = str(explain(model, {"sp": 3}, None, (ids_of(1, 13),)))
    assert "2 (1), 0 (0)" in text
    assert "4 query, 2 kv heads; 1 ranks idle" in text
    with torch.no_grad():
        assert certify(model, (ids_of(1, 13),), {"sp": 3}).passed


def test_parity_is_checked() -> None:
    model = flex_model()

    def run(mesh: DeviceMesh) -> bool:
        converted = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        return bool(check_parity(converted, (ids_of(2, 13),)).passed)

    assert all(run_on_mesh({"sp": 2}, run))


def test_a_model_without_any_attention_is_told_of_both() -> None:
    with pytest.raises(PlanError, match=r"calls .*scaled_dot_product_attention or flex_attention, so nothing matches"):
        explain(nn.Sequential(nn.Linear(2, 2)), {"sp": 2})
