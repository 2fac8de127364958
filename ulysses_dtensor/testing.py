"""Many ranks in one process, and hypothesis strategies for meshes, shapes and layouts.

Everything private of torch that this library touches is imported here. If a new torch moves one of these names,
`tests/test_testing.py` fails first: look for the threaded process group in torch's own distributed tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from ulysses_dtensor.layout import Layout, LayoutLike, as_layout, mesh_sizes
from ulysses_dtensor.notation import Axis, render

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hypothesis.strategies import SearchStrategy
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "ulysses_dtensor.testing needs hypothesis. Install the extra: pip install 'ulysses_dtensor[test]'"
    ) from error

Result = TypeVar("Result")


def run_ranks(ranks: int, function: Callable[..., Result], *args: Any, timeout: float = 60) -> list[Result]:
    """Returns `function(*args)` as run by each of `ranks` simulated ranks, rank 0 first.

    The ranks are threads of this process with a process group of their own each, so that collectives, DeviceMesh,
    DTensor and FSDP2 work as on real ranks in a few milliseconds. Random state is shared between them: make random
    tensors before and pass them. Every all-to-all is checked: what a rank sends a peer is what the peer expects.

    Args:
        ranks: how many ranks, at least one.
        function: called by every rank; sees its rank by `torch.distributed.get_rank()`.
        *args: given to `function`, the same objects to every rank.
        timeout: seconds until a rank that does not end counts as hung.

    Raises:
        Exception: whatever the first failing rank raised; the other ranks are ended with it.
        TimeoutError: a rank did not end in time.
    """
    _choose_kernels()
    results: dict[int, Result] = {}
    errors: list[tuple[int, BaseException]] = []
    store = c10d.HashStore()

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group(backend="threaded", rank=rank, world_size=ranks, store=store)
            results[rank] = function(*args)
        except SystemExit:
            pass  # another rank failed, and the threaded group ended this one
        except BaseException as error:
            errors.append((rank, error))
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    with _threaded_world():
        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(timeout)
            if thread.is_alive():
                hung = TimeoutError(
                    f"run_ranks: rank {rank} of {ranks} did not end in {timeout} s; did a rank skip a collective?"
                )
                threaded.ProcessLocalGroup.exception_handle(hung)
                errors.append((rank, hung))
                for other in threads:
                    other.join(timeout)
                break
    if errors:
        rank, error = errors[0]
        error.add_note(f"raised on simulated rank {rank} of {ranks}")
        raise error
    return [results[rank] for rank in range(ranks)]


def run_on_mesh(sizes: Mapping[str, int], function: Callable[..., Result], *args: Any) -> list[Result]:
    """Returns `function(mesh, *args)` as run by each simulated rank of a mesh with these named sizes."""
    ranks = prod(sizes.values())

    def with_mesh() -> Result:
        return function(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)), *args)

    return run_ranks(ranks, with_mesh)


def full_value(x: DTensor) -> torch.Tensor:
    """Returns the whole tensor on every rank, gathered by this library (autograd does not see it)."""
    from ulysses_dtensor.redistribute import redistribute

    names = " ".join(f"x{dim}" for dim in range(x.ndim))
    with torch.no_grad():
        return redistribute(x, names).to_local().clone()


def meshes(*, max_ranks: int = 8, max_dims: int = 2) -> SearchStrategy[dict[str, int]]:
    """Draws mesh sizes by name (`cp`, `sp`, `tp`), of at most `max_ranks` ranks and three dimensions in all."""
    names = (("sp",), ("cp", "sp"), ("cp", "sp", "tp"))[:max_dims]
    sizes = (
        dict(zip(some, counts, strict=True))
        for some in names
        for counts in product(range(1, max_ranks + 1), repeat=len(some))
        if prod(counts) <= max_ranks
    )
    return st.sampled_from(list(sizes))


def shapes(ndim: int, *, max_size: int = 7) -> SearchStrategy[tuple[int, ...]]:
    """Draws global shapes of `ndim` dims, sizes from zero up."""
    return st.tuples(*(st.integers(0, max_size) for _ in range(ndim)))


def layouts(mesh: Mapping[str, int], names: Sequence[str] = ("b", "s", "h")) -> SearchStrategy[Layout]:
    """Draws layouts of the tensor axes `names` in which each mesh axis cuts any of them, or none."""

    def build(dims: Sequence[int]) -> Layout:
        cut = (tuple(axis for axis, at in zip(mesh, dims, strict=True) if at == dim) for dim in range(len(names)))
        return Layout(render(tuple(Axis(name, axes) for name, axes in zip(names, cut, strict=True))))

    return st.tuples(*(st.integers(-1, len(names) - 1) for _ in mesh)).map(build)


def local_by_torch_chunk(
    x: torch.Tensor, layout: LayoutLike, mesh: DeviceMesh | Mapping[str, int], coordinate: Sequence[int]
) -> torch.Tensor:
    """Returns what one rank holds of `x`, cut by `torch.chunk` itself: the oracle for layouts."""
    where = dict(zip((name for name, _ in mesh_sizes(mesh)), coordinate, strict=True))
    sizes = dict(mesh_sizes(mesh))
    for dim, axis in enumerate(as_layout(layout).expand(x.ndim)):
        for name in axis.mesh_axes:
            pieces = torch.chunk(x, sizes[name], dim)
            x = pieces[where[name]] if where[name] < len(pieces) else x.narrow(dim, 0, 0)
    return x


@lru_cache(maxsize=1)
def _choose_kernels() -> None:
    """Calls each function of the processor's vector library once, before several threads do.

    MKL 2024.2 chooses a kernel at a function's first call, and may run one of half the digits for a thread that calls it
    meanwhile: one cold process in some dozens had a cosine right to 1e-8 in float64. https://github.com/pytorch/pytorch/issues/188792
    """
    for dtype in (torch.float32, torch.float64):
        for (
            name
        ) in "acos asin atan cos cosh erf erfc erfinv exp expm1 log log10 log1p log2 sin sinh sqrt tan tanh".split():
            getattr(torch, name)(torch.full((64,), 0.5, dtype=dtype))


@contextmanager
def _threaded_world() -> Iterator[None]:
    c10d._set_thread_isolation_mode(True)  # pyright: ignore[reportAttributeAccessIssue] - missing in torch's stubs
    threaded._install_threaded_pg()
    work = threaded.AllToAllBase.work
    threaded.AllToAllBase.work = _checked(work)
    try:
        yield
    finally:
        threaded.AllToAllBase.work = work
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        c10d._set_thread_isolation_mode(False)  # pyright: ignore[reportAttributeAccessIssue] - missing in torch's stubs


def _checked(work: Callable[..., None]) -> Callable[..., None]:
    """Fails where splits do not match: the threaded all-to-all would broadcast or cut what real ones refuse."""

    def checked(self: Any, data: list[Any]) -> None:
        def splits(buffer: torch.Tensor, sizes: Any) -> list[int]:
            return (
                [int(n) for n in sizes] if sizes is not None and len(sizes) else [len(buffer) // len(data)] * len(data)
            )

        sends = [splits(call[1], call[3]) for call in data]
        receives = [splits(call[0], call[2]) for call in data]
        for src in range(len(data)):
            for dst in range(len(data)):
                if sends[src][dst] != receives[dst][src]:
                    raise RuntimeError(
                        f"all-to-all: rank {src} sends {sends[src][dst]} elements to rank {dst}, "
                        f"which expects {receives[dst][src]}"
                    )
        work(self, data)

    return checked
