"""The queue: one order, overlap, failures that stay, and a quiet end."""

import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from themis.comm.all_to_all import all_to_all
from themis.comm.communicator import Communicator
from themis.comm.mesh import Mesh
from themis.comm.sparse import sparse_all_gather, sparse_reduce_scatter
from themis.core.errors import PeerError, ThemisError
from themis.core.topology import Topology
from themis.planning.transfers import transfers
from themis.testing.ranks import run_ranks

OWNERS_E = np.array([0, 1, 2, 3])
EVERYWHERE_ED = np.ones((4, 4), dtype=bool)


def _with_communicator(function):
    """`function(mesh, communicator)` on two ranks; its values by rank."""

    def main(rank):
        mesh = Mesh.create(timeout_s=5)
        communicator = Communicator(mesh)
        value = function(mesh, communicator)
        communicator.close()
        communicator.close()
        mesh.close()
        return value

    return run_ranks(2, main)


def test_operations_run_first_in_first_out_beside_the_main_thread():
    def submit(mesh, communicator):
        gate, ran = threading.Event(), []
        first = communicator.submit("first", lambda: (gate.wait(), ran.append("first")))
        second = communicator.submit("second", lambda: ran.append("second"))
        before = (first.done(), second.done(), list(ran))  # the main thread goes on while the first is held up
        gate.set()
        second.wait()
        after = (first.done(), second.done(), ran, list(communicator.issued))
        communicator.clear_issued()
        return before, after, list(communicator.issued)

    names = ["first", "second"]
    assert _with_communicator(submit) == [((False, False, []), (True, True, names, names), [])] * 2


def test_blocked_time_counts_only_waiting():
    def submit(mesh, communicator):
        hidden = communicator.submit("hidden", lambda: time.sleep(0.2))
        time.sleep(0.4)
        hidden.wait()
        after_hidden = communicator.blocked_s
        communicator.submit("exposed", lambda: time.sleep(0.3)).wait()
        return after_hidden, communicator.blocked_s

    for after_hidden, after_exposed in _with_communicator(submit):
        assert after_hidden < 0.1
        assert 0.25 < after_exposed < 2


def test_a_failure_is_raised_by_its_wait_and_by_all_that_follows():
    def submit(mesh, communicator):
        def fail():
            raise PeerError("rank 1 is lost", (1,))

        gate, ran, texts = threading.Event(), [], []
        held = communicator.submit("held", gate.wait)
        works = [communicator.submit("fails", fail), communicator.submit("behind", lambda: ran.append(1))]
        gate.set()
        held.wait()
        attempts = [*(work.wait for work in works), lambda: communicator.submit("later", lambda: ran.append(2))]
        for attempt in attempts:
            with pytest.raises(PeerError) as caught:
                attempt()
            texts.append((str(caught.value), caught.value.ranks))
        return texts, ran, list(communicator.issued)

    expected = ([("rank 1 is lost", (1,))] * 3, [], ["held", "fails"])
    assert _with_communicator(submit) == [expected] * 2


def test_other_errors_pass_through_unchanged():
    def submit(mesh, communicator):
        work = communicator.submit("divides", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            work.wait()
        with pytest.raises(ZeroDivisionError):
            communicator.submit("later", print)
        return True

    assert _with_communicator(submit) == [True, True]


def test_a_closed_communicator_finishes_and_takes_nothing_more():
    def submit(mesh, communicator):
        ran = []
        communicator.submit("slow", lambda: (time.sleep(0.1), ran.append(1)))
        communicator.close()
        with pytest.raises(ThemisError, match="late was submitted to a closed communicator"):
            communicator.submit("late", print)
        return ran

    assert _with_communicator(submit) == [[1], [1]]


def test_a_world_of_one_runs_in_place():
    communicator = Communicator(Mesh.create(device=torch.device("cpu")))
    ran = []
    work = communicator.submit("only", lambda: ran.append(threading.current_thread()))
    assert work.done()
    work.wait()
    assert ran == [threading.main_thread()]
    assert list(communicator.issued) == ["only"]
    with pytest.raises(ZeroDivisionError):
        communicator.submit("divides", lambda: 1 // 0).wait()
    communicator.close()


def _train_like(rank, seed):
    """Sparse collectives in flight while the main thread computes and exchanges tokens, at random speeds."""
    pace = random.Random(seed * 10 + rank)
    mesh = Mesh.create(Topology(2, 2), timeout_s=20)
    communicator = Communicator(mesh)
    plan = transfers(OWNERS_E, EVERYWHERE_ED, mesh.topology, expert_bytes=8 * 3000, piece_bytes=2000)
    good = True
    for step in range(12):
        chunks = {e: torch.full((3000,), float(e + step) if e == rank else -1.0) for e in range(4)}
        grads = {e: torch.full((3000,), float(rank + step)) for e in range(4)}
        time.sleep(pace.random() * 0.004)
        gather = sparse_all_gather(communicator, plan, chunks, name=f"gather {step}")
        reduce = sparse_reduce_scatter(communicator, plan, grads, name=f"reduce {step}")
        time.sleep(pace.random() * 0.004)
        rows = all_to_all(mesh, torch.full((4, 2), float(rank)), [1] * 4, [1] * 4)
        waits = [gather.wait, reduce.wait]
        pace.shuffle(waits)  # ranks may wait in any order; what counts is the order of issue
        for wait in waits:
            wait()
        good &= rows[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
        good &= all(bool((chunks[e] == e + step).all()) for e in range(4))
        good &= bool((grads[rank] == 6 + 4 * step).all())
    issued = list(communicator.issued)
    communicator.close()
    mesh.close()
    return good, issued


@pytest.mark.parametrize("seed", [0, 1])
def test_one_order_on_all_ranks_under_random_delays(seed):
    results = run_ranks(4, _train_like, seed)
    expected = [name for step in range(12) for name in (f"gather {step}", f"reduce {step}")]
    assert results == [(True, expected)] * 4


def test_forgetting_to_close_does_not_hang_the_interpreter():
    script = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from dataclasses import replace
from themis.comm.communicator import Communicator
from themis.comm.mesh import Mesh
from themis.core.topology import Topology
mesh = replace(Mesh.create(device=torch.device("cpu")), world_size=2, timeout_s=1.0)
communicator = Communicator(mesh)  # with a worker thread, as in a world of two
communicator.submit("stuck", lambda: time.sleep(60))
print("end of script", flush=True)
"""
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "end of script\n"), ended.stderr
    assert time.monotonic() - began < 30
