"""The command line: `ulysses-dtensor demo` and `ulysses-dtensor check`. Needs the extra `demo`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from ulysses_dtensor.errors import PlanError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
_console = Console()


@app.callback()
def _main() -> None:
    """Ulysses sequence parallelism for any PyTorch model."""


@app.command()
def demo(
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Ranks to start on this machine (under torchrun: its own); default: dp x sp."),
    ] = None,
    seq_len: Annotated[int, typer.Option(min=2, help="Bytes of text in a sequence.")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 8,
    sp: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share a sequence; default: 2, or what dp leaves of the ranks.")
    ] = None,
    dp: Annotated[int, typer.Option(min=1, help="Replicas, each with its own text.")] = 1,
    corpus: Annotated[Path | None, typer.Option(help="A file or folder of text; default: Python's own source.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and text.")] = 0,
) -> None:
    """Trains a byte-level decoder on real text, sequence-parallel and on one rank, and compares the numbers.

    Exits with 1 when losses or gradient norms differ by more than rounding.
    """
    from ulysses_dtensor.demo.corpus import CorpusError
    from ulysses_dtensor.demo.run import Options, RankFailed, run_demo

    if "TORCHELASTIC_RUN_ID" in os.environ:
        ranks = int(os.environ["WORLD_SIZE"])
    sp = sp or (2 if ranks is None else ranks // dp)
    ranks = dp * sp if ranks is None else ranks
    if dp * sp != ranks:
        _fail(f"demo: dp={dp} x sp={sp} is not ranks={ranks}. Choose them so that dp x sp = ranks.")
    try:
        code = run_demo(Options(ranks, dp, sp, seq_len, steps, corpus, seed), _console)
    except (CorpusError, RankFailed) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _console.print("interrupted; all ranks are ended")
        raise typer.Exit(130) from None
    raise typer.Exit(code)


@app.command()
def check(
    target: Annotated[
        str, typer.Argument(help="module:function; the function returns (model, inputs) or (model, inputs, plan).")
    ],
    sp: Annotated[int, typer.Option(min=1, help="Ranks to explain sizes for.")] = 2,
) -> None:
    """Shows what a plan would convert and proves that tokens stay apart, in one process without ranks.

    The function returns a model and its inputs (a tuple of positional or a mapping of keyword arguments), and a UlyssesPlan
    where the default is not the one to check. Exits with 1 when the plan refuses the model.
    """
    from ulysses_dtensor.certificate import certify

    model, inputs, *plan = _load(target)
    try:
        certificate = certify(model, inputs, {"sp": sp}, *plan)
    except PlanError as error:
        _fail(str(error))
    print(certificate)
    raise typer.Exit(0 if certificate.passed else 1)


def _load(target: str) -> tuple[Any, ...]:
    module, _, function = target.partition(":")
    if not function:
        _fail(f"check: {target!r} is not module:function.")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        _fail(f"check: {target!r} cannot be loaded: {error}")
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        _fail(f"check: {target} returned a {type(made).__name__}, not (model, inputs) or (model, inputs, plan).")
    return made


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)
