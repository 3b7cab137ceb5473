"""Re-sharding: experts move to new owners, with their optimizer states (Themis paper, section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.comm.collectives import exchange
from themis.comm.mesh import Mesh
from themis.fssdp.expert_state import pack_expert, unpack_expert

if TYPE_CHECKING:
    from themis.fssdp.sharded_layer import ShardedLayer


def move_experts(
    layers: Sequence[ShardedLayer],
    owner_LE: NDArray[np.int64],
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: Mesh,
) -> None:
    """Make `owner_LE` int64 [L, E] the owners. A collective; layer by layer, so that little is held twice.

    An expert's parameters, gradients and per-parameter optimizer state arrive as they left; nothing else changes.
    """
    for layer, owner_E in zip(layers, owner_LE, strict=True):
        moves = [
            (int(e), int(layer.shard.owner_E[e]), int(owner_E[e]))
            for e in np.flatnonzero(owner_E != layer.shard.owner_E)
        ]
        if moves:
            _move_layer(layer, moves, optimizers, mesh)
            layer.shard.owner_E = owner_E.copy()


def _move_layer(
    layer: ShardedLayer,
    moves: list[tuple[int, int, int]],
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: Mesh,
) -> None:
    leaving = {e: pack_expert(layer.shard, e, optimizers) for e, old, _ in moves if old == mesh.rank}
    arriving = [(e, old) for e, old, new in moves if new == mesh.rank]
    # Lengths first, as states differ in size between optimizers; then the bytes.
    sizes = {e: torch.zeros(1, dtype=torch.int64, device=mesh.device) for e, _ in arriving}
    sends = [(new, torch.tensor([leaving[e].numel()], device=mesh.device)) for e, old, new in moves if old == mesh.rank]
    exchange(mesh, sends, [(old, sizes[e]) for e, old in arriving])
    packed: dict[int, Tensor] = {
        e: torch.empty(int(size.item()), dtype=torch.uint8, device=mesh.device) for e, size in sizes.items()
    }
    sends = [(new, leaving[e]) for e, old, new in moves if old == mesh.rank]
    exchange(mesh, sends, [(old, packed[e]) for e, old in arriving])
    for e in leaving:
        _drop(layer.shard.parameters(e).values(), optimizers)
        layer.shard.give(e)
    for e, data in packed.items():
        unpack_expert(layer.shard, e, data, optimizers)


def _drop(parameters: object, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    gone = {id(parameter) for parameter in parameters}  # type: ignore[attr-defined]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in [p for p in group["params"] if id(p) in gone]:
                optimizer.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if id(p) not in gone]
