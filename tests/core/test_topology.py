from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from themis.core.errors import ConfigError
from themis.core.topology import Link, LinkClass, Topology
from themis.testing.strategies import quick, topologies


@quick(30)
@given(topologies())
def test_devices_are_numbered_node_by_node(topology):
    node_of_D = topology.node_of_D
    assert node_of_D.size == topology.num_devices
    assert (np.diff(node_of_D) >= 0).all()
    assert np.bincount(node_of_D).tolist() == [topology.devices_per_node] * topology.num_nodes
    with pytest.raises(ValueError, match="read-only"):
        node_of_D[0] = 1
    for source in range(topology.num_devices):
        for destination in range(topology.num_devices):
            same_node = node_of_D[source] == node_of_D[destination]
            expected = LinkClass.INTRA if same_node else LinkClass.INTER
            expected = LinkClass.LOCAL if source == destination else expected
            assert topology.link_class(source, destination) is expected


def test_the_binding_ingress():
    fast, slow = Link(0.0, 10.0), Link(0.0, 2.0)
    assert Topology(2, 2, intra=fast, inter=slow).ingress_bytes_per_s == 2.0
    assert Topology(2, 2, intra=slow, inter=fast).ingress_bytes_per_s == 2.0
    assert Topology(1, 2, intra=fast, inter=slow).ingress_bytes_per_s == 10.0


def test_nothing_takes_no_time():
    link = Link(0.5, 4.0)
    assert link.seconds(0) == 0.0
    assert link.seconds(2) == 1.0


@pytest.mark.parametrize("shape", [(0, 1), (1, 0), (-1, 2), (1.5, 2), (True, 2), ("2", 2)])
def test_bad_shapes(shape):
    with pytest.raises(ConfigError, match=r"must be a whole number, 1 or more"):
        Topology(*shape)


@pytest.mark.parametrize("link", [(-1.0, 1.0), (0.0, 0.0), (0.0, -5.0)])
def test_bad_links(link):
    with pytest.raises(ConfigError, match="it must be"):
        Link(*link)


def test_equal_topologies_are_equal():
    assert Topology(2, 3) == Topology(2, 3) != Topology(3, 2)
    assert hash(Topology(2, 3)) == hash(Topology(2, 3))
