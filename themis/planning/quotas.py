"""Which token goes where when each copy of an expert has a quota: own tokens first, then the node's, then the rest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from themis.core.topology import Topology
from themis.planning.compiled import compiled, ints


def route_quotas(tokens_ED: NDArray[np.int64], quota_ED: NDArray[np.int64], topology: Topology) -> NDArray[np.int64]:
    """int64 [E, source, destination]: a dispatch plan that gives device d exactly quota_ED[e, d] tokens of expert e.

    tokens_ED, quota_ED: int [E, D], of equal sums for each expert. A device keeps of its own tokens what its quota
    has room for; what is left goes to the quotas left on its node, and then to those left anywhere, by ascending index.
    """
    return _route(  # type: ignore[no-any-return]
        ints(tokens_ED, "tokens_ED", 2), ints(quota_ED, "quota_ED", 2), topology.devices_per_node
    )


@compiled
def _route(tokens_ED, quota_ED, local):  # type: ignore[no-untyped-def]
    num_experts, num_devices = tokens_ED.shape
    route_EDD = np.zeros((num_experts, num_devices, num_devices), dtype=np.int64)
    left_D, room_D = np.empty(num_devices, dtype=np.int64), np.empty(num_devices, dtype=np.int64)
    for e in range(num_experts):
        for d in range(num_devices):
            own = min(tokens_ED[e, d], quota_ED[e, d])
            left_D[d], room_D[d] = tokens_ED[e, d] - own, quota_ED[e, d] - own
            if own > 0:
                route_EDD[e, d, d] = own
        for first in range(0, num_devices, local):
            _match(left_D, room_D, first, first + local, route_EDD[e])
        _match(left_D, room_D, 0, num_devices, route_EDD[e])
    return route_EDD


@compiled
def _match(left_D, room_D, begin, end, route_DD):  # type: ignore[no-untyped-def]
    """Fill the room of devices `begin` to `end` with what is left there, both by ascending index."""
    to = begin
    for source in range(begin, end):
        while left_D[source] > 0:
            while to < end and room_D[to] == 0:
                to += 1
            if to == end:
                return
            moved = min(left_D[source], room_D[to])
            route_DD[source, to] += moved
            left_D[source] -= moved
            room_D[to] -= moved
