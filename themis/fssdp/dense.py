"""What becomes of the parameters that are no experts: torch's replicate (DDP), fully_shard, or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from themis.comm.mesh import Mesh
from themis.core.errors import ConfigError
from themis.fssdp.adapters import MoESite
from themis.fssdp.precision import MixedPrecision
from themis.fssdp.trained import Dense, dense_trains
from themis.moe.interface import InterfaceLayer


def parallelize_dense(
    model: nn.Module, sites: list[MoESite], mesh: Mesh, dense: Dense, precision: MixedPrecision
) -> None:
    """Have the gradients of all parameters outside the experts of `sites` averaged over the mesh, as `dense` says."""
    if mesh.world_size == 1 or dense == "none":
        return
    experts = [site.layer.experts for site in sites]
    ignored = {parameter for module in experts for parameter in module.parameters()}
    if dense == "replicate":
        if dense_trains(model, experts):  # DDP refuses a model without
            # Some transformers models have parameters that no loss reaches, for which DDP would wait.
            replicate(
                model,
                ignored_modules=experts,
                process_group=mesh.dense_group,
                find_unused_parameters=any(isinstance(site.layer, InterfaceLayer) for site in sites),
            )
        return
    device_mesh = DeviceMesh.from_group(mesh.dense_group, mesh.device.type)
    types = MixedPrecisionPolicy(param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype)
    shard = partial(fully_shard, mesh=device_mesh, ignored_params=ignored)
    for module in dict.fromkeys([*(site.block for site in sites if site.block is not None), model]):
        main = Counter(p.dtype for p in module.parameters() if p not in ignored).most_common(1)
        if main:
            _shard_others(module, main[0][0], ignored, shard)
        shard(module, mp_policy=types)


def _shard_others(module: nn.Module, main: torch.dtype, ignored: set[nn.Parameter], shard: Callable[..., Any]) -> None:
    """Shard what is of another type than `main` by itself, as it is: many families keep their routers in float32.

    fully_shard wants one type in a module, apart from the modules in it that are sharded already.
    """
    for child in module.children():
        if not isinstance(child, FSDPModule):
            _shard_others(child, main, ignored, shard)
    types = {p.dtype for p in module.parameters(recurse=False) if p not in ignored}
    if not types - {main}:
        return
    if len(types) > 1:
        raise ConfigError(
            f"dense is 'fully_shard', and {type(module).__name__} of the model has parameters of the types "
            f"{sorted(map(str, types))}; give it one type, or choose dense='replicate'"
        )
    for child in module.children():
        if not isinstance(child, FSDPModule) and any(p not in ignored for p in child.parameters()):
            shard(child)
    shard(module)
