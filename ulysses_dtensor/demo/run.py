"""Runs the demo: both trainings with progress bars, the table, the verdict."""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ulysses_dtensor.demo.corpus import draw_batches, read_corpus
from ulysses_dtensor.demo.train import Settings, Step, train_parallel, train_single

TOLERANCE = 1e-9
"""Largest relative difference of a loss or gradient norm that counts as rounding in float64."""


@dataclass(frozen=True, slots=True)
class Options:
    """The demo's command line."""

    ranks: int
    dp: int
    sp: int
    seq_len: int
    steps: int
    corpus: Path | None
    seed: int


def run_demo(options: Options, console: Console) -> int:
    """Returns the exit code: 0 when both runs agree, 1 when their numbers part or a rank failed, 130 after Ctrl-C."""
    corpus = read_corpus(options.corpus, at_least=options.seq_len + 2)
    batches = draw_batches(corpus, seq_len=options.seq_len, steps=options.steps, replicas=options.dp, seed=options.seed)
    settings = Settings(batches, options.dp, options.sp, options.seed)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _under_torchrun(settings, console)
    torch.set_num_threads(1)
    with _progress(console) as progress:
        single_bar = progress.add_task("one rank", total=options.steps)
        parallel_bar = progress.add_task(f"dp={options.dp} sp={options.sp}", total=options.steps)
        single = train_single(settings, lambda _: progress.advance(single_bar))
        parallel = _spawn(settings, options.ranks, lambda: progress.advance(parallel_bar))
    return _verdict(single, parallel, settings, console)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)


def _under_torchrun(settings: Settings, console: Console) -> int:
    dist.init_process_group()
    try:
        first = dist.get_rank() == 0
        with _progress(console if first else Console(quiet=True)) as progress:
            single_bar = progress.add_task("one rank", total=len(settings.batches))
            parallel_bar = progress.add_task(f"dp={settings.dp} sp={settings.sp}", total=len(settings.batches))
            parallel = train_parallel(settings, lambda _: progress.advance(parallel_bar))
            single = train_single(settings, lambda _: progress.advance(single_bar)) if first else []
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, parallel)
        code = [_verdict(single, rows, settings, console) if first else 0]
        dist.broadcast_object_list(code)  # every machine's torchrun ends with the verdict
        return code[0]
    finally:
        dist.destroy_process_group()


def _spawn(settings: Settings, ranks: int, advance: Callable[[], None]) -> list[list[Step]]:
    """Runs `train_parallel` in processes of its own; ends all of them when one fails or on Ctrl-C."""
    context = mp.get_context("spawn")
    messages = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "rendezvous"
        processes = [
            context.Process(target=_rank_main, args=(rank, ranks, str(store), settings, messages), daemon=True)
            for rank in range(ranks)
        ]
        results: dict[int, list[Step]] = {}
        try:
            for process in processes:
                process.start()
            while len(results) < ranks:
                rank, kind, content = _next_message(messages, processes)
                if kind == "failed":
                    time.sleep(0.5)  # where another rank died, this one failed for that: let it be seen
                    _raise_if_died(processes)
                    raise RankFailed(f"rank {rank} of {ranks} failed:\n{content}")
                if kind == "done":
                    results[rank] = content
                elif rank == 0:
                    advance()
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
    return [results[rank] for rank in range(ranks)]


class RankFailed(RuntimeError):
    """A rank of the demo raised an error or died."""


def _next_message(messages: Any, processes: list[Any]) -> tuple[int, str, Any]:
    import queue

    while True:
        try:
            return messages.get(timeout=0.2)
        except queue.Empty:
            _raise_if_died(processes)


def _raise_if_died(processes: list[Any]) -> None:
    for rank, process in enumerate(processes):
        if process.exitcode not in (None, 0):
            raise RankFailed(f"rank {rank} of {len(processes)} ended with exit code {process.exitcode}.")


def _rank_main(rank: int, ranks: int, store: str, settings: Settings, messages: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends the ranks
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        steps = train_parallel(settings, lambda step: messages.put((rank, "step", step)))
        dist.destroy_process_group()
        messages.put((rank, "done", steps))
    except Exception:
        messages.put((rank, "failed", traceback.format_exc()))


def _verdict(single: list[Step], parallel: list[list[Step]], settings: Settings, console: Console) -> int:
    lead = parallel[0]
    table = Table(
        "step", "loss\none rank", "\nparallel", "\ndiffer", "gradient norm\none rank", "\nparallel", "\ndiffer"
    )
    worst = 0.0
    for number, (one, many) in enumerate(zip(single, lead, strict=True)):
        losses = _difference(one.loss, many.loss)
        norms = _difference(one.gradient_norm, many.gradient_norm)
        worst = max(worst, losses, norms)
        cells = (one.loss, many.loss, losses, one.gradient_norm, many.gradient_norm, norms)
        table.add_row(str(number), *(f"{cell:.1e}" if at in (2, 5) else f"{cell:.8g}" for at, cell in enumerate(cells)))
    console.print(table)
    one_bytes = max(step.activation_bytes for step in single)
    many_bytes = max(step.activation_bytes for steps in parallel for step in steps)
    exchanged = max(step.exchanged_bytes for steps in parallel for step in steps)
    summary = Table("", "one rank", f"each of dp={settings.dp} x sp={settings.sp} ranks", "ratio")
    summary.add_row("peak activation bytes", f"{one_bytes:,}", f"{many_bytes:,}", f"{many_bytes / one_bytes:.3f}")
    summary.add_row("bytes exchanged per step", "0", f"{exchanged:,}", "")
    console.print(summary)
    agree = worst <= TOLERANCE
    console.print(
        f"largest relative difference: {worst:.1e} ({'equal to rounding' if agree else f'past {TOLERANCE:.0e}: the numbers part'})"
    )
    return 0 if agree else 1


def _difference(one: float, many: float) -> float:
    """Returns the relative difference, infinite where either is not a number."""
    difference = abs(one - many) / max(abs(one), sys.float_info.min)
    return difference if difference >= 0 else math.inf
