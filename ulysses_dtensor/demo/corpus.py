"""Real text that every machine has: the Python standard library's own source files."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


class CorpusError(ValueError):
    """The text is missing or too short."""


def read_corpus(path: Path | None, *, at_least: int) -> torch.Tensor:
    """Returns bytes of text as int64 (N,), at least `at_least` of them.

    Args:
        path: a file, or a folder whose `.py`, `.txt` and `.md` files are read; None: the standard library.
        at_least: bytes needed.

    Raises:
        CorpusError: there is no such text, or not enough of it.
    """
    root = path or Path(sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise CorpusError(f"corpus: {root} does not exist.")
    files = (
        [root]
        if root.is_file()
        else sorted(p for p in root.rglob("*") if p.suffix in (".py", ".txt", ".md") and p.is_file())
    )
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= max(at_least, 2**20):
            break
    if len(text) < at_least:
        raise CorpusError(
            f"corpus: {root} has {len(text)} bytes of text, {at_least} are needed. Give more text, or shorter sequences."
        )
    return torch.frombuffer(text, dtype=torch.uint8).long()


def draw_batches(corpus: torch.Tensor, *, seq_len: int, steps: int, replicas: int, seed: int) -> torch.Tensor:
    """Returns windows of text, int64 (steps, replicas, 1, S + 1): tokens and the token after each."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(corpus) - seq_len, (steps * replicas,), generator=generator)
    windows = torch.stack([corpus[start : start + seq_len + 1] for start in starts.tolist()])
    return windows.view(steps, replicas, 1, seq_len + 1)
