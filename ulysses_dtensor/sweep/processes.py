"""Judges families in processes of their own, each in its time limit."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch

from ulysses_dtensor.sweep.judge import Result

Judge = Callable[..., Result]


def in_processes(
    judge: Judge, names: Sequence[str], args: tuple[Any, ...], jobs: int, seconds: float
) -> Iterator[Result]:
    """Yields `judge(name, *args)` of each family, in the order they end; one that takes longer than `seconds` has failed."""
    context = multiprocessing.get_context("fork")  # transformers is loaded once
    pending = list(names)
    running: dict[Any, tuple[str, Any, float]] = {}
    try:
        while pending or running:
            while pending and len(running) < jobs:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_send, args=(sender, judge, pending[0], args), daemon=True)
                process.start()
                sender.close()
                running[receiver] = (pending.pop(0), process, time.monotonic() + seconds)
            nearest = min(deadline for _, _, deadline in running.values())
            ready = wait(list(running), timeout=max(0.0, nearest - time.monotonic()))
            late = [each for each, (_, _, deadline) in running.items() if deadline <= time.monotonic()]
            for receiver in {*ready, *late}:
                family, process, _ = running.pop(receiver)
                yield _received(receiver, family, process, f"did not end in {seconds:.0f} s")
    finally:
        for _, process, _ in running.values():
            process.kill()


def _received(receiver: Any, family: str, process: Any, late: str) -> Result:
    try:
        return receiver.recv() if receiver.poll() else Result(family, "failed", late)
    except EOFError:
        process.join()
        return Result(family, "failed", f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
        receiver.close()


def _send(sender: Any, judge: Judge, family: str, args: tuple[Any, ...]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sender.send(judge(family, *args))
