"""The end of a process whose ranks speak through gloo."""

from __future__ import annotations

import atexit
import functools
import time

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_SECONDS = 0.2


def leave_after_gloo(mesh: DeviceMesh) -> None:
    """Lets gloo's threads let go of their last tensors before the interpreter ends, once for a process.

    A collective returns before the thread that ran it gives up its tensors. Where these are Python's the thread needs the
    interpreter, and one that asks for it while it ends aborts the process: a run that was right exits with SIGABRT. Nothing of
    torch's waits for the threads as long as any cache holds a mesh. At exit this does, asleep, so that they can run; ranks on a
    GPU do not wait.
    """
    if mesh.device_type == "cpu" and "gloo" in str(dist.get_backend_config(mesh.get_group())):
        _sleep_at_exit()


@functools.cache
def _sleep_at_exit() -> None:
    atexit.register(time.sleep, _SECONDS)
