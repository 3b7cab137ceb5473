"""Slow, plain references of other systems' rules: what their kernels must equal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from themis.core.cost import LayerCost
from themis.core.placement import owner_mask
from themis.core.topology import Topology
from themis.planning.dispatch import dispatch
from themis.planning.shadow import broadcast_s


def even_reference(tokens_ED: NDArray[np.int64], placement_ED: NDArray[np.bool_]) -> NDArray[np.int64]:
    """As `dispatch` with rule "even"."""
    num_experts, num_devices = tokens_ED.shape
    route_EDD = np.zeros((num_experts, num_devices, num_devices), dtype=np.int64)
    for e, source in np.ndindex(tokens_ED.shape):
        holders = np.flatnonzero(placement_ED[e])
        for token in range(int(tokens_ED[e, source])):
            route_EDD[e, source, holders[(source + token) % holders.size]] += 1
    return route_EDD


def shadow_reference(
    owner_E: NDArray[np.int64], tokens_ED: NDArray[np.int64], topology: Topology, cost: LayerCost
) -> NDArray[np.bool_]:
    """As `shadow`."""
    chosen_E = np.zeros(owner_E.size, dtype=np.bool_)

    def seconds(shadowed_E: NDArray[np.bool_]) -> float:
        placement_ED = owner_mask(owner_E, topology.num_devices) | shadowed_E[:, None]
        layer_s = cost.layer_s(dispatch(tokens_ED, placement_ED, topology), topology)
        return layer_s + 2 * int(shadowed_E.sum()) * broadcast_s(topology, cost)

    for e in np.argsort(-tokens_ED.sum(axis=1), kind="stable"):
        candidate_E = chosen_E.copy()
        candidate_E[e] = True
        if seconds(candidate_E) >= seconds(chosen_E):
            break
        chosen_E = candidate_E
    return chosen_E


def replicate_reference(
    owner_E: NDArray[np.int64], load_E: NDArray[np.float64], topology: Topology, *, budget: int
) -> NDArray[np.bool_]:
    """As `replicate`."""
    devices, experts = range(topology.num_devices), range(owner_E.size)
    copies = [1] * owner_E.size
    for _ in range(topology.num_devices * budget):
        open_experts = [e for e in experts if load_E[e] > 0 and copies[e] < topology.num_devices]
        if open_experts:
            copies[max(open_experts, key=lambda e: (load_E[e] / copies[e], -e))] += 1
    placement_ED = owner_mask(owner_E, topology.num_devices)
    shares = [load_E[e] / copies[e] for e in experts]
    load, free = [0.0 for _ in devices], [budget for _ in devices]
    for e in experts:
        load[owner_E[e]] += shares[e]
    for e in sorted(experts, key=lambda e: -shares[e]):
        for _ in range(copies[e] - 1):
            fitting = [d for d in devices if free[d] and not placement_ED[e, d]]
            if fitting:
                d = min(fitting, key=lambda d: load[d])
                placement_ED[e, d], load[d], free[d] = True, load[d] + shares[e], free[d] - 1
    return placement_ED


def route_quotas_reference(
    tokens_ED: NDArray[np.int64], quota_ED: NDArray[np.int64], topology: Topology
) -> NDArray[np.int64]:
    """As `route_quotas`, token by token."""
    num_experts, num_devices = tokens_ED.shape
    route_EDD = np.zeros((num_experts, num_devices, num_devices), dtype=np.int64)
    node_D = topology.node_of_D
    left_ED, room_ED = tokens_ED.copy(), quota_ED.copy()
    for reach in ("own", "node", "all"):
        for e, source in np.ndindex(tokens_ED.shape):
            for d in range(num_devices):
                near = {"own": d == source, "node": node_D[d] == node_D[source], "all": True}[reach]
                while near and left_ED[e, source] and room_ED[e, d]:
                    route_EDD[e, source, d] += 1
                    left_ED[e, source] -= 1
                    room_ED[e, d] -= 1
    return route_EDD
