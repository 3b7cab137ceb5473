"""The tensors of a parallelized transformers model under the names and shapes that transformers gives them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from themis.fssdp.adapters import MoESite
from themis.moe.interface import BANK


def dense_tensors(model: nn.Module, sites: Sequence[MoESite]) -> dict[str, Tensor]:
    """Parameters and saved buffers outside the experts of `sites`, by name; shared ones under each of their names."""
    banks = tuple(f"{site.name}.{BANK}." for site in sites)
    return {name: t for name, t in model.state_dict(keep_vars=True).items() if not name.startswith(banks)}


def stacked_shapes(sites: Sequence[MoESite]) -> dict[str, tuple[int, ...]]:
    """Of each stack of all experts' parameters, as transformers has them: its name and shape [E, ...]."""
    return {
        f"{site.name}.{name}": (site.layer.experts.num_experts, *shape)
        for site in sites
        for name, shape in site.layer.experts.layout.shapes.items()
    }
