"""One call makes a model sequence-parallel: models of every kind equal one device, and what a plan refuses."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from model_zoo import (
    KV_HEADS,
    VOCABULARY,
    WIDTH,
    ZOO,
    Block,
    RotaryDecoder,
    Sample,
    SelfAttention,
    ids_of,
    numbers,
    seeded,
)
from one_device import Run, assert_equals_one_device, assert_runs_equal, call, on_one_device, refused, refused_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize_module

from ulysses_dtensor import PlanError, UlyssesAttention, UlyssesPlan, bypass, parallelize_module
from ulysses_dtensor.testing import run_on_mesh, run_ranks

SIZES = [(2, 9, 3, "replicate"), (4, 13, 2, "shard"), (4, 6, 2, "replicate")]
ATTENTIONS = dict.fromkeys(ZOO, 2) | {"skips": 4, "one block three times": 3, "two towers": 3}
ATTENTIONS |= {name: 3 for name in ZOO if name.endswith("between blocks")}


def assert_sample_equals_one_device(sample: Sample, ranks: int, seq_len: int, batch: int, outputs: str) -> Run:
    plan = lambda: UlyssesPlan(outputs=outputs)  # type: ignore[arg-type] # noqa: E731
    return assert_equals_one_device(sample.model(), sample.inputs(batch, seq_len), ranks, plan=plan)


@pytest.mark.parametrize(("ranks", "seq_len", "batch", "outputs"), SIZES)
@pytest.mark.parametrize("sample", ZOO.values(), ids=ZOO)
def test_loss_outputs_and_every_gradient_equal_one_device(
    sample: Sample, ranks: int, seq_len: int, batch: int, outputs: str
) -> None:
    run = assert_sample_equals_one_device(sample, ranks, seq_len, batch, outputs)
    short = -(-seq_len // ranks) * (ranks - 1) >= seq_len
    attentions = 2 * ATTENTIONS[sample.name]
    again = attentions if sample.name == "checkpointed" else 0
    if sample.name != "two towers":  # of which some parts are longer
        assert run.forward.count("all-to-all") == (0 if short else attentions)
        assert run.backward.count("all-to-all") == (0 if short else attentions + again)


@given(st.sampled_from(list(ZOO.values())), st.integers(1, 4), st.integers(1, 14), st.integers(1, 3), st.booleans())
def test_any_model_at_any_size_equals_one_device(
    sample: Sample, ranks: int, seq_len: int, batch: int, sharded: bool
) -> None:
    assert_sample_equals_one_device(sample, ranks, seq_len, batch, "shard" if sharded else "replicate")


def test_collectives_are_two_exchanges_an_attention_and_nothing_of_the_size_of_logits_when_sharded() -> None:
    run = assert_sample_equals_one_device(ZOO["rotary decoder"], 4, 16, 2, "shard")
    assert run.forward == ("all-reduce", *["all-to-all"] * 4)
    assert run.backward == (*["all-to-all"] * 4, "all-reduce", "all-reduce")
    run = assert_sample_equals_one_device(ZOO["rotary decoder"], 4, 16, 2, "replicate")
    assert run.forward == ("all-reduce", *["all-to-all"] * 4, "all-gather")
    assert run.backward == (*["all-to-all"] * 4, "all-reduce", "all-reduce")


def test_sharded_outputs_carry_their_placement() -> None:
    original, inputs = decoder(), {"ids": ids_of(2, 9)}

    def run(mesh: DeviceMesh) -> tuple[Any, ...]:
        model = parallelize_module(copy.deepcopy(original), mesh, UlyssesPlan(outputs="shard"))
        logits = model(**inputs)
        assert isinstance(logits, DTensor)
        return logits.placements, tuple(logits.shape), logits.device_mesh == mesh, tuple(logits.to_local().shape)

    assert run_on_mesh({"sp": 2}, run) == [
        ((Shard(1),), (2, 9, VOCABULARY), True, (2, 5, VOCABULARY)),
        ((Shard(1),), (2, 9, VOCABULARY), True, (2, 4, VOCABULARY)),
    ]


def test_the_check_itself_fails_without_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ulysses_dtensor.inside.sharded_sdpa",
        lambda *args, tokens, group, strategy: F.scaled_dot_product_attention(
            *args[:6], scale=args[6], enable_gqa=args[7]
        ),
    )
    with pytest.raises(AssertionError, match="relative error"):
        assert_sample_equals_one_device(ZOO["rotary decoder"], 2, 9, 1, "replicate")


# Ways to say it


INNER = "b h (sp s) d -> b (sp h) s d"


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(
            lambda: UlyssesPlan(attention={"layers.*.attention.inner": UlyssesAttention(INNER)}), id="declared"
        ),
        pytest.param(lambda: UlyssesPlan(attention={"layers.*.inner": "sdpa"}), id="named"),
        pytest.param(lambda: UlyssesPlan(inputs={"freqs_cis": "(sp s) d"}), id="declared input"),
        pytest.param(lambda: UlyssesPlan(check="first"), id="checked at first"),
    ],
)
def test_attentions_and_inputs_may_be_declared(plan: Any) -> None:
    sample = ZOO["whole table"]
    run = assert_equals_one_device(sample.model(), sample.inputs(2, 13), 3, plan=plan)
    assert run.forward.count("all-to-all") == 4


def test_a_plan_is_a_style_for_torchs_own_parallelize_module() -> None:
    original, inputs = decoder(), {"ids": ids_of(2, 9)}

    def run(mesh: DeviceMesh, convert: Any) -> torch.Tensor:
        return convert(copy.deepcopy(original), mesh)(**inputs)

    for convert in (
        lambda model, mesh: torch_parallelize_module(model, mesh, UlyssesPlan()),
        lambda model, mesh: parallelize_module(model, mesh),
    ):
        for logits in run_on_mesh({"sp": 2}, run, convert):
            torch.testing.assert_close(logits, original(**inputs), rtol=1e-12, atol=1e-12)


def test_a_plan_for_a_part_of_the_model() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.value = RotaryDecoder(), nn.Linear(VOCABULARY, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.value(self.decoder(ids)).mean(dim=1)

    model, inputs = seeded(Outer), {"ids": ids_of(2, 9)}
    reference = on_one_device(model, inputs)

    def run(mesh: DeviceMesh) -> Run:
        ours = copy.deepcopy(model)
        parallelize_module(ours, mesh, {"decoder": UlyssesPlan()})
        return on_one_device_in_place(ours, inputs)

    for each in run_on_mesh({"sp": 2}, run):
        assert_runs_equal(each, reference)


def on_one_device_in_place(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Run:
    from one_device import buffers_of, gradients_of, loss_of, whole

    result = call(model, inputs)
    loss = loss_of(result)
    loss.backward()
    return Run(loss.detach(), whole(result), gradients_of(model), buffers_of(model))


def test_the_signature_of_forward_stays_readable() -> None:
    import inspect

    def run(mesh: DeviceMesh) -> list[str]:
        model = parallelize_module(ZOO["padding mask"].model(), mesh, UlyssesPlan())
        return list(inspect.signature(model.forward).parameters)

    assert run_on_mesh({"sp": 2}, run) == [["ids", "keep"]] * 2


# Refusals


class NoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers[0](ids)


def decoder() -> nn.Module:
    return ZOO["rotary decoder"].model()


@pytest.mark.parametrize(
    ("build", "plan", "match"),
    [
        pytest.param(
            NoAttention,
            UlyssesPlan,
            r"no module's forward calls .*, so nothing matches\. Name the attentions:",
            id="nothing",
        ),
        pytest.param(
            decoder,
            lambda: UlyssesPlan(attention={"blocks.*": "sdpa"}),
            r"attention pattern 'blocks\.\*' matches no module\.",
            id="pattern",
        ),
        pytest.param(
            SelfAttention, UlyssesPlan, r"the model is itself an attention\. Convert the model", id="attention"
        ),
        pytest.param(
            decoder,
            lambda: UlyssesPlan(inputs={"cosine": "(sp s) d"}),
            r"inputs\['cosine'\]: neither a block nor the model has such an argument, they have cos, .*sin, x\.",
            id="argument",
        ),
        pytest.param(
            decoder,
            lambda: UlyssesPlan(inputs={"cos": "(ps s) d"}),
            r"inputs\['cos'\]: .*ps",
            id="layout",
        ),
        pytest.param(
            decoder,
            lambda: UlyssesPlan(attention={"layers.*.attention": UlyssesAttention("b h (cp s) d -> b (cp h) s d")}),
            r"moves 'cp', the mesh is \('sp',\)\.",
            id="axis",
        ),
        pytest.param(
            decoder,
            lambda: {"encoder": UlyssesPlan()},
            r"parallelize_module: 'encoder' matches no module of RotaryDecoder\.",
            id="dictionary",
        ),
    ],
)
def test_rejects_plans_that_do_not_fit_and_leaves_the_model_as_it_was(build: Any, plan: Any, match: str) -> None:
    model = seeded(build)

    def convert(mesh: DeviceMesh) -> None:
        ours = copy.deepcopy(model)
        try:
            parallelize_module(ours, mesh, plan())
        finally:
            assert not any("forward" in vars(module) for module in ours.modules())

    message = refused(2, convert)
    assert re.search(match, message), message


def test_all_problems_come_in_one_error_a_line_each() -> None:
    plan = lambda: UlyssesPlan(attention={"a.*": "sdpa", "b.*": "sdpa"}, inputs={"cosine": "(sp s) d"})  # noqa: E731
    message = refused(2, lambda mesh: parallelize_module(decoder(), mesh, plan()))
    assert message.startswith("UlyssesPlan on RotaryDecoder:\n  ")
    assert len(message.splitlines()) == 4


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"outputs": "sharded"}, "UlyssesPlan: outputs='sharded' is neither 'replicate' nor 'shard'."),
        ({"check": "never"}, "UlyssesPlan: check='never' is neither 'always' nor 'first'."),
        ({"attention": {"a": "ring"}}, "UlyssesPlan: attention['a']='ring' is neither a UlyssesAttention nor 'sdpa'."),
    ],
)
def test_rejects_options_it_does_not_know(options: dict[str, Any], match: str) -> None:
    with pytest.raises(PlanError, match=re.escape(match)):
        UlyssesPlan(**options)


def test_rejects_a_second_conversion() -> None:
    def twice(mesh: DeviceMesh) -> None:
        model = parallelize_module(decoder(), mesh, UlyssesPlan())
        parallelize_module(model, mesh, UlyssesPlan())

    assert "the model is converted already. Convert a model once." in refused(2, twice)

    def part_first(mesh: DeviceMesh) -> None:
        model = ZOO["whole table"].model()
        parallelize_module(model, mesh, {"layers.0.attention.inner": UlyssesAttention(INNER)})
        parallelize_module(model, mesh, UlyssesPlan())

    assert "layers.0.attention.inner is converted already. Convert a model once." in refused(2, part_first)


@pytest.mark.parametrize(
    ("mesh_of", "match"),
    [
        pytest.param(
            lambda mesh: 2, r"parallelize_module: mesh=2 is a int, not a DeviceMesh\. Pass for example", id="number"
        ),
        pytest.param(
            lambda mesh: init_device_mesh("cpu", (4,)), r"has no dimension names\. Pass mesh_dim_names", id="no name"
        ),
    ],
)
def test_rejects_meshes_of_another_kind(mesh_of: Any, match: str) -> None:
    message = refused(
        4, lambda mesh: parallelize_module(decoder(), mesh_of(mesh), UlyssesPlan()), sizes={"dp": 2, "sp": 2}
    )
    assert re.search(match, message), message


def test_rejects_a_mesh_that_leaves_this_rank_out() -> None:
    def run() -> str:
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("sp",))
        if torch.distributed.get_rank() < 2:
            return ""
        with pytest.raises(PlanError) as raised:
            parallelize_module(decoder(), mesh, UlyssesPlan())
        return str(raised.value)

    assert "this rank is not part of" in run_ranks(3, run)[2]


def test_rejects_a_model_inside_ddp() -> None:
    def convert(mesh: DeviceMesh) -> None:
        parallelize_module(nn.parallel.DistributedDataParallel(decoder()), mesh, UlyssesPlan())

    assert "the model is wrapped in DistributedDataParallel. Convert the module, then wrap it." in refused(2, convert)


def test_a_plan_of_another_style_passes_through() -> None:
    def run(mesh: DeviceMesh) -> bool:
        model = parallelize_module(decoder(), mesh, {"layers.*.mlp.w1": ColwiseParallel()})
        return isinstance(model.layers[0].mlp.w1.weight, DTensor)  # type: ignore[union-attr] - a ModuleList

    assert run_on_mesh({"sp": 2}, run) == [True, True]


def test_rejects_an_attention_that_does_not_run() -> None:
    class Unused(Block):
        def forward(self, x: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if x is None:
                return self.attention(x)
            return x + self.mlp(self.norm2(x))

    model = seeded(lambda: RotaryDecoder(block=Unused))
    message = refused_model(model, {"ids": ids_of(2, 9)})
    assert message.startswith("UlyssesPlan: layers.0 (Unused): its attention (SelfAttention) did not run")
    assert "UlyssesPlan(attention=...)" in message


def test_rejects_attention_by_other_means_beside_a_known_one() -> None:
    class ByHand(Block):
        def forward(self, x: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            scores = x @ x.transpose(1, 2)
            return super().forward(x, *tables) + scores.softmax(-1) @ x

    message = refused_model(seeded(lambda: RotaryDecoder(block=ByHand)), {"ids": ids_of(2, 9)})
    assert "it mixes tokens outside attention" in message


def test_a_refused_forward_runs_under_bypass() -> None:
    model, inputs = (
        seeded(lambda: nn.Sequential(nn.ModuleList([Block(), nn.Linear(1, 1)])[0], Mean())),
        numbers(2, 9, WIDTH),
    )

    def run(mesh: DeviceMesh) -> torch.Tensor:
        ours = parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan())
        with bypass(ours):
            return ours(inputs)

    assert all(torch.equal(out, model(inputs)) for out in run_on_mesh({"sp": 2}, run))


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=1)


def test_heads_that_no_group_divides_are_refused() -> None:
    class Odd(SelfAttention):
        def __init__(self) -> None:
            super().__init__(kv_heads=KV_HEADS + 1)

    class OddBlock(Block):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Odd()

    message = refused_model(seeded(lambda: RotaryDecoder(block=OddBlock)), {"ids": ids_of(2, 9)})
    assert "its attention has 4 query heads, no multiple of 3 kv heads" in message
