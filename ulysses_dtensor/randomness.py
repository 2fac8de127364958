"""Random numbers that differ between the ranks of a sequence group and come back in a recompute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ulysses_dtensor.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


DRAWS = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson uniform_ normal_ "
    "random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ gumbel_softmax rrelu".split()
)


def refuse_draw(func: object, kwargs: Mapping[str, object]) -> None:
    """Refuses a function that draws random numbers, dropout apart, on ranks whose generators differ.

    A generator that the model passes itself is its own matter.

    Raises:
        PlanError: `func` is one.
    """
    name = getattr(func, "__name__", "")
    if name in DRAWS and kwargs.get("generator") is None:
        raise PlanError(
            f"UlyssesPlan: the model draws random numbers ({name}), and the ranks of a sequence group stand at different "
            "states of the generator: each would draw its own. Seed them alike, or draw before the model and pass the numbers."
        )


@contextmanager
def own_random_state(device: torch.device, group: ProcessGroup) -> Iterator[None]:
    """Runs the block with random numbers of this rank's own.

    Ranks that share a seed would drop the same positions of different tokens or heads. A seed is drawn from the
    default generator of `device`, so that the same state before gives the same numbers (activation checkpointing
    restores it), the rank is mixed in, and the default generator goes on as if one number had been drawn.
    """
    # With its generator named: this is no draw of the model's, which a mode around would refuse.
    generator = _default_generator(device)
    seed = int(torch.randint(2**62, (), device=device, dtype=torch.int64, generator=generator).item())
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(_mixed(seed, group))
        yield


@contextmanager
def own_kernel_draws(device: torch.device, group: ProcessGroup, *, all_draw: bool) -> Iterator[None]:
    """Runs the block with random numbers of this rank's own where a kernel draws them; else leaves no trace.

    On a CPU what draws is a function that a mode sees. Elsewhere the seed comes from the state of the device's default
    generator, which goes on as if one number had been drawn where the block drew any.

    Raises:
        PlanError: the block drew, and not every rank runs such a block (`all_draw`): their generators would part.
    """
    if device.type == "cpu" or torch.compiler.is_compiling():
        yield
        return
    generator = _default_generator(device)
    before = generator.get_state()
    generator.manual_seed(_mixed(hash(tuple(before.tolist())), group))  # numbers' hashes are the same in all processes
    fresh = generator.get_state()
    drawn = False
    try:
        yield
        drawn = not torch.equal(generator.get_state(), fresh)
    finally:
        generator.set_state(before)
    if drawn and not all_draw:
        raise PlanError(IDLE)
    if drawn:
        torch.rand((), device=device, generator=generator)


IDLE = (
    "UlyssesAttention: the attention draws random numbers, and some rank has no head to call it with: the ranks' generators would "
    "part. Use as many ranks as heads, or an attention without dropout."
)


def kernels_drew(device: torch.device, before: torch.Tensor | None) -> bool:
    """Whether code drew from a device's default generator since its `kernel_state`; on a CPU a mode sees what draws."""
    return before is not None and not torch.equal(_default_generator(device).get_state(), before)


def kernel_state(device: torch.device) -> torch.Tensor | None:
    """Returns the state of the device's default generator; None on a CPU."""
    return None if device.type == "cpu" else _default_generator(device).get_state()


def _mixed(seed: int, group: ProcessGroup) -> int:
    return (seed + 0x9E3779B97F4A7C15 * (dist.get_rank(group) + 1)) % 2**63


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]
