"""What crosses which link: dispatch plans and transfer plans as loads of each device's links.

A dispatch plan [E, D, D] of thousands of devices fits no memory, so the loads of Algorithm 3 are summed up without it;
tests hold them to `dispatch`'s own plan, entry by entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from themis.core.plan import TransferPlan
from themis.core.topology import Topology
from themis.planning.compiled import bools, compiled, ints

Floats = NDArray[np.float64]


@final
@dataclass(frozen=True, eq=False)
class LinkLoads:
    """float64 [D] each, in tokens or bytes: what leaves and enters every device, inside its node and across uplinks.

    computed_D: what ends at each device, what never left it included (for transfers: what it received).
    """

    intra_out_D: Floats
    intra_in_D: Floats
    inter_out_D: Floats
    inter_in_D: Floats
    computed_D: Floats

    @staticmethod
    def nothing(num_devices: int) -> LinkLoads:
        """No traffic."""
        return LinkLoads(*np.zeros((5, num_devices)))

    def __add__(self, other: LinkLoads) -> LinkLoads:
        return LinkLoads(*(getattr(self, n) + getattr(other, n) for n in _NAMES))

    def scaled(self, factor: float) -> LinkLoads:
        """These loads, each times `factor`."""
        return LinkLoads(*(getattr(self, n) * factor for n in _NAMES))

    @property
    def intra(self) -> float:
        """All that crosses links inside nodes."""
        return float(self.intra_in_D.sum())

    @property
    def inter(self) -> float:
        """All that crosses uplinks."""
        return float(self.inter_in_D.sum())


_NAMES = ("intra_out_D", "intra_in_D", "inter_out_D", "inter_in_D", "computed_D")


def local_first_loads(tokens_ED: NDArray[np.int64], placement_ED: NDArray[np.bool_], topology: Topology) -> LinkLoads:
    """The loads of `dispatch(tokens_ED, placement_ED, topology)`, without its plan: O(E * D) time, O(D) memory.

    tokens_ED: int [E, D]; placement_ED: bool [E, D] with a holder for every expert that has tokens.
    """
    rows_5D = _local_first(
        ints(tokens_ED, "tokens_ED", 2), bools(placement_ED, "placement_ED", 2), topology.devices_per_node
    )
    return LinkLoads(*rows_5D)


def route_loads(route_EDD: NDArray[np.int64], topology: Topology) -> LinkLoads:
    """The loads of any dispatch plan, int64 [E, source, destination]."""
    return LinkLoads(*_traffic(ints(route_EDD, "route_EDD", 3).sum(axis=0), topology.devices_per_node))


def transfer_loads(plan: TransferPlan, expert_bytes: int, topology: Topology) -> LinkLoads:
    """Bytes of a sparse collective that gathers by `plan`, chunks of `expert_bytes`; a reduction runs it backwards."""
    if plan.num_transfers == 0:
        return LinkLoads.nothing(topology.num_devices)
    rows_5D = _rows(
        plan.expert_X,
        plan.piece_X,
        plan.source_X,
        plan.destination_X,
        plan.pieces_E,
        expert_bytes,
        topology.num_devices,
        topology.devices_per_node,
    )
    return LinkLoads(*rows_5D)


@compiled
def _mark(odd_H: Any, begin: Any, odd: Any, holders: Any) -> None:
    """One more token for each of `odd` holders from `begin` on, round the end: as steps up and down."""
    odd_H[begin] += 1
    if begin + odd <= holders:
        odd_H[begin + odd] -= 1
    else:
        odd_H[0] += 1
        odd_H[begin + odd - holders] -= 1


@compiled
def _local_first(tokens_ED: Any, placement_ED: Any, local: Any) -> Any:
    num_experts, num_devices = tokens_ED.shape
    loads_5D = np.zeros((5, num_devices))
    holder_H = np.empty(num_devices, dtype=np.int64)
    odd_H = np.empty(num_devices + 1, dtype=np.int64)
    for e in range(num_experts):
        holders = 0
        for d in range(num_devices):
            holder_H[holders] = d
            holders += placement_ED[e, d]
        if holders == 0:
            continue
        odd_H[: holders + 1] = 0
        everyone = 0  # tokens that each holder gets from other nodes, before the odd ones
        first = last = 0
        for source in range(num_devices):
            if source % local == 0:
                first = last
                while last < holders and holder_H[last] < source + local:
                    last += 1
            tokens = tokens_ED[e, source]
            if tokens == 0:
                continue
            if placement_ED[e, source]:
                loads_5D[4, source] += tokens
            elif last > first:
                size = last - first
                each, odd = tokens // size, tokens % size
                loads_5D[0, source] += tokens
                for i in range(size):
                    holder = holder_H[first + (source + i) % size]
                    share = each + (1 if i < odd else 0)
                    loads_5D[1, holder] += share
                    loads_5D[4, holder] += share
            else:
                loads_5D[2, source] += tokens
                everyone += tokens // holders
                _mark(odd_H, source % holders, tokens % holders, holders)
        extra = 0
        for h in range(holders):
            extra += odd_H[h]
            loads_5D[3, holder_H[h]] += everyone + extra
            loads_5D[4, holder_H[h]] += everyone + extra
    return loads_5D


@compiled
def _traffic(traffic_DD: Any, local: Any) -> Any:
    num_devices = traffic_DD.shape[0]
    loads_5D = np.zeros((5, num_devices))
    for source in range(num_devices):
        for to in range(num_devices):
            amount = traffic_DD[source, to]
            loads_5D[4, to] += amount
            if source // local != to // local:
                loads_5D[2, source] += amount
                loads_5D[3, to] += amount
            elif source != to:
                loads_5D[0, source] += amount
                loads_5D[1, to] += amount
    return loads_5D


@compiled
def _rows(
    expert_X: Any, piece_X: Any, source_X: Any, to_X: Any, pieces_E: Any, size: Any, devices: Any, local: Any
) -> Any:
    loads_5D = np.zeros((5, devices))
    for x in range(expert_X.size):
        pieces = pieces_E[expert_X[x]]
        amount = size * (piece_X[x] + 1) // pieces - size * piece_X[x] // pieces
        source, to = source_X[x], to_X[x]
        loads_5D[4, to] += amount
        at = 0 if source // local == to // local else 2
        loads_5D[at, source] += amount
        loads_5D[at + 1, to] += amount
    return loads_5D
