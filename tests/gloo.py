"""Real gloo ranks for a whole test session: processes that are started once and then fed with cases.

A case is a function of a test module, run by `n` ranks at once under a process group of their own, which is made for
the case and destroyed after it. Whatever goes wrong in a case comes back as one exception that says what each rank did.
The ranks live on unless one of them died or hangs; then all are killed, and the next case starts new ones.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from textwrap import indent
from typing import Any, TypeVar

Value = TypeVar("Value")

PATIENCE_SECONDS = 120  # with what is no case: importing torch on a busy machine, forming a group, leaving it
LEAVE = b"leave"
GRACE_SECONDS = 5.0  # after the first failure, until ranks that did not follow are killed


@dataclass(frozen=True, slots=True)
class Reply:
    """What one rank's case came to: a value, or an error and where it was raised."""

    value: Any = None
    error: Exception | None = None
    trace: str = ""
    seconds: float = 0.0  # of the clock that all processes share: the first error is the cause of the others


@dataclass(frozen=True, slots=True)
class Rank:
    """One process as its owner sees it."""

    number: int
    process: BaseProcess
    pipe: Connection
    directory: Path

    def send(self, message: bytes) -> None:
        with suppress(ConnectionError):  # a dead rank shows when its reply is read
            self.pipe.send_bytes(message)

    def receive(self) -> Reply | None:
        """Returns the rank's next reply, or None if it died."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return None

    def printed(self) -> str:
        """Returns the end of what the rank wrote to its output and error streams in this case."""
        return _read(self.directory / f"{self.number}.log")[-4000:].strip()

    def death(self) -> str:
        """Says what ended the process."""
        self.process.join(PATIENCE_SECONDS)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"left the process with exit status {code}"

    def stack(self) -> str:
        """Returns where the rank's threads stand now, innermost call first."""
        path = self.directory / f"{self.number}.stack"
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        text = ""
        for _ in range(20):  # there is no mark at the end of a dump: read until it stays the same
            time.sleep(0.05)
            before, text = text, _read(path)
            if text and text == before:
                break
        threads = [block for block in text.strip().split("\n\n") if _end_with_parent.__name__ not in block]
        return "\n".join(threads) or "no stack: it does not take signals"


class GlooPool:
    """Ranks that run cases; started when a case needs them, ended by `stop` or with the process that made them."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._ranks: list[Rank] = []
        self._directory: Path | None = None
        self._cases = 0

    def run(self, ranks: int, function: Callable[..., Value], *args: Any, timeout: float = 60) -> list[Value]:
        """Returns `function(*args)` as run by each of `ranks` processes, rank 0 first.

        The function sees a default process group of exactly these ranks, random state seeded alike, and one thread.
        It warns and prints in vain unless it fails.

        Args:
            ranks: at most the size of the pool.
            function: of a module that the ranks can import, and no lambda; it is pickled.
            args: pickled for each rank, tensors by value. So is what the function returns.
            timeout: seconds until a rank that has not ended the function counts as hung. Starting ranks is not counted.

        Raises:
            Exception: what the first rank raised that failed, with a note that says which, where, and what others did.
            ChildProcessError: a rank's process ended, by a signal for example.
            TimeoutError: a rank hangs; the message shows where each stands.
        """
        if not 1 <= ranks <= self.size:
            raise ValueError(f"gloo.run: ranks={ranks} is not between 1 and the size of the pool, {self.size}")
        name = f"{function.__module__}.{function.__qualname__}"
        try:
            case = pickle.dumps((function, args))
        except Exception as error:
            error.add_note(f"gloo.run: {name} and its arguments travel by pickle; use a function of a module")
            raise
        try:
            self._start(ranks)
            replies = self._replies(name, self._ranks[:ranks], case, timeout)
        except BaseException:
            self.stop()
            raise
        if any(reply.error is not None for reply in replies.values()):
            raise _first_error(self._ranks[:ranks], replies) from None
        return [reply.value for _, reply in sorted(replies.items())]

    def stop(self) -> None:
        """Kills the ranks and what they started, and removes their files."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            assert rank.process.pid is not None
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.kill()  # one that is still importing has no process group of its own yet
        for rank in ranks:
            rank.process.join()
            rank.process.close()
            rank.pipe.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _start(self, ranks: int) -> None:
        """Starts what is missing of the first `ranks` ranks."""
        context = multiprocessing.get_context("spawn")
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="gloo-"))
        new = range(len(self._ranks), ranks)
        for number in new:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(number, theirs, self._directory), name=f"gloo-{number}", daemon=True
            )
            # A Ctrl-C reaches every process of the terminal. The ranks inherit the mask: only their owner reacts to it.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                process.start()
                self._ranks.append(Rank(number, process, ours, self._directory))
            finally:
                theirs.close()
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._expect("start", [self._ranks[number] for number in new], PATIENCE_SECONDS)

    def _replies(self, name: str, ranks: list[Rank], case: bytes, timeout: float) -> dict[int, Reply]:
        """Returns what each rank came to; raises where not every rank can go on with another case."""
        assert self._directory is not None
        self._cases += 1
        store = self._directory / f"{self._cases}.store"
        for rank in ranks:
            rank.send(pickle.dumps((len(ranks), str(store))))
        self._expect("form a process group", ranks, PATIENCE_SECONDS)
        for rank in ranks:
            rank.send(case)
        replies, died = _collect(ranks, timeout)
        if died:
            raise ChildProcessError(_account(f"gloo.run: a rank of {name} died", ranks, replies, died))
        if len(replies) < len(ranks):
            if any(reply.error is not None for reply in replies.values()):
                raise _first_error(ranks, replies)
            hung = f"gloo.run: {len(ranks) - len(replies)} of {len(ranks)} ranks did not end {name} in {timeout} s"
            raise TimeoutError(_account(f"{hung}; did a rank skip a collective?", ranks, replies, stacks=True))
        for rank in ranks:
            if replies[rank.number].error is None:
                rank.send(LEAVE)
        self._expect("destroy their process group", ranks, PATIENCE_SECONDS)
        store.unlink(missing_ok=True)
        return replies

    def _expect(self, what: str, ranks: list[Rank], seconds: float) -> None:
        """Waits for one reply of each rank."""
        replies, died = _collect(ranks, seconds)
        if died:
            raise ChildProcessError(_account(f"gloo.run: ranks failed to {what}", ranks, replies, died))
        if len(replies) < len(ranks):
            problem = f"gloo.run: ranks did not {what} in {seconds} s"
            raise TimeoutError(_account(problem, ranks, replies, stacks=True))


