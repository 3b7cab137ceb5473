"""The rules of other systems: against plain references, against cases worked out by hand, and their promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from themis.core.cost import LayerCost
from themis.core.errors import ConfigError
from themis.core.placement import Placement, even_owner, shard_only
from themis.core.topology import Link, Topology
from themis.planning.exact_load import exact_load
from themis.planning.exchange import exchange_owners
from themis.planning.expand import adjust, device_load, placement_s
from themis.planning.quotas import route_quotas
from themis.planning.reference_rules import replicate_reference, route_quotas_reference, shadow_reference
from themis.planning.replicate import replicate
from themis.planning.shadow import broadcast_s, shadow
from themis.testing.strategies import loads, owners, quick, tokens, topologies

#: Two nodes of two devices; a token is 1 byte, an expert 100; inside a node 1 byte/s, a node's uplink 1 byte/s.
TOY = Topology(2, 2, Link(0.0, 1.0), Link(0.0, 1.0))
OWNER_E = even_owner(4, 4)
costs = st.builds(
    LayerCost, st.sampled_from([1e-7, 1e-2, 1.0]), st.sampled_from([1, 8192]), st.sampled_from([10, 10**6])
)


@st.composite
def counts(draw):
    topology, num_experts = draw(topologies(3, 3)), draw(st.integers(1, 7))
    return draw(owners(num_experts, topology.num_devices)), draw(tokens(num_experts, topology.num_devices)), topology


# FasterMoE


@quick(80)
@given(counts(), costs)
def test_shadows_are_those_of_the_reference(case, cost):
    owner_E, tokens_ED, topology = case
    chosen_E = shadow(owner_E, tokens_ED, topology, cost)
    np.testing.assert_array_equal(chosen_E, shadow_reference(owner_E, tokens_ED, topology, cost))


def test_an_expert_is_shadowed_exactly_while_it_pays():
    """Expert 0 has 40 tokens of each device, the others 1 of each. Owner 0 computes 160 tokens, the others 4.

    Into node 0 come 2 * 40 tokens for expert 0 and 2 for expert 1, out go 2 * 2: the uplink's worst is 82 bytes;
    inside node 0 device 0 takes in 40. AlltoAlls: 4 * 82 = 328 s; experts 160 s at 1 s a token. With expert 0
    everywhere each device computes 40 + 3 of its own and others', 43 on device 0 and 44 on the rest; the uplink's worst
    is node 1's two experts from two devices, 4 bytes: 16 s. Saved: 488 - 60 = 428 s, so two broadcasts may cost
    less than that. A broadcast enters node 1 once: 100 bytes, 100 s at most; twice is 200 s.
    """
    tokens_ED = np.array([[40, 40, 40, 40], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]])
    cost = LayerCost(expert_s_per_token=1.0, token_bytes=1, expert_bytes=100)
    assert broadcast_s(TOY, cost) == 100.0
    assert shadow(OWNER_E, tokens_ED, TOY, cost).tolist() == [True, False, False, False]
    dear = LayerCost(expert_s_per_token=1.0, token_bytes=1, expert_bytes=215)
    assert not shadow(OWNER_E, tokens_ED, TOY, dear).any()
    just = LayerCost(expert_s_per_token=1.0, token_bytes=1, expert_bytes=213)
    assert shadow(OWNER_E, tokens_ED, TOY, just).tolist() == [True, False, False, False]


def test_the_first_that_does_not_pay_ends_the_search():
    """Expert 1 is heaviest, but its tokens are its owner's own, so nothing is won; expert 0 behind it is not tried."""
    tokens_ED = np.array([[0, 50, 50, 50], [0, 400, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    cost = LayerCost(expert_s_per_token=1.0, token_bytes=1, expert_bytes=1)
    assert not shadow(OWNER_E, tokens_ED, TOY, cost).any()


# SmartMoE


def test_experts_are_exchanged_by_hand():
    """Devices hold {0, 1} and {2, 3}; loads 8, 7, 2, 1.

    Expert 0 to device 0 (its own, on a tie), 1 to device 1 (0 < 8), 2 to device 1 (7 < 8), and 3 to device 0, which
    alone has a slot left: 9 and 9 instead of 15 and 3.
    """
    new_E = exchange_owners(np.array([0, 0, 1, 1]), np.array([8.0, 7.0, 2.0, 1.0]), 2)
    assert new_E.tolist() == [0, 1, 1, 0]


def test_nothing_moves_unless_the_maximum_falls():
    owner_E = np.array([0, 1, 1, 0])
    assert exchange_owners(owner_E, np.array([8.0, 7.0, 2.0, 1.0]), 2) is owner_E
    assert exchange_owners(owner_E, np.zeros(4), 2) is owner_E


@quick(60)
@given(counts(), st.data())
def test_exchanges_keep_counts_and_never_raise_the_maximum(case, data):
    owner_E, _, topology = case
    load_E, devices = data.draw(loads(owner_E.size)), topology.num_devices
    new_E = exchange_owners(owner_E, load_E, devices)
    np.testing.assert_array_equal(np.bincount(new_E, minlength=devices), np.bincount(owner_E, minlength=devices))
    before, after = (np.bincount(o, weights=load_E, minlength=devices).max() for o in (owner_E, new_E))
    assert after < before or new_E is owner_E


# FlexMoE


def adjusted(load_E, *, extra=1, threshold=1.2, held=None, cost=None, topology=TOY):
    held = held or shard_only(even_owner(len(load_E), topology.num_devices), topology.num_devices)
    slots_D = np.bincount(even_owner(len(load_E), topology.num_devices), minlength=topology.num_devices) + extra
    cheap = LayerCost(expert_s_per_token=1.0, token_bytes=1, expert_bytes=1)
    return adjust(held, np.array(load_E, dtype=float), topology, cost or cheap, slots_D=slots_D, threshold=threshold)


def test_expands_to_the_least_loaded_device_with_a_slot():
    """One node of three devices, an expert each, loads 90, 30, 6, mean 42.

    Expert 0 goes to device 2: 45, 30, 51, and 51 / 42 = 1.21 is over 1.2 still. Expert 0, with 45 a copy, on device 1
    too would make 30, 60, 36: worse. So a copy moves off the busiest, device 2: expert 0 to device 1 would make
    45, 75, 6, expert 2 makes 45, 36, 45.
    """
    one_node = Topology(1, 3, Link(0.0, 1.0), Link(0.0, 1.0))
    free = LayerCost(expert_s_per_token=1.0, token_bytes=0, expert_bytes=1)
    after = adjusted([90, 30, 6], topology=one_node, cost=free)
    assert after.placement_ED.astype(int).tolist() == [[1, 0, 1], [0, 1, 0], [0, 1, 0]]
    assert after.owner_E.tolist() == [0, 1, 1]
    assert device_load(after.placement_ED, np.array([90.0, 30.0, 6.0])).tolist() == [45.0, 36.0, 45.0]


def test_the_time_of_a_placement_by_hand():
    """Two nodes of one device, an expert each, loads 6 and 2; expert 0 on both. Computed: 3 and 3 + 2.

    Each device sends half of every device's load: node 1 takes in 5 / 2, node 0 sends it; four AlltoAlls 10 s.
    Gradients: 7 bytes over and back, 14 s. Experts 5 s at 1 s a token.
    """
    pair = Topology(2, 1, Link(0.0, 1.0), Link(0.0, 1.0))
    placed_ED = np.array([[True, True], [False, True]])
    seconds = placement_s(placed_ED, np.array([6.0, 2.0]), pair, LayerCost(1.0, 1, 7))
    assert seconds == pytest.approx(5 + 10 + 14)


def test_shrinks_the_least_loaded_copy_where_no_slot_is_free():
    """Expert 3 was hot and has copies everywhere, which fill all slots; now expert 0 is, with 40 on devices 0 and 3.

    Loads 41, 13, 9, 41. Expert 3's copy on device 2, the least loaded without expert 0, makes room: 28, 13.3, 34.7, 28.
    """
    kept_ED = np.eye(4, dtype=bool)
    kept_ED[3] = True
    full_ED = kept_ED.copy()
    full_ED[0, 3] = True  # device 3's extra slot
    held = Placement(OWNER_E, full_ED)
    free = LayerCost(expert_s_per_token=1.0, token_bytes=0, expert_bytes=1)
    after = adjusted([80, 12, 8, 4], held=held, cost=free, threshold=1.4)
    changed = np.argwhere(held.placement_ED != after.placement_ED)
    assert changed.tolist() == [[0, 2], [3, 2]]
    assert device_load(after.placement_ED, np.array([80.0, 12, 8, 4])) == pytest.approx([28, 40 / 3, 104 / 3, 28])


def test_an_owner_whose_copy_goes_hands_over_to_the_lowest_left():
    held = Placement(np.array([0, 0, 1]), np.array([[True, True, False], [True, False, False], [False, True, True]]))
    one_node = Topology(1, 3, Link(0.0, 1e9), Link(0.0, 1e9))
    after = adjusted([30, 30, 1], held=held, topology=one_node, extra=1)
    for e in range(3):
        holders = np.flatnonzero(after.placement_ED[e])
        assert after.owner_E[e] == (held.owner_E[e] if held.owner_E[e] in holders else holders[0])


def test_balanced_or_too_dear_leaves_the_very_placement():
    held = shard_only(OWNER_E, 4)
    assert adjusted([5, 5, 5, 6], held=held) is held
    assert adjusted([50, 5, 5, 6], held=held, cost=LayerCost(1.0, 1, 10**9)) is held
    assert adjusted([0, 0, 0, 0], held=held) is held


@quick(40)
@given(topologies(2, 3), st.data(), costs, st.integers(0, 2))
def test_changes_stay_within_slots_and_lower_the_time(topology, data, cost, extra):
    load_E = data.draw(loads(data.draw(st.integers(1, 6))))
    held = shard_only(even_owner(load_E.size, topology.num_devices), topology.num_devices)
    for _ in range(3):
        after = adjusted(load_E, extra=extra, held=held, cost=cost, topology=topology)
        even_D = np.bincount(even_owner(load_E.size, topology.num_devices), minlength=topology.num_devices)
        assert (after.placement_ED.sum(axis=0) <= even_D + extra).all()
        if after is not held:
            before_s, after_s = (placement_s(p.placement_ED, load_E, topology, cost) for p in (held, after))
            assert after_s < before_s
        held, load_E = after, load_E[::-1].copy()


# EPLB


@quick(80)
@given(counts(), st.data(), st.integers(0, 3))
def test_spare_slots_are_those_of_the_reference(case, data, budget):
    owner_E, _, topology = case
    load_E = data.draw(loads(owner_E.size))
    placed_ED = replicate(owner_E, load_E, topology, budget=budget)
    np.testing.assert_array_equal(placed_ED, replicate_reference(owner_E, load_E, topology, budget=budget))
    assert (placed_ED.sum(axis=0) - np.bincount(owner_E, minlength=topology.num_devices) <= budget).all()


def test_spare_slots_by_hand():
    """Four slots, loads 60, 30, 6, 4: to expert 0 (60 a copy), then 0 and 1 have 30 each, the lower index wins: 0 (20
    each), then 1 (15 each), then 0 again (15 each). Packing: expert 0 at 15 on all four devices, where owners count 15,
    15, 6 and 4: first to device 3 (4), then 2 (6), then 1. Expert 1 at 15: slots are left on device 0 alone."""
    placed_ED = replicate(OWNER_E, np.array([60.0, 30.0, 6.0, 4.0]), TOY, budget=1)
    assert placed_ED.astype(int).tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


# exact load


@quick(80)
@given(counts(), st.integers(0, 2), st.integers(1, 4))
def test_quotas_are_whole_and_within_bounds(case, budget, min_tokens):
    owner_E, tokens_ED, topology = case
    quota_ED = exact_load(owner_E, tokens_ED, topology, budget=budget, min_tokens=min_tokens)
    np.testing.assert_array_equal(quota_ED.sum(axis=1), tokens_ED.sum(axis=1))
    replica_ED = quota_ED > 0
    replica_ED[np.arange(owner_E.size), owner_E] = False
    assert (quota_ED >= 0).all()
    assert (replica_ED.sum(axis=0) <= budget).all()
    assert (quota_ED[replica_ED] >= min_tokens).all()
    plain = np.bincount(owner_E, weights=tokens_ED.sum(axis=1), minlength=topology.num_devices).max()
    assert quota_ED.sum(axis=0).max() <= plain
    route_EDD = route_quotas(tokens_ED, quota_ED, topology)
    np.testing.assert_array_equal(route_EDD.sum(axis=1), quota_ED)
    np.testing.assert_array_equal(route_EDD.sum(axis=2), tokens_ED)
    np.testing.assert_array_equal(route_EDD, route_quotas_reference(tokens_ED, quota_ED, topology))


def test_the_smallest_maximum_by_hand():
    """Device loads 100, 20, 40, 40, mean 50: device 0 keeps 50 and sheds 50; its node-mate has room for 30, the other
    node's two for 10 each, one slot a device. All at 50."""
    tokens_ED = np.diag([100, 20, 40, 40])
    quota_ED = exact_load(OWNER_E, tokens_ED, TOY, budget=1, min_tokens=1)
    assert quota_ED.tolist() == [[50, 30, 10, 10], [0, 20, 0, 0], [0, 0, 40, 0], [0, 0, 0, 40]]


def test_replicas_of_too_few_tokens_are_not_made():
    """As above, but ten tokens make no replica: what the node-mate can take evens the two out at 60."""
    tokens_ED = np.diag([100, 20, 40, 40])
    quota_ED = exact_load(OWNER_E, tokens_ED, TOY, budget=1, min_tokens=40)
    assert quota_ED.tolist() == [[60, 40, 0, 0], [0, 20, 0, 0], [0, 0, 40, 0], [0, 0, 0, 40]]


def test_bad_arguments():
    for call in (
        lambda: replicate(OWNER_E, np.ones(4), TOY, budget=-1),
        lambda: exact_load(OWNER_E, np.diag([1, 1, 1, 1]), TOY, budget=1, min_tokens=0),
        lambda: exact_load(OWNER_E, np.diag([1.5, 1, 1, 1]), TOY, budget=1, min_tokens=1),
    ):
        with pytest.raises(ConfigError, match="it must be"):
            call()
