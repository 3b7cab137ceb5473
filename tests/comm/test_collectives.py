"""Counts, reductions, exchanges: on one rank and on several, with their bytes."""

import numpy as np
import pytest
import torch

from themis.comm import collectives
from themis.comm.beats import Channel
from themis.comm.mesh import Mesh
from themis.core.errors import ConfigError
from themis.core.topology import Topology
from themis.testing.ranks import run_ranks


def _talk(rank, nodes, local):
    mesh = Mesh.create(Topology(nodes, local), timeout_s=10)
    size = mesh.world_size
    counts = collectives.gather_counts(mesh, [10 * rank, 10 * rank + 1])
    empty = collectives.gather_counts(mesh, np.zeros(0, dtype=np.int64))
    total = collectives.all_reduce_sum(mesh, torch.tensor([1.0, float(rank)], dtype=torch.float64))
    largest = collectives.all_reduce_max(mesh, torch.tensor([rank, -rank]))
    collectives.barrier(mesh)
    sent = torch.arange(3) + 100 * rank
    target, origin = (rank + 1) % size, (rank - 1) % size
    received, nothing = torch.zeros(3, dtype=torch.int64), torch.zeros(0)
    collectives.exchange(mesh, [(target, sent), (target, nothing)], [(origin, received), (origin, nothing)])
    collectives.exchange(mesh, [], [])
    traffic = mesh.traffic.snapshot()
    mesh.close()
    return counts.tolist(), empty.shape, total.tolist(), largest.tolist(), received.tolist(), traffic


@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_small_collectives(nodes, local):
    size = nodes * local
    results = run_ranks(size, _talk, nodes, local)
    for rank, (counts, empty, total, largest, received, traffic) in enumerate(results):
        assert counts == [[10 * r, 10 * r + 1] for r in range(size)]
        assert empty == (size, 0)
        assert total == [size, sum(range(size))]
        assert largest == [size - 1, 0]
        assert received == [100 * ((rank - 1) % size) + i for i in range(3)]
        assert traffic["counts"] == {"intra": 16 * (local - 1), "inter": 16 * (size - local)}
        crosses = nodes > 1 and (rank + 1) % local == 0
        stays = size == 1
        assert traffic["reshard"] == {"intra": 24 * (not crosses and not stays), "inter": 24 * crosses}


def test_counts_are_copies():
    mesh = Mesh.create(device=torch.device("cpu"))
    given = np.array([1, 2], dtype=np.int64)
    found = collectives.gather_counts(mesh, given)
    found[0, 0] = 9
    assert given.tolist() == [1, 2]
    with pytest.raises(ConfigError, match=r"counts is 'of shape \(1, 2\)'"):
        collectives.gather_counts(mesh, given[None])


def test_exchange_copies_what_stays_and_gradients_do_not_notice():
    mesh = Mesh.create(device=torch.device("cpu"))
    target = torch.zeros(2, requires_grad=True)
    version = target._version
    collectives.exchange(mesh, [(0, torch.ones(2))], [(0, target)])
    assert target.tolist() == [1.0, 1.0]
    assert target._version == version


def test_messages_between_two_ranks_match_in_order():
    def swap(rank):
        mesh = Mesh.create(timeout_s=10)
        received = [torch.zeros(2) for _ in range(5)]
        sends = [(1 - rank, torch.full((2,), 10.0 * rank + i)) for i in range(5)]
        collectives.exchange(mesh, sends, [(1 - rank, tensor) for tensor in received])
        mesh.close()
        return [tensor[0].item() for tensor in received]

    assert run_ranks(2, swap) == [[10.0, 11.0, 12.0, 13.0, 14.0], [0.0, 1.0, 2.0, 3.0, 4.0]]


@pytest.mark.parametrize(
    ("send", "receive", "message"),
    [
        ([1, 2], [3], r"send_D is \[1, 2\]; it must be 1 counts >= 0"),
        ([-3], [3], r"send_D is \[-3\]"),
        ([2], [2], r"send_D is '\[2\], 2 rows'; it must be 3 rows, as given"),
        ([3], [4], r"receive_D is \[4\]; it must be \[3\]"),
    ],
)
def test_row_counts_are_checked(send, receive, message):
    mesh = Mesh.create(device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=message):
        collectives.all_to_all_rows(mesh, torch.zeros(3, 2), send, receive)


def _talk_in_objects(rank):
    mesh = Mesh.create(timeout_s=10)
    for _ in range(2):  # opened once, however often it is asked for
        mesh.open(Channel.SAVING)
    gathered = collectives.gather_objects(mesh, Channel.SAVING, "gathering", {"rank": rank})
    mine = collectives.scatter_objects(mesh, Channel.SAVING, "scattering", gathered and gathered[::-1])
    shared = collectives.share_objects(mesh, Channel.SAVING, "sharing", rank or None)
    mesh.close()
    return gathered, mine, shared


@pytest.mark.parametrize("size", [1, 3])
def test_objects(size):
    for rank, (gathered, mine, shared) in enumerate(run_ranks(size, _talk_in_objects)):
        assert gathered == (None if rank else [{"rank": r} for r in range(size)])
        assert mine == {"rank": size - 1 - rank}
        assert shared == [None, *range(1, size)]
