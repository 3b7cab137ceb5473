"""What the joint planner trades: seconds of a layer by token and by copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.cost import LayerCost
from themis.core.topology import Topology


@final
@dataclass(frozen=True)
class Terms:
    """The layer-time model, latencies left out, as they are the same for every plan.

    compute_s: seconds that a token adds to the device that computes it, forward and backward; inter_s, intra_s: to the
    node's uplink, or the device's link, that it crosses in all four AlltoAlls; node_copy_s: until a chunk has come over
    a node's uplink; device_copy_s: over a device's link; window_s: seconds of copying that attention hides in forward,
    and twice as many in backward.

    A layer takes compute_s * tokens of the busiest device + max(inter_s * tokens over the busiest uplink, intra_s *
    tokens over the busiest device link) + max(0, copying - window_s) + max(0, copying - 2 * window_s), where copying is
    the larger of node_copy_s * experts new to a node and device_copy_s * copies added to a device.
    """

    compute_s: float
    inter_s: float
    intra_s: float
    node_copy_s: float
    device_copy_s: float
    window_s: float

    @staticmethod
    def of(topology: Topology, cost: LayerCost, window_s: float) -> Terms:
        """The terms of one layer on one cluster."""
        crossings = LayerCost.ALL_TO_ALLS * cost.token_bytes
        inter, intra = topology.inter.bytes_per_s, topology.intra.bytes_per_s
        return Terms(
            cost.expert_s_per_token,
            crossings / inter,
            crossings / intra,
            cost.expert_bytes / inter,
            cost.expert_bytes / intra,
            window_s,
        )

    def array(self) -> NDArray[np.float64]:
        """float64 [6], for kernels."""
        array_6 = np.array(
            [self.compute_s, self.inter_s, self.intra_s, self.node_copy_s, self.device_copy_s, self.window_s]
        )
        array_6.setflags(write=False)
        return array_6
