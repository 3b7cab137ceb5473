"""Every policy of the field in the engine: the losses of one process, whatever moves, grows or shrinks on the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.fssdp.harness import WIDTH, Case, assert_same, train_alone, train_on_rank
from themis.core.placement import Placement
from themis.core.topology import Link, Topology
from themis.moe import MoEConfig
from themis.policies import EPLB, ExactLoad, FasterMoE, FlexMoE, Policy, SmartMoE, ThemisJoint
from themis.testing.ranks import run_ranks

STEPS = 100
#: Links over which a copy costs less than what a straggler computes.
FAST = Link(0.0, 1e12)
CASE = Case(
    config=MoEConfig(WIDTH, 8, 8, 2),
    topology=Topology(2, 2, FAST, FAST),
    policy=FasterMoE(),
    tokens_SD=[[9, 7, 0, 8]] * STEPS,
    random_owners=False,
    keep_steps=False,
    drift=12,
)
BASELINES: dict[str, Policy] = {
    "faster-moe": FasterMoE(),
    "smart-moe": SmartMoE(interval=5),
    "flex-moe": FlexMoE(interval=3, extra_slots=1),
    "eplb": EPLB(budget=1),
    "exact-load": ExactLoad(budget=1, min_tokens=1),
    "themis-joint": ThemisJoint(budget=1, reshard_interval=30),
}


@pytest.fixture(scope="module")
def alone() -> dict:
    return train_alone(CASE)


def train_all(rank: int, cases: list[Case]) -> list[dict]:
    return [train_on_rank(rank, case) for case in cases]


def changes(kept: list[list[Placement]]) -> Counter[str]:
    """How often a layer's experts changed owners, gained and lost replicas, from step to step."""
    count: Counter[str] = Counter()
    for before_L, after_L in pairwise(kept):
        for before, after in zip(before_L, after_L, strict=True):
            count["exchanges"] += int((before.owner_E != after.owner_E).sum())
            count["expansions"] += int((after.placement_ED & ~before.placement_ED).sum())
            count["shrinks"] += int((before.placement_ED & ~after.placement_ED).sum())
    return count


@pytest.fixture(scope="module")
def trained() -> dict[str, list[dict]]:
    """Each policy's results by rank; one start of ranks for all."""
    cases = [replace(CASE, policy=policy) for policy in BASELINES.values()]
    by_rank = run_ranks(4, train_all, cases, timeout_s=180.0)
    return {name: [results[i] for results in by_rank] for i, name in enumerate(BASELINES)}


@pytest.mark.parametrize("name", BASELINES)
def test_losses_and_parameters_are_those_of_one_process(name: str, trained: dict, alone: dict) -> None:
    case = replace(CASE, policy=BASELINES[name])
    assert_same(case, trained[name], alone, 1e-8)


def test_each_moved_what_its_rule_moves(trained: dict) -> None:
    moved = {name: changes(results[0]["kept"]) for name, results in trained.items()}
    assert moved["smart-moe"]["exchanges"] >= 5
    assert moved["flex-moe"]["expansions"] >= 10
    assert moved["flex-moe"]["shrinks"] >= 10
    for name in ("faster-moe", "eplb", "exact-load", "themis-joint"):
        assert moved[name].total() == 0 or name == "themis-joint", f"{name} keeps nothing"
        replicas = [np.sum(placed_L) - 16 for placed_L in trained[name][0]["placements"]]
        assert np.count_nonzero(replicas) > STEPS // 2, f"{name} replicates in most steps"
