"""Models that are made for Themis; any other model with MoE layers goes through themis.parallelize as well."""

from themis.models.gpt_moe import GPTMoE, GPTMoEConfig, GPTOutput

__all__ = ["GPTMoE", "GPTMoEConfig", "GPTOutput"]
