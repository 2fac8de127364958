"""The page of the sweep: each family, what became of it, and the largest error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ulysses_dtensor.sweep.judge import Result

_ORDER = ("wrong", "failed", "right", "refused", "unbuilt")
_SAID = {
    "right": "right",
    "refused": "refused",
    "wrong": "**wrong**",
    "failed": "**failed**",
    "unbuilt": "cannot be built here",
}


def report(results: Sequence[Result], options: dict[str, Any], transformers: str, torch: str) -> str:
    """Returns the page as Markdown."""
    counts = Counter(result.kind for result in results)
    ranks = " and ".join(map(str, options["ranks"]))
    sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in options["sizes"].items())
    lines = [
        "# Models",
        "",
        f"Every causal-LM family of transformers {transformers} (torch {torch}), tiny and with random weights, on one device "
        f"against {ranks} ranks: {options['length']} tokens, padded on the left and on the right, and packed documents; loss, "
        f"logits and every gradient. Sizes: {sizes}, or what a family needs. Made by `python -m ulysses_dtensor.sweep "
        "--page docs/models.md`, which takes other sizes, lengths and seeds, and ends with an error where a family is wrong.",
        "",
        ", ".join(f"{counts[kind]} {_SAID[kind].strip('*')}" for kind in _ORDER if counts[kind]) + ".",
        "",
        "Errors are relative to the largest value of each gradient. The library computes losses, and norms and rotary tables of "
        "many families, in float32.",
        "",
        "| family | result | attention, dtype | largest error | why, or what was left out |",
        "|---|---|---|---|---|",
    ]
    for result in sorted(results, key=lambda each: (_ORDER.index(each.kind), each.family)):
        how = f"{result.implementation}, {result.dtype}" if result.implementation else ""
        error = f"{result.error:.0e}" if result.kind in ("right", "wrong") else ""
        lines.append(f"| {result.family} | {_SAID[result.kind]} | {how} | {error} | {_short(result.detail)} |")
    return "\n".join(lines) + "\n"


def _short(text: str) -> str:
    text = text.replace("|", "\\|").replace("UlyssesPlan: ", "")
    return text if len(text) <= 240 else text[:237] + "..."
