"""Ulysses sequence parallelism for any PyTorch model: layouts, the exchange, one call."""

from ulysses_dtensor.attention import UlyssesAttention
from ulysses_dtensor.collectives import count_collectives
from ulysses_dtensor.errors import LayoutError, PlanError
from ulysses_dtensor.explain import explain
from ulysses_dtensor.layout import Layout
from ulysses_dtensor.parity import ParityReport, check_parity
from ulysses_dtensor.plan import UlyssesPlan, parallelize_module
from ulysses_dtensor.redistribute import distribute, redistribute
from ulysses_dtensor.region import bypass
from ulysses_dtensor.transition import Transition

__all__ = [
    "Layout",
    "LayoutError",
    "ParityReport",
    "PlanError",
    "Transition",
    "UlyssesAttention",
    "UlyssesPlan",
    "bypass",
    "check_parity",
    "count_collectives",
    "distribute",
    "explain",
    "parallelize_module",
    "redistribute",
]
