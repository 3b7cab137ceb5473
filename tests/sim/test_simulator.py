"""Simulated iterations: deterministic, never below the bounds, equal to the planners' plans, conserving bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from themis.core.errors import ConfigError
from themis.core.topology import Link
from themis.policies import EP, POLICIES, Themis, ThemisRM, Uniform
from themis.sim.efficiency import CLUSTERS
from themis.sim.hardware import Cluster, Device
from themis.sim.results import Totals
from themis.sim.routing import GeneratedRouting, RecordedRouting, Skew
from themis.sim.simulator import Simulator, dispatch_loads
from themis.sim.traffic import route_loads
from themis.sim.workload import PAPER_MODELS, ModelShape, Workload

CLUSTER = replace(CLUSTERS["b"], num_nodes=2, devices_per_node=4)
SHAPE = replace(PAPER_MODELS["qwen1.5-moe"], num_layers=3, num_experts=16, sequence=512)
WORK = Workload(SHAPE, CLUSTER, 1)


def routing(seed: int = 0, share_std: float = 0.07, work: Workload = WORK) -> GeneratedRouting:
    return GeneratedRouting.for_workload(work, Skew(share_std), seed)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_simulated_alike_twice(name):
    one, two = (Simulator(WORK, POLICIES[name](), routing()).run(8, 4) for _ in range(2))
    assert one.iteration_s == two.iteration_s
    assert one.spent_s == two.spent_s
    assert one.bytes_moved == two.bytes_moved
    assert sum(one.spent_s.values()) == pytest.approx(one.iteration_s)
    assert one.iteration_s >= one.layer_s.sum()
    assert one.tokens_per_s == pytest.approx(512 * 8 / one.iteration_s)
    assert one.quiet_s <= one.iteration_s * (1 + 1e-12)
    assert one.imbalance >= 1.0
    assert min(one.spent_s.values()) >= 0.0


@pytest.mark.parametrize("name", POLICIES)
def test_loads_are_those_of_the_policys_own_plan(name):
    simulator = Simulator(WORK, POLICIES[name](), routing())
    policy = simulator.policy
    simulator.step(None)
    source, context = routing(5), simulator.context
    for layer in range(3):
        tokens_ED = source.tokens_ED(layer)
        placement = policy.calibrate(
            policy.place(simulator._held_L[layer], tokens_ED.sum(axis=1).astype(float), context), tokens_ED, context
        )
        planned = route_loads(policy.route(placement, tokens_ED, context), context.topology)
        priced = dispatch_loads(policy, placement, tokens_ED, context)
        for field in ("intra_out_D", "intra_in_D", "inter_out_D", "inter_in_D", "computed_D"):
            np.testing.assert_array_equal(getattr(priced, field), getattr(planned, field))
        assert priced.computed_D.sum() == tokens_ED.sum()


def test_balanced_tokens_take_the_bounds_time():
    result = Simulator(WORK, Uniform(), routing()).run(2, 1)
    assert result.imbalance == 1.0
    assert result.spent_s["waiting"] == 0.0
    tokens = WORK.tokens * SHAPE.top_k
    assert result.spent_s["experts"] == pytest.approx(3 * 3 * tokens * WORK.expert_s_per_token)
    # Half of a node's tokens leave it: four devices' over one uplink, four times a layer.
    inter_s = CLUSTER.inter.latency_s + 4 * tokens / 2 * SHAPE.token_bytes / CLUSTER.inter.bytes_per_s
    assert result.spent_s["all_to_all"] == pytest.approx(4 * 3 * inter_s)


@pytest.mark.parametrize("policy", [Themis(budget=3), ThemisRM(budget=3), Themis(budget=1, calibration=False)])
def test_collectives_never_beat_their_bound(policy):
    """Section 3.3: the most that a device must receive, over its link's bandwidth."""
    simulator = Simulator(WORK, policy, routing())
    simulator.step(None)
    for layer in range(3):
        load_E = simulator.routing.tokens_ED(layer).sum(axis=1).astype(float)
        priced = simulator._price(layer, load_E, simulator.routing.tokens_ED(layer))
        received = priced.replicas_D.max() * SHAPE.expert_bytes
        fastest = max(CLUSTER.intra.bytes_per_s, CLUSTER.inter.bytes_per_s)
        assert received > 0
        assert priced.times.gather.total_s + priced.times.added.total_s >= received / fastest
        gathered = priced.moved["gather"]
        assert gathered is not None
        times = 2 if policy.rematerialize and layer < 2 else 1
        assert gathered.intra + gathered.inter == times * priced.replicas_D.sum() * SHAPE.expert_bytes
        reduced = priced.moved["reduce"]
        assert reduced is not None
        assert reduced.intra + reduced.inter == priced.replicas_D.sum() * SHAPE.expert_bytes


