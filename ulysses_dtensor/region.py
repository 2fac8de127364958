"""What the converted modules of one model share, and how to run them as if they had never been converted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.gradients import ReduceAtEnd
from ulysses_dtensor.layout import Layout
from ulysses_dtensor.probe import Decision
from ulysses_dtensor.strategy import Strategy
from ulysses_dtensor.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Region:
    """What the converted modules of one model share: the mesh, the plan's choices, what the probe decided."""

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        outputs: str,
        check: str,
        inputs: Mapping[str, Layout],
        axes: Mapping[str, int],
        strategy: Strategy,
        signature: str,
        who: str,
        world: World,
        parts: Mapping[str, str],
    ) -> None:
        self.mesh, self.outputs, self.check, self.inputs = mesh, outputs, check, dict(inputs)
        self.axes, self.strategy = dict(axes), strategy
        self.signature, self.who, self.world, self.parts = signature, who, world, dict(parts)
        self.active = 0
        self.bypassed = 0
        self.inside = 0
        self.declared_len: int | None = None
        self.input_sizes = ""
        self.agreed = False
        self.seeded_alike = True
        self.agreement_seconds: float | None = None
        self.decisions: dict[Any, Decision | None] = {}
        self.natures: dict[Any, Any] = {}
        self.reducer = ReduceAtEnd(mesh)
        self.history = ""
        self.nested: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        copied = Region(
            self.mesh,
            outputs=self.outputs,
            check=self.check,
            inputs=self.inputs,
            axes=self.axes,
            strategy=self.strategy,
            signature=self.signature,
            who=self.who,
            parts=self.parts,
            world=self.world,
        )
        copied.decisions, copied.natures = dict(self.decisions), dict(self.natures)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        fresh = ReduceAtEnd(self.mesh)
        return {
            **self.__dict__,
            "reducer": fresh,
            "active": 0,
            "bypassed": 0,
            "inside": 0,
            "agreed": False,
        }

    @property
    def ranks(self) -> int:
        """How many ranks share a sequence."""
        return self.mesh.size()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Marks that a block's code runs."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def is_short(self, seq_len: int) -> bool:
        """Whether some rank would hold no token; such a sequence runs whole on every rank."""
        share = -(-seq_len // self.ranks)
        return share * (self.ranks - 1) >= seq_len and self.ranks > 1


def region_of(module: nn.Module) -> Region | None:
    """Returns the region that `module` was converted into, None when it was not."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, partial) and len(forward.args) > 1 and isinstance(forward.args[1], Region):
        return forward.args[1]
    return None


@contextmanager
def bypass(model: nn.Module) -> Iterator[None]:
    """Runs a converted model as if it had never been converted: whole sequences, no communication of ours.

    Raises:
        PlanError: nothing in `model` is converted.
    """
    regions = {id(region): region for module in model.modules() if (region := region_of(module)) is not None}
    if not regions:
        raise PlanError(f"bypass: {type(model).__name__} is not converted. Call parallelize_module first.")
    for region in regions.values():
        region.bypassed += 1
    try:
        yield
    finally:
        for region in regions.values():
            region.bypassed -= 1
