"""The mesh: topology from the environment, worlds of one, checks."""

import pytest
import torch

from themis.comm import collectives
from themis.comm.mesh import Mesh
from themis.core.errors import ConfigError
from themis.core.topology import Topology
from themis.testing.ranks import run_ranks


def test_a_world_of_one_needs_no_process_group():
    mesh = Mesh.create(device=torch.device("cpu"))
    assert (mesh.rank, mesh.world_size, mesh.topology) == (0, 1, Topology(1, 1))
    assert mesh.dense_group is None
    assert mesh.heartbeat is None
    collectives.barrier(mesh)
    mesh.close()
    mesh.close()


@pytest.mark.parametrize(("local", "nodes"), [("2", 2), ("4", 1), ("1", 4), ("3", 1), ("", 1), ("many", 1)])
def test_the_environment_says_how_many_ranks_a_node_has(local, nodes):
    def describe(rank):
        import os

        os.environ["LOCAL_WORLD_SIZE"] = local
        mesh = Mesh.create(timeout_s=10)
        found = mesh.rank, mesh.world_size, mesh.topology.num_nodes, mesh.device.type
        groups = {mesh.token_group, mesh.sparse_group, mesh.dense_group, mesh.control_group}
        mesh.close()
        mesh.close()
        return found, len(groups)

    assert run_ranks(4, describe) == [((rank, 4, nodes, "cpu"), 4) for rank in range(4)]


def test_topology_and_world_must_agree():
    with pytest.raises(ConfigError, match=r"topology has 2 x 2 = 4 devices but there are 1 rank\(s\)"):
        Mesh.create(Topology(2, 2))
    with pytest.raises(ConfigError, match="timeout_s is 0; it must be above zero seconds"):
        Mesh.create(timeout_s=0)


def test_several_meshes_live_side_by_side():
    def both(rank):
        first, second = Mesh.create(timeout_s=10), Mesh.create(Topology(2, 1), timeout_s=10)
        sums = [collectives.all_reduce_sum(mesh, torch.tensor([rank + 1.0])).item() for mesh in (first, second)]
        first.close()
        sums.append(collectives.all_reduce_sum(second, torch.tensor([rank + 1.0])).item())
        second.close()
        return sums

    assert run_ranks(2, both) == [[3.0] * 3] * 2
