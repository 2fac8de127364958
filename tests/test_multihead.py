"""`nn.MultiheadAttention` and torch's transformers: the function built anew, and models of them in parallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from model_zoo import HEADS, VOCABULARY, WIDTH, ids_of, loss_of, numbers, seeded
from one_device import assert_close, assert_equals_one_device, call, on_one_device, refused, refused_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ulysses_dtensor import PlanError, UlyssesPlan, bypass, count_collectives, explain, parallelize_module
from ulysses_dtensor.calls import Call, hidden_options
from ulysses_dtensor.certificate import certify
from ulysses_dtensor.layout import as_layout
from ulysses_dtensor.multihead import multi_head_attention
from ulysses_dtensor.testing import run_on_mesh
from ulysses_dtensor.trees import tree_flatten

# The function


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Draws the arguments of a call; one key of one batch at least can be looked at, unless `nothing` is drawn."""
    batch, tokens, heads, size = (draw(st.integers(1, 4)) for _ in range(4))
    batched, packed, same, biased = (draw(st.booleans()) for _ in range(4))
    batch = batch if batched else 1
    keys = tokens if same else draw(st.integers(1, 5))
    width, kwidth, vwidth = heads * size, *((heads * size,) * 2 if packed else (3, 5))
    query, key, value = (
        numbers(tokens, batch, width),
        numbers(keys, batch, kwidth, seed=1),
        numbers(keys, batch, vwidth, seed=2),
    )
    if packed and draw(st.booleans()):
        value = key
    if packed and same and draw(st.booleans()):
        query = key = value
    weights = [numbers(width, n, seed=3 + at) for at, n in enumerate((width, kwidth, vwidth))]
    mask, padding = draw(st.sampled_from([None, "bool", "float"])), draw(st.booleans())
    attn_mask, key_padding_mask = None, None
    if mask is not None:
        shape = (batch * heads, tokens, keys) if draw(st.booleans()) else (tokens, keys)
        attn_mask = numbers(*shape, seed=7) if mask == "float" else numbers(*shape, seed=7) > 0.5
        if mask == "float":
            attn_mask = attn_mask.masked_fill(attn_mask > 1, -torch.inf)
    if padding:
        key_padding_mask = numbers(batch, keys, seed=8)
        key_padding_mask = key_padding_mask if mask == "float" else key_padding_mask > 0.5
    extra = draw(st.booleans())
    return {
        "query": query if batched else query[:, 0],
        "key": key if batched else key[:, 0],
        "value": value if batched else value[:, 0],
        "embed_dim_to_check": width,
        "num_heads": heads,
        "in_proj_weight": torch.cat(weights) if packed else None,
        "in_proj_bias": numbers(3 * width, seed=9) if biased else None,
        "bias_k": numbers(1, 1, width, seed=10) if extra else None,
        "bias_v": numbers(1, 1, width, seed=11) if extra else None,
        "add_zero_attn": draw(st.booleans()),
        "dropout_p": draw(st.sampled_from([0.0, 0.5])),
        "out_proj_weight": numbers(width, width, seed=12),
        "out_proj_bias": numbers(width, seed=13) if biased else None,
        "training": False,
        "key_padding_mask": key_padding_mask if batched or key_padding_mask is None else key_padding_mask[0],
        "need_weights": draw(st.booleans()),
        "attn_mask": attn_mask,
        "use_separate_proj_weight": not packed,
        "q_proj_weight": None if packed else weights[0],
        "k_proj_weight": None if packed else weights[1],
        "v_proj_weight": None if packed else weights[2],
        "average_attn_weights": draw(st.booleans()),
        "is_causal": attn_mask is not None and draw(st.booleans()),
    }


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """Returns output and gradients of every floating argument, and the weights' shape."""
    made = {id(x): x.clone() for x in arguments.values() if isinstance(x, torch.Tensor)}
    leaves = [x for x in made.values() if x.is_floating_point()]
    for x in leaves:
        x.requires_grad_()
    out, weights = function(
        *(made.get(id(x), x) for x in list(arguments.values())[:13]),
        **{name: made.get(id(x), x) for name, x in list(arguments.items())[13:]},
    )
    gradients = torch.autograd.grad(loss_of(out), leaves, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)]
    return [out.detach(), *found], () if weights is None else tuple(weights.shape)


