"""explain and the certificate: sizes from a dry run, nothing applied, no process group."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import Block, RotaryDecoder, SelfAttention, float64, ids_of
from torch import nn
from typer.testing import CliRunner

from ulysses_dtensor import PlanError, UlyssesPlan, explain, parallelize_module
from ulysses_dtensor.certificate import certify
from ulysses_dtensor.cli import app
from ulysses_dtensor.testing import run_on_mesh


class OneKeyHead(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention(kv_heads=1)


def decoder() -> RotaryDecoder:
    with float64():
        torch.manual_seed(0)
        return RotaryDecoder()


def test_shows_modules_and_layouts_without_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    text = str(explain(decoder(), {"sp": 4}))
    assert text in capsys.readouterr().out
    assert "to be proven at the first forward" in text
    assert "pass example_inputs to see sizes" in text


def test_shows_heads_and_bytes_of_a_dry_run() -> None:
    model = decoder()
    text = str(explain(model, {"sp": 4}, UlyssesPlan(), (ids_of(1, 8),)))
    # 4 query and 2 kv heads of size 4 over 4 ranks: a rank holds 2 tokens and sends 3 of its 4 query heads, and to each
    # other rank the kv head it reads: 2 tokens * (3 + 3 + 3) * 4 numbers of 8 bytes; of the output 1 head of 6 tokens.
    assert "b h (sp s) d" in text
    assert "b (sp h) s d" in text
    assert "1 (1)" in text
    assert " 576 " in text
    assert " 192 " in text
    assert "forward" not in model.__dict__


def test_works_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = RotaryDecoder()
    text = str(explain(model, {"sp": 3}, None, {"ids": torch.empty(1, 8, dtype=torch.long, device="meta")}))
    assert "2 (1), 0 (0)" in text
    assert "1 ranks idle" in text


def test_shows_the_certificate_of_a_converted_model() -> None:
    def certificate(mesh: Any, models: list[nn.Module]) -> str:
        model = parallelize_module(models[dist.get_rank()], mesh, UlyssesPlan())
        model(ids_of(1, 9))
        return str(explain(model, mesh))

    text = run_on_mesh({"sp": 2}, certificate, [decoder(), decoder()])[0]
    assert "tokens stay apart: proven in" in text
    assert "the ranks agreed in" in text


def test_shows_queries_and_heads_on_two_dimensions() -> None:
    text = str(explain(decoder(), {"cp": 2, "sp": 2}, None, (ids_of(1, 16),)))
    assert "RotaryDecoder on cp=2, sp=2" in text
    assert "b h (cp sp s) d" in text
    assert "b (sp h) (cp s) d" in text
    assert "2 (1)" in text


def test_says_which_mesh_leaves_no_rank_idle() -> None:
    text = str(explain(decoder(), {"sp": 8}, None, (ids_of(1, 64),)))
    assert "4 ranks idle, none on a mesh of (cp=2, sp=4)" in text
    assert "idle" not in str(explain(decoder(), {"cp": 2, "sp": 4}, None, (ids_of(1, 64),)))


def test_shows_both_figures_where_there_is_a_choice() -> None:
    """4 query and 1 kv heads of size 4 on 2 ranks, 16 tokens: 2 heads of q, 1 of k and v, 2 of the output; or k and v alone."""
    model = RotaryDecoder(block=OneKeyHead)
    moved, gathered = 8 * (2 + 1 + 1 + 2) * 4 * 4, 8 * 2 * 4 * 4
    both = f"moving heads {moved:,} bytes, gathering keys and values {gathered:,} bytes"
    auto = str(explain(model, {"sp": 2}, UlyssesPlan(strategy="auto"), (ids_of(1, 16),)))
    assert both in auto
    assert re.search(r"b h \(sp s\) d +│ b h \(sp s\) d +│", auto)
    default = str(explain(model, {"sp": 2}, None, (ids_of(1, 16),)))
    assert "gathering keys and values" in default
    assert "(strategy='auto')" in default
    assert "gathering" not in str(explain(RotaryDecoder(), {"sp": 4}, None, (ids_of(1, 16),)))


def test_rejects_a_mesh_of_three_dimensions() -> None:
    with pytest.raises(PlanError, match=r"explain: mesh=.* has 3 dimensions"):
        explain(decoder(), {"dp": 2, "cp": 2, "sp": 2})


def test_rejects_a_model_without_attention() -> None:
    with pytest.raises(PlanError, match=r"(?s)explain: UlyssesPlan on Linear:.*nothing matches"):
        explain(nn.Linear(2, 2), {"sp": 2})


def test_certifies_in_one_process() -> None:
    model = decoder()
    certificate = certify(model, (ids_of(1, 9),), {"sp": 2})
    assert certificate.passed
    assert "tokens stay apart" in str(certificate)
    assert "forward" not in model.__dict__
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_certificate_says_which_block_mixes() -> None:
    model = decoder()

    class Mixing(Block):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(x + x.roll(1, 1), *args, **kwargs)

    model.layers[1].__class__ = Mixing
    certificate = certify(model, (ids_of(1, 9),), {"sp": 2})
    assert not certificate.passed
    assert "REFUSED" in str(certificate)
    assert "mixes tokens" in str(certificate)


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of functions that make a model and inputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "made_for_check.py").write_text(
        "import torch\nfrom model_zoo import Block, RotaryDecoder\n"
        "def right(): return RotaryDecoder(), (torch.zeros(1, 9, dtype=torch.long),)\n"
        "def plain(): return torch.nn.Linear(2, 2), (torch.zeros(1, 2),)\n"
        "def wrong(): return RotaryDecoder()\n"
        "from ulysses_dtensor import UlyssesAttention, UlyssesPlan\n"
        "def with_plan(normed):\n"
        "    style = UlyssesAttention('b h (sp s) d -> b (sp h) s d')\n"
        "    return Declared(normed), (torch.randn(1, 9, 8),), UlyssesPlan(attention={'blocks.*.inner': style})\n"
        "def declared(): return with_plan(False)\n"
        "def over_heads(): return with_plan(True)\n"
        "class Inner(torch.nn.Module):\n"
        "    def forward(self, q, k, v):\n"
        "        out = (q @ k.mT).softmax(-1) @ v\n"
        "        return out / out.square().mean(1, keepdim=True).add(1).sqrt() if self.normed else out\n"
        "class DeclaredBlock(torch.nn.Module):\n"
        "    def __init__(self, normed):\n"
        "        super().__init__()\n"
        "        self.inner, self.qkv = Inner(), torch.nn.Linear(8, 24)\n"
        "        self.inner.normed = normed\n"
        "    def forward(self, x):\n"
        "        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)\n"
        "        return x + self.inner(q, k, v).transpose(1, 2).flatten(2)\n"
        "class Declared(torch.nn.Module):\n"
        "    def __init__(self, normed):\n"
        "        super().__init__()\n"
        "        self.blocks = torch.nn.ModuleList([DeclaredBlock(normed)])\n"
        "    def forward(self, x): return self.blocks[0](x)\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("made_for_check:right", 0, "tokens stay apart"),
        ("made_for_check:plain", 2, "nothing matches"),
        ("made_for_check:declared", 0, "tokens stay apart"),
        ("made_for_check:over_heads", 1, "depends on their numbers or on each other"),
        ("made_for_check:wrong", 2, "returned a RotaryDecoder, not (model, inputs) or (model, inputs, plan)"),
        ("made_for_check:absent", 2, "cannot be loaded"),
        ("made_for_nothing:right", 2, "cannot be loaded"),
        ("made_for_check", 2, "is not module:function"),
    ],
)
@pytest.mark.usefixtures("targets")
def test_check_on_the_command_line(target: str, code: int, said: str) -> None:
    result = CliRunner().invoke(app, ["check", target])
    assert said in result.output
    assert result.exit_code == code


@pytest.mark.usefixtures("targets")
def test_declared_attentions_are_in_the_dry_run_and_left_as_they_are() -> None:
    model, inputs, plan = __import__("made_for_check").declared()
    assert "b (sp s) h d" not in str(explain(model, {"sp": 2}, plan, inputs))
    row = next(line for line in str(explain(model, {"sp": 2}, plan, inputs)).splitlines() if "blocks.0.inner" in line)
    assert "not called" not in row
    assert "forward" not in vars(model.blocks[0].inner)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "4", "--dp", "3"], "dp=3 x sp=1 is not ranks=4"),
        (["--corpus", "nowhere"], "nowhere does not exist"),
        (["--corpus", "made_for_check.py", "--seq-len", "4000"], "bytes of text, 4002 are needed"),
    ],
)
@pytest.mark.usefixtures("targets")
def test_the_demo_refuses_what_it_cannot_do(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert said in result.output
    assert result.exit_code == 2
