"""Random numbers that differ between the ranks of a sequence group and come back in a recompute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@contextmanager
def own_random_state(device: torch.device, group: ProcessGroup) -> Iterator[None]:
    """Runs the block with random numbers of this rank's own.

    Ranks that share a seed would drop the same positions of different tokens or heads. A seed is drawn from the
    default generator of `device`, so that the same state before gives the same numbers (activation checkpointing
    restores it), the rank is mixed in, and the default generator goes on as if one number had been drawn.
    """
    seed = int(torch.randint(2**62, (), device=device, dtype=torch.int64).item())
    own = (seed + 0x9E3779B97F4A7C15 * (dist.get_rank(group) + 1)) % 2**63
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(own)
        yield
