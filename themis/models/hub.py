"""Models from a local directory, each rank reading the dense part and the experts it owns, no more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from themis.core.errors import ConfigError, require
from themis.fssdp import WeightSource, parallelize
from themis.fssdp.adapters import MoESite
from themis.fssdp.weights import begin_initialisation
from themis.models.family import floating_type, model_of, require_transformers
from themis.models.model_directory import ModelDirectory
from themis.models.tensors import dense_tensors, stacked_shapes

if TYPE_CHECKING:
    from themis.models.conversion import ImportPlan, Target


def from_pretrained(
    path: str | Path, *, dtype: torch.dtype | str | None = None, drop: Sequence[str] = (), **options: Any
) -> nn.Module:
    """The transformers model of the local directory `path`, parallelized, in training mode; a collective.

    path: config.json and safetensors, in one file or many, with a tensor an expert or one for all; every rank must
    see it. dtype: the type of the parameters, by default the one that config.json names, or else that of the tensors;
    drop: shell-style patterns of tensors that are left out; options: those of `themis.parallelize`, such as `prepare`
    for adapters. A rank never holds more than its own part and one expert.
    ConfigError for a directory that is not whole or does not fit the model.
    """
    dtype = floating_type("dtype", dtype)
    weights = PretrainedWeights(path, drop=drop)
    model = model_of(Path(path), dtype, weights.dtype)
    return parallelize(model.train(), weights=weights, **options)


@final
class PretrainedWeights(WeightSource):
    """The values of a transformers model out of the local directory `path`; `drop`: patterns of tensors to leave out.

    For `themis.parallelize(model, weights=…)` of a model that was built on the meta device.
    """

    def __init__(self, path: str | Path, *, drop: Sequence[str] = ()) -> None:
        require_transformers()
        require(isinstance(path, str | Path), "path", path, "the path of a local model directory")
        self._directory = ModelDirectory(Path(path))
        self._drop = drop

    @property
    def dtype(self) -> torch.dtype:
        """The type of the directory's tensors: of the first floating-point one."""
        return self._directory.dtype

    @torch.no_grad()
    def fill(self, model: Any, sites: Sequence[MoESite]) -> None:
        """Read what this rank holds. ConfigError where a tensor is missing, has no slot or has another shape."""
        from themis.models.conversion import ImportPlan  # needs transformers, which is optional

        dense, stacks = dense_tensors(model, [site.name for site in sites]), stacked_shapes(sites)
        slots = {name: tuple(tensor.shape) for name, tensor in dense.items()} | stacks
        plan = ImportPlan(self._directory, model, slots, self._drop)
        filled = self._fill_dense(plan, [t for name, t in plan.targets.items() if name not in stacks], dense)
        for site in sites:
            filled |= self._fill_experts(plan, site)
        self._directory.close()
        missing = [n for n in slots if n not in filled and n not in getattr(model, "all_tied_weights_keys", {})]
        if missing:
            raise ConfigError(f"{str(self._directory.path)!r} lacks {missing[0]} ({len(missing)} such tensors)")
        for tensor in dense.values():
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        begin_initialisation(model, sites)  # what no directory holds, such as rotary frequencies
        model._weight_conversions = plan.used()
        # Directories may have tied tensors under each of their names; export gives back what was there.
        model._themis_tied = sorted(filled & set(getattr(model, "all_tied_weights_keys", {})))

    def _fill_dense(self, plan: ImportPlan, targets: list[Target], dense: dict[str, Tensor]) -> set[str]:
        filled: set[str] = set()
        first: dict[int, str] = {}
        for target in targets:
            for name, value in plan.read(target).items():
                slot = dense[name]
                other = first.setdefault(id(slot), name)
                if other != name and not torch.equal(slot, value.to(slot.dtype)):
                    raise ConfigError(
                        f"{str(self._directory.path)!r} has {other} and {name} with different values; by its "
                        "config.json they are one: drop one by name, or set tie_word_embeddings to false there"
                    )
                self._copy(name, slot, value)
                filled.add(name)
        return filled

    def _fill_experts(self, plan: ImportPlan, site: MoESite) -> set[str]:
        """Read each expert of `site` that is here; the names of the stacks that the directory has."""
        bank = site.layer.experts
        parameter_of = {f"{site.name}.{name}": name for name in bank.layout.shapes}
        targets = [target for name, target in plan.targets.items() if name in parameter_of]
        found = {target.name for target in targets} if bank.held else set(parameter_of)
        for e in bank.held:
            for target in targets:
                for name, value in plan.read_expert(target, e, bank.num_experts).items():
                    self._copy(name, bank.expert(e)[parameter_of[name]], value[0])
                    found.add(name)
        return found

    def _copy(self, name: str, slot: Tensor, value: Tensor) -> None:
        small = value.is_floating_point() and torch.finfo(value.dtype).bits < 16
        if small or value.is_floating_point() != slot.is_floating_point():
            raise ConfigError(
                f"{str(self._directory.path)!r} has {name} as {value.dtype}, a quantised form; give an unquantised copy"
            )
        if slot.shape != value.shape:
            raise ConfigError(
                f"{str(self._directory.path)!r} has {name} as {list(value.shape)}; by its config.json it would be "
                f"{list(slot.shape)}"
            )
        slot.copy_(value)