def plain(*args: Any, **kwargs: Any) -> Any:
    return multi_head_attention(F.scaled_dot_product_attention, *args, **kwargs)


@given(arguments=calls())
def test_the_function_is_torchs_own(arguments: dict[str, Any]) -> None:
    (expected, shape), (found, found_shape) = (
        outcome(function, arguments) for function in (F.multi_head_attention_forward, plain)
    )
    assert shape == found_shape
    if expected[0].isnan().any():  # a row with everything masked, whose gradients are as meaningless
        found, expected = found[:1], expected[:1]
    for number, (x, y) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11, equal_nan=True, msg=f"tensor {number}: {x} for {y}")


def arguments_of(**changes: Any) -> list[Any]:
    x, weight = numbers(5, 2, 8), numbers(8, 8)
    packed = {"in_proj_weight": numbers(24, 8), "in_proj_bias": None, "bias_k": None, "bias_v": None}
    rest = {"add_zero_attn": False, "dropout_p": 0.0, "out_proj_weight": weight, "out_proj_bias": None}
    positional = {"query": x, "key": x, "value": x, "embed_dim_to_check": 8, "num_heads": 2, **packed, **rest}
    return [{**positional, **{k: v for k, v in changes.items() if k in positional}}, {
        k: v for k, v in changes.items() if k not in positional
    }]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"static_k": numbers(4, 5, 4)}, "static_k and static_v are not supported"),
        ({"key": numbers(5, 8)}, r"key=\(5, 8\), .* all of them \(tokens, batch, size\)"),
        ({"num_heads": 3}, "for a width of 8 in 3 heads"),
        ({"key": numbers(4, 2, 8)}, r"key=\(4, 2, 8\), .* do not fit each other"),
        ({"bias_k": numbers(1, 1, 8)}, "one of bias_k and bias_v is None"),
        ({"is_causal": True}, "is_causal=True without attn_mask"),
        ({"attn_mask": numbers(2, 5, 5)}, r"attn_mask=\(2, 5, 5\) is neither \(L, S\) nor \(4, L, S\)"),
        ({"key_padding_mask": numbers(5, 2)}, r"key_padding_mask=\(5, 2\) is not \(2, S\)"),
        ({"attn_mask": numbers(5, 4), "key_padding_mask": numbers(2, 5)}, "are for 4 and 5 keys"),
        ({"attn_mask": ids_of(5, 5)}, r"a mask of torch\.int64"),
        ({"in_proj_weight": None}, "projection weights are missing"),
    ],
)
def test_rejects_arguments_that_do_not_fit(changes: dict[str, Any], match: str) -> None:
    positional, named = arguments_of(**changes)
    with pytest.raises(PlanError, match=match):
        plain(**positional, **named)


# Models


class Encoder(nn.Module):
    def __init__(
        self, layers: int = 2, heads: int = HEADS, batch_first: bool = True, dropout: float = 0.0, **how: Any
    ) -> None:
        super().__init__()
        how = {"dim_feedforward": 24, "dropout": dropout, "batch_first": batch_first, **how}
        self.batch_first = batch_first
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nested = batch_first and not how.get("norm_first", False) and heads % 2 == 0
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, heads, **how), layers, nn.LayerNorm(WIDTH), enable_nested_tensor=nested
        )
        for p in self.encoder.parameters():  # layers are copies of one, its biases are zeros
            nn.init.normal_(p, std=0.3)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, **how: Any) -> torch.Tensor:
        x = self.encoder(self.embed(ids if self.batch_first else ids.t()), **how)
        return self.head(x if self.batch_first else x.transpose(0, 1))


