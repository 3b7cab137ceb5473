"""Placement and quotas from exact counts (after UltraEP, arXiv 2606.04101): the smallest feasible maximum load."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from themis.core.topology import Topology
from themis.planning.compiled import compiled, ints, whole

#: The search for the smallest maximum ends within this part of the mean load.
TOLERANCE = 0.01


def exact_load(
    owner_E: NDArray[np.int64], tokens_ED: NDArray[np.int64], topology: Topology, *, budget: int, min_tokens: int
) -> NDArray[np.int64]:
    """int64 [E, D]: tokens of each expert that each device is to compute; a device with none holds no replica of it.

    owner_E: int [E]; tokens_ED: int [E, D], exact counts; budget: replicas a device may hold; min_tokens: the fewest
    tokens for which a replica is made. A bisection between the mean device load and that of plain expert parallelism
    finds the smallest maximum load for which the greedy assignment below succeeds, to `TOLERANCE` of the mean.

    Assignment under a maximum: devices over it, most loaded first, shed their experts' tokens, the largest expert
    first, to the device of the most room that has a free slot or a replica of the expert already: on their own node
    if one there has room for min_tokens, else anywhere.
    """
    tokens_E = ints(tokens_ED, "tokens_ED", 2).sum(axis=1)
    return _search(  # type: ignore[no-any-return]
        ints(owner_E, "owner_E", 1),
        tokens_E,
        topology.num_devices,
        topology.devices_per_node,
        whole(budget, "budget", 0),
        whole(min_tokens, "min_tokens", 1),
        TOLERANCE,
    )


@compiled
def _search(owner_E, tokens_E, devices, local, budget, least, tolerance):  # type: ignore[no-untyped-def]
    home_ED = np.zeros((owner_E.size, devices), dtype=np.int64)
    load_D = np.zeros(devices, dtype=np.int64)
    for e in range(owner_E.size):
        home_ED[e, owner_E[e]] = tokens_E[e]
        load_D[owner_E[e]] += tokens_E[e]
    best_ED, high = home_ED, load_D.max()
    low = (load_D.sum() + devices - 1) // devices
    step = max(1, np.int64(tolerance * load_D.sum() / devices))
    while low < high:
        limit = (low + high) // 2 if high - low > step else low
        good, quota_ED = _assign(owner_E, home_ED, load_D, local, budget, least, limit)
        if good:
            best_ED, high = quota_ED, limit
        elif high - low <= step:
            break
        else:
            low = limit + 1
    return best_ED


@compiled
def _assign(owner_E, home_ED, load_D, local, budget, least, limit):  # type: ignore[no-untyped-def]
    """(whether no device exceeds `limit`, quotas int64 [E, D])."""
    devices = load_D.size
    quota_ED, now_D = home_ED.copy(), load_D.copy()
    free_D = np.full(devices, budget)
    for full in np.argsort(-load_D, kind="mergesort"):
        while now_D[full] > limit:
            expert = -1
            for e in range(owner_E.size):
                if owner_E[e] == full and (expert < 0 or quota_ED[e, full] > quota_ED[expert, full]):
                    expert = e
            wanted = min(now_D[full] - limit, quota_ED[expert, full])
            to = _roomiest(quota_ED[expert], now_D, free_D, full, limit, full // local * local, local)
            if to < 0 or limit - now_D[to] < min(least, wanted):
                to = _roomiest(quota_ED[expert], now_D, free_D, full, limit, 0, devices)
            if to < 0:
                return False, quota_ED
            # A new replica is worth its copy only from `least` tokens on; the owner then keeps so many fewer.
            moved = wanted if quota_ED[expert, to] > 0 else min(max(wanted, least), quota_ED[expert, full])
            moved = min(moved, limit - now_D[to])
            if moved < least and quota_ED[expert, to] == 0:
                return False, quota_ED
            if quota_ED[expert, to] == 0:
                free_D[to] -= 1
            quota_ED[expert, full] -= moved
            quota_ED[expert, to] += moved
            now_D[full] -= moved
            now_D[to] += moved
    return True, quota_ED


@compiled
def _roomiest(quota_D, now_D, free_D, full, limit, begin, count):  # type: ignore[no-untyped-def]
    """The device with the most room from `begin` on that may take the expert; -1 for none."""
    best = -1
    for d in range(begin, begin + count):
        fits = d != full and now_D[d] < limit and (free_D[d] > 0 or quota_D[d] > 0)
        if fits and (best < 0 or now_D[d] < now_D[best]):
            best = d
    return best
