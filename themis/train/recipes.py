"""Recipes: functions that return a full run configuration, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from themis.core.errors import ConfigError
from themis.models import GPTMoEConfig, TransformersConfig
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


def _family(name: str, model: TransformersConfig) -> RunConfig:
    """A model of section 5.1 on transformers' classes, as many layers as on its cluster A."""
    return RunConfig(
        name=name,
        steps=10_000,
        model=model,
        batch=BatchConfig(sequences=128),
        optimizer=OptimizerConfig(lr=3e-4, warmup_steps=500),
        parallel=ParallelConfig(compute="bf16"),
        checkpoint=CheckpointConfig(every=500),
        log=LogConfig(every=10, evaluate_every=500, routing_every=100),
    )


def _twin(base: RunConfig, model: TransformersConfig) -> RunConfig:
    """The same family small enough for two CPU cores, on the text and with the settings of `tiny`."""
    return replace(tiny(), name=f"{base.name}-tiny", steps=200, model=model)


def phi_3_5_moe() -> RunConfig:
    """Phi-3.5-MoE: width 4,096, 32 experts (one on each of 32 devices) of 6,400, K = 2."""
    model = TransformersConfig(
        model_type="phimoe",
        vocab_size=32_064,
        sequence_length=4096,
        width=4096,
        num_heads=32,
        num_layers=4,
        num_experts=32,
        top_k=2,
        expert_hidden=6400,
        settings={"num_key_value_heads": 8, "router_jitter_noise": 0.01, "attention_bias": True, "lm_head_bias": True},
    )
    return _family("phi-3.5-moe", model)


def phi_3_5_moe_tiny() -> RunConfig:
    """Phi-3.5-MoE's family with 8 experts of 200 and width 128."""
    model = TransformersConfig(
        model_type="phimoe",
        expert_hidden=200,
        settings={"num_key_value_heads": 2, "router_jitter_noise": 0.01, "attention_bias": True, "lm_head_bias": True},
    )
    return _twin(phi_3_5_moe(), model)


def qwen1_5_moe() -> RunConfig:
    """Qwen1.5-MoE: width 2,048, 64 experts (two a device) of 1,408 and a shared one of 5,632, K = 4."""
    model = TransformersConfig(
        model_type="qwen2_moe",
        vocab_size=151_936,
        sequence_length=4096,
        width=2048,
        num_heads=16,
        num_layers=12,
        num_experts=64,
        top_k=4,
        expert_hidden=1408,
        settings={"shared_expert_intermediate_size": 5632},
    )
    return _family("qwen1.5-moe", model)


def qwen1_5_moe_tiny() -> RunConfig:
    """Qwen1.5-MoE's family with 16 experts of 88, a shared one of 352, and width 128."""
    model = TransformersConfig(
        model_type="qwen2_moe",
        num_experts=16,
        top_k=4,
        expert_hidden=88,
        settings={"shared_expert_intermediate_size": 352},
    )
    return _twin(qwen1_5_moe(), model)


def deepseek_v3() -> RunConfig:
    """DeepSeek-V3: width 7,168, 128 experts (four a device) of 2,048 and a shared one, K = 8, balanced by biases."""
    model = TransformersConfig(
        model_type="deepseek_v3",
        vocab_size=129_280,
        sequence_length=4096,
        width=7168,
        num_heads=128,
        num_layers=2,
        num_experts=128,
        top_k=8,
        expert_hidden=2048,
        aux_loss_weight=0.0,
        bias_update_rate=0.001,
        settings={"first_k_dense_replace": 0, "n_group": 8, "topk_group": 4, "n_shared_experts": 1},
    )
    return _family("deepseek-v3", model)


def deepseek_v3_tiny() -> RunConfig:
    """DeepSeek-V3's family with 16 experts of 40, a shared one, latent attention and width 128."""
    model = TransformersConfig(
        model_type="deepseek_v3",
        num_experts=16,
        top_k=4,
        expert_hidden=40,
        aux_loss_weight=0.0,
        bias_update_rate=0.001,
        settings={
            "first_k_dense_replace": 0,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    )
    return _twin(deepseek_v3(), model)


def mixtral() -> RunConfig:
    """Mixtral 8x7B: width 4,096, 8 experts of 14,336, K = 2, 32 layers."""
    model = TransformersConfig(
        model_type="mixtral",
        vocab_size=32_000,
        sequence_length=4096,
        width=4096,
        num_heads=32,
        num_layers=32,
        num_experts=8,
        top_k=2,
        expert_hidden=14_336,
        settings={"num_key_value_heads": 8},
    )
    return _family("mixtral", model)


def mixtral_tiny() -> RunConfig:
    """Mixtral's family with 8 experts of 256 and width 128."""
    return _twin(mixtral(), TransformersConfig(model_type="mixtral", settings={"num_key_value_heads": 2}))


RECIPES: Mapping[str, Callable[[], RunConfig]] = {
    "tiny": tiny,
    "gpt-s-moe": gpt_s_moe,
    "gpt-l-moe": gpt_l_moe,
    "phi-3.5-moe": phi_3_5_moe,
    "phi-3.5-moe-tiny": phi_3_5_moe_tiny,
    "qwen1.5-moe": qwen1_5_moe,
    "qwen1.5-moe-tiny": qwen1_5_moe_tiny,
    "deepseek-v3": deepseek_v3,
    "deepseek-v3-tiny": deepseek_v3_tiny,
    "mixtral": mixtral,
    "mixtral-tiny": mixtral_tiny,
}


def recipe(name: str) -> RunConfig:
    """The configuration of recipe `name`; ConfigError where there is none of that name."""
    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r} is unknown; there are {', '.join(RECIPES)}")
    return RECIPES[name]()


def list_recipes() -> str:
    """A line a recipe: its name and what it is."""
    width = max(map(len, RECIPES))
    return "\n".join(f"  {name:<{width}}  {_first_line(make)}" for name, make in RECIPES.items())


def _first_line(make: Callable[[], RunConfig]) -> str:
    return (make.__doc__ or "").partition("\n")[0]
