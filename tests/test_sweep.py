"""The sweep: what it judges goes on where it was stopped, ends in time, and is written down."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ulysses_dtensor.sweep import run
from ulysses_dtensor.sweep.judge import Result
from ulysses_dtensor.sweep.processes import in_processes
from ulysses_dtensor.sweep.report import report

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own, of many kinds


def made_up(family: str, *args: object) -> Result:
    """Stands in for a judgement."""
    if family == "hangs":
        time.sleep(60)
    if family == "dies":
        os._exit(7)
    return Result(family, "wrong" if family == "wrong" else "right", f"of {args}")


def test_each_family_is_judged_in_a_process_of_its_own_and_in_time() -> None:
    started = time.monotonic()
    found = {result.family: result for result in in_processes(made_up, ["fine", "hangs", "dies"], (1,), 2, 2.0)}
    assert time.monotonic() - started < 30
    assert found["fine"] == Result("fine", "right", "of (1,)")
    assert found["hangs"] == Result("hangs", "failed", "did not end in 2 s")
    assert found["dies"] == Result("dies", "failed", "its process ended with 7")


def test_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, page = tmp_path / "results.jsonl", tmp_path / "models.md"
    command = ["llama", "gpt2", "--results", str(results), "--page", str(page)]
    monkeypatch.setattr(run, "judge", made_up)
    assert CliRunner().invoke(run.app, command).exit_code == 0
    lines = results.read_text().splitlines()
    assert {json.loads(line)["result"]["family"] for line in lines} == {"llama", "gpt2"}
    results.write_text(lines[0] + "\n" + lines[1][:20])  # stopped while it wrote
    again = CliRunner().invoke(run.app, command)
    assert again.exit_code == 0, again.output
    assert "2 right" in again.output
    assert len(results.read_text().splitlines()) == 3  # what was cut short stays on a line of its own
    other = CliRunner().invoke(run.app, [*command, "--length", "17"])  # another question: judged anew
    assert other.exit_code == 0
    assert len(results.read_text().splitlines()) == 5
    assert page.read_text().count("| right |") == 2


def test_ends_with_an_error_where_a_family_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "judge", lambda family, *args: Result(family, "wrong", "the loss off"))
    result = CliRunner().invoke(run.app, ["llama", "--results", str(tmp_path / "results.jsonl")])
    assert result.exit_code == 1
    assert "1 wrong" in result.output


def test_rejects_what_is_no_family(tmp_path: Path) -> None:
    result = CliRunner().invoke(run.app, ["lama", "--results", str(tmp_path / "results.jsonl")])
    assert result.exit_code == 2
    assert "lama" in result.output


def test_the_page_has_the_worst_first() -> None:
    found = [Result("b", "right", "", "sdpa", "float64", 3e-7), Result("a", "wrong", "the loss | off", error=0.5)]
    options = {"ranks": [2, 3], "length": 13, "sizes": {"kv_heads": 2}}
    text = report(found, options, "5.24", "2.13")
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert rows == [
        "| a | **wrong** |  | 5e-01 | the loss \\| off |",
        "| b | right | sdpa, float64 | 3e-07 |  |",
    ]
    assert "against 2 and 3 ranks: 13 tokens" in text
    assert "kv heads 2" in text
