"""Small transformers models, one a kind of experts, for tests: every flag of the experts interface is among them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from themis.core.errors import require

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}

_LOCAL = {"intermediate_size": 24, "num_local_experts": 8}
_PLAIN = {"intermediate_size": 24, "num_experts": 8}
_MIXED = {"moe_intermediate_size": 24, "intermediate_size": 40, "num_experts": 8}
_ROUTED = {
    "moe_intermediate_size": 24,
    "intermediate_size": 40,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

#: What each model type's configuration is given besides the common part. Experts' hidden width 24, model width 32.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": _LOCAL,
    "phimoe": {**_LOCAL, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "granitemoe": _LOCAL,
    "gpt_oss": _LOCAL,
    "openai_privacy_filter": _LOCAL,
    "minimax_m2": _LOCAL,
    "olmoe": _PLAIN,
    "flex_olmo": _PLAIN,
    "jamba": {**_PLAIN, "expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 1,
              "attn_layer_offset": 0, "use_mamba_kernels": False},
    "qwen2_moe": {**_MIXED, "shared_expert_intermediate_size": 40},
    "qwen3_moe": _MIXED,
    "ernie4_5_moe": {**_MIXED, "moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0},
    "hunyuan_v1_moe": {**_PLAIN, "moe_topk": 2},
    "lfm2_moe": {**_MIXED, "num_dense_layers": 0, "layer_types": ["full_attention"] * 2},
    "glm4_moe": _ROUTED,
    "aria_text": {**_LOCAL, "moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1},
    "deepseek_v2": {**_ROUTED, **_LATENT, "head_dim": 8},
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "nemotron_h": {**_ROUTED, "layers_block_type": ["attention", "moe"] * 2, "num_hidden_layers": 4,
                   "moe_shared_expert_intermediate_size": 40},
    "muse_spark_text": {**_MIXED, "num_local_experts": 8, "moe_hidden_size": 20, "layer_rope_theta": [10000.0] * 2,
                        "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["sparse"] * 2},
}  # fmt: skip


def build_tiny(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A causal language model of `family`, a key of FAMILIES, with random weights, the same for the same seed.

    Needs the extra `hf`. The router gets weights large enough that experts differ in load.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    require(family in FAMILIES, "family", family, f"one of {', '.join(FAMILIES)}")
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family]})
    headed = type(config) in AutoModelForCausalLM._model_mapping
    builder: Any = AutoModelForCausalLM if headed else AutoModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = builder.from_config(config)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.empty(parameter.shape).normal_(std=0.2, generator=draw))
            else:
                parameter.add_(torch.empty(parameter.shape).normal_(std=0.05, generator=draw))
    return model.to(dtype).train()


def output_of(output: Any) -> Tensor:
    """The logits of a model's output, or its last hidden state where it has no head."""
    result: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return result
