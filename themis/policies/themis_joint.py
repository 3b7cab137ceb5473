"""Our own policy: placement and split chosen together, corrected after the gate (docs/joint.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import is_whole, require
from themis.core.placement import Placement
from themis.planning import overlap_degree
from themis.planning.joint.correct import correct
from themis.planning.joint.search import ESTIMATES, place
from themis.planning.joint.split import split
from themis.policies.base import LayerContext, Policy, is_due
from themis.policies.themis import sharded


@final
@dataclass(frozen=True)
class ThemisJoint(Policy):
    """Fully Sharded Sparse Data Parallelism with replicas and split planned by one model of the layer's time.

    budget: replicas a device and layer; reshard_interval: iterations between re-shardings by Algorithm 2, 0 for never;
    correction: whether replicas may change after the gate, where the counts make the layer slower than was predicted;
    estimates: how many placements a plan may look at.
    """

    budget: int = 2
    reshard_interval: int = 100
    correction: bool = True
    estimates: int = ESTIMATES

    def __post_init__(self) -> None:
        require(is_whole(self.budget, 0), "budget", self.budget, "a whole number, 0 or more replicas a device")
        interval = self.reshard_interval
        require(is_whole(interval, 0), "reshard_interval", interval, "a whole number, 0 or more iterations")
        require(is_whole(self.estimates, 1), "estimates", self.estimates, "a whole number, 1 or more")

    @property
    def name(self) -> str:
        """See Policy."""
        return "themis-joint"

    @property
    def plans_by_source(self) -> bool:
        """Yes."""
        return True

    @property
    def dispatch_rule(self) -> str:
        """The joint planner's own split."""
        return "joint"

    def replicas_per_device(self) -> int:
        """The budget."""
        return self.budget

    def rearrange(
        self, iteration: int, load_LE: NDArray[np.float64] | None, held_L: Sequence[Placement], context: LayerContext
    ) -> Sequence[Placement]:
        """Algorithm 2 every `reshard_interval` iterations."""
        if load_LE is None or not is_due(iteration, self.reshard_interval):
            return held_L
        degree = self.budget
        if self.budget and context.attention_s is not None:
            bandwidth = context.topology.ingress_bytes_per_s
            degree = overlap_degree(context.attention_s, bandwidth, context.cost.expert_bytes)
        return sharded(held_L, load_LE, context.topology, degree)

    def place(self, held: Placement, load_E: NDArray[np.float64] | None, context: LayerContext) -> Placement:
        """The placement of least estimated time for the predicted tokens of each device."""
        if load_E is None or self.budget == 0:
            return held
        placement_ED = place(
            held.owner_E,
            predicted(load_E, context),
            context.topology,
            context.cost,
            window_s=window(context),
            budget=self.budget,
            previous_ED=None if context.previous is None else context.previous.placement_ED,
            estimates=self.estimates,
        )
        return held.merge(placement_ED)

    def calibrate(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> Placement:
        """Other replicas where the prediction was off and they pay for their own way."""
        if not self.correction or self.budget == 0:
            return placement
        corrected_ED = correct(
            placement,
            tokens_ED,
            context.predicted_ED,
            context.topology,
            context.cost,
            window_s=window(context),
            budget=self.budget,
            estimates=self.estimates,
        )
        return placement if corrected_ED is None else Placement(placement.owner_E, corrected_ED)

    def route(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> NDArray[np.int64]:
        """The split of least time for the exact counts."""
        return split(tokens_ED, placement.placement_ED, placement.owner_E, context.topology, context.cost)


def window(context: LayerContext) -> float:
    """Seconds of copying that attention hides; all of it while attention has not been measured."""
    return np.inf if context.attention_s is None else context.attention_s


def predicted(load_E: NDArray[np.float64], context: LayerContext) -> NDArray[np.float64]:
    """float64 [E, D]: the predicted tokens of each device; all alike where only sums are known."""
    if context.predicted_ED is not None:
        return context.predicted_ED
    devices = context.topology.num_devices
    return np.repeat(load_E[:, None] / devices, devices, axis=1)
