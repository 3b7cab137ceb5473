"""Shapes of models: parameters against the published numbers, times against arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from themis.core.errors import ConfigError
from themis.sim.efficiency import CLUSTERS
from themis.sim.workload import PAPER_MODELS, Workload, from_config, paper_model

PHI = {
    "hidden_size": 4096,
    "intermediate_size": 6400,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 32064,
}


def test_phi_as_published():
    shape = from_config(PHI, sequence=4096)
    total = shape.dense_parameters + shape.num_layers * shape.num_experts * shape.expert_parameters
    assert total == pytest.approx(41.9e9, rel=0.01)  # its model card
    # Section 2.3: one expert of each layer is 5 GB of parameters and 30.2 GB of optimizer state.
    assert shape.num_layers * shape.expert_bytes == pytest.approx(5.03e9, rel=0.01)
    assert shape.num_layers * shape.expert_parameters * 12 == pytest.approx(30.2e9, rel=0.01)


def test_deepseek_attention_as_published():
    shape = PAPER_MODELS["deepseek-v3"]
    assert shape.attention_parameters == pytest.approx(187.1e6, rel=0.01)  # counted from the released tensors
    assert shape.expert_parameters == 3 * 7168 * 2048
    assert shape.shared_hidden == 2048


def test_table_1():
    sizes = {
        "gpt-s-moe": (12, 12, 64, 2),
        "gpt-l-moe": (12, 12, 64, 2),
        "phi-3.5-moe": (4, 8, 32, 2),
        "qwen1.5-moe": (12, 24, 64, 4),
        "deepseek-v3": (2, 4, 128, 8),
    }
    for name, (layers_a, layers_b, experts, top_k) in sizes.items():
        for cluster, layers in ((CLUSTERS["a"], layers_a), (CLUSTERS["b"], layers_b)):
            shape = paper_model(name, cluster)
            assert (shape.num_layers, shape.num_experts, shape.top_k) == (layers, experts, top_k)
    assert paper_model("qwen1.5-moe", CLUSTERS["b"], top_k=2).top_k == 2
    assert paper_model("deepseek-v3", CLUSTERS["a"].of_nodes(8)).num_experts == 256


def test_experts_of_gpt_have_two_matrices():
    assert PAPER_MODELS["gpt-l-moe"].expert_parameters == 2 * 1536 * 6144
    assert PAPER_MODELS["qwen1.5-moe"].expert_parameters == 3 * 2048 * 1408


def test_times_by_hand():
    cluster = CLUSTERS["a"]
    shape = replace(PAPER_MODELS["gpt-s-moe"], attention_parameters=4 * 768 * 768, num_experts=64)
    work = Workload(shape, cluster, 2)
    assert work.tokens == 4096
    projections, scores = 2 * 4 * 768 * 768 * 4096, 4 * 768 * 4096 * 1024
    assert work.attention_s == pytest.approx((projections + scores) / cluster.device.flops_per_s)
    assert work.shared_s == 2 * 768 * 64 * 4096 / cluster.device.flops_per_s
    assert work.window_backward_s == 2 * work.window_s == 2 * (work.attention_s + work.shared_s)
    assert work.expert_s_per_token == 4 * 768 * 3072 / cluster.device.grouped_flops_per_s
    assert work.cost.expert_s_per_token == 3 * work.expert_s_per_token
    assert (work.cost.token_bytes, work.cost.expert_bytes) == (1536, 2 * 2 * 768 * 3072)
    assert work.counts_s == pytest.approx(cluster.inter.latency_s + 4 * 64 * 32 / cluster.inter.bytes_per_s)
    assert Workload(shape, replace(cluster, num_nodes=1, devices_per_node=1), 1).counts_s == 0.0


@pytest.mark.parametrize("missing", ["hidden_size", "num_local_experts", "num_experts_per_tok", "vocab_size"])
def test_a_config_that_is_no_moe_model(missing):
    with pytest.raises(ConfigError, match="the configuration has none of"):
        from_config({k: v for k, v in PHI.items() if k != missing}, sequence=16)


def test_nested_configs_are_read():
    assert from_config({"text_config": PHI, "model_type": "x"}, sequence=16) == from_config(PHI, sequence=16)


def test_bad_arguments():
    with pytest.raises(ConfigError, match="model 'gpt-5' is unknown; there are gpt-s-moe"):
        paper_model("gpt-5", CLUSTERS["a"])
    with pytest.raises(ConfigError, match="batch is 0"):
        Workload(PAPER_MODELS["gpt-s-moe"], CLUSTERS["a"], 0)
    with pytest.raises(ConfigError, match="top_k is 20; it must be at most num_experts"):
        replace(PAPER_MODELS["gpt-s-moe"], top_k=20)
