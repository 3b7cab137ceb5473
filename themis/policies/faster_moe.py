"""FasterMoE: overloaded experts are broadcast to every device after the gate (PPoPP 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.placement import Placement
from themis.planning.shadow import shadow
from themis.policies.base import LayerContext, Policy


@final
@dataclass(frozen=True)
class FasterMoE(Policy):
    """Dynamic shadowing.

    From the paper: the greedy choice in every iteration from exact counts (algorithm 1), no bound on memory, tokens of
    a shadowed expert computed where they are, parameters broadcast between gate and dispatch, gradients reduced to the
    owner, who alone has optimizer state. Its equation 8 leaves out the AlltoAll of tokens that still travel; here both
    sides of the comparison count it. A broadcast is priced as the engine runs it, in pieces through the nodes. The
    paper's smart schedule (splitting a layer into chunks of devices) is no matter of placement and is left out.
    """

    @property
    def name(self) -> str:
        """See Policy."""
        return "faster-moe"

    def replicas_per_device(self) -> None:
        """Unbounded."""

    def calibrate(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> Placement:
        """The shadowed experts on every device."""
        shadowed_E = shadow(placement.owner_E, tokens_ED, context.topology, context.cost)
        if not shadowed_E.any():
            return placement
        return placement.merge(np.broadcast_to(shadowed_E[:, None], placement.placement_ED.shape))
