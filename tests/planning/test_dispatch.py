from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from themis.core.errors import ConfigError
from themis.core.topology import Topology
from themis.planning import dispatch
from themis.planning.reference import dispatch_reference
from themis.planning.reference_rules import even_reference
from themis.testing.strategies import owners, placements, quick, tokens, topologies


@st.composite
def problems(draw):
    topology, num_experts = draw(topologies()), draw(st.integers(1, 8))
    placement_ED = draw(placements(draw(owners(num_experts, topology.num_devices)), topology.num_devices))
    return draw(tokens(num_experts, topology.num_devices)), placement_ED, topology


@quick(150)
@given(problems())
def test_local_first_invariants_and_reference(problem):
    tokens_ED, placement_ED, topology = problem
    before = tokens_ED.copy(), placement_ED.copy()
    route_EDD = dispatch(tokens_ED, placement_ED, topology)
    assert np.array_equal(tokens_ED, before[0])
    assert np.array_equal(placement_ED, before[1])
    assert np.array_equal(route_EDD.sum(axis=2), tokens_ED)
    assert (route_EDD >= 0).all()
    assert not route_EDD.sum(axis=1)[~placement_ED].any()  # only holders are sent tokens
    assert np.array_equal(route_EDD, dispatch_reference(tokens_ED, placement_ED, topology))


@quick(80)
@given(problems())
def test_even_invariants_and_reference(problem):
    tokens_ED, placement_ED, topology = problem
    route_EDD = dispatch(tokens_ED, placement_ED, topology, rule="even")
    assert np.array_equal(route_EDD.sum(axis=2), tokens_ED)
    assert np.array_equal(route_EDD, even_reference(tokens_ED, placement_ED))


def test_even_knows_no_place_and_odd_tokens_rotate():
    placement_ED = np.array([[True, False, True, True]])
    route_EDD = dispatch([[7, 1, 2, 0]], placement_ED, Topology(2, 2), rule="even")
    assert route_EDD[0].tolist() == [[3, 0, 2, 2], [0, 0, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]]


def test_own_tokens_then_the_node_then_all_and_odd_ones_rotate():
    placement_ED = np.array([[True, True, False, False, False, False]])
    route_EDD = dispatch([[5, 5, 3, 3, 4, 3]], placement_ED, Topology(2, 3))
    expected = [[5, 0], [0, 5], [2, 1], [1, 2], [2, 2], [1, 2]]
    assert route_EDD[0, :, :2].tolist() == expected
    assert not route_EDD[0, :, 2:].any()


def test_odd_tokens_favour_no_holder():
    placement_ED = np.array([[True, True] + [False] * 6])
    route_EDD = dispatch(np.ones((1, 8), dtype=np.int64), placement_ED, Topology(1, 8))
    assert route_EDD.sum(axis=(0, 1))[[0, 1]].tolist() == [4, 4]


@pytest.mark.parametrize(
    ("tokens_ED", "placement_ED", "options", "message"),
    [
        ([[1, -1]], [[True, False]], {}, "tokens_ED is negative"),
        ([[0.5, 1.0]], [[True, False]], {}, "tokens_ED is of type"),
        ([1, 1], [[True, False]], {}, "tokens_ED is of shape"),
        ([[1, 1, 1]], [[True, False, False]], {}, "both must be"),
        ([[1, 1]], [[1, 0]], {}, "placement_ED is of type"),
        ([[1, 1]], [[True, False], [True, False]], {}, "both must be"),
        ([[0, 0], [0, 1]], [[False, False], [False, False]], {}, "no holder of expert 1"),
        ([[1, 1]], [[True, False]], {"rule": "fair"}, "rule is 'fair'; it must be one of local-first, balanced, even"),
        ([[1, -1]], [[True, False]], {"rule": "even"}, "tokens_ED is negative"),
        ([[0, 0], [0, 1]], [[False, False], [False, False]], {"rule": "even"}, "no holder of expert 1"),
    ],
)
def test_bad_arguments(tokens_ED, placement_ED, options, message):
    with pytest.raises(ConfigError, match=message):
        dispatch(tokens_ED, np.array(placement_ED), Topology(1, 2), **options)


def test_an_idle_expert_needs_no_holder():
    assert not dispatch([[0, 0]], np.array([[False, False]]), Topology(1, 2)).any()
