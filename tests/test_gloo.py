from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo import GlooPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

CASES = """
import json, os, pathlib, signal, time

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background of a shell

def pid():
    return os.getpid()

def hang():
    time.sleep(600)

def test_hang(gloo):
    pathlib.Path("pids").write_text(json.dumps(gloo.run(2, pid)))
    if os.environ["ENDS_BY"] != "itself":
        gloo.run(2, hang, timeout=600)
"""


def where() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def mesh_sum(x: torch.Tensor, sizes: tuple[int, ...]) -> list[float]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "sp")[-len(sizes) :])
    rank = dist.get_rank()
    sums = []
    for name in mesh.mesh_dim_names or ():
        y = x + rank
        dist.all_reduce(y, group=mesh.get_group(name))
        sums.append(y.sum().item())
    return sums


def full_tensor(size: int) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(torch.full((size,), float(dist.get_rank())), mesh, [Shard(0)]).full_tensor()


def exchange(x: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    return received * dist.get_world_size()


def compiled_exchange(x: torch.Tensor) -> torch.Tensor:
    return torch.compile(exchange, fullgraph=True, backend="aot_eager")(x)


def draw(size: int) -> torch.Tensor:
    return torch.rand(size)


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * x.requires_grad_()


def barrier_but_rank_1_raises(error: BaseException) -> None:
    if dist.get_rank() == 1:
        print("about to raise")
        raise error
    dist.barrier()


def all_raise() -> None:
    raise LookupError(f"nothing for {dist.get_rank()}")


def sleep_but_rank_1_raises() -> None:
    if dist.get_rank() == 1:
        raise LookupError("one is missing")
    time.sleep(600)


class TwoArguments(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def barrier_but_rank_0_ends() -> None:
    if dist.get_rank() != 0:
        dist.barrier()


def barrier_but_rank_1_is_killed(by: int) -> None:
    if dist.get_rank() == 1:
        print("about to die")
        os.kill(os.getpid(), by)
    dist.barrier()


def exit_process() -> None:
    os._exit(3)


def noise() -> int:
    print("printed")
    os.write(2, b"written\n")
    warnings.warn("warned", UserWarning, stacklevel=1)
    return dist.get_rank()


def threads() -> tuple[int, str | None]:
    return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


def pid() -> int:
    return os.getpid()


def make_lambda() -> object:
    return lambda: None


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # an orphan that nobody has waited for yet is gone all the same
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("ranks", [2, 4, 1, 3])
def test_returns_results_in_rank_order(gloo: GlooPool, ranks: int) -> None:
    assert gloo.run(ranks, where) == [(rank, ranks) for rank in range(ranks)]


def test_a_mesh_sees_exactly_the_ranks_of_the_case(gloo: GlooPool) -> None:
    x = torch.ones(2)
    assert gloo.run(4, mesh_sum, x, (2, 2)) == [[8.0, 6.0], [12.0, 6.0], [8.0, 14.0], [12.0, 14.0]]
    assert gloo.run(2, mesh_sum, x, (2,)) == [[6.0], [6.0]]
    assert gloo.run(2, mesh_sum, x, (1, 2)) == [[2.0, 6.0], [4.0, 6.0]]


def test_nothing_of_a_case_reaches_the_next(gloo: GlooPool) -> None:
    for ranks in (2, 4, 2, 2, 4):
        (first, *others) = gloo.run(ranks, full_tensor, 3)
        assert torch.equal(first, torch.arange(float(ranks)).repeat_interleave(3))
        assert all(torch.equal(first, other) for other in others)
        received = gloo.run(ranks, compiled_exchange, torch.arange(4.0))
        assert torch.equal(received[0], ranks * torch.arange(4 // ranks).repeat(ranks))


def test_ranks_draw_the_same_numbers_in_every_case(gloo: GlooPool) -> None:
    draws = [*gloo.run(2, draw, 3), *gloo.run(2, draw, 3)]
    assert all(torch.equal(draws[0], other) for other in draws)


def test_tensors_travel_by_value(gloo: GlooPool) -> None:
    x = torch.arange(300_000.0)
    results = gloo.run(2, scale, x)
    assert all(torch.equal(result, x * x) for result in results)
    assert not x.requires_grad


def test_a_rank_has_one_thread(gloo: GlooPool) -> None:
    assert gloo.run(2, threads) == [(1, "1")] * 2


def test_noise_is_neither_an_error_nor_seen(gloo: GlooPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert gloo.run(2, noise) == [0, 1]
    assert capfd.readouterr() == ("", "")


def test_an_error_on_one_rank_ends_all_with_it(gloo: GlooPool) -> None:
    pids = gloo.run(4, pid)
    with pytest.raises(LookupError, match="one is missing") as raised:
        gloo.run(4, barrier_but_rank_1_raises, LookupError("one is missing"))
    assert "raised on gloo rank 1 of 4:\nTraceback" in notes(raised.value)
    assert "in barrier_but_rank_1_raises\n    raise error\n" in notes(raised.value)
    assert "rank 1 printed:\nabout to raise" in notes(raised.value)
    for rank in (0, 2, 3):
        assert f"\nrank {rank} raised RuntimeError: " in notes(raised.value)
    assert gloo.run(4, pid) == pids  # all ranks ended the case by themselves, none had to be killed


def test_an_error_on_all_ranks_is_one_error(gloo: GlooPool) -> None:
    with pytest.raises(LookupError, match=r"nothing for \d") as raised:
        gloo.run(3, all_raise)
    assert notes(raised.value).count("raised LookupError: nothing for ") == 2


def test_an_error_ends_ranks_that_wait_for_something_else(gloo: GlooPool) -> None:
    start = time.monotonic()
    with pytest.raises(LookupError, match="one is missing") as raised:
        gloo.run(2, sleep_but_rank_1_raises)
    assert "rank 0 still runs" in notes(raised.value)
    assert time.monotonic() - start < 30
    assert gloo.run(2, where) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TwoArguments("salt", "pepper"), "TwoArguments: salt and pepper"),
        (SystemExit(5), "SystemExit: 5"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
    ],
)
def test_an_error_that_cannot_travel_arrives_as_its_text(gloo: GlooPool, error: BaseException, text: str) -> None:
    with pytest.raises(RuntimeError, match=text) as raised:
        gloo.run(2, raise_here, type(error), error.args, text)
    assert f"\n{type(error).__name__}" in notes(raised.value) or "Traceback" in notes(raised.value)


def raise_here(kind: type[BaseException], args: tuple[object, ...], text: str) -> None:
    if kind is TwoArguments:
        first, second = text.partition(": ")[2].split(" and ")
        raise TwoArguments(first, second)
    raise kind(*args)


def test_a_result_that_cannot_travel_is_an_error(gloo: GlooPool) -> None:
    with pytest.raises(Exception, match=r"pickle.*lambda|lambda.*pickle|local object") as raised:
        gloo.run(2, make_lambda)
    assert "raised on gloo rank" in notes(raised.value)


def test_a_function_that_cannot_travel_is_refused(gloo: GlooPool) -> None:
    with pytest.raises(Exception, match=r"lambda") as raised:
        gloo.run(2, lambda: None)
    assert "use a function of a module" in notes(raised.value)


@pytest.mark.parametrize("ranks", [0, 5])
def test_rejects_more_ranks_than_there_are(gloo: GlooPool, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"ranks={ranks} is not between 1 and the size of the pool, 4"):
        gloo.run(ranks, where)


def test_a_hang_shows_where_each_rank_stands(gloo: GlooPool) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"1 of 2 ranks did not end \w+.barrier_but_rank_0_ends") as raised:
        gloo.run(2, barrier_but_rank_0_ends, timeout=3)
    assert time.monotonic() - start < 30
    ended, stands = str(raised.value).split("\nrank 1 ")
    assert ended.endswith("rank 0 has ended")
    assert stands.startswith("still runs\n")
    assert "distributed_c10d.py" in stands
    assert "in barrier_but_rank_0_ends\n" in stands
    assert "_end_with_parent" not in stands
    assert gloo.run(2, where) == [(0, 2), (1, 2)]


def test_a_killed_rank_is_named_with_its_signal(gloo: GlooPool) -> None:
    with pytest.raises(ChildProcessError, match="barrier_but_rank_1_is_killed died") as raised:
        gloo.run(4, barrier_but_rank_1_is_killed, signal.SIGKILL)
    assert "rank 1 was killed by SIGKILL" in str(raised.value)
    for rank in (0, 2, 3):
        assert f"rank {rank} raised RuntimeError: " in str(raised.value)
    assert gloo.run(4, where) == [(rank, 4) for rank in range(4)]


def test_a_crash_shows_its_python_stack(gloo: GlooPool) -> None:
    with pytest.raises(ChildProcessError, match="rank 1 was killed by SIGSEGV") as raised:
        gloo.run(2, barrier_but_rank_1_is_killed, signal.SIGSEGV)
    assert "about to die" in str(raised.value)
    assert "in barrier_but_rank_1_is_killed\n" in str(raised.value)
    assert gloo.run(2, where) == [(0, 2), (1, 2)]


def test_a_rank_that_leaves_the_process_is_named(gloo: GlooPool) -> None:
    with pytest.raises(ChildProcessError, match="rank 0 left the process with exit status 3"):
        gloo.run(1, exit_process)
    assert gloo.run(2, where) == [(0, 2), (1, 2)]


@pytest.mark.parametrize("ends_by", ["itself", "ctrl-c", "kill"])
def test_no_process_outlives_the_session(tmp_path: Path, ends_by: str) -> None:
    for name in ("conftest.py", "gloo.py"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    (tmp_path / "test_case.py").write_text(CASES)
    (tmp_path / "tmp").mkdir()
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_case.py"],
        cwd=tmp_path,
        env={**os.environ, "ENDS_BY": ends_by, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with session:
        pids = tmp_path / "pids"
        while not pids.exists() or not pids.read_text():
            assert session.poll() is None, session.communicate()[0]
            time.sleep(0.1)
        if ends_by == "ctrl-c":
            time.sleep(0.5)
            os.killpg(session.pid, signal.SIGINT)
        elif ends_by == "kill":
            session.kill()
        printed = session.communicate(timeout=60)[0]
    if ends_by != "kill":
        assert ("KeyboardInterrupt" if ends_by == "ctrl-c" else "1 passed") in printed
    ranks = json.loads(pids.read_text())
    assert len(ranks) == 2
    until = time.monotonic() + 30
    while left := [*filter(alive, ranks), *(tmp_path / "tmp").iterdir()]:
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.1)
