"""Estimated memory is measured memory."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from tests.train.harness import small_config, write_text
from themis.core.topology import Topology
from themis.fssdp import executor_of, expert_parameters
from themis.models import GPTMoE, GPTMoEConfig, TransformersConfig
from themis.testing.ranks import run_ranks
from themis.train.config import BatchConfig, OptimizerConfig, PolicyConfig
from themis.train.memory import count, rank_memory
from themis.train.optim import build_optimizer
from themis.train.ranks import Place
from themis.train.recipes import recipe
from themis.train.session import build_model

SHAPE = {"width": 16, "num_heads": 2, "num_layers": 3, "num_experts": 5, "expert_hidden": 24, "sequence_length": 8}
SHARED = {"shared_expert_intermediate_size": 20}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"experts": "swiglu", "bias": False},
        {"shared_hidden": 12, "router_noise": True},
        {"tie_embeddings": False, "bias": False},
        {"shared_hidden": 12, "experts": "swiglu"},
    ],
)
def test_parameters_are_counted(change):
    config = GPTMoEConfig(**{**SHAPE, **change})
    model = GPTMoE(config)
    assert count(config).total == sum(parameter.numel() for parameter in model.parameters())
    unused = {f".experts.{e}." for e in range(config.top_k, config.num_experts)}
    active = [p.numel() for name, p in model.named_parameters() if not any(part in name for part in unused)]
    assert count(config).active == sum(active)


def num_bytes(values) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in values)


def _measure(rank: int, config, world_size: int) -> dict[str, int]:
    """Two steps; memory of the replicas at the fullest moment, between a forward and its backward."""
    model = build_model(config, Place(rank, world_size, torch.device("cpu"), Topology(1, world_size)))
    executor = executor_of(model)
    optimizer = build_optimizer(model, OptimizerConfig())
    tokens_BS = torch.randint(0, 256, (8, config.model.sequence_length))
    fullest, freed = 0, []
    for _ in range(2):
        peaks: list[int] = []
        for layer in executor.layers:
            layer.recorders[:] = [lambda *_: peaks.append(executor.replica_bytes)]  # noqa: B023
        loss = model(tokens_BS, tokens_BS).loss
        assert loss is not None
        peaks.append(executor.replica_bytes)
        loss.backward()
        optimizer.step()
        fullest = max(peaks)
        freed.append(executor.replica_bytes)
    experts = expert_parameters(model)
    ids = {id(p) for p in experts}
    dense = [p for p in model.parameters() if id(p) not in ids]
    measured = {
        "dense_parameters_bytes": num_bytes(dense),
        "expert_parameters_bytes": num_bytes(experts),
        "dense_gradients_bytes": num_bytes(p.grad for p in dense),
        "expert_gradients_bytes": num_bytes(p.grad for p in experts),
        "optimizer_bytes": num_bytes(v for state in optimizer.state.values() for v in state.values()),
        "replicas_bytes": fullest,  # with the copies, which lie in the same buffers
    }
    assert freed == [0, 0]
    executor.close()
    return measured


@pytest.mark.parametrize("policy", ["ep", "themis", "themis-rm"])
@pytest.mark.parametrize("compute", ["full", "bf16"])
@pytest.mark.parametrize("family", [None, "qwen2_moe"])
def test_the_estimate_is_within_a_percent_of_what_ranks_hold(tmp_path, policy, compute, family):
    config = small_config(write_text(tmp_path), batch=BatchConfig(8, 1))
    model = config.model if family is None else TransformersConfig(family, **SHAPE, settings=SHARED)
    config = replace(
        config,
        model=replace(model, num_experts=5, num_layers=3),
        policy=PolicyConfig(name=policy, budget=2, overlap_degree=5, calibration=False),
        parallel=replace(config.parallel, dtype="float32", compute=compute),
    )
    for rank, measured in enumerate(run_ranks(2, _measure, config, 2)):
        estimate = asdict(rank_memory(config, 2, rank))
        estimate["replicas_bytes"] += estimate["copies_bytes"]
        for kind, number in measured.items():
            assert estimate[kind] == pytest.approx(number, rel=0.01), (rank, kind)


def test_themis_rm_needs_less_than_themis():
    config = recipe("gpt-l-moe")
    full = rank_memory(config, 32)
    freed = rank_memory(replace(config, policy=replace(config.policy, name="themis-rm")), 32)
    none = rank_memory(replace(config, policy=replace(config.policy, name="ep")), 32)
    assert none.replicas_bytes == 0 < freed.replicas_bytes < full.replicas_bytes
    assert full.total_bytes - full.replicas_bytes - full.copies_bytes == (
        freed.total_bytes - freed.replicas_bytes - freed.copies_bytes
    )


def test_sharding_dense_parameters_saves_its_share():
    config = recipe("gpt-s-moe")
    sharded = replace(config, parallel=replace(config.parallel, dense="fully_shard"))
    assert rank_memory(sharded, 8).dense_parameters_bytes == pytest.approx(
        rank_memory(config, 8).dense_parameters_bytes / 8, rel=1e-6
    )
    assert rank_memory(sharded, 8).buckets_bytes == 0
