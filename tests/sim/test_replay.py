"""Run directories are read as they are written, and refused in a line when they are not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from themis.core.errors import ConfigError
from themis.sim.efficiency import CLUSTERS
from themis.sim.replay import read_run, replay
from themis.train.config import PolicyConfig, save_config
from themis.train.recipes import recipe

CLUSTER = CLUSTERS["a"].of_nodes(1)


@pytest.fixture
def run(tmp_path):
    config = recipe("tiny")
    save_config(config, tmp_path / "config.json")
    tokens_ILED = np.random.default_rng(0).integers(20, 80, (12, 4, 8, 8)).astype(np.int32)
    np.savez(tmp_path / "routing.npz", tokens=tokens_ILED, iteration=np.arange(12))
    lines = [json.dumps({"step_s": 9.0 if step < 5 else 0.25}) for step in range(12)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_run_is_replayed_under_its_own_policy(run):
    recorded = read_run(run, CLUSTER)
    model = recorded.workload.model
    assert (model.width, model.num_layers, model.num_experts, model.top_k) == (128, 4, 8, 2)
    assert (model.element_bytes, recorded.workload.batch) == (4, 2)
    assert (recorded.policy.name, recorded.policy.replicas_per_device()) == ("themis", PolicyConfig().budget)
    assert recorded.step_s == 0.25
    told = replay(recorded)
    assert told.recorded_s == 0.25
    assert told.ratio == pytest.approx(told.result.iteration_s / 0.25)
    assert told.result.policy == "themis"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "cannot be read"),
        ("config.json", "[]", "is list; it must be a run's configuration"),
        ("config.json", "{}", "is no gpt run's configuration"),
        ("metrics.jsonl", '{"step_s": 1}\n', "has 1 steps; there must be more than 5"),
        ("metrics.jsonl", "{}\n" * 9, "cannot be read"),
        ("routing.npz", "", "cannot be read"),
    ],
)
def test_bad_runs_are_refused_in_a_line(run, name, content, message):
    (run / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_run(run, CLUSTER)
    assert "\n" not in str(caught.value)


def test_a_run_of_other_size_is_refused(run):
    with pytest.raises(ConfigError, match="had 8 ranks; cluster 'a' has 32 devices"):
        read_run(run, CLUSTERS["a"])
