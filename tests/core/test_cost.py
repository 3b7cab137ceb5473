from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from themis.core.cost import LayerCost, link_tokens
from themis.core.errors import ConfigError
from themis.core.plan import TransferPlan
from themis.core.topology import Link, Topology
from themis.testing.strategies import quick, topologies

TOPOLOGY = Topology(2, 2, intra=Link(0.25, 10.0), inter=Link(0.5, 4.0))


def slow_link_tokens(traffic_DD, topology):
    """One counter a link and direction."""
    intra, inter = {}, {}
    for (source, destination), tokens in np.ndenumerate(traffic_DD):
        nodes = topology.node_of_D[source], topology.node_of_D[destination]
        links = intra if nodes[0] == nodes[1] else inter
        ends = (source, destination) if nodes[0] == nodes[1] else nodes
        if source != destination:
            for key in (("out", ends[0]), ("in", ends[1])):
                links[key] = links.get(key, 0) + tokens
    return max(intra.values(), default=0), max(inter.values(), default=0)


@quick()
@given(topologies(), st.integers(0, 2**31))
def test_link_tokens_equals_its_reference(topology, seed):
    traffic_DD = np.random.default_rng(seed).integers(0, 9, (topology.num_devices, topology.num_devices))
    assert link_tokens(traffic_DD, topology) == slow_link_tokens(traffic_DD, topology)


def test_layer_seconds_by_hand():
    cost = LayerCost(expert_s_per_token=0.1, token_bytes=2, expert_bytes=8)
    route_EDD = np.zeros((1, 4, 4), dtype=np.int64)
    route_EDD[0, 0] = [3, 1, 0, 0]  # one token inside the node: 0.25 + 2 / 10
    assert np.isclose(cost.layer_s(route_EDD, TOPOLOGY), 0.3 + 4 * 0.45)
    route_EDD[0, 1, 2] = 5  # five across: 0.5 + 10 / 4
    assert np.isclose(cost.layer_s(route_EDD, TOPOLOGY), 0.5 + 4 * 3.0)
    assert cost.layer_s(np.zeros_like(route_EDD), TOPOLOGY) == 0.0


def test_transfer_seconds_by_hand():
    cost = LayerCost(0.0, 1, expert_bytes=8)
    columns = [[0, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 2], [2, 2, 3]]  # both halves to device 2, one on to device 3
    plan = TransferPlan(4, np.array([0]), np.array([2]), *map(np.array, columns))
    assert np.isclose(cost.transfer_s(plan, TOPOLOGY), 0.5 + 8 / 4)
    nothing = TransferPlan(4, np.array([0]), np.array([1]), *(np.empty(0) for _ in range(5)))
    assert cost.transfer_s(nothing, TOPOLOGY) == 0.0


@pytest.mark.parametrize("constants", [(-1.0, 1, 1), (1.0, -1, 1), (1.0, 1, 0)])
def test_bad_constants(constants):
    with pytest.raises(ConfigError, match="it must be"):
        LayerCost(*constants)
