"""The sweep's command: judges families, keeps what became of them as it goes, and writes the page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.progress import Progress

from ulysses_dtensor.sweep.judge import LENGTH, RANKS, Result, judge
from ulysses_dtensor.sweep.processes import in_processes
from ulysses_dtensor.sweep.report import report
from ulysses_dtensor.sweep.tiny import DEFAULT, Sizes, families

app = typer.Typer(add_completion=False)


@app.command()
def sweep(
    only: Annotated[list[str] | None, typer.Argument(help="Families; default: all.")] = None,
    results: Annotated[
        Path, typer.Option(help="Results so far, a line of JSON each; those of the same options are not run again.")
    ] = Path("sweep.jsonl"),
    page: Annotated[Path | None, typer.Option(help="Where to write the table, for example docs/models.md.")] = None,
    seconds: Annotated[int, typer.Option(min=1, help="Time limit of one family.")] = 240,
    jobs: Annotated[int, typer.Option(min=1, help="Families at a time.")] = 2,
    ranks: Annotated[list[int] | None, typer.Option(min=1, help="Simulated ranks; may be repeated.")] = None,
    length: Annotated[int, typer.Option(min=6, help="Tokens.")] = LENGTH,
    layers: Annotated[int, typer.Option(min=1)] = DEFAULT.layers,
    heads: Annotated[int, typer.Option(min=1)] = DEFAULT.heads,
    kv_heads: Annotated[int, typer.Option(min=1)] = DEFAULT.kv_heads,
    head_size: Annotated[int, typer.Option(min=2)] = DEFAULT.head_size,
    window: Annotated[int, typer.Option(min=1, help="Tokens of a sliding window or a chunk.")] = DEFAULT.window,
    seed: Annotated[int, typer.Option(help="Of weights and tokens.")] = DEFAULT.seed,
) -> None:
    """Builds a tiny model of every causal-LM family and compares one device with simulated ranks.

    Ends with 1 when a family is wrong or failed. Can be stopped, and goes on where it was.
    """
    wanted = families()
    if unknown := sorted(set(only or ()) - set(wanted)):
        raise typer.BadParameter(f"no causal-LM families of transformers {transformers.__version__}: {unknown}")
    sizes = Sizes(layers, heads, kv_heads, head_size, window, seed)
    options = {"sizes": asdict(sizes), "length": length, "ranks": ranks or list(RANKS)}
    done = {result.family: result for result in _read(results, options)}
    todo = [family for family in (only or wanted) if family not in done]
    cut_short = results.exists() and not results.read_text().endswith("\n") and results.stat().st_size > 0
    with Progress() as progress, results.open("a") as file:
        file.write("\n" if cut_short else "")
        bar = progress.add_task("families", total=len(todo))
        for result in in_processes(judge, todo, (sizes, length, options["ranks"]), jobs, seconds):
            done[result.family] = result
            file.write(json.dumps({**options, "result": asdict(result)}) + "\n")
            file.flush()
            progress.update(bar, advance=1, description=f"{result.family}: {result.kind}")
    found = [done[family] for family in (only or wanted)]
    if page is not None:
        page.write_text(report(found, options, transformers.__version__, torch.__version__))
    for result in found:
        if only or result.kind in ("wrong", "failed"):
            typer.echo(f"{result.family}: {result.kind} {result.detail}")
    typer.echo(", ".join(f"{count} {kind}" for kind, count in Counter(each.kind for each in found).most_common()))
    raise typer.Exit(any(result.kind in ("wrong", "failed") for result in found))


def _read(results: Path, options: dict[str, object]) -> Iterator[Result]:
    """Yields the results of the same options. A line cut short by an end of the process is run again."""
    if not results.exists():
        return
    for line in results.read_text().splitlines():
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if {name: found.get(name) for name in options} == options:
            yield Result(**found["result"])
