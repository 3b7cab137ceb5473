"""Replicas cost neither optimizer state nor lasting memory."""

from __future__ import annotations

import gc
import weakref

import torch

import themis
from tests.fssdp.harness import WIDTH, Case, build, make_tokens, scripted
from themis.core.topology import Topology
from themis.fssdp import executor_of, expert_parameters
from themis.moe import MoEConfig
from themis.testing.models import rank_loss
from themis.testing.ranks import run_ranks

LAYERS, EXPERTS = 5, 4


def _case(rematerialize: bool) -> Case:
    policy = scripted(1, density=1.0, rematerialize_replicas=rematerialize, reshard_every=0)
    config = MoEConfig(WIDTH, 8, EXPERTS, 2)
    return Case(config=config, policy=policy, num_layers=LAYERS, topology=Topology(1, 2), tokens_SD=[[5, 4]] * 2)


def _peak_layers(rank: int, rematerialize: bool) -> tuple[float, int, int, int]:
    """The most replicas held at once, in layers' worth; after each step; owned elements; optimizer's elements."""
    case = _case(rematerialize)
    model = themis.parallelize(build(case), case.topology, policy=case.policy)
    executor = executor_of(model)
    held: list[int] = []
    for layer in executor.layers:
        layer.recorders.append(lambda *_: held.append(executor.replica_bytes))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(2):
        output_TM, losses = model(make_tokens(case, step, rank))
        held.append(executor.replica_bytes)
        (rank_loss(output_TM) + losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    del output_TM, losses
    per_layer = executor.layers[0].shard.expert_bytes * EXPERTS // 2
    moments = sum(s["exp_avg"].numel() for s in optimizer.state.values())
    trained = sum(p.numel() for p in model.parameters())
    result = max(held) / per_layer, executor.replica_bytes, trained, moments
    executor.close()
    return result


def test_themis_holds_all_layers_and_nothing_after_the_step() -> None:
    for peak, after, trained, moments in run_ranks(2, _peak_layers, False):
        assert peak == LAYERS
        assert after == 0
        assert trained == moments, "optimizer state is kept for owned and dense parameters alone"


def test_rm_holds_at_most_two_layers() -> None:
    for peak, after, trained, moments in run_ranks(2, _peak_layers, True):
        assert peak == 2
        assert after == 0
        assert trained == moments


def _forget_model(rank: int) -> bool:
    case = _case(False)
    model = themis.parallelize(build(case), case.topology, policy=case.policy)
    ref = weakref.ref(model)
    executor_of(model).close()
    del model
    gc.collect()
    return ref() is None


def test_nothing_outlives_the_model() -> None:
    assert run_ranks(2, _forget_model) == [True, True]


def _expert_elements(rank: int) -> tuple[int, int]:
    case = _case(False)
    model = themis.parallelize(build(case), case.topology, policy=case.policy)
    executor = executor_of(model)
    numbers = sum(p.numel() for p in expert_parameters(model)), executor.layers[0].shard.layout.numel
    executor.close()
    return numbers


def test_owned_parameters_lie_in_their_chunks() -> None:
    for owned, chunk in run_ranks(2, _expert_elements):
        experts = LAYERS * EXPERTS // 2
        assert owned == experts * (2 * WIDTH * 8 + 8 + WIDTH)
        assert chunk == 2 * WIDTH * 8 + 8 + 16
