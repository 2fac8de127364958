"""What the documents show runs: doctests of the docs, the README and the modules, and every example."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ulysses_dtensor

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MODULES = sorted(
    [module.name for module in pkgutil.walk_packages(ulysses_dtensor.__path__, "ulysses_dtensor.")]
    + ["ulysses_dtensor"]
)
FENCE = re.compile(r"^```(?:python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sessions(text: str, name: str) -> doctest.DocTest:
    """Returns the examples of all fenced Python blocks of a document as one session."""
    examples = []
    for block in FENCE.finditer(text):
        line = text.count("\n", 0, block.start(1))
        for example in doctest.DocTestParser().get_examples(block.group(1), name):
            example.lineno += line
            examples.append(example)
    return doctest.DocTest(examples, {"__name__": "__main__"}, name, name, 0, text)


def failures(test: doctest.DocTest) -> tuple[int, str]:
    """Runs a session; returns how many of its examples failed, and the report."""
    report: list[str] = []
    failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append).failed
    return failed, "".join(report)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_document_runs(path: Path) -> None:
    failed, report = failures(sessions(path.read_text(), path.name))
    assert not failed, report


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        failed, report = failures(test)
        assert not failed, report


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100


def run_layouts(source: str, directory: Path) -> subprocess.CompletedProcess[str]:
    path = directory / "layouts.py"
    path.write_text(source)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, env=environment)


def test_layouts_example_runs_and_fails_when_a_value_is_wrong(tmp_path: Path) -> None:
    source = (ROOT / "examples" / "layouts.py").read_text()
    done = run_layouts(source, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run_layouts(source.replace("(1, 5 - rank, 5, 4)", "(1, 4 + rank, 5, 4)"), tmp_path)
    assert done.returncode != 0
    assert "wrong: 9 tokens are held as 5 and 4" in done.stderr


def test_the_notation_page_is_not_empty() -> None:
    assert len(sessions((ROOT / "docs" / "notation.md").read_text(), "notation.md").examples) > 20


def test_the_check_itself_fails_on_a_wrong_value() -> None:
    text = "# Title\n\n```python\n>>> x = 1\n```\n\nand\n\n```python\n>>> x + 1\n3\n```\n"
    failed, report = failures(sessions(text, "wrong.md"))
    assert failed == 1
    assert 'File "wrong.md", line 10' in report
    assert failures(sessions(text.replace("3\n", "2\n"), "right.md")) == (0, "")
