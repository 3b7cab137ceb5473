"""A model from its configuration, on the meta device."""

from __future__ import annotations

import torch

from themis.models.gpt_moe import GPTMoE, GPTMoEConfig
from themis.models.transformers_config import TransformersConfig
from themis.models.transformers_lm import TransformersLM

ModelConfig = GPTMoEConfig | TransformersConfig
LanguageModel = GPTMoE | TransformersLM


def build(config: ModelConfig, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """The model that `config` describes, its parameters of type `dtype`; memory and values come by parallelize."""
    if isinstance(config, TransformersConfig):
        return TransformersLM(config, dtype)
    with torch.device("meta"):
        return GPTMoE(config).to(dtype)