def test_resharding_moves_optimizer_state_on_the_critical_path():
    policy = Themis(budget=0, reshard_interval=4)
    simulator = Simulator(WORK, policy, routing())
    quiet, moving = Totals(), Totals()
    for _ in range(4):
        simulator.step(quiet)
    assert quiet.spent_s["rearrangement"] == 0.0
    owners_L = [held.owner_E.copy() for held in simulator._held_L]
    simulator.step(moving)
    moved = sum((old != held.owner_E).sum() for old, held in zip(owners_L, simulator._held_L, strict=True))
    assert moved > 0
    seven = 7 * SHAPE.expert_bytes  # section 2.3
    assert moving.bytes_moved["rearrangement_intra"] + moving.bytes_moved["rearrangement_inter"] == moved * seven
    assert moving.spent_s["rearrangement"] > 0
    assert moving.quiet == []


def test_one_tiny_iteration_by_hand():
    """Two nodes of one device, two experts, one layer: 1 FLOP a ns, 1 byte a ns, no latency."""
    device = Device("toy", 1e9, 1e9, 10**12, 1e9)
    cluster = Cluster("toy", 2, 1, device, Link(0.0, 1e9), Link(0.0, 1e9), plan_s=1e-6)
    shape = ModelShape("toy", 2, 3, 2, 1, 4, 1, False, 5, 2, 2, 7)
    tokens_ILED = np.array([[[[4, 3], [0, 1]]]])
    work = Workload(shape, cluster, 1)
    result = Simulator(work, EP(), RecordedRouting(tokens_ILED)).run(1)
    ns = {kind: seconds * 1e9 for kind, seconds in result.spent_s.items()}
    # attention 2*5*4 + 4*2*4*4/2 = 104, router 2*(2*2)*4 = 32, head 2*(2*7)*4 = 112; forward once, backward twice
    assert ns["attention"] == pytest.approx(3 * (104 + 32 + 112))
    # 12 parameters an expert: 24 a token. 7 tokens on device 0, 1 on device 1.
    assert ns["experts"] == pytest.approx(3 * 24 * 4)
    assert ns["waiting"] == pytest.approx(3 * 24 * 3)
    # 3 tokens of 4 bytes to device 0, four times
    assert ns["all_to_all"] == pytest.approx(4 * 12)
    assert ns["counts"] == pytest.approx(4 * 2 * 2)
    assert ns["plan"] == pytest.approx(1000)
    # layer 5 + 4 + 4 = 13 parameters, embedding and head 28: gradients of 2 bytes, 2 (2-1)/2 of them: 26 and 56 ns.
    # The head's 56 drain under the experts' backward; the layer's 26 come last and stay.
    assert ns["all_reduce"] == pytest.approx(26)
    # Adam: 28 bytes for each of 41 dense parameters and the 12 of one expert
    assert ns["optimizer"] == pytest.approx(28 * (41 + 12))
    assert result.iteration_s * 1e9 == pytest.approx(sum(ns.values()))


def test_thousands_of_devices_need_no_dispatch_plan():
    cluster = CLUSTERS["b"].of_nodes(128)
    work = Workload(replace(SHAPE, num_layers=1, num_experts=2048), cluster, 1)
    simulator = Simulator(work, Themis(budget=2), routing(work=work, share_std=0.001))
    assert not simulator.policy.calibration
    simulator.step(None)
    assert simulator.step(None).now_s > 0
    with pytest.raises(ConfigError, match="policy 'themis' needs dispatch plans of 17 GB for 1024 devices"):
        Simulator(work, Themis(dispatch_rule="balanced"), routing(work=work, share_std=0.001))
