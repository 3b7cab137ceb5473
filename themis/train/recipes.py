"""Recipes: functions that return a full run configuration, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from themis.core.errors import ConfigError
from themis.models import GPTMoEConfig
from themis.train.config import (
    BatchConfig,
    CheckpointConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    RunConfig,
)


def tiny() -> RunConfig:
    """A byte-level model that two CPU cores train in minutes, on the Python standard library's sources."""
    return RunConfig(
        name="tiny",
        steps=400,
        model=GPTMoEConfig(
            vocab_size=256,
            sequence_length=128,
            width=128,
            num_heads=4,
            num_layers=4,
            num_experts=8,
            top_k=2,
            expert_hidden=256,
        ),
        batch=BatchConfig(sequences=16),
        optimizer=OptimizerConfig(lr=2e-3, warmup_steps=20),
        policy=PolicyConfig(reshard_interval=100, dispatch_rule="balanced"),
        parallel=ParallelConfig(intra_bytes_per_s=2e9, inter_bytes_per_s=1e9),
        checkpoint=CheckpointConfig(every=100),
        log=LogConfig(evaluate_every=100, evaluate_sequences=64, routing_every=10, sample_tokens=160),
    )


def _paper(name: str, width: int, expert_hidden: int, num_heads: int) -> RunConfig:
    """The GPT models of section 5.1: 12 layers, 64 experts on 32 devices, K = 2, sequences of 2,048."""
    return RunConfig(
        name=name,
        steps=10_000,
        model=GPTMoEConfig(
            vocab_size=50_304,
            sequence_length=2048,
            width=width,
            num_heads=num_heads,
            num_layers=12,
            num_experts=64,
            top_k=2,
            expert_hidden=expert_hidden,
        ),
        batch=BatchConfig(sequences=128),
        optimizer=OptimizerConfig(lr=3e-4, warmup_steps=500),
        parallel=ParallelConfig(compute="bf16"),
        checkpoint=CheckpointConfig(every=500),
        log=LogConfig(every=10, evaluate_every=500, routing_every=100),
    )


def gpt_s_moe() -> RunConfig:
    """GPT-S-MoE of the paper: width 768, expert hidden width 3,072."""
    return _paper("gpt-s-moe", width=768, expert_hidden=3072, num_heads=12)


def gpt_l_moe() -> RunConfig:
    """GPT-L-MoE of the paper: width 1,536, expert hidden width 6,144."""
    return _paper("gpt-l-moe", width=1536, expert_hidden=6144, num_heads=16)


RECIPES: Mapping[str, Callable[[], RunConfig]] = {"tiny": tiny, "gpt-s-moe": gpt_s_moe, "gpt-l-moe": gpt_l_moe}


def recipe(name: str) -> RunConfig:
    """The configuration of recipe `name`; ConfigError where there is none of that name."""
    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r} is unknown; there are {', '.join(RECIPES)}")
    return RECIPES[name]()
