"""A run that takes a second: its configuration, its data, and how to run it on forked ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from themis.core.topology import Topology
from themis.models import GPTMoEConfig
from themis.testing.ranks import run_ranks
from themis.train.config import (
    BatchConfig,
    CheckpointConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    RunConfig,
)
from themis.train.data import DataConfig
from themis.train.observer import Silent
from themis.train.ranks import Place
from themis.train.session import run


def write_text(directory: Path) -> Path:
    """A text with structure enough to be learned from."""
    path = directory / "text.txt"
    path.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}.\n" for n in range(400)))
    return path


def small_config(source: Path | str, **changes: Any) -> RunConfig:
    """Two layers, four experts, float64, deterministic plans."""
    config = RunConfig(
        name="small",
        steps=8,
        model=GPTMoEConfig(sequence_length=16, width=16, num_heads=2, num_layers=2, num_experts=4, expert_hidden=24),
        data=DataConfig(source=str(source), held_out=0.1),
        batch=BatchConfig(sequences=8, accumulation=2),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2),
        policy=PolicyConfig(budget=1, overlap_degree=2, reshard_interval=3, calibration=False),
        parallel=ParallelConfig(dtype="float64"),
        checkpoint=CheckpointConfig(every=4, keep=5),
        log=LogConfig(evaluate_every=4, evaluate_sequences=5, routing_every=2, sample_tokens=3, tensorboard=False),
    )
    return replace(config, **changes)


def train_on_ranks(world_size: int, config: RunConfig, run_dir: Path, *, resume: bool = False) -> list[dict[str, Any]]:
    """Run to the end on forked ranks; the lines of metrics.jsonl."""
    run_dir.mkdir(parents=True, exist_ok=True)
    run_ranks(world_size, _train, world_size, config, run_dir, resume, timeout_s=60.0)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _train(rank: int, world_size: int, config: RunConfig, run_dir: Path, resume: bool) -> None:
    place = Place(rank, world_size, torch.device("cpu"), Topology(1, world_size))
    run(config, run_dir, place, Silent(), resume=resume)
