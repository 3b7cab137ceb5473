from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from themis.core.errors import ConfigError
from themis.core.placement import even_owner, owner_mask
from themis.core.topology import Topology
from themis.planning import materialize, overlap_degree
from themis.planning.materialize import extend
from themis.planning.reference import extend_reference, materialize_reference
from themis.testing.strategies import drifting_tokens, loads, owners, placements, quick, topologies


@st.composite
def problems(draw):
    topology, num_experts = draw(topologies()), draw(st.integers(1, 12))
    owner_E = draw(owners(num_experts, topology.num_devices))
    return owner_E, draw(loads(num_experts)), topology, draw(st.integers(0, 14)), draw(st.integers(0, 6))


def check(owner_E, load_E, topology, degree, budget):
    before = owner_E.copy(), load_E.copy()
    placement_ED = materialize(owner_E, load_E, topology, overlap_degree=degree, budget=budget)
    assert np.array_equal(owner_E, before[0])
    assert np.array_equal(load_E, before[1])
    own_ED = owner_mask(owner_E, topology.num_devices)
    replicas_ED = placement_ED & ~own_ED
    assert placement_ED.dtype == np.bool_
    assert (placement_ED >= own_ED).all()
    assert replicas_ED.sum(axis=0).max() <= min(budget, degree)
    replicated = np.flatnonzero(replicas_ED.any(axis=1))
    assert replicated.size <= degree
    assert (load_E[replicated] > 0).all()
    if replicated.size:
        lightest = load_E[replicated].min()
        assert (load_E > lightest).sum() < degree  # only the heaviest are replicated
    top = [e for e in np.argsort(-load_E, kind="stable")[:degree] if load_E[e] > 0]
    if top:  # a slot stays free only where the last of the top experts can make no use of it
        most = min(budget, degree, load_E.size)
        assert placement_ED[top[-1], replicas_ED.sum(axis=0) < most].all()
    slow_ED = materialize_reference(owner_E, load_E, topology, overlap_degree=degree, budget=budget)
    assert np.array_equal(placement_ED, slow_ED)
    return placement_ED


@quick(200)
@given(problems())
def test_invariants_and_reference(problem):
    check(*problem)


def test_recorded_loads():
    tokens_ILED = drifting_tokens(1, iterations=8, num_layers=2, num_experts=16, num_devices=8, tokens_per_device=500)
    for load_E in tokens_ILED.sum(axis=3).reshape(-1, 16).astype(np.float64):
        for degree, budget in ((4, 1), (6, 2), (3, 4)):
            check(even_owner(16, 8), load_E, Topology(2, 4), degree, budget)


@quick()
@given(st.data())
def test_extend_equals_its_reference(data):
    owner_E, load_E, topology, degree, budget = data.draw(problems())
    placement_ED = data.draw(placements(owner_E, topology.num_devices))
    free = st.lists(st.integers(-2, 4), min_size=topology.num_devices, max_size=topology.num_devices)
    free_D = np.array(data.draw(free), dtype=np.int64)
    options = {"overlap_degree": degree, "budget": budget, "free_D": free_D}
    extended_ED = extend(placement_ED, load_E, topology, **options)
    assert np.array_equal(extended_ED, extend_reference(placement_ED, load_E, topology, **options))
    assert (extended_ED >= placement_ED).all()
    assert ((extended_ED & ~placement_ED).sum(axis=0) <= np.maximum(free_D, 0)).all()


def test_small_overlap_puts_the_heaviest_everywhere():
    placement_ED = materialize([0, 1, 2, 3], [1.0, 5.0, 5.0, 9.0], Topology(2, 2), overlap_degree=2, budget=3)
    assert placement_ED[3].all()
    assert placement_ED[1].all()  # tied with expert 2: the lower index wins
    assert placement_ED.sum() == 4 + 4 + 2


def test_slots_follow_load_and_nodes_come_before_devices():
    # Four slots for loads 3 : 1 give three copies and one. Expert 0 lives on node 0, so its first copy goes to node 1.
    placement_ED = materialize([0, 2], [30.0, 10.0], Topology(2, 2), overlap_degree=2, budget=1)
    assert placement_ED.tolist() == [[True, True, True, True], [True, False, True, False]]
    first_ED = materialize([0, 0, 0], [9.0, 2.0, 1.0], Topology(3, 1), overlap_degree=3, budget=1)
    assert first_ED.tolist() == [[True, True, True], [True, False, False], [True, False, False]]


def test_budget_left_by_a_capped_expert_goes_to_the_next():
    placement_ED = materialize([0, 1, 0], [100.0, 1.0, 1.0], Topology(1, 2), overlap_degree=3, budget=1)
    # Expert 0 asks for both slots and can use one; expert 1 takes the other.
    assert placement_ED.tolist() == [[True, True], [True, True], [True, False]]


def test_no_load_no_replica():
    placement_ED = materialize([0, 1], [0.0, 0.0], Topology(1, 2), overlap_degree=2, budget=2)
    assert placement_ED.sum() == 2


@quick(40)
@given(problems(), st.sampled_from([0.5, 4.0, 1024.0]))
def test_only_ratios_of_load_matter(problem, scale):
    owner_E, load_E, topology, degree, budget = problem
    options = {"overlap_degree": degree, "budget": budget}
    scaled_ED = materialize(owner_E, load_E * scale, topology, **options)
    assert np.array_equal(scaled_ED, materialize(owner_E, load_E, topology, **options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"owner_E": [0, 4]}, "owner_E names devices 0 to 4"),
        ({"owner_E": [0, -1]}, "owner_E names devices -1"),
        ({"owner_E": [0.0, 1.0]}, "owner_E is of type"),
        ({"owner_E": [[0, 1]]}, "owner_E is of shape"),
        ({"owner_E": 1}, "owner_E is of shape"),
        ({"load_E": 1}, "load_E is of shape"),
        ({"owner_E": np.empty(0, dtype=np.int64), "load_E": []}, "owner_E is of shape"),
        ({"load_E": [1.0]}, "load_E has 1 loads"),
        ({"load_E": [1.0, -1.0]}, "load_E is negative"),
        ({"load_E": [1.0, float("nan")]}, "load_E is negative, infinite"),
        ({"load_E": [1.0, float("inf")]}, "load_E is negative, infinite"),
        ({"load_E": ["a", "b"]}, "load_E is of type"),
        ({"overlap_degree": -1}, "overlap_degree is -1"),
        ({"overlap_degree": True}, "overlap_degree is True"),
        ({"budget": 1.5}, "budget is 1.5"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {"owner_E": [0, 1], "load_E": [1.0, 2.0], "overlap_degree": 1, "budget": 1} | change
    with pytest.raises(ConfigError, match=message):
        materialize(arguments.pop("owner_E"), arguments.pop("load_E"), Topology(2, 2), **arguments)


def test_overlap_degree_is_a_floor():
    assert overlap_degree(1e-3, 50e9, 10_000_000) == 5
    assert overlap_degree(1.19e-3, 50e9, 10_000_000) == 5
    assert overlap_degree(0.0, 50e9, 10_000_000) == 0
    for arguments in ((-1.0, 1.0, 1), (float("inf"), 1.0, 1), (1.0, 0.0, 1), (1.0, 1.0, 0)):
        with pytest.raises(ConfigError, match="it must be"):
            overlap_degree(*arguments)
