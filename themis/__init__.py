"""Themis: fast Mixture-of-Experts training under skewed routing, with Fully Sharded Sparse Data Parallelism.

The public names load on first use, so that the planners can be imported without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from themis.fssdp import FreshWeights, MixedPrecision, clip_grad_norm_, parallelize, step_report
    from themis.models.export import export
    from themis.models.hub import PretrainedWeights, from_pretrained
    from themis.policies import (
        EP,
        EPLB,
        ExactLoad,
        FasterMoE,
        FlexMoE,
        SmartMoE,
        Themis,
        ThemisJoint,
        ThemisRM,
        Uniform,
    )

_HOME = {
    "EP": "themis.policies",
    "EPLB": "themis.policies",
    "ExactLoad": "themis.policies",
    "FasterMoE": "themis.policies",
    "FlexMoE": "themis.policies",
    "FreshWeights": "themis.fssdp",
    "MixedPrecision": "themis.fssdp",
    "PretrainedWeights": "themis.models.hub",
    "SmartMoE": "themis.policies",
    "Themis": "themis.policies",
    "ThemisJoint": "themis.policies",
    "ThemisRM": "themis.policies",
    "Uniform": "themis.policies",
    "clip_grad_norm_": "themis.fssdp",
    "export": "themis.models.export",
    "from_pretrained": "themis.models.hub",
    "parallelize": "themis.fssdp",
    "step_report": "themis.fssdp",
}

__all__ = [
    "EP",
    "EPLB",
    "ExactLoad",
    "FasterMoE",
    "FlexMoE",
    "FreshWeights",
    "MixedPrecision",
    "PretrainedWeights",
    "SmartMoE",
    "Themis",
    "ThemisJoint",
    "ThemisRM",
    "Uniform",
    "__version__",
    "clip_grad_norm_",
    "export",
    "from_pretrained",
    "parallelize",
    "step_report",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'themis' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
