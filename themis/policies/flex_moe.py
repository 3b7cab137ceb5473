"""FlexMoE: replicas that stay, with optimizer states of their own (SIGMOD 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import is_whole, require
from themis.core.placement import Placement, even_owner
from themis.planning.expand import adjust
from themis.policies.base import LayerContext, Policy, is_due


@final
@dataclass(frozen=True)
class FlexMoE(Policy):
    """Dynamic expert management: expand, shrink, migrate.

    interval: iterations between looks at the balance; threshold: busiest device over the mean that calls for changes;
    extra_slots: copies a device may keep beyond its even share of experts. From the paper, as others tell of it: slots
    reserved in advance, replicas with even parts of the load, one change after another as long as the predicted time
    falls, parameters and optimizer states copied before the iteration begins, gradients of replicas all-reduced in
    each. Left open there and chosen here: all changes of an interval happen at once, the load is the mean of the last
    five iterations, tokens go to all copies evenly wherever they are, and migration moves copies only to free slots.
    """

    interval: int = 10
    threshold: float = 1.2
    extra_slots: int = 2

    def __post_init__(self) -> None:
        require(is_whole(self.interval, 1), "interval", self.interval, "a whole number, 1 or more iterations")
        require(self.threshold >= 1, "threshold", self.threshold, "1 or more times the mean load")
        require(is_whole(self.extra_slots, 0), "extra_slots", self.extra_slots, "a whole number, 0 or more a device")

    @property
    def name(self) -> str:
        """See Policy."""
        return "flex-moe"

    @property
    def dispatch_rule(self) -> str:
        """Evenly over all copies."""
        return "even"

    def persistent_replicas_per_device(self) -> int:
        """The extra slots."""
        return self.extra_slots

    def rearrange(
        self, iteration: int, load_LE: NDArray[np.float64] | None, held_L: Sequence[Placement], context: LayerContext
    ) -> Sequence[Placement]:
        """The changes that pay, when it is time to look."""
        if load_LE is None or not is_due(iteration, self.interval):
            return held_L
        devices = context.topology.num_devices
        slots_D = np.bincount(even_owner(held_L[0].num_experts, devices), minlength=devices) + self.extra_slots
        new_L = [
            adjust(held, load_E, context.topology, context.cost, slots_D=slots_D, threshold=self.threshold)
            for held, load_E in zip(held_L, load_LE, strict=True)
        ]
        return held_L if all(new is held for new, held in zip(new_L, held_L, strict=True)) else new_L
