"""Floors: a module imports only from modules below it, and what is private to torch stays in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ulysses_dtensor

PACKAGE = Path(ulysses_dtensor.__file__).parent
FLOORS = (
    "__init__",
    "sweep",
    "testing",  # for tests alone: nothing below may need it
    "__main__",
    "cli",
    "demo",
    "certificate",
    "explain",
    "parity",
    "plan",
    "models",
    "attention",
    "per_head",
    "forwards",
    "decisions",
    "carried",
    "recorder",
    "tail",
    "deferred",
    "region",
    "world",
    "probe",
    "trial",
    "findings",
    "tryout",
    "operands",
    "unseen",
    "stub",
    "compare",
    "telling",
    "calls",
    "inside",
    "multihead",
    "sdpa",
    "strategy",
    "rows",
    "flex",
    "mods",
    "reading",
    "attend",
    "randomness",
    "agreement",
    "contents",
    "leftovers",
    "gradients",
    "loss",
    "boundary",
    "passes",
    "meshes",
    "leaving",
    "tables",
    "redistribute",
    "exchange",
    "collectives",
    "heads",
    "tokens",
    "transition",
    "route",
    "layout",
    "notation",
    "trees",
    "errors",
)
"""The modules of the package, highest first. A new one gets its place here."""

WITHOUT_A_PUBLIC_NAME = {
    "trees": "torch.utils._pytree",
    "explain": "torch._subclasses.fake_tensor.FakeTensorMode",
    "unseen": "torch.utils._python_dispatch._disable_current_modes",
}
"""What torch has no public name for: walking nested arguments, running a model on shapes, hiding from dispatch modes.

Each may be imported in one file.
"""

FILES = sorted(PACKAGE.rglob("*.py"))


def floor_of(path: Path, package: Path = PACKAGE) -> str:
    return path.relative_to(package).with_suffix("").parts[0]


def imported(source: str) -> Iterator[tuple[str, str]]:
    """Yields (module, name) for everything that `source` imports anywhere, name empty for a whole module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (("." * node.level + (node.module or ""), alias.name) for alias in node.names)


def imports_that_point_up(source: str, floor: str) -> list[str]:
    """Returns the modules of the package that `source`, a file on `floor`, imports though they stand above it."""
    wrong = []
    for module, name in imported(source):
        parts = module.split(".")
        if module.startswith("."):
            wrong.append(module)  # whole names only: they are what this test reads
        elif parts[0] == "ulysses_dtensor":
            target = parts[1] if len(parts) > 1 else name if name in FLOORS else "__init__"
            assert target in FLOORS, f"{target} has no place in FLOORS of this test"
            if FLOORS.index(target) < FLOORS.index(floor):
                wrong.append(target)
    return wrong


def private_torch_imports(source: str, floor: str) -> list[str]:
    """Returns what `source` imports from torch with a name that starts with an underscore somewhere."""
    names = [".".join(filter(None, pair)) for pair in imported(source)]
    private = [name for name in names if name.startswith("torch.") and "._" in name]
    allowed = WITHOUT_A_PUBLIC_NAME.get(floor)
    return [name for name in private if allowed is None or not name.startswith(allowed)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    assert floor_of(path) in FLOORS, f"{path.name} has no place in FLOORS of this test"
    assert imports_that_point_up(path.read_text(), floor_of(path)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_testing_imports_what_is_private_to_torch(path: Path) -> None:
    if floor_of(path) != "testing":
        assert private_torch_imports(path.read_text(), floor_of(path)) == []


@pytest.mark.parametrize("floor", ["notation", "layout", "route", "transition", "heads", "errors"])
def test_what_integers_decide_imports_no_process_groups(floor: str) -> None:
    tree = ast.parse((PACKAGE / f"{floor}.py").read_text())
    at_import = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    source = "\n".join(ast.unparse(node) for node in at_import)
    assert [module for module, _ in imported(source) if module.split(".")[0] == "torch"] == []


def test_the_checks_themselves_fail() -> None:
    assert imports_that_point_up("from ulysses_dtensor.plan import UlyssesPlan", "layout") == ["plan"]
    assert imports_that_point_up("def f():\n    import ulysses_dtensor.route", "layout") == ["route"]
    assert imports_that_point_up("from ulysses_dtensor import Layout", "route") == ["__init__"]
    assert imports_that_point_up("from . import layout", "route") == ["."]
    assert imports_that_point_up("from ulysses_dtensor.layout import Layout", "route") == []
    assert private_torch_imports("import torch._C", "trees") == ["torch._C"]
    assert private_torch_imports("from torch.testing._internal.x import y", "layout") == ["torch.testing._internal.x.y"]
    assert private_torch_imports("if True:\n    from torch.utils import _foreach_utils", "layout") == [
        "torch.utils._foreach_utils"
    ]
    assert private_torch_imports("from torch.utils._pytree import tree_map", "trees") == []
    assert private_torch_imports("from torch.utils._pytree import tree_map", "layout") == [
        "torch.utils._pytree.tree_map"
    ]
    assert private_torch_imports("from torch.distributed import tensor\nfrom os import _exit", "layout") == []
