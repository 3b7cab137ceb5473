"""What each policy decides, and what all of them promise: pure functions, checked arguments, true names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from themis.core.cost import LayerCost
from themis.core.errors import ConfigError
from themis.core.placement import Placement, even_owner, shard_only
from themis.core.topology import Link, Topology
from themis.planning import calibrate, dispatch, materialize, shard
from themis.policies import (
    EP,
    EPLB,
    POLICIES,
    ExactLoad,
    FasterMoE,
    FlexMoE,
    LayerContext,
    Policy,
    SmartMoE,
    Themis,
    ThemisJoint,
    ThemisRM,
    Uniform,
)
from themis.testing.strategies import loads, owners, quick, tokens, topologies
from themis.train.config import PolicyName

FAST = Topology(2, 2, Link(0.0, 1e9), Link(0.0, 1e6))
COST = LayerCost(expert_s_per_token=1e-3, token_bytes=100, expert_bytes=1000)
CONTEXT = LayerContext(FAST, COST, attention_s=1.0)
OWNER_E = even_owner(4, 4)
HELD = shard_only(OWNER_E, 4)
HOT_E = np.array([90.0, 5.0, 3.0, 2.0])
HOT_ED = np.array([[50, 50, 50, 50], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]])
EVERY: dict[str, Policy] = {
    "ep": EP(),
    "uniform": Uniform(),
    "themis": Themis(budget=2, overlap_degree=3, reshard_interval=1),
    "themis-balanced": Themis(budget=1, overlap_degree=2, reshard_interval=1, dispatch_rule="balanced"),
    "themis-unmeasured": Themis(budget=1, reshard_interval=2),
    "themis-rm": ThemisRM(2, 3, 1),
    "themis-joint": ThemisJoint(budget=2, reshard_interval=1, estimates=60),
    "faster-moe": FasterMoE(),
    "smart-moe": SmartMoE(interval=2),
    "flex-moe": FlexMoE(interval=2, extra_slots=1),
    "eplb": EPLB(budget=2),
    "exact-load": ExactLoad(budget=1, min_tokens=2),
}
each_policy = pytest.mark.parametrize("policy", EVERY.values(), ids=EVERY.keys())


@pytest.mark.parametrize("name", POLICIES)
def test_registry_names_are_the_policies_own(name: str) -> None:
    policy = POLICIES[name]()
    assert policy.name == name
    assert POLICIES[name]() == policy, "makers give equal policies each time"


def test_registry_knows_the_policies_of_this_release() -> None:
    ours = {"ep", "uniform", "themis", "themis-rm", "themis-joint"}
    assert set(POLICIES) == ours | {"faster-moe", "smart-moe", "flex-moe", "eplb", "exact-load"}
    assert set(POLICIES) == set(get_args(PolicyName)), "the command line knows them all"


@st.composite
def situations(draw: st.DrawFn) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64], LayerContext, int]:
    """(owner_LE, load_LE, tokens_ED, context, iteration)."""
    topology, num_experts = draw(topologies(3, 3)), draw(st.integers(1, 6))
    layers = range(draw(st.integers(1, 3)))
    owner_LE = np.stack([draw(owners(num_experts, topology.num_devices)) for _ in layers])
    load_LE = np.stack([draw(loads(num_experts)) for _ in layers])
    cost = LayerCost(draw(st.sampled_from([1e-7, 1e-2])), 8192, draw(st.sampled_from([100, 10**7])))
    context = LayerContext(topology, cost, draw(st.sampled_from([None, 0.0, 1e-3, 10.0])))
    return owner_LE, load_LE, draw(tokens(num_experts, topology.num_devices)), context, draw(st.integers(0, 4))


def alone(owner_LE: NDArray[np.int64], context: LayerContext = CONTEXT) -> list[Placement]:
    """Owners without replicas."""
    return [shard_only(owner_E, context.topology.num_devices) for owner_E in owner_LE]


def decide(policy: Policy, situation: tuple) -> list[NDArray[np.generic]]:
    """All decisions of one layer and iteration, in the order in which the runtime asks."""
    owner_LE, load_LE, tokens_ED, context, iteration = situation
    held = policy.rearrange(iteration, load_LE, alone(owner_LE, context), context)[0]
    placement = policy.place(held, load_LE[0], context)
    forced_TK = policy.force(7, 1, load_LE.shape[1])
    calibrated = policy.calibrate(placement, tokens_ED, context)
    route_EDD = policy.route(calibrated, tokens_ED, context)
    forced = np.empty(0) if forced_TK is None else forced_TK
    decided = [held.placement_ED, placement.placement_ED, forced, calibrated.placement_ED, route_EDD]
    return [held.owner_E, placement.owner_E, calibrated.owner_E, *decided]


@each_policy
def test_decisions_are_pure_and_lawful(policy: Policy) -> None:
    @quick(40)
    @given(situations())
    def check(situation: tuple) -> None:
        owner_LE, load_LE, tokens_ED, _, _ = situation
        kept = [array.copy() for array in (owner_LE, load_LE, tokens_ED)]
        for array in (owner_LE, load_LE, tokens_ED):
            array.setflags(write=False)
        first, again = decide(policy, situation), decide(policy, situation)
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other)
        for array, before in zip((owner_LE, load_LE, tokens_ED), kept, strict=True):
            np.testing.assert_array_equal(array, before)

        owner_E, placed_owner_E, calibrated_owner_E, held_ED, placed_ED, _, calibrated_ED, route_EDD = first
        np.testing.assert_array_equal(owner_E, placed_owner_E)
        np.testing.assert_array_equal(owner_E, calibrated_owner_E)
        assert (placed_ED >= held_ED).all()
        assert (calibrated_ED >= held_ED).all()
        bound = policy.replicas_per_device()
        replicas_D = calibrated_ED.sum(axis=0) - held_ED.sum(axis=0)
        assert bound is None or replicas_D.max() <= bound, "memory estimates count with this bound"
        np.testing.assert_array_equal(route_EDD.sum(axis=2), tokens_ED)
        assert (route_EDD >= 0).all()
        assert not route_EDD.sum(axis=1)[~calibrated_ED].any(), "tokens go to holders alone"

    check()


@each_policy
def test_before_the_first_observation_owners_stand_alone(policy: Policy) -> None:
    held_L = alone(np.stack([OWNER_E, OWNER_E[::-1].copy()]))
    assert policy.rearrange(10, None, held_L, CONTEXT) is held_L
    assert policy.place(held_L[0], None, CONTEXT) is held_L[0]


@pytest.mark.parametrize("policy", [EP(), Uniform()], ids=["ep", "uniform"])
def test_ep_never_moves_or_copies(policy: EP) -> None:
    held_L = alone(OWNER_E[None])
    assert all(policy.rearrange(i, HOT_E[None], held_L, CONTEXT) is held_L for i in range(300))
    placement = policy.place(HELD, HOT_E, CONTEXT)
    assert placement is HELD
    assert policy.calibrate(placement, HOT_ED, CONTEXT) is placement
    route_EDD = policy.route(placement, HOT_ED, CONTEXT)
    for e, d, destination in np.ndindex(route_EDD.shape):
        assert route_EDD[e, d, destination] == (HOT_ED[e, d] if destination == OWNER_E[e] else 0)
    assert policy.replicas_per_device() == 0
    assert not policy.rematerialize


@quick(60)
@given(st.integers(0, 30), st.integers(1, 9), st.data())
def test_uniform_deals_out_experts_evenly_and_distinct_for_each_token(
    num_tokens: int, num_experts: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    experts_TK = Uniform().force(num_tokens, top_k, num_experts)
    assert experts_TK is not None
    assert experts_TK.shape == (num_tokens, top_k)
    assert experts_TK.dtype == np.int64
    assert all(len(set(row)) == top_k for row in experts_TK.tolist())
    counts_E = np.bincount(experts_TK.ravel(), minlength=num_experts)
    assert counts_E.size == num_experts
    assert counts_E.max() - counts_E.min() <= 1


@pytest.mark.parametrize("policy", [EP(), Themis(), ThemisRM()], ids=["ep", "themis", "themis-rm"])
def test_other_policies_leave_the_gate_free(policy: Policy) -> None:
    assert policy.force(5, 2, 8) is None


def test_themis_places_by_algorithm_1() -> None:
    placement = Themis(budget=1, overlap_degree=1).place(HELD, HOT_E, CONTEXT)
    np.testing.assert_array_equal(placement.placement_ED[0], [True] * 4)
    assert placement.replicas_ED.sum() == 3
    expected_ED = materialize(OWNER_E, HOT_E, FAST, overlap_degree=1, budget=1)
    np.testing.assert_array_equal(placement.placement_ED, expected_ED)
    assert not Themis(budget=0).place(HELD, HOT_E, CONTEXT).replicas_ED.any()


@pytest.mark.parametrize(
    ("policy", "attention_s", "degree"),
    [
        (Themis(overlap_degree=7), 1.0, 7),
        (Themis(overlap_degree=0), None, 0),
        (Themis(budget=0), 1.0, 0),
        (Themis(budget=0, overlap_degree=7), None, 0),
        (Themis(budget=3), None, 3),  # not measured yet
        (Themis(), 0.0, 0),
        (Themis(), 0.0045, 4),  # 0.0045 s at 1 MB/s take in four chunks of 1,000 bytes
        (Themis(), 1.0, 1000),
    ],
)
def test_degree_is_what_fits_behind_attention(policy: Themis, attention_s: float | None, degree: int) -> None:
    assert policy.degree(LayerContext(FAST, COST, attention_s)) == degree


def test_degree_counts_with_the_link_that_binds() -> None:
    one_node = LayerContext(Topology(1, 4, FAST.intra, FAST.inter), COST, 0.0045)
    assert Themis().degree(one_node) == 4500


def test_no_time_behind_attention_means_no_replicas() -> None:
    context = dataclasses.replace(CONTEXT, attention_s=0.0)
    placement = Themis().place(HELD, HOT_E, context)
    assert not placement.replicas_ED.any()
    assert Themis().calibrate(placement, HOT_ED, context) is placement


def test_themis_reshards_by_algorithm_2_only_when_due() -> None:
    policy = Themis(overlap_degree=1, reshard_interval=10)
    owner_LE = np.array([[0, 0, 0, 0], [3, 3, 3, 3]])
    load_LE, held_L = np.stack([HOT_E, HOT_E]), alone(owner_LE)
    expected_LE = shard(load_LE, FAST, overlap_degree=1, current_LE=owner_LE)
    for iteration in range(41):
        new_L = policy.rearrange(iteration, load_LE, held_L, CONTEXT)
        if iteration in (10, 20, 30, 40):
            new_LE = np.stack([held.owner_E for held in new_L])
            assert not any(held.replicas_ED.any() for held in new_L)
            np.testing.assert_array_equal(new_LE, expected_LE)
            assert np.bincount(new_LE.ravel(), minlength=4).tolist() == [2, 2, 2, 2]
        else:
            assert new_L is held_L
    never = Themis(reshard_interval=0)
    assert all(never.rearrange(i, load_LE, held_L, CONTEXT) is held_L for i in range(210))


def test_calibration_adds_what_the_prediction_missed() -> None:
    policy = Themis(budget=1, overlap_degree=1)
    missed = policy.place(HELD, np.array([0.0, 0.0, 0.0, 9.0]), CONTEXT)  # expert 3 was to be hot, expert 0 is
    np.testing.assert_array_equal(missed.placement_ED[3], [True] * 4)
    late = policy.calibrate(missed, HOT_ED, CONTEXT)
    np.testing.assert_array_equal(late.placement_ED[0], [True, False, False, True])  # the one slot that was left
    np.testing.assert_array_equal(late.placement_ED[1:], missed.placement_ED[1:])
    before = shard_only(OWNER_E, 4)
    after = policy.calibrate(before, HOT_ED, CONTEXT)
    assert after.placement_ED[0].all()
    expected = calibrate(
        before, HOT_ED, FAST, overlap_degree=1, budget=1, cost=COST, latency_budget_s=1.0, rule="local-first"
    )
    np.testing.assert_array_equal(after.placement_ED, expected.placement_ED)


@pytest.mark.parametrize(
    "changes",
    [{"calibration": False}, {"budget": 0}, {"calibration_s": 0.0}, {"overlap_degree": 0}],
    ids=lambda changes: next(iter(changes)),
)
def test_calibration_returns_the_very_placement_when_off_or_out_of_time(changes: dict[str, float]) -> None:
    before = shard_only(OWNER_E, 4)
    options = {"budget": 1, "overlap_degree": 1} | changes
    assert Themis(**options).calibrate(before, HOT_ED, CONTEXT) is before  # type: ignore[arg-type]


def test_calibration_may_take_as_long_as_attention_unless_told_otherwise() -> None:
    before = shard_only(OWNER_E, 4)
    short = dataclasses.replace(CONTEXT, attention_s=1e-4)  # the added transfers take 4 ms, and save far more
    assert Themis(1, overlap_degree=1).calibrate(before, HOT_ED, short) is before
    assert Themis(1, overlap_degree=1, calibration_s=1.0).calibrate(before, HOT_ED, short) is not before
    unmeasured = dataclasses.replace(CONTEXT, attention_s=None)
    assert Themis(1, overlap_degree=1).calibrate(before, HOT_ED, unmeasured) is not before


@pytest.mark.parametrize("rule", ["local-first", "balanced"])
def test_themis_routes_by_its_rule(rule: str) -> None:
    placement_ED = np.eye(4, dtype=np.bool_)
    placement_ED[0, 2] = True
    placement = Placement(OWNER_E, placement_ED)
    route_EDD = Themis(dispatch_rule=rule).route(placement, HOT_ED, CONTEXT)  # type: ignore[arg-type]
    np.testing.assert_array_equal(route_EDD, dispatch(HOT_ED, placement_ED, FAST, rule=rule, cost=COST))


def test_themis_rm_is_themis_that_gathers_again() -> None:
    policy = ThemisRM(budget=3, overlap_degree=5, reshard_interval=7, calibration=False)
    assert policy == Themis(3, 5, 7, calibration=False, rematerialize=True)
    assert (policy.name, policy.rematerialize, policy.replicas_per_device()) == ("themis-rm", True, 3)
    assert (Themis().name, Themis().rematerialize) == ("themis", False)


@pytest.mark.parametrize("make", [Themis, ThemisRM])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": -1}, "budget is -1; it must be a whole number, 0 or more"),
        ({"budget": 1.5}, r"budget is 1\.5; it must be a whole number"),
        ({"budget": "2"}, "budget is '2'"),
        ({"budget": None}, "budget is None"),
        ({"overlap_degree": -2}, "overlap_degree is -2; it must be None, or a whole number"),
        ({"overlap_degree": 0.5}, r"overlap_degree is 0\.5"),
        ({"reshard_interval": -1}, "reshard_interval is -1; it must be a whole number, 0 or more"),
        ({"reshard_interval": 2.5}, r"reshard_interval is 2\.5"),
    ],
)
def test_bad_arguments_name_themselves(make: Callable[..., Themis], changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calibration_s": -0.1}, r"calibration_s is -0\.1; it must be None, or zero or more seconds"),
        ({"calibration_s": float("nan")}, "calibration_s is nan"),
        ({"dispatch_rule": "best"}, "dispatch_rule is 'best'; it must be 'local-first' or 'balanced'"),
    ],
)
def test_bad_arguments_of_themis_alone(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Themis(**changes)  # type: ignore[arg-type]
