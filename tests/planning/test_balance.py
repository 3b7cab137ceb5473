from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from themis.core.cost import LayerCost
from themis.core.load import imbalance
from themis.core.placement import even_owner
from themis.core.topology import Link, Topology
from themis.planning import LoadPredictor, dispatch, materialize
from themis.planning.balance import default_cost
from themis.planning.balance_reference import balance_reference, optimal_layer_s
from themis.testing.strategies import drifting_tokens, owners, placements, quick, tokens, topologies


@st.composite
def problems(draw):
    topology, num_experts = draw(topologies(4, 3)), draw(st.integers(1, 8))
    placement_ED = draw(placements(draw(owners(num_experts, topology.num_devices)), topology.num_devices))
    tokens_ED = draw(tokens(num_experts, topology.num_devices, most=draw(st.sampled_from([2, 40, 300]))))
    cost = LayerCost(draw(st.sampled_from([0.0, 1e-7, 1e-5, 1e-2])), draw(st.sampled_from([0, 64, 8192])), 1000)
    return tokens_ED, placement_ED, topology, cost


@quick(120)
@given(problems())
def test_invariants_and_reference(problem):
    tokens_ED, placement_ED, topology, cost = problem
    before = tokens_ED.copy()
    route_EDD = dispatch(tokens_ED, placement_ED, topology, rule="balanced", cost=cost)
    assert np.array_equal(tokens_ED, before)
    assert np.array_equal(route_EDD.sum(axis=2), tokens_ED)
    assert (route_EDD >= 0).all()
    assert not route_EDD.sum(axis=1)[~placement_ED].any()
    local_EDD = dispatch(tokens_ED, placement_ED, topology)
    assert cost.layer_s(route_EDD, topology) <= cost.layer_s(local_EDD, topology)
    assert np.array_equal(route_EDD, balance_reference(tokens_ED, placement_ED, topology, cost))


def recorded(iterations=7):
    """Placements from predicted loads, and the tokens that then came."""
    tokens_ILED = drifting_tokens(
        3, iterations=iterations, num_layers=3, num_experts=16, num_devices=8, tokens_per_device=1000
    )
    topology = Topology(2, 4, Link(0.0, 300e9), Link(0.0, 50e9))
    predictor = LoadPredictor()
    for tokens_LED in tokens_ILED:
        load_LE = predictor.predict()
        if load_LE is not None:
            for tokens_ED, load_E in zip(tokens_LED, load_LE, strict=True):
                yield tokens_ED, materialize(even_owner(16, 8), load_E, topology, overlap_degree=5, budget=2), topology
        predictor.observe(tokens_LED.sum(axis=2))


def test_near_the_optimum_of_the_linear_program():
    ratios = []
    for tokens_ED, placement_ED, topology in recorded(5):
        for weight in (0.5, 4.0, 32.0):
            cost = LayerCost(weight * 4 * 8192 / 50e9, 8192, 1)
            route_EDD = dispatch(tokens_ED, placement_ED, topology, rule="balanced", cost=cost)
            ratios.append(cost.layer_s(route_EDD, topology) / optimal_layer_s(tokens_ED, placement_ED, topology, cost))
    assert min(ratios) > 1 - 1e-9
    assert max(ratios) < 1.06
    assert np.mean(ratios) < 1.015


def test_default_cost_evens_out_recorded_loads():
    before, after, crossing = [], [], []
    for tokens_ED, placement_ED, topology in recorded():
        for rule, kept in (("local-first", before), ("balanced", after)):
            kept.append(imbalance(dispatch(tokens_ED, placement_ED, topology, rule=rule).sum(axis=(0, 1))))
        traffic_DD = dispatch(tokens_ED, placement_ED, topology, rule="balanced").sum(axis=0)
        between = topology.node_of_D[:, None] != topology.node_of_D[None, :]
        crossing.append(traffic_DD[between].sum() / traffic_DD.sum())
    assert np.mean(after) < 1.08 < np.mean(before)
    assert np.mean(crossing) < 0.2


def test_tokens_leave_a_node_only_when_that_pays():
    # Expert 0 lives on both nodes, and all of its tokens on node 0.
    tokens_ED, placement_ED = np.array([[100, 0]]), np.array([[True, True]])
    topology = Topology(2, 1, Link(0.0, 1e9), Link(0.0, 1e6))
    near = dispatch(tokens_ED, placement_ED, topology, rule="balanced", cost=LayerCost(1e-6, 1000, 1))
    assert near[0].tolist() == [[100, 0], [0, 0]]
    far = dispatch(tokens_ED, placement_ED, topology, rule="balanced", cost=LayerCost(1.0, 1000, 1))
    assert far[0].tolist() == [[50, 50], [0, 0]]


def test_default_cost_weighs_a_token_and_its_share_of_the_uplink_alike():
    topology = Topology(4, 8, Link(0.0, 300e9), Link(0.0, 50e9))
    cost = default_cost(topology)
    crossings_s = cost.ALL_TO_ALLS * cost.token_bytes / (topology.inter.bytes_per_s / 8)
    assert np.isclose(cost.expert_s_per_token, crossings_s)
