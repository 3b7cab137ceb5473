"""SmartMoE: experts change places at intervals (USENIX ATC 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import is_whole, require
from themis.core.placement import Placement, moved_owners
from themis.planning.exchange import exchange_owners
from themis.policies.base import LayerContext, Policy, is_due


@final
@dataclass(frozen=True)
class SmartMoE(Policy):
    """Online expert placement.

    interval: iterations between exchanges. From the artifact: permutations alone, no replicas; the greedy rule, layer
    by layer, adopted where the maximum device load falls; the mean of the last two iterations as load; every 10
    iterations by default. Parameters and optimizer states move before the iteration begins. The offline search for a
    pool of parallel strategies is left out: all devices are expert-parallel here.
    """

    interval: int = 10

    def __post_init__(self) -> None:
        require(is_whole(self.interval, 1), "interval", self.interval, "a whole number, 1 or more iterations")

    @property
    def name(self) -> str:
        """See Policy."""
        return "smart-moe"

    @property
    def prediction_window(self) -> int:
        """Two iterations."""
        return 2

    def rearrange(
        self, iteration: int, load_LE: NDArray[np.float64] | None, held_L: Sequence[Placement], context: LayerContext
    ) -> Sequence[Placement]:
        """The greedy exchange, when it is due."""
        if load_LE is None or not is_due(iteration, self.interval):
            return held_L
        devices = context.topology.num_devices
        pairs = zip(held_L, load_LE, strict=True)
        return moved_owners(
            held_L, np.stack([exchange_owners(held.owner_E, load_E, devices) for held, load_E in pairs])
        )
