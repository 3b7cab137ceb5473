"""Every mixture-of-experts family of the installed transformers, built tiny, for tests of the experts adapter."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_LAYERS = 2
_EXPERTS = 8

#: What a configuration is given of the names it knows.
_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_experts_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "dense_intermediate_size": 40,
    "prefix_dense_intermediate_size": 40,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 8,
    "swa_head_dim": 8,
    "global_head_dim": 8,
    "vocab_size": 128,
    "unpadded_vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 64,
    "num_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "moe_num_experts": _EXPERTS,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "enable_moe_block": True,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "decoder_sparse_step": 1,
    "mlp_layer_types": ["sparse"] * _LAYERS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    "sliding_window": 4,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "output_router_logits": False,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

#: What a family needs besides.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "zaya": {"num_experts_per_tok": 1},
    "jamba": {"expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 1, "attn_layer_offset": 0,
              "use_mamba_kernels": False},
    "nemotron_h": {"num_hidden_layers": None, "layers_block_type": ["attention", "moe"] * 2},
    "muse_spark": {"moe_hidden_size": 20, "layer_rope_theta": [10000.0] * 2, "layer_types": ["full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["full_attention"] * 2},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [24, 24], "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    "glm4v_moe": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}},
    "hy_v4_vl": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "flint": {"mlp_only_layers": []},
    "granitemoehybrid": {"layer_types": ["full_attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 8},
    "unlimited_ocr": {"num_key_value_heads": 4},
    "deepseek_v4": {"mlp_layer_types": ["moe"] * 2, "num_key_value_heads": 1},
    "glm5_next": {"index_kpool": 2, "qk_rope_head_dim": 0, "head_dim": 0},
}  # fmt: skip


def _root() -> Path:
    import transformers

    assert transformers.__file__ is not None
    return Path(transformers.__file__).parent / "models"


def family_names() -> list[str]:
    """The names of all families: models whose file gives a class the experts interface."""
    return sorted(path.name for path in _root().iterdir() if _has_interface(path.name))


def _file(name: str) -> Path:
    return _root() / name / f"modeling_{name}.py"


def _has_interface(name: str) -> bool:
    file = _file(name)
    return file.is_file() and "\n@use_experts_implementation" in file.read_text(encoding="utf-8")


def _model_class(name: str) -> Any:
    """The class of `name` to build: the smallest one with a language-model head, else the text backbone."""
    file = _file(name)
    module = importlib.import_module(f"transformers.models.{name}.{file.stem}")
    found = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    for suffix in ("ForCausalLM", "TextModel", "Model", "ForConditionalGeneration"):
        for candidate in found:
            label = candidate.__name__
            if label.endswith(suffix) and "PreTrained" not in label and getattr(candidate, "config_class", None):
                return candidate
    raise ValueError(f"family {name}: no class to build in {file}")


def _config(name: str, config_class: Any) -> Any:
    known = set(inspect.signature(config_class.__init__).parameters)
    known |= {key for c in config_class.__mro__ for key in getattr(c, "__annotations__", {})}
    values = {key: value for key, value in _COMMON.items() if key in known or key in config_class.attribute_map}
    if "kv_lora_rank" in known:
        values["num_key_value_heads"] = values["num_attention_heads"]  # latent attention has no grouped heads
    values |= _OVERRIDES.get(name, {})
    values = {key: value for key, value in values.items() if value is not None or key not in _COMMON}
    return config_class(**values, attn_implementation="eager", experts_implementation="eager")


def _redraw(model: nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def normal(like: Tensor, std: float) -> Tensor:
        return torch.empty(like.shape).normal_(std=std, generator=draw).to(like.dtype)

    with torch.no_grad():
        for label, parameter in model.named_parameters():
            norm = parameter.dim() == 1 and label.endswith("weight") and "norm" in label
            parameter.copy_(normal(parameter, 0.05) + 1 if norm else normal(parameter, 0.1))
        for label, buffer in model.named_buffers():
            if buffer.is_floating_point() and re.search(r"bias|correction", label):
                buffer.copy_(normal(buffer, 0.02))


def build_tiny(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    """A model of family `name`, the same for the same seed: 2 layers, width 32, expert width 24, 8 experts, top 2.

    It is in training mode and deterministic; on the device "meta" it has no values. Raises ValueError, naming the
    family, where it cannot be built.
    """
    if not _has_interface(name):
        raise ValueError(f"family {name}: not one of {', '.join(family_names())}")
    try:
        builder = _model_class(name)
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            # transformers' own cast: parameters that a family declares float32 stay so (inkling2 relies on it).
            model: nn.Module = builder._from_config(_config(name, builder.config_class), dtype=dtype)
    except Exception as error:
        raise ValueError(f"family {name}: cannot be built tiny: {type(error).__name__}: {error}") from error
    if device != "meta":
        _redraw(model, seed)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def output_of(output: Any) -> Tensor:
    """The logits of a model's output, or its last hidden state where it has no head."""
    logits = getattr(output, "logits", None)
    result: Tensor = output.last_hidden_state if logits is None else logits
    return result
