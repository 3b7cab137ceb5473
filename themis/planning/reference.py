"""Slow, plain references of Algorithms 1, 2 and 3 and of the transfer scheme: what the kernels must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from themis.core.placement import owner_mask
from themis.core.topology import Topology

Row = tuple[int, int, int, int, int]


def materialize_reference(
    owner_E: NDArray[np.int64], load_E: NDArray[np.float64], topology: Topology, *, overlap_degree: int, budget: int
) -> NDArray[np.bool_]:
    """As `materialize`."""
    most = min(budget, overlap_degree, owner_E.size)
    return extend_reference(
        owner_mask(owner_E, topology.num_devices),
        load_E,
        topology,
        overlap_degree=overlap_degree,
        budget=budget,
        free_D=np.full(topology.num_devices, most),
    )


def extend_reference(
    placement_ED: NDArray[np.bool_],
    load_E: NDArray[np.float64],
    topology: Topology,
    *,
    overlap_degree: int,
    budget: int,
    free_D: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """As `extend`."""
    placed_ED, devices = placement_ED.copy(), range(topology.num_devices)
    free = [max(0, int(slots)) for slots in free_D]
    degree = min(overlap_degree, placed_ED.shape[0])
    top = [e for e in _descending(load_E)[:degree] if load_E[e] > 0]
    added = {e: int(placed_ED[e].sum()) - 1 for e in top}
    share = dict.fromkeys(top, topology.num_devices - 1)
    if degree > min(budget, degree):
        share = dict(zip(top, _largest_remainder(load_E[top], sum(free) + sum(added.values())), strict=True))
    unused = 0
    for e in top:
        wanted, placed = share[e] - added[e] + unused, 0
        while placed < wanted:
            node_copies_N = np.bincount(topology.node_of_D, weights=placed_ED[e])
            open_devices = [d for d in devices if not placed_ED[e, d] and free[d] > 0]
            if not open_devices:
                break
            best = min(open_devices, key=lambda d: (node_copies_N[topology.node_of_D[d]], -free[d], d))
            placed_ED[e, best] = True
            free[best] -= 1
            placed += 1
        unused = max(0, wanted - placed)
    return placed_ED


def _descending(load_E: NDArray[np.float64]) -> list[int]:
    """Experts by load, descending, ties to the lower index."""
    return sorted(range(load_E.size), key=lambda e: (-load_E[e], e))


def _largest_remainder(load_T: NDArray[np.float64], slots: int) -> list[int]:
    """`slots` in proportion to `load_T`: whole parts first, then one each by the largest fractions."""
    total = 0.0
    for load in load_T:
        total += float(load)
    exact = [slots * (float(load) / total) for load in load_T]
    share = [math.floor(part) for part in exact]
    by_fraction = sorted(range(len(exact)), key=lambda i: (share[i] - exact[i], i))
    for i in by_fraction[: max(0, slots - sum(share))]:
        share[i] += 1
    return share


def shard_reference(
    load_LE: NDArray[np.float64],
    topology: Topology,
    *,
    overlap_degree: int,
    current_LE: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """As `shard`."""
    num_layers = load_LE.shape[0]
    node_of_D, devices = topology.node_of_D, range(topology.num_devices)
    slots = [load_LE.size // len(devices) + (d < load_LE.size % len(devices)) for d in devices]
    owner_LE = np.full(load_LE.shape, -1, dtype=np.int64)
    load_LD = np.zeros((num_layers, len(devices)))
    load_LN = np.zeros((num_layers, topology.num_nodes))

    def settle(layer: int, e: int, device: int | None = None) -> None:
        if device is None:
            open_devices = [d for d in devices if slots[d] > 0]
            slots_N = np.bincount(node_of_D, weights=slots)
            node = min((node_of_D[d] for d in open_devices), key=lambda n: (load_LN[layer, n], slots_N[n], n))
            inside = [d for d in open_devices if node_of_D[d] == node]
            device = min(inside, key=lambda d: (load_LD[layer, d], slots[d], d))
        owner_LE[layer, e] = device
        slots[device] -= 1
        load_LD[layer, device] += load_LE[layer, e]
        load_LN[layer, node_of_D[device]] += load_LE[layer, e]

    order = [_descending(load_E) for load_E in load_LE]
    light = [experts[overlap_degree:] for experts in order]
    heaviest = [load_LE[layer, experts[0]] if experts else 0.0 for layer, experts in enumerate(light)]
    for layer in sorted(range(num_layers), key=lambda layer: (-heaviest[layer], layer)):
        for e in light[layer]:
            settle(layer, e)
    heavy = [(layer, e) for layer in range(num_layers) for e in order[layer][:overlap_degree]]
    for layer, e in heavy:
        if current_LE is not None and slots[current_LE[layer, e]] > 0:
            settle(layer, e, int(current_LE[layer, e]))
    for layer, e in heavy:
        if owner_LE[layer, e] < 0:
            settle(layer, e)
    return owner_LE


def dispatch_reference(
    tokens_ED: NDArray[np.int64], placement_ED: NDArray[np.bool_], topology: Topology
) -> NDArray[np.int64]:
    """As `dispatch` with rule "local-first"."""
    num_experts, num_devices = tokens_ED.shape
    route_EDD = np.zeros((num_experts, num_devices, num_devices), dtype=np.int64)
    for e in range(num_experts):
        for source in range(num_devices):
            holders = [int(h) for h in np.flatnonzero(placement_ED[e])]
            near = [h for h in holders if topology.node_of_D[h] == topology.node_of_D[source]]
            chosen = [source] if source in holders else near or holders
            for token in range(int(tokens_ED[e, source])):
                route_EDD[e, source, chosen[(source + token) % len(chosen)]] += 1
    return route_EDD


def transfers_reference(
    owner_E: NDArray[np.int64],
    placement_ED: NDArray[np.bool_],
    topology: Topology,
    pieces_E: Sequence[int],
    rounds_E: Sequence[int],
) -> list[Row]:
    """The rows (stage, expert, piece, source, destination) of `transfers` for given pieces and rounds of a chunk."""
    rows: list[Row] = []
    for e, owner in enumerate(int(o) for o in owner_E):
        home = int(topology.node_of_D[owner])
        receivers: dict[int, list[int]] = {}
        for d in np.flatnonzero(placement_ED[e]):
            if d != owner:
                receivers.setdefault(int(topology.node_of_D[d]), []).append(int(d))
        entered = sorted(n for n in receivers if n != home)
        for piece in range(pieces_E[e]):
            stage = piece // (pieces_E[e] // rounds_E[e])
            legs = []  # (source, entry, entry's node, hop)
            if home in receivers:
                legs.append((owner, receivers[home][(piece + e) % len(receivers[home])], home, 0))
            if entered:
                turn, lead = piece // len(entered) + e, entered[(piece + e) % len(entered)]
                entry = {n: receivers[n][turn % len(receivers[n])] for n in entered}
                legs.append((owner, entry[lead], lead, 0))
                legs += [(entry[lead], entry[n], n, 1) for n in entered if n != lead]
            for source, gate, node, hop in legs:
                rows.append((stage + hop, e, piece, source, gate))
                rows += [(stage + hop + 1, e, piece, gate, d) for d in receivers[node] if d != gate]
    return sorted(rows, key=lambda row: row[0])
