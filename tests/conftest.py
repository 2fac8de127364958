"""Hypothesis profiles, one thread, and the gloo ranks of the session."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in every rank

import pytest
import torch
from gloo import GlooPool
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

_SHARED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=20, **_SHARED)
settings.register_profile("ci", max_examples=50, derandomize=True, **_SHARED)
settings.register_profile("deep", max_examples=2000, **_SHARED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooPool]:
    """Four real ranks: `gloo.run(ranks, function, *args)` returns what the function returned on each."""
    pool = GlooPool()
    try:
        yield pool
    finally:
        pool.stop()
