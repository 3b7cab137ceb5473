"""What counts as an iteration and as a load: one observation a step, whatever happens inside it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.fssdp.harness import WIDTH, Case, assert_same, scripted, train_alone, train_on_rank
from themis.core.topology import Topology
from themis.moe import MoEConfig
from themis.policies import EP, Policy, Themis, ThemisJoint, ThemisRM
from themis.testing.ranks import run_ranks

CASE = Case(
    config=MoEConfig(WIDTH, 8, 5, 2),
    topology=Topology(1, 2),
    policy=scripted(2),
    tokens_SD=[[5, 3], [4, 0], [1, 6], [2, 2]],
)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("checkpointing", ["none", "plain", "reentrant"])
def test_loads_are_counted_once(accumulate: int, checkpointing: str) -> None:
    case = dataclasses.replace(CASE, accumulate=accumulate, checkpointing=checkpointing, evaluate=True)
    for result in run_ranks(2, train_on_rank, case):
        assert result["iteration"] == 4 // accumulate
        history = np.array(result["observed"]["loads"])
        per_step = np.array(case.tokens_SD).sum(axis=1).reshape(-1, accumulate).sum(axis=1) * 2
        np.testing.assert_array_equal(history.sum(axis=-1), np.stack([per_step, per_step], axis=1))


STEPS = 200
LONG = dataclasses.replace(
    CASE,
    config=MoEConfig(WIDTH, 8, 8, 2),
    topology=Topology(2, 2),
    tokens_SD=[[6, 6, 6, 6]] * STEPS,
    random_owners=False,
    keep_steps=False,
    bias_LE=[[2.0, 1.0, 0, 0, 0, 0, 0, -1.0]] * 2,
)


POLICIES = {
    "ep": EP(),
    "themis": Themis(2, 3, 10),
    "themis-rm": ThemisRM(2, 3, 10),
    "themis-joint": ThemisJoint(2, 10, estimates=100),
}


@pytest.mark.parametrize("topology", [Topology(1, 1), LONG.topology], ids=["1 rank", "4 ranks"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_two_hundred_steps(policy: Policy, topology: Topology) -> None:
    case = dataclasses.replace(LONG, policy=policy, topology=topology)
    ranks = run_ranks(topology.num_devices, train_on_rank, case)
    assert_same(case, ranks, train_alone(case), 1e-8)


def test_two_hundred_steps_in_float32() -> None:
    case = dataclasses.replace(LONG, dtype=torch.float32)
    alone = np.array(train_alone(case)["losses"])
    for policy in POLICIES.values():
        ranks = run_ranks(4, train_on_rank, dataclasses.replace(case, policy=policy))
        np.testing.assert_allclose(np.mean([r["losses"] for r in ranks], axis=0), alone, rtol=1e-3)
