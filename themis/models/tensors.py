"""The tensors of a parallelized transformers model under the names and shapes that transformers gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from themis.fssdp.adapters import MoESite
from themis.moe.interface import BANK


def dense_tensors(model: nn.Module, experts: Iterable[str]) -> dict[str, Tensor]:
    """Parameters and saved buffers outside the modules `experts`, by name; shared ones under each of their names."""
    banks = tuple(f"{name}.{BANK}." for name in experts)
    return {name: t for name, t in model.state_dict(keep_vars=True).items() if not name.startswith(banks)}


def stacked_shapes(sites: Sequence[MoESite]) -> dict[str, tuple[int, ...]]:
    """Of each stack of all experts' parameters, as transformers has them: its name and shape [E, ...]."""
    return {
        f"{site.name}.{name}": (site.layer.experts.num_experts, *shape)
        for site in sites
        for name, shape in site.layer.experts.layout.shapes.items()
    }