def padding(batch: int, seq_len: int) -> torch.Tensor:
    mask = torch.zeros(batch, seq_len, dtype=torch.bool)
    mask[0, (seq_len + 1) // 2 :] = True
    return mask


def causal(seq_len: int) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(seq_len, dtype=torch.float64)


MASKS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "none": lambda batch, seq_len: {},
    "padding": lambda batch, seq_len: {"src_key_padding_mask": padding(batch, seq_len)},
    "causal": lambda batch, seq_len: {"mask": causal(seq_len)},
    "hint": lambda batch, seq_len: {"mask": causal(seq_len), "is_causal": True},
    "bool": lambda batch, seq_len: {"mask": torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)},
    "both": lambda batch, seq_len: {
        "mask": torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1),
        "src_key_padding_mask": padding(batch, seq_len),
    },
    "numbers": lambda batch, seq_len: {
        "mask": numbers(seq_len, seq_len),
        "src_key_padding_mask": numbers(batch, seq_len, seed=1),
    },
    "heads": lambda batch, seq_len: {"mask": numbers(batch * HEADS, seq_len, seq_len)},
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["tokens first", "batch first"])
def test_an_encoder_equals_one_device(batch_first: bool, norm_first: bool, ranks: int) -> None:
    model = seeded(lambda: Encoder(batch_first=batch_first, norm_first=norm_first))
    run = assert_equals_one_device(model, {"ids": ids_of(2, 13)}, ranks)
    assert [kind for kind in run.forward if kind != "all-reduce"] == ["all-to-all"] * 4 + ["all-gather"]
    assert run.backward.count("all-to-all") == 4


@pytest.mark.parametrize("batch_first", [False, True], ids=["tokens first", "batch first"])
@pytest.mark.parametrize("masks", MASKS)
def test_masks_of_the_whole_sequence(masks: str, batch_first: bool) -> None:
    model = seeded(lambda: Encoder(batch_first=batch_first))
    run = assert_equals_one_device(model, {"ids": ids_of(2, 11), **MASKS[masks](2, 11)}, 3)
    assert run.forward.count("all-to-all") == 4


@given(
    batch=st.integers(1, 3), seq_len=st.integers(1, 14), heads=st.sampled_from([1, 2, 4, 8]), ranks=st.integers(1, 4),
    masks=st.sampled_from([name for name in MASKS if name != "heads"]), batch_first=st.booleans(),
)  # fmt: skip
def test_any_sizes(batch: int, seq_len: int, heads: int, ranks: int, masks: str, batch_first: bool) -> None:
    model = seeded(lambda: Encoder(1, heads, batch_first))
    assert_equals_one_device(model, {"ids": ids_of(batch, seq_len), **MASKS[masks](batch, seq_len)}, ranks)


class Alone(nn.Module):
    """One attention of torch in no list, called in some way."""

    def __init__(
        self, how: Callable[[Any, torch.Tensor], torch.Tensor], attention: type = nn.MultiheadAttention, **options: Any
    ) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 6)
        self.attn = attention(WIDTH, HEADS, batch_first=True, **options)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.how(self, self.embed(ids)))


class Own(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override] - its own signature
        return super().forward(x, x, x, need_weights=False)[0]


