"""Whole runs of transformers' families: the same on any number of ranks, the same after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.train.harness import small_config, train_on_ranks, write_text
from tests.train.test_session import losses, resumed
from themis.models import TransformersConfig
from themis.train.config import BatchConfig, PolicyConfig, RunConfig

pytest.importorskip("transformers")

SMALL = {
    "sequence_length": 16,
    "width": 16,
    "num_heads": 2,
    "num_layers": 2,
    "num_experts": 6,
    "expert_hidden": 12,
    "z_loss_weight": 0.01,
    "aux_loss_weight": 0.1,
}
QWEN = TransformersConfig(model_type="qwen2_moe", **SMALL, settings={"shared_expert_intermediate_size": 20})
#: Latent attention, routers in float32, balanced by biases.
DEEPSEEK = TransformersConfig(
    model_type="deepseek_v3",
    **SMALL,
    bias_update_rate=0.01,
    settings={
        "first_k_dense_replace": 0,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
)
#: Its router draws experts at random; without jitter it takes the largest.
PHI = TransformersConfig(model_type="phimoe", **SMALL, settings={"attention_bias": True, "router_jitter_noise": 0.0})
#: Norms and softmax compute in float32 whatever the model's type, so that the order of additions shows.
RTOL = {"qwen2_moe": 1e-6, "deepseek_v3": 1e-5, "phimoe": 1e-9}


def _config(directory: Path, model: TransformersConfig, **changes: Any) -> RunConfig:
    return small_config(directory / "text.txt", model=model, **changes)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """One process, no replicas."""
    directory = tmp_path_factory.mktemp("families")
    write_text(directory)
    runs = {}
    for model in (QWEN, DEEPSEEK, PHI):
        config = _config(directory, model, policy=PolicyConfig(name="ep"))
        runs[model.model_type] = train_on_ranks(1, config, directory / model.model_type)
    return directory, runs


def _change(config: RunConfig, how: str) -> RunConfig:
    if how == "fully_shard":
        return replace(config, parallel=replace(config.parallel, dense="fully_shard"))
    if how == "checkpoint_blocks":
        return replace(config, model=replace(config.model, checkpoint_blocks=True))
    return replace(config, policy=replace(config.policy, name=how))


@pytest.mark.parametrize(
    ("model", "world_size", "how"),
    [
        (QWEN, 3, "themis"),
        (QWEN, 2, "themis-rm"),
        (QWEN, 2, "fully_shard"),
        (QWEN, 2, "checkpoint_blocks"),
        (DEEPSEEK, 2, "themis"),
        (DEEPSEEK, 2, "fully_shard"),
        (PHI, 2, "checkpoint_blocks"),
    ],
)
def test_losses_do_not_depend_on_how_it_runs(
    reference: Any, tmp_path: Path, model: TransformersConfig, world_size: int, how: str
) -> None:
    directory, expected = reference
    lines = train_on_ranks(world_size, _change(_config(directory, model), how), tmp_path / "run")
    np.testing.assert_allclose(losses(lines), losses(expected[model.model_type]), rtol=RTOL[model.model_type])


@pytest.mark.parametrize("checkpoint_blocks", [False, True])
def test_more_ranks_than_sequences(reference: Any, tmp_path: Path, checkpoint_blocks: bool) -> None:
    """A rank without a sequence takes part in every exchange, and counts nowhere."""
    directory, _ = reference
    model = replace(QWEN, checkpoint_blocks=checkpoint_blocks)
    config = _config(directory, model, batch=BatchConfig(sequences=3, accumulation=2), steps=3)
    one = train_on_ranks(1, config, tmp_path / "one")
    four = train_on_ranks(4, config, tmp_path / "four")
    np.testing.assert_allclose(losses(four), losses(one), rtol=1e-6)


def _biases(run_dir: Path, step: int) -> list[torch.Tensor]:
    found = {}
    for file in (run_dir / f"checkpoints/step-{step:06d}").glob("*.safetensors"):
        found |= {name: t for name, t in load_file(file).items() if name.endswith("e_score_correction_bias")}
    return [found[name] for name in sorted(found)]


def test_router_biases_move_against_the_loads_and_resume(reference: Any, tmp_path: Path) -> None:
    directory, _ = reference
    config = _config(directory, DEEPSEEK)
    alone = _biases(directory / "deepseek_v3", 8)
    assert len(alone) == 2
    for bias_E in alone:
        assert bias_E.abs().max() > 0
        steps_E = bias_E / DEEPSEEK.bias_update_rate
        assert (steps_E - steps_E.round()).abs().max() < 1e-4
        assert steps_E.abs().max() <= 8
    whole = train_on_ranks(2, config, tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(_biases(tmp_path / "whole", 8), alone, strict=True))
    again = resumed(tmp_path / "whole", tmp_path / "again", 2, config, 4)
    np.testing.assert_array_equal(losses(again), losses(whole))
    other = resumed(tmp_path / "whole", tmp_path / "other", 3, config, 4)
    np.testing.assert_allclose(losses(other), losses(whole), rtol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(_biases(tmp_path / "other", 8), alone, strict=True))


def test_bf16_trains(reference: Any, tmp_path: Path) -> None:
    directory, _ = reference
    config = _config(directory, QWEN)
    config = replace(config, parallel=replace(config.parallel, dtype="float32", compute="bf16"), steps=12)
    lines = train_on_ranks(2, config, tmp_path / "run")
    assert lines[-1]["cross_entropy"] < lines[0]["cross_entropy"]
