"""Mixture-of-Experts layers out of exchangeable parts."""

from themis.moe.config import MoEConfig
from themis.moe.experts import Experts, GPTExperts, SwiGLUExperts
from themis.moe.gates import Gate
from themis.moe.layer import MoELayer, MoEOutput

__all__ = ["Experts", "GPTExperts", "Gate", "MoEConfig", "MoELayer", "MoEOutput", "SwiGLUExperts"]
