"""What a policy decides: owners, replicas before the gate, replicas after it, and how tokens are split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.cost import LayerCost
from themis.core.placement import Placement, shard_only
from themis.core.topology import Topology


@final
@dataclass(frozen=True)
class LayerContext:
    """What a policy may know of a layer: the cluster, the layer's costs, and the window its transfers hide in.

    attention_s: seconds of the attention that runs before the layer, None while it has not been measured.
    """

    topology: Topology
    cost: LayerCost
    attention_s: float | None = None


class Policy(ABC):
    """A maker of plans. All methods are pure: same input, same output on every rank.

    The runtime and the simulator ask in this order: `reshard` between iterations, then for each layer `place` before
    its attention, `force` in its gate, `calibrate` and `route` once the gate's counts are known.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name by which the command line knows the policy."""

    @property
    @abstractmethod
    def rematerialize(self) -> bool:
        """Whether replicas are freed after the forward and gathered again for the backward (section 3.1)."""

    @abstractmethod
    def replicas_per_device(self) -> int:
        """The most replicas a device holds of one layer: what memory estimates count with."""

    @abstractmethod
    def reshard(
        self, iteration: int, load_LE: NDArray[np.float64] | None, owner_LE: NDArray[np.int64], context: LayerContext
    ) -> NDArray[np.int64]:
        """int64 [L, E]: the owners for the iterations from `iteration` on; `owner_LE` itself to leave them.

        load_LE [L, E] is the predicted load, None before the first observation.
        """

    @abstractmethod
    def place(self, owner_E: NDArray[np.int64], load_E: NDArray[np.float64] | None, context: LayerContext) -> Placement:
        """The placement to gather before the gate, from the predicted load [E], None where none is known yet."""

    @abstractmethod
    def force(self, num_tokens: int, top_k: int, num_experts: int) -> NDArray[np.int64] | None:
        """int64 [T, K] experts that the gate must take, or None where the gate chooses."""

    @abstractmethod
    def calibrate(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> Placement:
        """The placement to compute with, now that the counts int64 [E, D] are known: `placement` or more."""

    @abstractmethod
    def route(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> NDArray[np.int64]:
        """int64 [E, source, destination]: how many tokens of each source go to which copy."""


def place_owners_only(owner_E: NDArray[np.int64], context: LayerContext) -> Placement:
    """The placement of plain expert parallelism."""
    return shard_only(owner_E, context.topology.num_devices)


def route_to_owners(owner_E: NDArray[np.int64], tokens_ED: NDArray[np.int64]) -> NDArray[np.int64]:
    """The dispatch plan of plain expert parallelism: every token to its expert's owner."""
    num_experts, num_devices = tokens_ED.shape
    route_EDD = np.zeros((num_experts, num_devices, num_devices), dtype=np.int64)
    route_EDD[np.arange(num_experts), :, owner_E] = tokens_ED
    return route_EDD
