"""What happened in the last training pass, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from themis.core.load import device_load, imbalance, owner_load
from themis.core.plan import TransferPlan
from themis.core.topology import LinkClass, Topology
from themis.fssdp.sharded_layer import ShardedLayer


@final
@dataclass(frozen=True)
class LayerReport:
    """One layer's last counted pass, the same on every rank.

    load_E: tokens of each expert; tokens_ED: by source rank; owner_E, placement_ED: where experts live and ran;
    imbalance_before: the busiest device over the mean, were every token computed at its expert's owner;
    imbalance_after: as it was computed; bytes_moved: by collective and link class ("intra", "inter"), all ranks
    together, forward and backward.
    """

    layer: int
    load_E: NDArray[np.int64]
    tokens_ED: NDArray[np.int64]
    owner_E: NDArray[np.int64]
    placement_ED: NDArray[np.bool_]
    imbalance_before: float
    imbalance_after: float
    bytes_moved: dict[str, dict[str, int]]


def report_layer(layer: ShardedLayer) -> LayerReport | None:
    """The report of `layer`; None before its first training pass."""
    decision = layer.last_decision
    if decision is None:
        return None
    load_E = decision.tokens_ED.sum(axis=1)
    placement = decision.placement
    topology = layer.mesh.topology
    shard = layer.shard
    regathers = [decision.transfers] if layer.policy.rematerialize and not layer.is_last else []
    return LayerReport(
        layer=layer.index,
        load_E=load_E,
        tokens_ED=decision.tokens_ED,
        owner_E=placement.owner_E,
        placement_ED=placement.placement_ED,
        imbalance_before=imbalance(owner_load(load_E, placement.owner_E, placement.num_devices)),
        imbalance_after=imbalance(device_load(decision.route_EDD)),
        bytes_moved={
            "all_to_all": _token_bytes(decision.route_EDD, topology, layer.cost.token_bytes),
            "sparse_all_gather": _chunk_bytes([*decision.first_gathers, *regathers], layer, shard.param_dtype),
            "sparse_reduce_scatter": _chunk_bytes([decision.transfers], layer, shard.reduce_dtype),
            "all_reduce": _chunk_bytes([decision.kept_transfers] * 2, layer, shard.reduce_dtype),
        },
    )


def _chunk_bytes(plans: list[TransferPlan], layer: ShardedLayer, dtype: torch.dtype) -> dict[str, int]:
    numel, topology = layer.shard.layout.numel, layer.mesh.topology
    by_plan = [plan.bytes_by_link(topology, numel, dtype.itemsize) for plan in plans]
    return {link.value: sum(counts[link] for counts in by_plan) for link in (LinkClass.INTRA, LinkClass.INTER)}


def _token_bytes(route_EDD: NDArray[np.int64], topology: Topology, token_bytes: int) -> dict[str, int]:
    """Dispatch and combine, in forward and in backward: each row crosses four times."""
    rows_DD = route_EDD.sum(axis=0)
    crosses_DD = topology.node_of_D[:, None] != topology.node_of_D[None, :]
    inter = int(rows_DD[crosses_DD].sum())
    intra = int(rows_DD.sum()) - inter - int(np.trace(rows_DD))
    return {LinkClass.INTRA.value: 4 * token_bytes * intra, LinkClass.INTER.value: 4 * token_bytes * inter}
