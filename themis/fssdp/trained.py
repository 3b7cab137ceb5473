"""Which parameters train is settled in the first forward; what nobody would average afterwards is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from themis.comm.collectives import all_reduce_max, barrier
from themis.comm.mesh import Mesh
from themis.core.errors import ConfigError
from themis.fssdp.expert_shard import ExpertShard

#: What averages the dense parameters' gradients over ranks; "none" leaves them to the caller.
Dense = Literal["replicate", "fully_shard", "none"]


@final
class TrainedParameters:
    """Refuses parameters that were added or unfrozen too late: their gradients would stay this rank's own, or absent.

    DDP takes up the model's parameters in the first forward, fully_shard in `parallelize`, and a shard notes there
    which parts of its experts train.
    """

    def __init__(self, model: nn.Module, shards: Sequence[ExpertShard], dense: Dense, mesh: Mesh) -> None:
        if mesh.world_size == 1:
            dense = "none"
        self._mesh = mesh
        self._dense = dense
        self._shards = shards
        self._experts = [shard.experts for shard in shards]
        # What is settled now: that DDP, which refuses a model without any, is not there, or that nobody is.
        settled = dense == "none" or (dense == "replicate" and not dense_trains(model, self._experts))
        self._taken: set[object] | None = set() if settled else None
        # Before fully_shard's hook, which puts whole parameters in place of the sharded ones.
        model.register_forward_pre_hook(self._begin, prepend=True)

    @torch.compiler.disable
    def _begin(self, model: nn.Module, _: object) -> None:
        if self._taken is not None and not (model.training and torch.is_grad_enabled()):
            return
        for shard in self._shards:
            _check_experts(shard)
        if self._dense == "none":
            return
        trained = dict(_trained(model, {id(bank) for bank in self._experts}))
        keys = {self._key(name, parameter): name for name, parameter in trained.items()}
        if self._taken is None:
            self._take(model, trained)
            self._taken = set(keys)
        elif late := [name for key, name in keys.items() if key not in self._taken]:
            raise ConfigError(_too_late(late[0], f"the first forward, where {self._dense} takes up what trains"))

    def _take(self, model: nn.Module, trained: dict[str, nn.Parameter]) -> None:
        if self._dense == "replicate":
            OncePerForward(model, set(trained.values()))  # a set, as tied ones go by several names
            # DDP's own first exchange comes next, and would not say which rank is missing.
            barrier(self._mesh)
            return
        for name, parameter in trained.items():
            if not isinstance(parameter, DTensor):
                raise ConfigError(_too_late(name, "themis.parallelize with dense='fully_shard'"))

    def __deepcopy__(self, _: object) -> NoReturn:
        refuse_copy()

    def _key(self, name: str, parameter: Tensor) -> object:
        # fully_shard shows a parameter's whole and its sharded form in turn under the same name.
        return id(parameter) if self._dense == "replicate" else name


def refuse_copy() -> NoReturn:
    """What the root's hooks answer when a copy of the model would copy them."""
    raise ConfigError("a parallelized model cannot be copied; build another and load its state_dict")


def agree_on_trained(shards: Sequence[ExpertShard], mesh: Mesh) -> None:
    """Note anew which parts of the experts train, on every rank alike, also where none of them is; a collective."""
    flags_LP = torch.zeros(len(shards), len(shards[0].trainable), dtype=torch.float64, device=mesh.device)
    for layer, shard in enumerate(shards):
        for e in shard.owned:
            flags = [float(parameter.requires_grad) for parameter in shard.parameters(e).values()]
            flags_LP[layer] = torch.maximum(flags_LP[layer], flags_LP.new_tensor(flags))
    all_reduce_max(mesh, flags_LP)
    for shard, flags_P in zip(shards, flags_LP.tolist(), strict=True):
        shard.trainable = {name: bool(flag) for name, flag in zip(shard.trainable, flags_P, strict=True)}


def dense_trains(model: nn.Module, experts: Sequence[nn.Module]) -> bool:
    """Whether a parameter of `model` outside the modules `experts` is trainable."""
    return next(_trained(model, {id(bank) for bank in experts}), None) is not None


def _trained(module: nn.Module, without: set[int], prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """The trainable parameters of `module` by name, those of the modules with the ids `without` left out."""
    if id(module) in without:
        return
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.requires_grad:
            yield prefix + name, parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _trained(child, without, f"{prefix}{name}.")


def _check_experts(shard: ExpertShard) -> None:
    for e in shard.owned:
        for name, parameter in shard.parameters(e).items():
            if parameter.requires_grad and not shard.trainable[name]:
                raise ConfigError(_too_late(f"{name} of expert {e}", "themis.parallelize"))


def _too_late(name: str, when: str) -> str:
    return (
        f"{name} was added or unfrozen after {when}, so its gradient would not be averaged over the ranks; do so "
        "before themis.parallelize, or in its prepare=… (themis.from_pretrained has it too)"
    )


@final
class OncePerForward:
    """Refuses what DDP gets wrong in silence: it averages a parameter's gradient once after each forward.

    A second gradient that reaches the parameter before the next forward would stay this rank's own.
    """

    def __init__(self, model: nn.Module, parameters: set[nn.Parameter]) -> None:
        self._averaged: set[int] = set()
        model.register_forward_pre_hook(self._begin)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _begin(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._averaged.clear()

    def _accumulated(self, parameter: Tensor) -> None:
        if id(parameter) in self._averaged:
            raise ConfigError(
                "dense is 'replicate', with which each forward takes one backward, straight after it, that meets each "
                "parameter once; sum the losses of several forwards, checkpoint with use_reentrant=False, or choose "
                "dense='fully_shard'"
            )
        self._averaged.add(id(parameter))
