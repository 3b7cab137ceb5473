from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from themis.core.cost import LayerCost
from themis.core.errors import ConfigError
from themis.core.placement import even_owner, owner_mask
from themis.core.topology import Link, LinkClass, Topology
from themis.planning import materialize, transfers
from themis.planning.reference import transfers_reference
from themis.planning.transfers import MAX_PIECES
from themis.testing.strategies import drifting_tokens, owners, placements, quick, topologies


@st.composite
def problems(draw):
    topology, num_experts = draw(topologies()), draw(st.integers(1, 6))
    owner_E = draw(owners(num_experts, topology.num_devices))
    placement_ED = draw(placements(owner_E, topology.num_devices))
    return owner_E, placement_ED, topology, draw(st.sampled_from([None, 100, 3_000_000, 50_000_000]))


def rows_of(plan):
    columns = (plan.stage_X, plan.expert_X, plan.piece_X, plan.source_X, plan.destination_X)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def check_plan(plan, owner_E, placement_ED, topology):
    """Pieces flow down trees from the owner: held before sent, received once by each replica and by nobody else."""
    held = {(e, piece, int(owner)): -1 for e, owner in enumerate(owner_E) for piece in range(plan.pieces_E[e])}
    for stage, e, piece, source, destination in rows_of(plan):
        assert 0 <= piece < plan.pieces_E[e]
        assert held[e, piece, source] < stage  # raises KeyError where the source never held the piece
        assert (e, piece, destination) not in held
        held[e, piece, destination] = stage
    expected = {(int(e), piece, int(d)) for e, d in np.argwhere(placement_ED) for piece in range(plan.pieces_E[e])}
    assert set(held) == expected
    assert set(plan.stage_X.tolist()) == set(range(plan.num_stages))
    numel = 1013  # a prime, so that pieces differ in size
    replicas = int(placement_ED.sum()) - owner_E.size
    node_EN = placement_ED.reshape(owner_E.size, topology.num_nodes, -1).any(axis=2)
    crossed = plan.bytes_by_link(topology, numel, 2)
    assert sum(crossed.values()) == replicas * numel * 2
    assert crossed[LinkClass.INTER] == (node_EN.sum() - owner_E.size) * numel * 2


@quick(150)
@given(problems())
def test_invariants_and_reference(problem):
    owner_E, placement_ED, topology, expert_bytes = problem
    before = placement_ED.copy()
    plan = transfers(owner_E, placement_ED, topology, expert_bytes=expert_bytes)
    assert np.array_equal(placement_ED, before)
    check_plan(plan, owner_E, placement_ED, topology)
    assert plan.pieces_E.max() <= (MAX_PIECES if expert_bytes is None else max(1, expert_bytes // 262144))
    rounds_E = [rounds_of(plan, e) for e in range(owner_E.size)]
    slow = transfers_reference(owner_E, placement_ED, topology, plan.pieces_E.tolist(), rounds_E)
    assert rows_of(plan) == slow


def rounds_of(plan, e):
    """How many rounds chunk `e` goes out in: the stages in which its owner sends."""
    sent = plan.stage_X[(plan.expert_X == e) & (plan.source_X == plan.owner_E[e])]
    return max(1, np.unique(sent).size)


def test_recorded_loads():
    topology = Topology(2, 4)
    tokens_ILED = drifting_tokens(4, iterations=6, num_layers=2, num_experts=16, num_devices=8, tokens_per_device=500)
    owner_E = even_owner(16, 8)
    for load_E in tokens_ILED.sum(axis=3).reshape(-1, 16):
        placement_ED = materialize(owner_E, load_E, topology, overlap_degree=5, budget=2)
        for expert_bytes in (None, 1 << 20, 1 << 25):
            check_plan(
                transfers(owner_E, placement_ED, topology, expert_bytes=expert_bytes), owner_E, placement_ED, topology
            )


@pytest.mark.parametrize(("nodes", "devices"), [(2, 1), (4, 1), (5, 1), (1, 4), (1, 7), (4, 2), (3, 4), (4, 8)])
def test_one_chunk_to_all_takes_about_the_bound(nodes, devices):
    """However many replicas: no link carries much more than one chunk (section 3.3), where a plain root sends k."""
    topology = Topology(nodes, devices, Link(0.0, 1e9), Link(0.0, 1e9))
    plan = transfers([0], np.ones((1, nodes * devices), dtype=np.bool_), topology)
    seconds = LayerCost(0.0, 0, 1_000_000).transfer_s(plan, topology)
    assert 1e-3 - 1e-12 <= seconds <= 1.3e-3


def test_every_device_of_a_node_shares_in_the_entry():
    placement_ED = np.array([[True, False, False, False, True, True, True, True]])
    plan = transfers([0], placement_ED, Topology(2, 4))
    assert plan.pieces_E.tolist() == [4]
    assert sorted(plan.destination_X[plan.stage_X == 0].tolist()) == [4, 5, 6, 7]


def test_small_chunks_turn_with_the_expert():
    placement_ED = np.ones((4, 5), dtype=np.bool_)
    plan = transfers([0, 0, 0, 0], placement_ED, Topology(5, 1), expert_bytes=10)
    assert plan.destination_X[plan.stage_X == 0].tolist() == [1, 2, 3, 4]


def test_pieces_and_rounds():
    everywhere_ED = np.ones((1, 6), dtype=np.bool_)

    def pieces(placement_ED, topology, **options):
        plan = transfers([0], placement_ED, topology, **options)
        return int(plan.pieces_E[0]), rounds_of(plan, 0)

    assert pieces(everywhere_ED, Topology(3, 2)) == (4, 1)
    assert pieces(everywhere_ED, Topology(3, 2), expert_bytes=4_000_000, piece_bytes=500_000) == (8, 2)
    assert pieces(everywhere_ED, Topology(3, 2), expert_bytes=1 << 30) == (32, 8)
    assert pieces(everywhere_ED, Topology(3, 2), expert_bytes=1_000_000, piece_bytes=500_000) == (2, 1)
    assert pieces(everywhere_ED, Topology(3, 2), expert_bytes=10) == (1, 1)
    assert pieces(np.ones((1, 2), dtype=np.bool_), Topology(2, 1), expert_bytes=1 << 30) == (1, 1)
    home_and_away_ED = np.array([[True, True, True, False]])
    assert pieces(home_and_away_ED, Topology(2, 2), expert_bytes=1 << 30) == (1, 1)


def test_no_replica_no_transfer():
    plan = transfers([0, 1], owner_mask(np.array([0, 1]), 2), Topology(1, 2))
    assert (plan.num_transfers, plan.num_stages) == (0, 0)


@pytest.mark.parametrize(
    ("owner_E", "placement_ED", "options", "message"),
    [
        ([0, 2], [[True, False], [False, True]], {}, "owner_E names devices 0 to 2"),
        ([0, 0], [[True, False], [False, True]], {}, "placement_ED lacks an expert"),
        ([0], [[True, False], [False, True]], {}, "placement_ED lacks an expert"),
        ([0], [[True]], {}, "placement_ED is of shape"),
        ([0], [[True, True]], {"expert_bytes": 0}, "expert_bytes is 0"),
        ([0], [[True, True]], {"expert_bytes": 10, "piece_bytes": 0}, "piece_bytes is 0"),
    ],
)
def test_bad_arguments(owner_E, placement_ED, options, message):
    with pytest.raises(ConfigError, match=message):
        transfers(owner_E, np.array(placement_ED), Topology(1, 2), **options)
