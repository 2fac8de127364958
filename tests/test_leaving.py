"""The interpreter ends after gloo's threads are done with it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.distributed.device_mesh import DeviceMesh

from ulysses_dtensor.leaving import _sleep_at_exit, leave_after_gloo
from ulysses_dtensor.testing import run_on_mesh

PROCESS = """
import os, sys, time
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from ulysses_dtensor import UlyssesPlan, parallelize_module
from ulysses_dtensor.demo.model import Decoder

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("sp",))
time.sleep = lambda seconds: os.write(1, b"asleep for %.1f s" % seconds)  # no race with a clock: what is asked for is printed
for _ in range(int(sys.argv[1])):
    parallelize_module(Decoder(), mesh, UlyssesPlan())
"""


@pytest.mark.parametrize(("models", "printed"), [("2", b"asleep for 0.2 s"), ("0", b"")])
def test_a_process_with_converted_models_sleeps_once_at_exit(models: str, printed: bytes) -> None:
    assert subprocess.check_output([sys.executable, "-c", PROCESS, models], timeout=120) == printed


def test_simulated_ranks_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    _sleep_at_exit.cache_clear()
    registered: list[object] = []
    monkeypatch.setattr("atexit.register", lambda *call: registered.append(call))

    def run(mesh: DeviceMesh) -> None:
        leave_after_gloo(mesh)

    run_on_mesh({"sp": 2}, run)
    assert not registered
