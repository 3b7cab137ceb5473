"""Finds the MoE layers of a model, and the blocks in which their attention runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import nn

from themis.core.errors import ConfigError
from themis.moe.layer import MoELayer


@final
@dataclass(frozen=True)
class MoESite:
    """A layer under its name in the model; `block` is what starts before the layer's attention."""

    name: str
    layer: MoELayer
    block: nn.Module


def find_sites(model: nn.Module) -> list[MoESite]:
    """The MoE layers of `model`, in the order of its modules; ConfigError where there is none.

    A layer's block is its nearest ancestor that stands in an nn.ModuleList or nn.Sequential, as transformer blocks
    do; where there is none, the layer itself, and nothing is prefetched.
    """
    modules = dict(model.named_modules())
    sites = [
        MoESite(name, module, _block_of(name, modules))
        for name, module in modules.items()
        if isinstance(module, MoELayer)
    ]
    if not sites:
        raise ConfigError(
            f"the model ({type(model).__name__}) has no MoE layer; it needs at least one themis.moe.MoELayer"
        )
    counts = sorted({site.layer.experts.num_experts for site in sites})
    if len(counts) > 1:
        raise ConfigError(f"the model's MoE layers have {counts} experts; all must have the same number")
    return sites


def _block_of(name: str, modules: dict[str, nn.Module]) -> nn.Module:
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        parent = modules[".".join(parts[: depth - 1])]
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            return modules[".".join(parts[:depth])]
    return modules[name]
