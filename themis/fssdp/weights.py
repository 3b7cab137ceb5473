"""Where the values of a model come from that was built on the meta device: it gets only the memory it needs here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor, nn

from themis.core.errors import ConfigError
from themis.fssdp.adapters import MoESite
from themis.moe.interface import InterfaceLayer


class WeightSource(ABC):
    """Gives a model its values."""

    @abstractmethod
    def fill(self, model: nn.Module, sites: Sequence[MoESite]) -> None:
        """Write every parameter and buffer of `model`: they have memory but no values yet.

        Of the experts of `sites` only those are there that this rank owns. Not a collective.
        """


@final
class FreshWeights(WeightSource):
    """The model's own initialisation, `model.initialize_weights()`, which every transformers model has.

    It draws from torch's global random stream: with the same seed on every rank, values do not depend on the number
    of ranks. One layer's experts exist whole at a time.
    """

    def fill(self, model: nn.Module, sites: Sequence[MoESite]) -> None:
        """Dense part first, then layer by layer the experts. ConfigError where the model has no such method."""
        begin_initialisation(model, sites)
        for site in sites:
            if isinstance(site.layer, InterfaceLayer):
                _draw_experts(site.name, site.layer, model)


def _draw_experts(name: str, layer: InterfaceLayer, model: nn.Module) -> None:
    """Have the family initialise the layer's experts; some do so with the experts' module, others with its parent."""
    family = _family_of(name, model)
    device = next(model.parameters()).device
    for module in (model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])):
        if layer.initialise(lambda: family._init_weights(module), device):  # noqa: B023 - called at once
            return
    raise ConfigError(f"the model's initialize_weights() leaves the experts {name!r} without values")


def begin_initialisation(model: nn.Module, sites: Sequence[MoESite]) -> None:
    """Run the model's own initialisation on all but foreign experts; tensors marked as initialised keep their values.

    transformers marks what has values, modules and tensors alike, by `_is_hf_initialized`. A model built on the meta
    device went through initialisation without effect, so its modules are marked anew: those whose tensors all have
    values, for some families write to tensors without a look at their marks.
    """
    initialise: Callable[[], None] | None = getattr(model, "initialize_weights", None)
    if initialise is None:
        raise ConfigError(
            f"the model ({type(model).__name__}) is on the meta device and has no initialize_weights(); give "
            "themis.parallelize a source of values, weights=…, or a model that has its values"
        )
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        done = bool(tensors) and all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors)
        module._is_hf_initialized = done  # type: ignore[assignment]
    with ExitStack() as stack:
        for site in sites:
            if isinstance(site.layer, InterfaceLayer):
                stack.enter_context(site.layer.masked())
        initialise()


def is_meta(model: nn.Module) -> bool:
    """Whether all parameters of `model` are on the meta device; ConfigError where only some of them are."""
    names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if names and len(names) < len(list(model.parameters())):
        raise ConfigError(
            f"the model has {names[0]!r} on the meta device and other parameters elsewhere; build all of it there, "
            "or give all of it memory and values"
        )
    return bool(names)


def give_values(model: nn.Module, sites: Sequence[MoESite], device: torch.device, weights: WeightSource) -> None:
    """Give every tensor of `model` memory on `device` and its values from `weights`; ConfigError where one has none."""
    _materialise(model, device)
    weights.fill(model, sites)
    _require_values(model, type(weights).__name__)


@torch.no_grad()
def _materialise(model: nn.Module, device: torch.device) -> None:
    """Give every parameter and buffer on the meta device memory on `device`, NaN at first; shared ones stay shared."""
    made: dict[int, Any] = {}

    def on_device(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            new = torch.empty_like(tensor, device=device)
            if new.is_floating_point():
                new.fill_(torch.nan)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = on_device(tensor)


def _require_values(model: nn.Module, source: str) -> None:
    """ConfigError where a tensor of `model` is still without values."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ConfigError(
                f"{name} of the model ({type(model).__name__}) was given no value, or NaN, by its {source}; give one "
                "that has it, or build the model with its values rather than on the meta device"
            )


def _family_of(name: str, model: nn.Module) -> Any:
    """The innermost module around `name` that knows how to initialise its parts."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        module = model.get_submodule(".".join(parts[:depth]))
        if hasattr(module, "_init_weights"):
            return module
    raise ConfigError(f"the experts {name!r} stand in no transformers model, so nothing says how to initialise them")
