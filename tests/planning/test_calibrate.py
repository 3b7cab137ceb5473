from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from themis.core.cost import LayerCost
from themis.core.errors import ConfigError
from themis.core.placement import Placement, even_owner, shard_only
from themis.core.topology import Link, Topology
from themis.planning import added_transfers, calibrate, dispatch, materialize
from themis.testing.strategies import loads, owners, quick, tokens, topologies

FAST = Topology(2, 2, Link(0.0, 1e12), Link(0.0, 1e12))
SLOW_EXPERTS = LayerCost(1e-3, 100, 1000)
HOT = np.array([[50, 50, 50, 50], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]])


def calibrated(placement, tokens_ED=HOT, topology=FAST, **changes):
    options = {"overlap_degree": 2, "budget": 2, "cost": SLOW_EXPERTS, "latency_budget_s": 1.0, "rule": "local-first"}
    return calibrate(placement, tokens_ED, topology, **(options | changes))


def test_replicates_the_expert_that_turned_out_hot():
    before = shard_only(even_owner(4, 4), 4)
    after = calibrated(before)
    assert after.placement_ED[0].all()
    assert (after.placement_ED >= before.placement_ED).all()


def test_keeps_the_very_object_unless_it_pays_and_fits():
    before = shard_only(even_owner(4, 4), 4)
    assert calibrated(before, budget=0) is before
    assert calibrated(before, overlap_degree=0) is before
    assert calibrated(before, np.zeros((4, 4), dtype=np.int64)) is before
    assert calibrated(before, latency_budget_s=0.0) is before
    dear = LayerCost(1e-3, 100, 10**15)  # each chunk takes a thousand seconds
    assert calibrated(before, cost=dear, latency_budget_s=float("inf")) is before
    after = calibrated(before)
    assert calibrated(after) is after


def test_spends_only_what_each_device_has_left():
    placement_ED = np.eye(4, dtype=np.bool_)
    placement_ED[3, :2] = True
    before = Placement(np.arange(4), placement_ED)
    after = calibrated(before, budget=1, overlap_degree=2)
    assert np.array_equal(after.replicas_ED.sum(axis=0), [1, 1, 1, 1])
    assert after.placement_ED[0].tolist() == [True, False, True, True]


@st.composite
def problems(draw):
    topology, num_experts = draw(topologies(3, 3)), draw(st.integers(1, 6))
    owner_E = draw(owners(num_experts, topology.num_devices))
    degree, budget = draw(st.integers(0, 6)), draw(st.integers(0, 3))
    # The prediction was made for a smaller budget, so that something is left for calibration.
    predicted_ED = materialize(
        owner_E, draw(loads(num_experts)), topology, overlap_degree=degree, budget=draw(st.integers(0, budget))
    )
    cost = LayerCost(draw(st.sampled_from([1e-7, 1e-2])), 8192, draw(st.sampled_from([100, 10**8])))
    latency_budget_s = draw(st.sampled_from([0.0, 1e-3, 1e3]))
    tokens_ED = draw(tokens(num_experts, topology.num_devices))
    rule = draw(st.sampled_from(["local-first", "balanced"]))
    return Placement(owner_E, predicted_ED), tokens_ED, topology, degree, budget, cost, latency_budget_s, rule


@quick(120)
@given(problems())
def test_adopts_only_what_pays(problem):
    before, tokens_ED, topology, degree, budget, cost, latency_budget_s, rule = problem
    after = calibrate(
        before,
        tokens_ED,
        topology,
        overlap_degree=degree,
        budget=budget,
        cost=cost,
        latency_budget_s=latency_budget_s,
        rule=rule,
    )
    if after is before:
        return
    added_ED = after.placement_ED & ~before.placement_ED
    assert added_ED.any()
    assert (after.placement_ED >= before.placement_ED).all()
    assert np.array_equal(after.owner_E, before.owner_E)
    assert after.replicas_ED.sum(axis=0).max() <= budget
    assert added_ED.any(axis=1).sum() <= degree
    plan = added_transfers(before, after.placement_ED, topology)
    received_ED = np.zeros_like(added_ED)
    received_ED[plan.expert_X, plan.destination_X] = True
    assert np.array_equal(received_ED, added_ED)
    added_s = 2 * cost.transfer_s(plan, topology)
    assert added_s <= latency_budget_s
    layer_s = [
        cost.layer_s(dispatch(tokens_ED, p.placement_ED, topology, rule=rule, cost=cost), topology)
        for p in (before, after)
    ]
    assert layer_s[0] - layer_s[1] > added_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latency_budget_s": -1.0}, "latency_budget_s is -1.0"),
        ({"latency_budget_s": float("nan")}, "latency_budget_s is nan"),
        ({"budget": -1}, "budget is -1"),
        ({"overlap_degree": 0.5}, "overlap_degree is 0.5"),
        ({"rule": "best"}, "rule is 'best'"),
        ({"tokens_ED": HOT[:, :3]}, "both must be"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(ConfigError, match=message):
        calibrated(shard_only(even_owner(4, 4), 4), **changes)
