"""A peer that dies, freezes or does not come: every other rank names it, within the limit."""

import os
import signal
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from themis.comm import collectives
from themis.comm.communicator import Communicator
from themis.comm.mesh import Mesh
from themis.comm.sparse import sparse_all_gather, sparse_reduce_scatter
from themis.core.errors import PeerError
from themis.planning.transfers import transfers
from themis.testing.ranks import run_ranks

LIMIT_S = 3.0
#: What a busy machine may add to the limit.
SLACK_S = 1.0
CULPRIT = 2


def _operate(mesh, communicator, where):
    if where == "counts":
        collectives.gather_counts(mesh, [1, 2])
    elif where == "all_to_all":
        collectives.all_to_all_rows(mesh, torch.ones(4, 2), [1] * 4, [1] * 4)
    elif where == "exchange":
        peer = mesh.rank ^ 2
        collectives.exchange(mesh, [(peer, torch.ones(2))], [(peer, torch.ones(2))])
    else:
        plan = transfers(np.array([0]), np.ones((1, 4), dtype=bool), mesh.topology, expert_bytes=4000, piece_bytes=500)
        collective = {"sparse_all_gather": sparse_all_gather, "sparse_reduce_scatter": sparse_reduce_scatter}[where]
        collective(communicator, plan, {0: torch.ones(1000)}).wait()


def _misbehave(how):
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "freezes":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raises":
        raise OSError("no space left")
    time.sleep(LIMIT_S + SLACK_S)


def _scenario(rank, where, how):
    """Three good rounds, then the culprit misbehaves; the others tell whom they blame, and after how long."""
    mesh = Mesh.create(timeout_s=LIMIT_S)
    communicator = Communicator(mesh)
    for _ in range(3):
        _operate(mesh, communicator, where)
    if rank == CULPRIT:
        _misbehave(how)
        return None
    began = time.monotonic()
    try:
        for _ in range(100):  # a rank may have nothing to fetch from the culprit and go on for a while
            _operate(mesh, communicator, where)
            began_last, began = began, time.monotonic()
    except PeerError as error:
        waited_s = time.monotonic() - began
        communicator.close()
        mesh.close()
        return str(error), error.ranks, waited_s
    return f"no error; last round took {time.monotonic() - began_last} s", (), 0.0


@pytest.mark.parametrize(
    ("where", "how", "words"),
    [
        ("counts", "dies", "counts failed: rank 2 stopped responding"),
        ("all_to_all", "dies", "all_to_all failed: rank 2 stopped responding"),
        ("sparse_all_gather", "dies", "sparse_all_gather failed: rank 2 stopped responding"),
        ("sparse_reduce_scatter", "dies", "sparse_reduce_scatter failed: rank 2 stopped responding"),
        ("all_to_all", "freezes", "all_to_all failed: rank 2 stopped responding"),
        ("sparse_all_gather", "raises", "sparse_all_gather failed: rank 2 stopped responding"),
        ("counts", "dawdles", "counts failed: rank 2 has not come to it; it is after counts (number 4)"),
        ("all_to_all", "dawdles", "all_to_all failed: rank 2 has not come to it"),
        ("sparse_all_gather", "dawdles", "sparse_all_gather failed: rank 2 has not come to it"),
        ("sparse_reduce_scatter", "dawdles", "sparse_reduce_scatter failed: rank 2 has not come to it"),
    ],
)
def test_the_culprit_is_named_within_the_limit(where, how, words):
    outcomes = run_ranks(4, _scenario, where, how, timeout_s=LIMIT_S + SLACK_S + 1, return_errors=True)
    for outcome in outcomes:
        if outcome.rank != CULPRIT:
            assert outcome.ok, outcome
            message, ranks, waited_s = outcome.value
            assert ranks == (CULPRIT,), message
            assert message.startswith(words)
            assert "\n" not in message
            assert waited_s < LIMIT_S + SLACK_S


def _lost_store(rank):
    """The default group over a TCP store that rank 0 hosts; then rank 0 dies, and the store with it."""
    port_store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False, timeout=timedelta(seconds=5))
        port_store.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(port_store.get("port")), 2, False, timeout=timedelta(seconds=5))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = Mesh.create(timeout_s=LIMIT_S)
    collectives.barrier(mesh)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while True:
            collectives.barrier(mesh)
    except PeerError as error:
        waited_s = time.monotonic() - began
        mesh.close()
        return str(error), error.ranks, waited_s


def test_a_lost_store_blames_its_host():
    killed, told = run_ranks(2, _lost_store, timeout_s=10, return_errors=True)
    assert killed.signal == signal.SIGKILL
    assert told.ok, told
    message, ranks, waited_s = told.value
    assert "the rendezvous store does not answer: the process that hosts it (rank 0" in message
    assert ranks == (0,)
    assert waited_s < LIMIT_S + SLACK_S


def test_a_rank_that_never_joins_is_named():
    def join(rank):
        if rank == 1:
            time.sleep(60)
        try:
            Mesh.create(timeout_s=2.0)
        except PeerError as error:
            return str(error), error.ranks

    told, _ = run_ranks(2, join, timeout_s=5, return_errors=True)
    assert told.ok, told
    assert told.value == ("joining the process groups failed: rank 1 never joined", (1,))


def test_a_wait_in_another_thread_ends_too():
    """The main thread waits for a collective whose worker still waits for the culprit: one error, told by both."""

    def run(rank):
        mesh = Mesh.create(timeout_s=LIMIT_S)
        communicator = Communicator(mesh)
        _operate(mesh, communicator, "all_to_all")
        if rank == CULPRIT:
            _misbehave("dawdles")
            return None
        plan = transfers(np.array([CULPRIT]), np.ones((1, 4), dtype=bool), mesh.topology)
        work = sparse_all_gather(communicator, plan, {0: torch.zeros(8)})
        told = []
        for attempt in (work.wait, work.wait, lambda: communicator.submit("later", print)):
            try:
                attempt()
            except PeerError as error:
                told.append(error.ranks)
        communicator.close()
        mesh.close()
        return told

    outcomes = run_ranks(4, run, timeout_s=LIMIT_S + SLACK_S + 1, return_errors=True)
    assert [o.value for o in outcomes if o.rank != CULPRIT] == [[(CULPRIT,)] * 3] * 3
