from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from themis.core.errors import ConfigError
from themis.core.topology import Topology
from themis.planning import shard
from themis.planning.reference import shard_reference
from themis.testing.strategies import drifting_tokens, loads, owners, quick, topologies


@st.composite
def problems(draw):
    topology, num_layers, num_experts = draw(topologies()), draw(st.integers(1, 4)), draw(st.integers(1, 9))
    load_LE = np.stack([draw(loads(num_experts)) for _ in range(num_layers)])
    current_LE = np.stack([draw(owners(num_experts, topology.num_devices)) for _ in range(num_layers)])
    return load_LE, topology, draw(st.integers(0, 10)), draw(st.sampled_from([None, current_LE]))


@quick(150)
@given(problems())
def test_invariants_and_reference(problem):
    load_LE, topology, degree, current_LE = problem
    before = load_LE.copy()
    owner_LE = shard(load_LE, topology, overlap_degree=degree, current_LE=current_LE)
    assert np.array_equal(load_LE, before)
    count_D = np.bincount(owner_LE.ravel(), minlength=topology.num_devices)
    assert count_D.max() - count_D.min() <= 1
    assert (np.diff(count_D) <= 0).all()  # the remainder lies with the lower indices
    slow_LE = shard_reference(load_LE, topology, overlap_degree=degree, current_LE=current_LE)
    assert np.array_equal(owner_LE, slow_LE)


@quick(40)
@given(problems())
def test_overloaded_experts_stay_when_all_are_overloaded(problem):
    load_LE, topology, _, _ = problem
    owner_LE = shard(load_LE, topology, overlap_degree=load_LE.shape[1])
    again_LE = shard(load_LE[:, ::-1], topology, overlap_degree=load_LE.shape[1], current_LE=owner_LE)
    assert np.array_equal(again_LE, owner_LE)


def test_underloaded_experts_spread_over_nodes_by_load():
    # Expert 0 is overloaded. Of the rest, 4 goes to node 0, 3 to node 1, 2 to node 1, 1 to node 0 where slots allow.
    owner_LE = shard([[9.0, 4.0, 3.0, 2.0]], Topology(2, 2), overlap_degree=1)
    assert owner_LE.tolist() == [[1, 0, 2, 3]]


def test_recorded_loads_even_out_what_materialisation_leaves():
    load_LE = drifting_tokens(2, iterations=1, num_layers=6, num_experts=16, num_devices=8, tokens_per_device=800)[
        0
    ].sum(axis=2)
    topology = Topology(2, 4)
    owner_LE = shard(load_LE, topology, overlap_degree=4)
    even_LE = np.tile(np.repeat(np.arange(8), 2), (6, 1))

    def busiest_node(owners_LE):
        busiest = []
        for layer in range(6):
            light = np.argsort(-load_LE[layer], kind="stable")[4:]
            nodes = topology.node_of_D[owners_LE[layer, light]]
            busiest.append(np.bincount(nodes, weights=load_LE[layer, light], minlength=2).max())
        return sum(busiest)

    assert busiest_node(owner_LE) < busiest_node(even_LE)


@pytest.mark.parametrize(
    ("load_LE", "options", "message"),
    [
        ([1.0, 2.0], {}, "load_LE is of shape"),
        ([[1.0, -2.0]], {}, "load_LE is negative"),
        (np.empty((0, 3)), {}, "load_LE is of shape"),
        ([[1.0, 2.0]], {"overlap_degree": -1}, "overlap_degree is -1"),
        ([[1.0, 2.0]], {"current_LE": [[0, 1, 1]]}, "current_LE is of shape"),
        ([[1.0, 2.0]], {"current_LE": [[0, 9]]}, "current_LE names devices 0 to 9"),
        ([[1.0, 2.0]], {"current_LE": [[0.0, 1.0]]}, "current_LE is of type"),
    ],
)
def test_bad_arguments(load_LE, options, message):
    with pytest.raises(ConfigError, match=message):
        shard(load_LE, Topology(1, 2), **({"overlap_degree": 1} | options))