def by_keywords(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + model.attn(query=x, key=x, value=x)[0]


def normed(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.norm(x)
    return x + model.attn(y, y, y, attn_mask=causal(x.shape[1]), need_weights=False)[0]


def twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    return by_keywords(model, by_keywords(model, x))


def position_in_query_and_key(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = x + numbers(*x.shape[1:])
    return model.attn(y, y, x)[0]


def narrow(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + model.attn(x, x, model.narrow(x), need_weights=False)[0]


def unbatched(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x[0] + model.attn(x[0], x[0], x[0])[0]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: Alone(by_keywords), id="keywords"),
        pytest.param(lambda: Alone(normed), id="causal"),
        pytest.param(lambda: Alone(twice, bias=False), id="twice"),
        pytest.param(lambda: Alone(position_in_query_and_key), id="positions"),
        pytest.param(lambda: Alone(narrow, vdim=6), id="narrow"),
        pytest.param(lambda: Alone(unbatched), id="unbatched"),
        pytest.param(lambda: Alone(lambda model, x: x + model.attn(x), Own), id="subclass"),
        pytest.param(lambda: Alone(by_keywords, add_bias_kv=True), id="bias"),
        pytest.param(lambda: Alone(by_keywords, add_zero_attn=True), id="zero"),
        pytest.param(lambda: Alone(by_keywords, add_bias_kv=True, add_zero_attn=True), id="bias and zero"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_attention_in_no_list_is_its_own_block(build: Callable[[], nn.Module], ranks: int) -> None:
    run = assert_equals_one_device(seeded(build), {"ids": ids_of(2, 9)}, ranks)
    assert run.forward.count("all-to-all") >= 2


class Masked(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.layers[0](x, x, x, attn_mask=mask, need_weights=False)[0]


@pytest.mark.parametrize("tokens", range(4, 12))
@pytest.mark.parametrize("zero", [False, True])
def test_a_mask_beside_learned_keys_is_no_mask_of_the_tokens_at_hand(zero: bool, tokens: int) -> None:
    model = seeded(lambda: Masked(add_bias_kv=True, add_zero_attn=zero))
    assert_equals_one_device(model, {"x": numbers(2, tokens, WIDTH), "mask": numbers(tokens, tokens)}, 2)


class Looks(nn.Module):
    """A block that looks whether it is given one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y = self.attn(x, x, x)[0]
        return 3 * y if other is x else y + other


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList([Looks()] * 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        y = self.layers[0](x, x)
        z = self.layers[0](y, y)
        z = self.layers[0](z, y)
        return self.head(self.layers[1](x, numbers(*x.shape)) + z)


def test_what_is_one_tensor_stays_one() -> None:
    assert_equals_one_device(seeded(Looking), {"ids": ids_of(2, 9)}, 2)


def options(*args: Any, inputs: dict[str, str] | None = None) -> list[dict[int, int]]:
    """Returns the candidates for the hidden state of a call of an attention."""
    leaves, spec = tree_flatten((args, {}))
    layouts = {name: as_layout(text) for name, text in (inputs or {}).items()}
    call = Call(nn.MultiheadAttention(4, 2), leaves, spec, layouts, None, {"sp": 2})
    return [option.hidden for option in hidden_options(call)]


def test_one_tensor_in_several_places_is_one_hidden_state() -> None:
    x, y = numbers(2, 9, 4), numbers(2, 9, 4)
    assert options(x, x, x) == [{0: 1, 1: 1, 2: 1}, {0: 0, 1: 0, 2: 0}]
    assert options(x, y, x) == [{0: 1, 2: 1}, {0: 0, 2: 0}, {1: 1}, {1: 0}]
    assert options(x, x, y, inputs={"query": "b (sp s) d", "value": "b s d"}) == [{0: 1, 1: 1}, {0: 1, 1: 1}, {1: 0}]
    assert options(x, x, y, inputs={"query": "b s d", "key": "(sp s) b d"}) == [{1: 0}, {2: 1}, {2: 0}]


class AroundLayer(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True, **how)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor, **how: Any) -> torch.Tensor:
        return self.head(self.layer(self.embed(ids), **how))


@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_layer_in_no_list(padded: bool, norm_first: bool) -> None:
    masks = {"src_key_padding_mask": padding(2, 9)} if padded else {}
    model = seeded(lambda: AroundLayer(norm_first=norm_first))
    run = assert_equals_one_device(model, {"ids": ids_of(2, 9), **masks}, 3)
    assert run.forward.count("all-to-all") == 2
    assert run.forward.count("all-gather") == 1  # the logits, and nothing before them


ROOTS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True),
    "layer, tokens first": lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0, norm_first=True),
    "encoder": lambda: Encoder().encoder,
    "encoder, tokens first": lambda: Encoder(batch_first=False, norm_first=True).encoder,
}


@pytest.mark.parametrize("root", ROOTS)
def test_a_model_that_is_torchs_own(root: str) -> None:
    shape = (13, 2, WIDTH) if "tokens first" in root else (2, 13, WIDTH)
    run = assert_equals_one_device(seeded(ROOTS[root]), {"src": numbers(*shape)}, 3)
    assert run.forward.count("all-to-all") == (4 if "encoder" in root else 2)


def test_rejects_a_model_that_is_itself_an_attention() -> None:
    x = numbers(2, 9, WIDTH)
    model = seeded(lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    assert "the model is itself an attention" in refused_model(model, {"query": x, "key": x, "value": x})


def transformer(batch_first: bool = True) -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, 1, 2, 24, 0.0, batch_first=batch_first)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("batch_first", [False, True], ids=["tokens first", "batch first"])
@pytest.mark.parametrize("lengths", [(9, 9), (9, 13), (13, 8)])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_a_transformer_equals_one_device(lengths: tuple[int, int], batch_first: bool, masked: bool) -> None:
    src, tgt = (numbers(2, n, WIDTH, seed=n) for n in lengths)
    masks = {
        "tgt_mask": causal(lengths[1]),
        "src_key_padding_mask": padding(2, lengths[0]).double() * -9,
        "memory_key_padding_mask": padding(2, lengths[0]).double() * -9,
    }
    model, inputs = seeded(lambda: transformer(batch_first)), {"src": src, "tgt": tgt}
    if not batch_first:
        inputs = {name: x.transpose(0, 1) for name, x in inputs.items()}
    assert_equals_one_device(model, {**inputs, **(masks if masked else {})}, 2)


@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
@pytest.mark.parametrize("lengths", [(9, 9), (5, 13)])
def test_a_decoder_layer_equals_one_device(lengths: tuple[int, int], norm_first: bool) -> None:
    model = seeded(
        lambda: nn.TransformerDecoder(
            nn.TransformerDecoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True, norm_first=norm_first), 2
        )
    )
    memory, tgt = (numbers(2, n, WIDTH, seed=n) for n in lengths)
    assert_equals_one_device(model, {"tgt": tgt, "memory": memory}, 2)


# Fast paths of inference


def in_inference(
    mesh: DeviceMesh, model: nn.Module, inputs: dict[str, Any], mode: Callable[[], Any]
) -> tuple[torch.Tensor, int]:
    model = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
    with mode(), count_collectives() as count:
        out = call(model, inputs)
    return out, count.kinds.count("all-to-all")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("kind", ["encoder", "layer", "attention"])
def test_inference_takes_no_way_around(kind: str, masks: str, mode: Any) -> None:
    builds: dict[str, Callable[[], nn.Module]] = {
        "encoder": Encoder,
        "layer": AroundLayer,
        "attention": lambda: Alone(by_keywords),
    }
    model = seeded(builds[kind]).eval()
    for part in model.modules():  # with nested tensors padding is refused
        if isinstance(part, nn.TransformerEncoder) and masks in ("padding", "both"):
            part.use_nested_tensor = False
    how = {} if kind == "attention" else MASKS[masks](2, 11)
    if kind == "layer":
        how = {name.replace("mask", "src_mask") if name == "mask" else name: mask for name, mask in how.items()}
    inputs = {"ids": ids_of(2, 11), **how}
    with mode():
        expected = call(copy.deepcopy(model), inputs)
    for out, exchanges in run_on_mesh({"sp": 3}, in_inference, model, inputs, mode):
        assert exchanges == (4 if kind == "encoder" else 2)
        assert_close(out, expected, "output", 1e-9)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_rejects_padding_where_torch_would_leave_it_out() -> None:
    model, inputs = seeded(Encoder).eval(), {"ids": ids_of(2, 11), "src_key_padding_mask": padding(2, 11)}
    expected = on_one_device(model, inputs).outputs[0]
    with torch.no_grad():
        assert not torch.allclose(call(copy.deepcopy(model), inputs)[padding(2, 11)], expected[padding(2, 11)])

    def run(mesh: DeviceMesh) -> None:
        with torch.no_grad():
            call(parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan()), inputs)

    assert "Make it with enable_nested_tensor=False" in refused(2, run)


def test_dropout_in_training_runs() -> None:
    def train(mesh: DeviceMesh, model: nn.Module) -> list[torch.Tensor]:
        model = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        torch.manual_seed(0)
        loss_of(model(ids_of(2, 9))).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    model = seeded(lambda: Encoder(dropout=0.4))
    for gradients in run_on_mesh({"sp": 2}, train, model):
        assert len(gradients) == len(list(model.parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert any(gradient.abs().max() > 0 for gradient in gradients)


# The weights


class Weighing(nn.Module):
    """A block that asks for its attention's weights and does something with them."""

    def __init__(self, use: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.use, self.kept = use, None
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        y, weights = self.attn(x, x, x)
        return self.use(self, x + y, weights)


class Weighed(nn.Module):
    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Weighing(use) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x)


def keep(block: Any, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    block.kept = weights
    return x


def test_weights_that_are_thrown_away_cost_nothing() -> None:
    run = assert_equals_one_device(seeded(lambda: Weighed(lambda block, x, weights: x)), {"ids": ids_of(2, 9)}, 2)
    assert run.forward.count("all-to-all") == 4


@pytest.mark.parametrize(
    "use",
    [
        lambda block, x, weights: x * weights.mean(),
        lambda block, x, weights: x + weights @ x,
        lambda block, x, weights: x if weights.max() > 2 else 2 * x,
        lambda block, x, weights: (x, weights),
        lambda block, x, weights: (x, {"weights": weights}),
        keep,
    ],
    ids=["mean", "product", "branch", "returned", "nested", "kept"],
)
def test_rejects_blocks_that_use_weights(use: Any) -> None:
    message = refused_model(seeded(lambda: Weighed(use)), {"ids": ids_of(2, 9)})
    assert "its attention weights are used, which no rank holds" in message
    assert "need_weights=False" in message
    assert "layers.0 (Weighing)" in message


@pytest.mark.parametrize(
    "how",
    [
        lambda model, x: x * model.attn(x, x, x)[1].mean(),
        lambda model, x: x[:, :1] + model.attn(x, x, x)[1].tolist()[0][0][0],
    ],
    ids=["mean", "list"],
)
def test_weights_of_an_attention_in_no_list_raise_when_they_are_used(how: Any) -> None:
    def use(mesh: DeviceMesh, model: nn.Module) -> str:
        model = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        with pytest.raises((PlanError, RuntimeError)) as raised:
            model(ids_of(2, 9))
        with bypass(model):
            assert model(ids_of(2, 9)).isfinite().all()
        return str(raised.value)

    for message in run_on_mesh({"sp": 2}, use, seeded(lambda: Alone(how))):
        assert "its attention weights are used" in message


class Returning(Alone):
    def forward(self, ids: torch.Tensor) -> Any:  # type: ignore[override] - the weights too
        x = self.embed(ids)
        return self.attn(x, x, x)


def test_rejects_a_model_that_returns_weights() -> None:
    def use(mesh: DeviceMesh, model: nn.Module) -> str:
        model = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        with pytest.raises(PlanError) as raised:
            model(ids_of(2, 9))
        return str(raised.value)

    for message in run_on_mesh({"sp": 2}, use, seeded(lambda: Returning(by_keywords))):
        assert message.startswith("UlyssesPlan on Returning: nn.MultiheadAttention: its attention weights are used")


# What is told of them


def test_explain_shows_heads_and_bytes() -> None:
    text = str(explain(seeded(Encoder), {"sp": 2}, None, {"ids": ids_of(1, 8)}))
    assert "encoder.layers.1.self_attn" in text
    assert "4 query, 4 kv heads" in text
    # Of q, k and v each 4 tokens * 2 heads * 4 numbers of 8 bytes go to the other rank, of the output as many.
    assert " 768 " in text
    assert " 256 " in text


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("training", [True, False])
def test_certificate(training: bool) -> None:
    inputs = {"ids": ids_of(2, 9), "src_key_padding_mask": padding(2, 9)}
    certificate = certify(seeded(Encoder).train(training), inputs, {"sp": 2})
    assert certificate.passed, str(certificate)


def test_rejects_static_keys() -> None:
    class Static(nn.MultiheadAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override] - its own signature
            static = torch.zeros(x.shape[1] * HEADS, x.shape[0], WIDTH // HEADS)
            return F.multi_head_attention_forward(
                x, x, x, WIDTH, HEADS, self.in_proj_weight, self.in_proj_bias, None, None, False, 0.0,
                self.out_proj.weight, self.out_proj.bias, static_k=static, static_v=static,
            )[0]  # fmt: skip

    model = seeded(lambda: Alone(lambda model, x: model.attn(x), Static))
    message = refused(2, lambda mesh: parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())(ids_of(2, 9)))
    assert "static_k and static_v are not supported" in message
