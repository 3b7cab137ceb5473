"""What a layer's plan costs: experts on the slowest device, tokens on the most loaded link, chunks on theirs.

The same model decides in calibration, in the balanced dispatch rule and in the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import require
from themis.core.plan import TransferPlan
from themis.core.topology import Topology


@final
@dataclass(frozen=True)
class LayerCost:
    """The constants of one MoE layer on one kind of device.

    expert_s_per_token: seconds one device computes for one token at one expert, in forward and backward together;
    token_bytes: bytes of one token on the wire; expert_bytes: bytes of one chunk on the wire (the paper's Psi).
    """

    expert_s_per_token: float
    token_bytes: int
    expert_bytes: int

    #: A token crosses four times: dispatch and combine, in forward and in backward.
    ALL_TO_ALLS = 4

    def __post_init__(self) -> None:
        require(self.expert_s_per_token >= 0, "expert_s_per_token", self.expert_s_per_token, "zero or more seconds")
        require(self.token_bytes >= 0, "token_bytes", self.token_bytes, "zero or more bytes")
        require(self.expert_bytes > 0, "expert_bytes", self.expert_bytes, "above zero bytes")

    def experts_s(self, tokens_D: NDArray[np.int64]) -> float:
        """Seconds the slowest device computes, for `tokens_D` tokens on each device [D]."""
        return float(tokens_D.max()) * self.expert_s_per_token

    def all_to_all_s(self, traffic_DD: NDArray[np.int64], topology: Topology) -> float:
        """Seconds of all four AlltoAlls by their most loaded link; `traffic_DD` int64 [source, destination] tokens."""
        intra, inter = link_tokens(traffic_DD, topology)
        slowest_s = max(
            topology.intra.seconds(intra * self.token_bytes), topology.inter.seconds(inter * self.token_bytes)
        )
        return self.ALL_TO_ALLS * slowest_s

    def layer_s(self, route_EDD: NDArray[np.int64], topology: Topology) -> float:
        """Seconds of a layer under a dispatch plan `route_EDD`: slowest device's experts plus the most loaded link."""
        traffic_DD = route_EDD.sum(axis=0)
        return self.experts_s(traffic_DD.sum(axis=0)) + self.all_to_all_s(traffic_DD, topology)

    def transfer_s(self, plan: TransferPlan, topology: Topology) -> float:
        """Seconds of one sparse collective: the bound of section 3.3, most loaded link over its bandwidth."""
        if plan.num_transfers == 0:
            return 0.0
        traffic_DD = np.zeros((topology.num_devices, topology.num_devices))
        share_X = self.expert_bytes / plan.pieces_E[plan.expert_X]
        np.add.at(traffic_DD, (plan.source_X, plan.destination_X), share_X)
        intra_bytes, inter_bytes = link_tokens(traffic_DD, topology)
        return max(topology.intra.seconds(intra_bytes), topology.inter.seconds(inter_bytes))


def link_tokens(traffic_DD: NDArray[np.generic], topology: Topology) -> tuple[float, float]:
    """The load of the most loaded device link and of the most loaded node uplink, in either direction.

    What stays on its device crosses nothing; what leaves the node crosses the uplink and no device link.
    """
    nodes, local = topology.num_nodes, topology.devices_per_node
    traffic_NGNG = np.asarray(traffic_DD, dtype=np.float64).reshape(nodes, local, nodes, local)
    traffic_NN = traffic_NGNG.sum(axis=(1, 3))
    np.fill_diagonal(traffic_NN, 0.0)
    inter = max(traffic_NN.sum(axis=0).max(), traffic_NN.sum(axis=1).max())
    inside_NGG = np.stack([traffic_NGNG[n, :, n, :] for n in range(nodes)])
    inside_NGG[:, np.arange(local), np.arange(local)] = 0.0
    intra = max(inside_NGG.sum(axis=1).max(), inside_NGG.sum(axis=2).max())
    return float(intra), float(inter)
