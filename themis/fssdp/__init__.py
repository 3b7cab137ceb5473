"""Fully Sharded Sparse Data Parallelism for PyTorch models."""

from themis.fssdp.api import clip_grad_norm_, executor_of, expert_parameters, parallelize, step_report
from themis.fssdp.executor import Executor
from themis.fssdp.precision import MixedPrecision
from themis.fssdp.step_report import LayerReport
from themis.fssdp.weights import FreshWeights, WeightSource

__all__ = [
    "Executor",
    "FreshWeights",
    "LayerReport",
    "MixedPrecision",
    "WeightSource",
    "clip_grad_norm_",
    "executor_of",
    "expert_parameters",
    "parallelize",
    "step_report",
]
