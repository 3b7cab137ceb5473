"""Models that `themis train` knows; any other model with MoE layers goes through themis.parallelize as well."""

from themis.models.build import LanguageModel, ModelConfig, build
from themis.models.gpt_moe import GPTMoE, GPTMoEConfig
from themis.models.output import LMOutput
from themis.models.transformers_config import TransformersConfig
from themis.models.transformers_lm import TransformersLM

__all__ = [
    "GPTMoE",
    "GPTMoEConfig",
    "LMOutput",
    "LanguageModel",
    "ModelConfig",
    "TransformersConfig",
    "TransformersLM",
    "build",
]
