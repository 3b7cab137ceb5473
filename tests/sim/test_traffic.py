"""Loads of links: those of plans nobody builds, held to the plans themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from themis.core.plan import TransferPlan
from themis.core.topology import LinkClass, Topology
from themis.planning import dispatch, transfers
from themis.sim.traffic import LinkLoads, local_first_loads, route_loads, transfer_loads
from themis.testing.strategies import owners, placements, quick, tokens, topologies

FIELDS = ("intra_out_D", "intra_in_D", "inter_out_D", "inter_in_D", "computed_D")


@st.composite
def layers(draw: st.DrawFn):
    """A topology, the gate's counts, owners and any placement on it."""
    topology, num_experts = draw(topologies()), draw(st.integers(1, 8))
    owner_E = draw(owners(num_experts, topology.num_devices))
    tokens_ED = draw(tokens(num_experts, topology.num_devices))
    return topology, tokens_ED, owner_E, draw(placements(owner_E, topology.num_devices))


@given(layers())
@quick(150)
def test_local_first_is_what_dispatch_says(layer):
    topology, tokens_ED, _, placement_ED = layer
    route_EDD = dispatch(tokens_ED, placement_ED, topology)
    summed, planned = local_first_loads(tokens_ED, placement_ED, topology), route_loads(route_EDD, topology)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(summed, name), getattr(planned, name), name)
    assert summed.computed_D.sum() == tokens_ED.sum()
    assert summed.intra_in_D.sum() == summed.intra_out_D.sum()
    assert summed.inter_in_D.sum() == summed.inter_out_D.sum()


@given(layers())
@quick()
def test_transfers_carry_every_byte_once(layer):
    topology, _, owner_E, placement_ED = layer
    plan = transfers(owner_E, placement_ED, topology, expert_bytes=1 << 20)
    loads = transfer_loads(plan, 999_983, topology)
    by_link = plan.bytes_by_link(topology, 999_983, 1)
    assert (loads.intra, loads.inter) == (by_link[LinkClass.INTRA], by_link[LinkClass.INTER])
    received_D = (placement_ED.sum(axis=0) - np.bincount(owner_E, minlength=topology.num_devices)) * 999_983
    np.testing.assert_array_equal(loads.computed_D, received_D)


def test_a_route_by_hand():
    topology = Topology(2, 2)
    route_EDD = np.zeros((2, 4, 4), dtype=np.int64)
    route_EDD[0, 0, 0], route_EDD[0, 0, 1], route_EDD[1, 1, 3], route_EDD[1, 2, 3] = 5, 7, 11, 13
    loads = route_loads(route_EDD, topology)
    assert loads.computed_D.tolist() == [5, 7, 0, 24]
    assert (loads.intra_out_D.tolist(), loads.intra_in_D.tolist()) == ([7, 0, 13, 0], [0, 7, 0, 13])
    assert (loads.inter_out_D.tolist(), loads.inter_in_D.tolist()) == ([0, 11, 0, 0], [0, 0, 0, 11])


def test_no_transfers_no_bytes():
    empty = np.zeros(0, dtype=np.int64)
    plan = TransferPlan(2, np.array([0, 1]), np.ones(2, dtype=np.int64), empty, empty, empty, empty, empty)
    loads = transfer_loads(plan, 10, Topology(1, 2))
    assert loads.computed_D.tolist() == [0.0, 0.0]


def test_loads_add_and_scale():
    ones = LinkLoads(*np.ones((5, 3)))
    both = ones + ones.scaled(2.0)
    assert [getattr(both, name).tolist() for name in FIELDS] == [[3.0] * 3] * 5
    assert (both.intra, both.inter) == (9.0, 9.0)


def test_an_expert_nobody_holds_is_no_load():
    loads = local_first_loads(np.array([[3, 4]]), np.zeros((1, 2), dtype=bool), Topology(1, 2))
    assert loads.computed_D.sum() == pytest.approx(0.0)
