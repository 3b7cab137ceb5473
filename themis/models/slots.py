"""Which tensors transformers has a place for, and what a model holds besides."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import DDP
from torch.distributed.fsdp import FSDPModule

from themis.core.errors import ConfigError, require
from themis.models.family import build_on_meta


def family_root(model: nn.Module) -> tuple[str, Any]:
    """The transformers model in `model`, itself or a part of it, and its name there with a dot behind, or ""."""
    for name, module in model.named_modules():
        if hasattr(module, "_init_weights") and hasattr(module, "config"):
            return f"{name}." if name else "", module
    raise ConfigError(
        f"the model ({type(model).__name__}) is none of transformers', so there is no form in which transformers "
        "would load it; export models that are built of transformers' classes"
    )


def family_class(root: Any) -> Any:
    """The class of `root` before torch's replicate or fully_shard put one of their own over it."""
    return next(c for c in type(root).__mro__ if not issubclass(c, FSDPModule | DDP))


def matching(patterns: Sequence[str], names: Iterable[str], where: str) -> set[str]:
    """Those of `names` that one of the shell-style `patterns` matches; ConfigError for one that matches none."""
    names = list(names)
    listed = [patterns] if isinstance(patterns, str) else patterns
    valid = isinstance(listed, Sequence) and all(isinstance(pattern, str) for pattern in listed)
    require(valid, "drop", patterns, "a list of shell-style patterns")
    found = set()
    for pattern in listed:
        hits = {name for name in names if fnmatchcase(name, pattern)}
        if not hits:
            raise ConfigError(f"drop is {pattern!r}, which matches none of the tensors that {where}")
        found |= hits
    return found


@final
class Slots:
    """The tensors of transformers' own model of `root`'s class and configuration, in `dtype` where it is given."""

    def __init__(self, root: Any, dtype: torch.dtype | None) -> None:
        family = family_class(root)
        self._label = family.__name__
        self._cast = dtype is not None
        twin = build_on_meta(family, copy.deepcopy(root.config), dtype or root.dtype)
        self._tied = set(twin.all_tied_weights_keys)
        self._kept = self._tied & set(getattr(root, "_themis_tied", ()))
        left_out = self._tied - self._kept
        self._tensors = {name: tensor for name, tensor in twin.state_dict().items() if name not in left_out}

    def check(self, prefix: str, names: Iterable[str], drop: Sequence[str]) -> None:
        """ConfigError unless `names`, all under `prefix`, are the slots', but for those that `drop` matches."""
        here = {name: name.removeprefix(prefix) if name.startswith(prefix) else "" for name in names}
        known = self._tensors.keys() | self._tied
        extra = [name for name, own in here.items() if own not in known]
        dropped = matching(drop, extra, f"a {self._label} of transformers has no slot for")
        if left := [name for name in extra if name not in dropped]:
            more = f" ({len(left)} such tensors)" if len(left) > 1 else ""
            raise ConfigError(
                f"the model has {left[0]!r}, for which a {self._label} of transformers has no slot{more}; "
                "drop it by name if the directory may do without"
            )
        if missing := sorted(self._tensors.keys() - set(here.values())):
            raise ConfigError(f"the model lacks {missing[0]!r}, which a {self._label} of transformers has")

    def fit(self, name: str, tensor: Tensor) -> Tensor | None:
        """`tensor` as the slot `name` has it; None where there is no such slot, or it is another's twin.

        A twin that the model's directory had too is a copy, as one file cannot have shared memory twice.
        """
        slot = self._tensors.get(name)
        if slot is None:
            return None
        if slot.shape != tensor.shape:
            raise ConfigError(
                f"the model has {name} as {list(tensor.shape)}; a {self._label} of its configuration has "
                f"{list(slot.shape)}"
            )
        fitting = tensor.to(slot.dtype) if self._cast and tensor.is_floating_point() else tensor
        return fitting.clone() if name in self._kept else fitting
