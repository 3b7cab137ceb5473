"""Rearranging: experts move to new owners, or gain replicas for keeps, with their optimizer states (section 4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from themis.comm.collectives import exchange
from themis.comm.mesh import Mesh
from themis.core.placement import Placement
from themis.fssdp.expert_state import pack_expert, unpack_expert

if TYPE_CHECKING:
    from themis.fssdp.sharded_layer import ShardedLayer


def move_experts(
    layers: Sequence[ShardedLayer],
    held_L: Sequence[Placement],
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: Mesh,
) -> None:
    """Make `held_L` the persistent placements. A collective; layer by layer, so that little is held twice.

    A device that newly holds an expert gets its parameters, gradients and per-parameter optimizer state from the owner
    before, as they are there; one that no longer does lets go of them. Nothing else changes.
    """
    for layer, held in zip(layers, held_L, strict=True):
        before = layer.shard.held
        if not np.array_equal(held.placement_ED, before.placement_ED):
            _move_layer(layer, before, held, optimizers, mesh)
        layer.shard.held = held


def _move_layer(
    layer: ShardedLayer,
    before: Placement,
    after: Placement,
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: Mesh,
) -> None:
    shard, rank = layer.shard, mesh.rank
    gained_ED = after.placement_ED & ~before.placement_ED
    copies = [(int(e), int(before.owner_E[e]), int(new)) for e, new in zip(*np.nonzero(gained_ED), strict=True)]
    leaving = {e: pack_expert(shard, e, optimizers) for e in {e for e, source, _ in copies if source == rank}}
    arriving = [(e, source) for e, source, new in copies if new == rank]
    # Lengths first, as states differ in size between optimizers; then the bytes.
    sizes = {e: torch.zeros(1, dtype=torch.int64, device=mesh.device) for e, _ in arriving}
    lengths = {e: torch.tensor([packed.numel()], device=mesh.device) for e, packed in leaving.items()}
    exchange(
        mesh,
        [(new, lengths[e]) for e, source, new in copies if source == rank],
        [(source, sizes[e]) for e, source in arriving],
    )
    packed: dict[int, Tensor] = {
        e: torch.empty(int(size.item()), dtype=torch.uint8, device=mesh.device) for e, size in sizes.items()
    }
    exchange(
        mesh,
        [(new, leaving[e]) for e, source, new in copies if source == rank],
        [(source, packed[e]) for e, source in arriving],
    )
    for e in np.flatnonzero((before.placement_ED & ~after.placement_ED)[:, rank]).tolist():
        _drop(shard.parameters(e).values(), optimizers)
        shard.give(e)
    for e, data in packed.items():
        unpack_expert(shard, e, data, optimizers)


def _drop(parameters: Iterable[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    gone = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in [p for p in group["params"] if id(p) in gone]:
                optimizer.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if id(p) not in gone]
