"""Fully Sharded Sparse Data Parallelism for PyTorch models."""

from themis.fssdp.api import clip_grad_norm_, executor_of, expert_parameters, parallelize, step_report
from themis.fssdp.executor import Executor
from themis.fssdp.precision import MixedPrecision
from themis.fssdp.step_report import LayerReport

__all__ = [
    "Executor",
    "LayerReport",
    "MixedPrecision",
    "clip_grad_norm_",
    "executor_of",
    "expert_parameters",
    "parallelize",
    "step_report",
]
