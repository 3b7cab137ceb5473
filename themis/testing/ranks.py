"""Run a function on several real ranks of one machine: forked processes, Gloo over loopback, no ports."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Literal, final, overload

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from themis.core.errors import ThemisError, require

#: After one rank has failed, how long the others may still report before they are ended.
_GRACE_S = 0.2
_PR_SET_PDEATHSIG = 1


class RankError(ThemisError, RuntimeError):
    """A rank of `run_ranks` raised, died or ran past its limit."""


@final
@dataclass(frozen=True)
class Outcome:
    """What became of one rank: a value, or the text of its error, or the number of the signal that ended it."""

    rank: int
    value: Any = None
    error: str | None = None
    signal: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.signal is None

    def __str__(self) -> str:
        if self.signal is not None:
            return f"rank {self.rank} was ended by {signal.Signals(self.signal).name}"
        return f"rank {self.rank} {self.error or 'returned'}"


@overload
def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = ...,
    return_errors: Literal[False] = ...,
) -> list[Any]: ...
@overload
def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = ..., return_errors: Literal[True]
) -> list[Outcome]: ...
def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, return_errors: bool = False
) -> list[Any]:
    """`function(rank, *args)` on `world_size` forked processes with torch.distributed ready (Gloo); values by rank.

    Values are pickled on their way back, so hand out NumPy arrays or numbers, not tensors. The first rank that
    raises, dies or is still running after `timeout_s` seconds ends all of them with RankError. With
    `return_errors` nothing is raised: the answer is one Outcome a rank, each rank running until it ends or its time
    is up. No process outlives the call. Keep the parent single-threaded (`torch.set_num_threads(1)`): a fork after
    OpenMP has run on several threads can hang.
    """
    require(world_size >= 1, "world_size", world_size, "1 or more")
    require(timeout_s > 0, "timeout_s", timeout_s, "above zero seconds")
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(world_size)]
    with tempfile.TemporaryDirectory(prefix="themis-ranks-") as folder:
        processes = [
            context.Process(target=_rank_main, args=(rank, pipes, Path(folder) / "store", timeout_s, function, args))
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            for _, rank_end in pipes:
                rank_end.close()
            ends = [parent_end for parent_end, _ in pipes]
            outcomes = _collect(processes, ends, timeout_s, stop_at_failure=not return_errors)
        finally:
            _end(processes)
            for parent_end, _ in pipes:
                parent_end.close()
    if return_errors:
        return [outcomes[rank] for rank in range(world_size)]
    for outcome in outcomes.values():
        if not outcome.ok:
            raise RankError(str(outcome))
    return [outcomes[rank].value for rank in range(world_size)]


def _collect(
    processes: list[ForkProcess], ends: list[Connection[Any, Any]], timeout_s: float, *, stop_at_failure: bool
) -> dict[int, Outcome]:
    """The outcome of every rank, in the order in which they came; with `stop_at_failure` others get no more time."""
    deadline = time.monotonic() + timeout_s
    found: dict[int, Outcome] = {}
    while len(found) < len(processes) and (left_s := deadline - time.monotonic()) > 0:
        waiting = [rank for rank in range(len(processes)) if rank not in found]
        ready = wait([ends[rank] for rank in waiting], timeout=left_s)
        for rank in waiting:
            if ends[rank] in ready:
                found[rank] = _receive(rank, processes[rank], ends[rank])
                if stop_at_failure and not found[rank].ok:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
    for rank in range(len(processes)):
        found.setdefault(rank, Outcome(rank, error=f"was still running after {timeout_s:g} s"))
    return found


def _receive(rank: int, process: ForkProcess, end: Connection[Any, Any]) -> Outcome:
    try:
        ok, payload = end.recv()
    except (EOFError, ConnectionResetError):
        process.join(5.0)
        code = process.exitcode
        if code is not None and code < 0:
            return Outcome(rank, signal=-code)
        return Outcome(rank, error=f"left with exit status {code} before it returned")
    return Outcome(rank, value=payload) if ok else Outcome(rank, error=f"failed:\n{payload}")


def _end(processes: list[ForkProcess]) -> None:
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join()
        process.close()


def _rank_main(
    rank: int,
    pipes: list[tuple[Connection[Any, Any], Connection[Any, Any]]],
    store_path: Path,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The life of one rank. It reports, then stays until the parent ends it, so that no peer sees it leave early."""
    _die_with_parent()
    end = pipes[rank][1]
    for other, (parent_end, rank_end) in enumerate(pipes):
        parent_end.close()
        if other != rank:
            rank_end.close()
    try:
        _join_group(rank, len(pipes), store_path, timeout_s)
        end.send((True, function(rank, *args)))
    except BaseException:
        end.send((False, traceback.format_exc()))
        sys.stdout.flush()
        os._exit(1)  # a failed rank is gone at once, as it would be in production
    sys.stdout.flush()
    while True:
        signal.pause()


def _join_group(rank: int, world_size: int, store_path: Path, timeout_s: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    store = FileStore(str(store_path), world_size)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    if store.add("joined", 1) == world_size:  # what a rank does to itself must not reach others that still connect
        store.set("all joined", "")
    store.wait(["all joined"], limit)


def _die_with_parent() -> None:
    """Where the kernel offers it, a rank dies with the parent, even if that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
