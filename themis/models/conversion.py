"""Between a model directory's tensors and a model's: transformers' own conversions, for one expert at a time.

transformers keeps, for every family, rules that rename a directory's tensors and stack, concatenate or transpose them
into the model's. They treat the experts alike, along the first dimension, so what they make of one expert's tensors
is that expert's part of the stack; and each expert can be read by itself, by its owner alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from themis.core.errors import ConfigError
from themis.models.family import reason
from themis.models.model_directory import ModelDirectory
from themis.models.slots import matching


@final
@dataclass(frozen=True)
class Target:
    """A tensor of the model, or several of which `name` is the first, and the directory's that make it, by pattern.

    `rule` is None where the directory's tensor is the model's as it is.
    """

    name: str
    rule: Any
    keys_of: dict[str, list[str]] = field(default_factory=dict)

    def convert(self, tensors_of: dict[str, list[Tensor]], model: Any) -> dict[str, Tensor]:
        """The model's tensors by name, made of the directory's, [...] each or a list of them, by rule."""
        if self.rule is None:
            ((tensor,),) = tensors_of.values()
            return {self.name: tensor}
        rule = deepcopy(self.rule)
        for pattern, tensors in tensors_of.items():
            for key, tensor in zip(self.keys_of[pattern], tensors, strict=False):
                rule.add_tensor(self.name, key, pattern, tensor)
        try:
            made = rule.convert(self.name, model=model, config=model.config)
        except Exception as error:  # torch's, of shapes that do not go together, and the rules' own
            keys = next(iter(self.keys_of.values()))
            raise ConfigError(f"the tensors like {keys[0]!r} do not make {self.name}: {reason(error)}") from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@final
class ImportPlan:
    """Which tensors of `directory` make which tensor of `model`, whose tensors are `slots`.

    ConfigError for a tensor of the directory that the model has no slot for, unless the family ignores it or a
    pattern of `drop` matches it.
    """

    def __init__(
        self, directory: ModelDirectory, model: Any, slots: Mapping[str, tuple[int, ...]], drop: Sequence[str] = ()
    ) -> None:
        self.directory = directory
        self.model = model
        self._slots = dict(slots)
        self._rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in self._rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in self._rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self.targets: dict[str, Target] = {}
        dropped = matching(drop, directory.keys, f"{str(directory.path)!r} has")
        for key in sorted(set(directory.keys) - dropped, key=dot_natural_key):
            self._enter(key)

    def _enter(self, key: str) -> None:
        prefix = self.model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._slots)
        if name not in self._slots and key in self._slots:
            name, pattern = key, None
        if name not in self._slots:
            if not _is_ignored(key, self.model):
                raise ConfigError(
                    f"{str(self.directory.path)!r} has {key!r}, for which a {type(self.model).__name__} has no slot; "
                    "drop it by name if it is not wanted"
                )
            return
        rule = self._by_pattern[pattern] if pattern is not None else None
        target = self.targets.setdefault(name, Target(name, rule))
        if rule is None and target.keys_of:
            (other,) = target.keys_of
            raise ConfigError(
                f"{str(self.directory.path)!r} has both {other!r} and {key!r} for {name}; drop one by name"
            )
        target.keys_of.setdefault(pattern or key, []).append(key)

    def used(self) -> list[Any]:
        """The rules that some tensor of the directory came under: what export has to undo."""
        return [rule for rule in self._rules if rule.was_used()]

    def read(self, target: Target) -> dict[str, Tensor]:
        """The whole of `target`, by name."""
        tensors_of = {pattern: [self.directory.read(key) for key in keys] for pattern, keys in target.keys_of.items()}
        return target.convert(tensors_of, self.model)

    def read_expert(self, target: Target, e: int, num_experts: int) -> dict[str, Tensor]:
        """The part of expert `e`, [1, ...], in the stacked tensors of `target`, by name."""
        tensors_of = {}
        for pattern, keys in target.keys_of.items():
            if len(keys) == num_experts and (num_experts == 1 or str(e) in keys[e].split(".")):
                tensors_of[pattern] = [self.directory.read(keys[e])]
            elif len(keys) == 1 and self.directory.shape(keys[0])[:1] == (num_experts,):
                tensors_of[pattern] = [self.directory.read(keys[0], row=e)]
            else:
                raise ConfigError(
                    f"{str(self.directory.path)!r} makes {target.name} of {len(keys)} tensors like {keys[0]!r}; "
                    f"of {num_experts} experts' either one each or one for all can be read"
                )
        return target.convert(tensors_of, self.model)


def _is_ignored(key: str, model: Any) -> bool:
    """Whether transformers, too, passes over tensor `key` without a word."""
    patterns = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    return any(re.search(pattern, key) for pattern in patterns)
