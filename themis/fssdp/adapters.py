"""Finds the MoE layers of a model, and the blocks in which their attention runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import nn

from themis.core.errors import ConfigError
from themis.moe.dispatch import DispatchedLayer
from themis.moe.interface import InterfaceLayer, is_interface_experts
from themis.moe.layer import MoELayer


@final
@dataclass(frozen=True)
class MoESite:
    """A layer under its name in the model; `block` is what starts before the layer's attention, None where unknown."""

    name: str
    layer: DispatchedLayer
    block: nn.Module | None


def find_sites(model: nn.Module) -> list[MoESite]:
    """The MoE layers of `model`, in the order of its modules, Themis' own and those of transformers.

    A layer's block is its nearest ancestor that stands in an nn.ModuleList or nn.Sequential, as transformer blocks
    do; where there is none, nothing is prefetched. ConfigError where the model has no MoE layer that Themis can
    express, or layers of different numbers of experts. Nothing is changed yet.
    """
    modules = dict(model.named_modules())
    sites = []
    for name, module in modules.items():
        layer = _layer_of(name, module)
        if layer is not None:
            sites.append(MoESite(name, layer, _block_of(name, modules)))
    if not sites:
        raise ConfigError(f"the model ({type(model).__name__}) has no MoE layer; {_advice(modules)}")
    counts = sorted({site.layer.experts.num_experts for site in sites})
    if len(counts) > 1:
        raise ConfigError(f"the model's MoE layers have {counts} experts; all must have the same number")
    return sites


def _layer_of(name: str, module: nn.Module) -> DispatchedLayer | None:
    if isinstance(module, MoELayer):
        return module
    return InterfaceLayer(name, module) if is_interface_experts(module) else None


def _advice(modules: dict[str, nn.Module]) -> str:
    """What to say of a model without sites: whether it has experts of a kind that is not supported."""
    for name, module in modules.items():
        kind = type(module).__name__
        if any(word in kind.lower() for word in ("moe", "experts", "sparsemlp")):
            return (
                f"{name or 'the model'!r} ({kind}) does not compute its experts through transformers' experts "
                "interface (use_experts_implementation), the only form of foreign experts that is supported"
            )
    return "it needs at least one themis.moe.MoELayer, or a transformers Mixture-of-Experts model"


def _block_of(name: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        parent = modules[".".join(parts[: depth - 1])]
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            return modules[".".join(parts[:depth])]
    return None
