"""run_ranks: values by rank, failures told, nothing left behind."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from themis.core.errors import ConfigError
from themis.testing.ranks import RankError, run_ranks


def _sum_of_ranks(rank, base):
    total = torch.tensor([float(base + rank)])
    dist.all_reduce(total)
    return rank, os.getpid(), total.item(), torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_come_back_by_rank(world_size):
    results = run_ranks(world_size, _sum_of_ranks, 10)
    expected = 10 * world_size + sum(range(world_size))
    assert [(rank, total, threads) for rank, _, total, threads in results] == [
        (rank, expected, 1) for rank in range(world_size)
    ]
    assert len({pid for _, pid, _, _ in results} | {os.getpid()}) == world_size + 1


def test_closures_work_and_large_values_return():
    payload = {"text": "x" * 3_000_000}
    assert run_ranks(2, lambda rank: payload | {"rank": rank}) == [payload | {"rank": 0}, payload | {"rank": 1}]


def test_no_process_is_left():
    for _, pid, _, _ in run_ranks(2, _sum_of_ranks, 0):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_exception_is_raised_with_rank_and_traceback():
    def fail(rank):
        if rank == 1:
            raise KeyError("lost")
        time.sleep(30)

    began = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 failed:.*Traceback.*KeyError: 'lost'"):
        run_ranks(3, fail)
    assert time.monotonic() - began < 10


def test_a_killed_rank_is_named():
    def die(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    with pytest.raises(RankError, match="rank 1 was ended by SIGKILL"):
        run_ranks(2, die)


def test_an_exit_without_a_word_is_named():
    with pytest.raises(RankError, match="rank 0 left with exit status 3"):
        run_ranks(1, lambda rank: os._exit(3))


@pytest.mark.parametrize("signal_number", [None, signal.SIGSTOP])
def test_a_rank_that_runs_too_long_is_ended(signal_number):
    def hang(rank):
        if signal_number is not None:
            os.kill(os.getpid(), signal_number)
        time.sleep(30)

    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 was still running after 0\.5 s"):
        run_ranks(1, hang, timeout_s=0.5)
    assert time.monotonic() - began < 10


def test_return_errors_tells_each_rank_apart():
    def each_differently(rank):
        if rank == 1:
            raise ValueError("bad")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 3:
            time.sleep(30)
        return "fine"

    fine, raised, killed, late = run_ranks(4, each_differently, timeout_s=2.0, return_errors=True)
    assert fine.ok
    assert fine.value == "fine"
    assert "ValueError: bad" in raised.error
    assert killed.signal == signal.SIGKILL
    assert "still running" in late.error
    assert not any(outcome.ok for outcome in (raised, killed, late))


def test_a_finished_rank_waits_for_the_others():
    """A peer that leaves early would break the others' last messages; here rank 0 has nothing more to do."""

    def talk(rank):
        if rank > 0:
            time.sleep(0.3)
            message = torch.zeros(1)
            if rank == 1:
                dist.send(message + 7, 2)
            else:
                dist.recv(message, 1)
            return message.item()
        return None

    assert run_ranks(3, talk) == [None, 0.0, 7.0]


def test_bad_arguments():
    with pytest.raises(ConfigError, match="world_size is 0; it must be 1 or more"):
        run_ranks(0, print)
    with pytest.raises(ConfigError, match="timeout_s is 0; it must be above zero"):
        run_ranks(1, print, timeout_s=0)
