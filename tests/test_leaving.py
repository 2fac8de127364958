"""The interpreter ends after gloo's threads are done with it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.distributed.device_mesh import DeviceMesh

from ulysses_dtensor.leaving import _sleep_at_exit, leave_after_gloo
from ulysses_dtensor.testing import run_on_mesh

LATE_THREAD = """
import os, sys, threading, time
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from ulysses_dtensor import UlyssesPlan, parallelize_module
from ulysses_dtensor.demo.model import Decoder

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("sp",))
if sys.argv[1] == "converted":
    parallelize_module(Decoder(), mesh, UlyssesPlan())

def late():  # as a thread of gloo's: it asks for the interpreter after the main thread's last line
    time.sleep(0.05)
    os.write(1, b"let go")

threading.Thread(target=late, daemon=True).start()
"""


@pytest.mark.parametrize(("model", "printed"), [("converted", b"let go"), ("plain", b"")])
def test_a_converted_process_waits_for_threads_at_exit(model: str, printed: bytes) -> None:
    output = subprocess.check_output([sys.executable, "-c", LATE_THREAD, model], timeout=120)
    assert output == printed


def test_simulated_ranks_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    _sleep_at_exit.cache_clear()
    registered: list[object] = []
    monkeypatch.setattr("atexit.register", lambda *call: registered.append(call))

    def run(mesh: DeviceMesh) -> None:
        leave_after_gloo(mesh)

    run_on_mesh({"sp": 2}, run)
    assert not registered
