"""The split that goes with the joint planner's placements: a dispatch plan from exact counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.core.cost import LayerCost
from themis.core.topology import Topology
from themis.planning.compiled import bools, compiled, ints
from themis.planning.joint.flows import PRICES, flows
from themis.planning.joint.terms import Terms


def split(
    tokens_ED: NDArray[np.int64],
    placement_ED: NDArray[np.bool_],
    owner_E: NDArray[np.int64],
    topology: Topology,
    cost: LayerCost,
) -> NDArray[np.int64]:
    """int64 [E, source, destination]: the dispatch plan for exact counts int [E, D] and a placement bool [E, D].

    By the model of `Terms` it is never slower than sending every token to its owner, int [E].
    """
    return _route(  # type: ignore[no-any-return]
        ints(tokens_ED, "tokens_ED", 2),
        bools(placement_ED, "placement_ED", 2),
        ints(owner_E, "owner_E", 1),
        topology.devices_per_node,
        Terms.of(topology, cost, 0.0).array(),
        PRICES,
    )


@compiled
def _route(tokens_ED: Any, placement_ED: Any, owner_E: Any, local: Any, terms_6: Any, prices_P: Any) -> Any:
    num_experts, devices = tokens_ED.shape
    flow_END = flows(tokens_ED, placement_ED, owner_E, local, terms_6, prices_P)
    route_EDD = np.zeros((num_experts, devices, devices), dtype=np.int64)
    quota_D, left_D = np.zeros(devices, dtype=np.int64), np.zeros(devices, dtype=np.int64)
    for e in range(num_experts):
        for first in range(0, devices, local):
            supply = tokens_ED[e, first : first + local].sum()
            if supply > 0:
                _round(flow_END[e, first // local], supply, quota_D)
                _deal(tokens_ED[e], first, local, quota_D, left_D, route_EDD[e])
    return route_EDD


@compiled
def _round(flow_D: Any, supply: Any, quota_D: Any) -> None:
    """Whole tokens of sum `supply`: the parts cut down, and the odd tokens to the largest rests (ties: lower index)."""
    total = 0
    for d in range(flow_D.size):
        quota_D[d] = np.int64(flow_D[d])
        total += quota_D[d]
    while total != supply:
        step = 1 if total < supply else -1
        best = -1
        for d in range(flow_D.size):
            open_ = flow_D[d] > 0 and quota_D[d] + step >= 0
            if open_ and (best < 0 or step * (flow_D[d] - quota_D[d]) > step * (flow_D[best] - quota_D[best])):
                best = d
        quota_D[best] += step
        total += step


@compiled
def _deal(tokens_D: Any, first: Any, local: Any, quota_D: Any, left_D: Any, route_DD: Any) -> None:
    """Tokens of the devices from `first` on to the quotas: own, then node-mates', then others'; by ascending index."""
    for s in range(first, first + local):
        own = min(tokens_D[s], quota_D[s])
        route_DD[s, s] = own
        quota_D[s] -= own
        left_D[s] = tokens_D[s] - own
    to = first
    for turn in range(local + quota_D.size):
        to = first + turn if turn < local else turn - local
        if quota_D[to] == 0:
            continue
        for s in range(first, first + local):
            moved = min(left_D[s], quota_D[to])
            if moved > 0:
                route_DD[s, to] += moved
                left_D[s] -= moved
                quota_D[to] -= moved
