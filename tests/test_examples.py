"""The examples and the demo as a user runs them: processes of their own, exit codes, Ctrl-C, ranks that die."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from ulysses_dtensor.demo.run import _verdict
from ulysses_dtensor.demo.train import Settings, Step

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
DEMO = [sys.executable, "-m", "ulysses_dtensor", "demo"]
SMALL = ["--seq-len", "33", "--steps", "2"]

# Each breaks something in every rank: a spawned rank imports the main script again.
WITHOUT_THE_FACTOR = """
import ulysses_dtensor.boundary as boundary
assert "factor" in __import__("inspect").getsource(boundary._Shard.backward), "the factor P is elsewhere now"
boundary._Shard.backward = staticmethod(lambda ctx, g: (boundary._local_gradient(g, ctx.mesh, ctx.dim), *[None] * 5))
"""
IN_EACH_RANK = """
import os, pathlib, signal
import torch.distributed as dist
import ulysses_dtensor.demo.run as run
train = run.train_parallel
def train_parallel(settings, report):
    {}
    return train(settings, report)
run.train_parallel = train_parallel
"""
RANK_1_DIES = IN_EACH_RANK.format("dist.get_rank() != 1 or os.kill(os.getpid(), signal.SIGKILL)")
RANK_1_FAILS = IN_EACH_RANK.format("assert dist.get_rank() != 1, 'out of luck'")
ENDLESS = IN_EACH_RANK.format("pathlib.Path(f'{dist.get_rank()}.ready').touch()") + "run.train_single = lambda *_: []"
RUN_DEMO = """
if __name__ == "__main__":
    from ulysses_dtensor.cli import app
    app()
"""
RUN_EXAMPLE = """
import runpy, sys
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@contextmanager
def started(*command: str | Path, directory: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Starts a command in a process group of its own, which is killed at the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=directory,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ran(*command: str | Path, timeout: float = 120) -> tuple[int, str]:
    """Runs a command to its end; returns its exit code and what it printed."""
    with started(*command) as process:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output


def alive(group: int) -> bool:
    """Whether a process group has a process that still runs."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def gone(group: int, *, within: float) -> bool:
    end = time.monotonic() + within
    while alive(group) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(group)


def script(directory: Path, text: str) -> Path:
    path = directory / "wrapped.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        (3, ["inner_attention.py"]),
        (4, ["train_fsdp2.py", "2"]),
        (4, ["transformers_fsdp2.py", "--sp", "2", "--tokens", "301"]),
        (4, ["transformers_trainer.py", "2"]),
    ],
    ids=["inner", "fsdp2", "transformers", "Trainer"],
)
def test_example_runs_under_torchrun(ranks: int, command: list[str]) -> None:
    code, output = ran(*TORCHRUN, str(ranks), ROOT / "examples" / command[0], *command[1:])
    assert code == 0, output


def test_transformers_example_takes_a_local_model(tmp_path: Path) -> None:
    """A folder with a model of another family, and a tokenizer of words."""
    config = transformers.GPTNeoXConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(99)} | {"?": 99}, unk_token="?"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment] - a property
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{n * n % 99}" for n in range(3000)))
    options = ["--model", tmp_path, "--text", text, "--tokens", "77", "--steps", "2"]
    code, output = ran(*TORCHRUN, "2", ROOT / "examples" / "transformers_fsdp2.py", *options)
    assert code == 0, output
    assert "step 1: loss" in output


def test_example_fails_when_gradients_are_wrong(tmp_path: Path) -> None:
    broken = script(tmp_path, WITHOUT_THE_FACTOR + RUN_EXAMPLE)
    code, output = ran(*TORCHRUN, "2", broken, ROOT / "examples" / "train_fsdp2.py")
    assert code != 0
    assert "AssertionError" in output


@pytest.mark.parametrize("launcher", [[], ["torchrun"]], ids=["by itself", "under torchrun"])
def test_demo_agrees_with_one_rank(launcher: list[str]) -> None:
    command = [*TORCHRUN, "2", *DEMO[1:]] if launcher else [*DEMO, "--ranks", "2"]
    code, output = ran(*command, *SMALL)
    assert code == 0, output
    assert "equal to rounding" in output
    assert output.count("2/2 steps") >= 2


def test_demo_fails_when_gradients_lack_the_factor(tmp_path: Path) -> None:
    code, output = ran(sys.executable, script(tmp_path, WITHOUT_THE_FACTOR + RUN_DEMO), "demo", *SMALL)
    assert code == 1, output
    assert "the numbers part" in output


def test_demo_fails_when_a_loss_is_no_number() -> None:
    settings = Settings(torch.zeros(1, 1, 1, 2, dtype=torch.int64), dp=1, sp=2)
    right, broken = Step(2.0, 1.0, 8, 8), Step(math.nan, 1.0, 8, 8)
    assert _verdict([right], [[right], [right]], settings, Console(quiet=True)) == 0
    assert _verdict([right], [[broken], [broken]], settings, Console(quiet=True)) == 1


@pytest.mark.parametrize(
    ("breakage", "said"),
    [
        (RANK_1_DIES, "rank 1 of 2 ended with exit code -9."),
        (RANK_1_FAILS, "AssertionError: out of luck"),
    ],
    ids=["killed", "raised"],
)
def test_demo_names_the_rank_that_failed(tmp_path: Path, breakage: str, said: str) -> None:
    with started(sys.executable, script(tmp_path, breakage + RUN_DEMO), "demo", *SMALL) as process:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 2, output
        assert said in output
        assert gone(process.pid, within=5)


def test_demo_says_what_does_not_fit() -> None:
    code, output = ran(*DEMO, "--ranks", "4", "--dp", "3")
    assert code == 2
    assert "demo: dp=3 x sp=1 is not ranks=4. Choose them so that dp x sp = ranks." in output
    code, output = ran(*DEMO, "--corpus", str(ROOT / "none"))
    assert code == 2
    assert "does not exist" in output


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    command = [script(tmp_path, ENDLESS + RUN_DEMO), "demo", "--steps", "100000", "--seq-len", "16"]
    with started(sys.executable, *command, directory=tmp_path) as process:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("*.ready"))) < 2 and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        assert len(list(tmp_path.glob("*.ready"))) == 2
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output
        assert "interrupted; all ranks are ended" in output
        assert "Traceback" not in output
        assert gone(process.pid, within=5)


def test_readme_snippet_runs(tmp_path: Path) -> None:
    snippet = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    code, output = ran(*TORCHRUN, "2", script(tmp_path, snippet.replace("4096", "128")))
    assert code == 0, output
