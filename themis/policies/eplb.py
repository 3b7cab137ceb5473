"""EPLB-style placement: DeepSeek's expert-parallel load balancer, with replicas that live for one iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import is_whole, require
from themis.core.placement import Placement
from themis.planning.replicate import replicate
from themis.policies.base import LayerContext, Policy


@final
@dataclass(frozen=True)
class EPLB(Policy):
    """Spare slots to the experts of the most load a replica, replicas packed heaviest first, tokens evenly to all.

    budget: spare slots a device and layer. The balancer is an inference server's: it knows no training state and packs
    all experts anew. Here owners stay where they are and replicas are gathered before the gate as Themis's are, so
    that the two differ in placement and dispatch alone. Its groups of experts that share a node (group-limited
    routing) are left out, as the gate is the model's own.
    """

    budget: int = 2

    def __post_init__(self) -> None:
        require(is_whole(self.budget, 0), "budget", self.budget, "a whole number, 0 or more replicas a device")

    @property
    def name(self) -> str:
        """See Policy."""
        return "eplb"

    @property
    def dispatch_rule(self) -> str:
        """Evenly over all replicas."""
        return "even"

    def replicas_per_device(self) -> int:
        """The budget."""
        return self.budget

    def place(self, held: Placement, load_E: NDArray[np.float64] | None, context: LayerContext) -> Placement:
        """The replicas by predicted load."""
        if load_E is None or self.budget == 0:
            return held
        return held.merge(replicate(held.owner_E, load_E, context.topology, budget=self.budget))
