"""EPLB's rule (DeepSeek's expert-parallel load balancer): spare slots to the experts of the most load a replica."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from themis.core.topology import Topology
from themis.planning.compiled import compiled, floats, ints, whole


def replicate(owner_E: ArrayLike, load_E: ArrayLike, topology: Topology, *, budget: int) -> NDArray[np.bool_]:
    """bool [E, D]: the owners' placement with at most `budget` further replicas a device.

    One after another, the D * budget spare slots go to the expert of the most load a replica (ties: lower index),
    none to idle experts or beyond a copy a device. Then the replicas are packed, those of the most load first: each to
    the least-loaded device that has a slot and lacks the expert (ties: lower index), where owners, who stay, count
    with their own replica's load. A replica that finds no such device is dropped.
    """
    owners_E, loads_E = ints(owner_E, "owner_E", 1), floats(load_E, "load_E", 1)
    return _replicate(owners_E, loads_E, topology.num_devices, whole(budget, "budget", 0))  # type: ignore[no-any-return]


@compiled
def _replicate(owner_E, load_E, num_devices, budget):  # type: ignore[no-untyped-def]
    num_experts = owner_E.size
    copies_E = np.ones(num_experts, dtype=np.int64)
    for _ in range(num_devices * budget):
        best = -1
        for e in range(num_experts):
            may = load_E[e] > 0 and copies_E[e] < num_devices
            if may and (best < 0 or load_E[e] / copies_E[e] > load_E[best] / copies_E[best]):
                best = e
        if best < 0:
            break
        copies_E[best] += 1
    share_E = load_E / copies_E
    placement_ED = np.zeros((num_experts, num_devices), dtype=np.bool_)
    load_D, free_D = np.zeros(num_devices), np.full(num_devices, budget)
    for e in range(num_experts):
        placement_ED[e, owner_E[e]] = True
        load_D[owner_E[e]] += share_E[e]
    for e in np.argsort(-share_E, kind="mergesort"):
        for _ in range(copies_E[e] - 1):
            best = -1
            for d in range(num_devices):
                if free_D[d] > 0 and not placement_ED[e, d] and (best < 0 or load_D[d] < load_D[best]):
                    best = d
            if best < 0:
                break
            placement_ED[e, best] = True
            free_D[best] -= 1
            load_D[best] += share_E[e]
    return placement_ED