def _collect(ranks: Iterable[Rank], seconds: float) -> tuple[dict[int, Reply], set[int]]:
    """Returns the replies that come in time, by rank, and the ranks that died. A failure shortens the time."""
    replies: dict[int, Reply] = {}
    died: set[int] = set()
    waiting = {rank.pipe: rank for rank in ranks}
    deadline = time.monotonic() + seconds
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            reply = rank.receive()
            if reply is None:
                died.add(rank.number)
            else:
                replies[rank.number] = reply
            if reply is None or reply.error is not None:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return replies, died


def _first_error(ranks: list[Rank], replies: Mapping[int, Reply]) -> Exception:
    """Returns the error that was raised first, with notes: the others can be its consequences."""
    raised = {number: reply for number, reply in replies.items() if reply.error is not None}
    first = min(raised, key=lambda number: raised[number].seconds)
    error = raised[first].error
    assert error is not None
    error.add_note(f"raised on gloo rank {first} of {len(ranks)}:\n{raised[first].trace.rstrip()}")
    if printed := ranks[first].printed():
        error.add_note(f"rank {first} printed:\n{printed}")
    if others := [rank for rank in ranks if rank.number != first]:
        error.add_note(_account("the other ranks:", others, replies))
    return error


def _account(
    problem: str,
    ranks: Iterable[Rank],
    replies: Mapping[int, Reply],
    died: Collection[int] = (),
    *,
    stacks: bool = False,
) -> str:
    """Returns the problem and what became of each rank, with what explains it."""
    lines = [problem]
    for rank in ranks:
        reply = replies.get(rank.number)
        below = ""
        if rank.number in died:
            state, below = rank.death(), rank.printed()
        elif reply is None:
            state, below = "still runs", rank.stack() if stacks else ""
        elif reply.error is None:
            state = "has ended"
        else:
            text = str(reply.error).strip().partition("\n")[0]
            state = f"raised {type(reply.error).__name__}: {text}"
        lines.append(f"rank {rank.number} {state}")
        if below:
            lines.append(indent(below, "    "))
    return "\n".join(lines)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _rank_main(number: int, pipe: Connection, directory: Path) -> None:
    """Runs cases until the owner of the pool ends or kills this process."""
    os.setpgid(0, 0)  # so that what a case starts is killed along with the rank
    threading.Thread(target=_end_with_parent, args=(directory,), daemon=True).start()
    log = os.open(directory / f"{number}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(2, all_threads=False)
    faulthandler.register(signal.SIGUSR1, (directory / f"{number}.stack").open("w"))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"

    import torch  # takes seconds: not before the thread above watches
    import torch.distributed as dist

    torch.set_num_threads(1)
    pipe.send_bytes(pickle.dumps(Reply()))
    while True:
        ranks, store = pickle.loads(pipe.recv_bytes())
        os.ftruncate(log, 0)
        hour = timedelta(hours=1)  # the owner's timeout comes first: it knows where each rank stands
        dist.init_process_group("gloo", f"file://{store}", hour, rank=number, world_size=ranks)
        pipe.send_bytes(pickle.dumps(Reply()))
        # A rank that failed leaves its group at once, so that those that wait for it fail too. One that ended keeps its
        # group until told to leave: to leave early could break connections of those that still run.
        ended, reply = _reply(pipe.recv_bytes())
        pipe.send_bytes(reply)
        if ended:
            assert pipe.recv_bytes() == LEAVE
        if dist.is_initialized():
            dist.destroy_process_group()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # a case counts towards no other one's limit of recompilations
        pipe.send_bytes(pickle.dumps(Reply()))


def _reply(case: bytes) -> tuple[bool, bytes]:
    """Returns whether the case ended without an error, and the pickled reply."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            function, args = pickle.loads(case)
            return True, pickle.dumps(Reply(function(*args)))
    except BaseException as error:
        seconds = time.monotonic()
        trace = "".join(traceback.format_exception(error))
        return False, pickle.dumps(Reply(error=_portable(error), trace=trace, seconds=seconds))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _portable(error: BaseException) -> Exception:
    """Returns the error, or one with its text where it cannot travel or would mean something else to pytest."""
    if isinstance(error, Exception):
        with suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _end_with_parent(directory: Path) -> None:
    """Ends this process and what it started when the owner of the pool is gone, however it went."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
