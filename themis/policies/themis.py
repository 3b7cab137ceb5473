"""The paper's policy: per-iteration sparse materialisation, calibration, heterogeneous sharding (section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import is_whole, require
from themis.core.placement import Placement, moved_owners
from themis.core.topology import Topology
from themis.planning import calibrate, materialize, overlap_degree, shard
from themis.policies.base import LayerContext, Policy, is_due


def sharded(
    held_L: Sequence[Placement], load_LE: NDArray[np.float64], topology: Topology, degree: int
) -> list[Placement]:
    """The owners of Algorithm 2, no replica beside them."""
    owner_LE = np.stack([held.owner_E for held in held_L])
    return moved_owners(held_L, shard(load_LE, topology, overlap_degree=degree, current_LE=owner_LE))


@final
@dataclass(frozen=True)
class Themis(Policy):
    """Fully Sharded Sparse Data Parallelism with Algorithms 1, 2 and 3.

    budget: replicas a device and layer (m); overlap_degree: distinct replicated experts (t), None to derive it from
    the measured attention time; reshard_interval: iterations between re-shardings (K), 0 for never; calibration:
    whether replicas may be added after the gate, within calibration_s seconds (None: the attention's time);
    dispatch_rule: "local-first" (Algorithm 3) or "balanced"; rematerialize: free replicas after the forward and
    gather them again for the backward (Themis-RM).
    """

    budget: int = 2
    overlap_degree: int | None = None
    reshard_interval: int = 100
    calibration: bool = True
    calibration_s: float | None = None
    dispatch_rule: Literal["local-first", "balanced"] = "local-first"
    rematerialize: bool = False

    def __post_init__(self) -> None:
        require(is_whole(self.budget, 0), "budget", self.budget, "a whole number, 0 or more replicas a device")
        degree = self.overlap_degree
        require(
            degree is None or is_whole(degree, 0),
            "overlap_degree",
            degree,
            "None, or a whole number, 0 or more experts",
        )
        interval = self.reshard_interval
        require(is_whole(interval, 0), "reshard_interval", interval, "a whole number, 0 or more iterations")
        wait = self.calibration_s
        require(wait is None or wait >= 0, "calibration_s", wait, "None, or zero or more seconds")
        rules = ("local-first", "balanced")
        require(self.dispatch_rule in rules, "dispatch_rule", self.dispatch_rule, " or ".join(map(repr, rules)))

    @property
    def name(self) -> str:
        """See Policy."""
        return "themis-rm" if self.rematerialize else "themis"

    def replicas_per_device(self) -> int:
        """The budget."""
        return self.budget

    def degree(self, context: LayerContext) -> int:
        """The overlap degree t; the budget stands in until the attention's time is known.

        Without a budget it is 0: re-sharding must not set experts aside for replicas that never come.
        """
        if self.budget == 0:
            return 0
        if self.overlap_degree is not None:
            return self.overlap_degree
        if context.attention_s is None:
            return self.budget
        return overlap_degree(context.attention_s, context.topology.ingress_bytes_per_s, context.cost.expert_bytes)

    def rearrange(
        self, iteration: int, load_LE: NDArray[np.float64] | None, held_L: Sequence[Placement], context: LayerContext
    ) -> Sequence[Placement]:
        """Algorithm 2 every `reshard_interval` iterations: owners move, and nothing else is kept."""
        if load_LE is None or not is_due(iteration, self.reshard_interval):
            return held_L
        return sharded(held_L, load_LE, context.topology, self.degree(context))

    def place(self, held: Placement, load_E: NDArray[np.float64] | None, context: LayerContext) -> Placement:
        """Algorithm 1 on the predicted load."""
        if load_E is None or self.budget == 0:
            return held
        placement_ED = materialize(
            held.owner_E, load_E, context.topology, overlap_degree=self.degree(context), budget=self.budget
        )
        return held.merge(placement_ED)

    def calibrate(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> Placement:
        """More replicas where the exact counts show that they pay for their own transfer."""
        if not self.calibration or self.budget == 0:
            return placement
        limit_s = self.calibration_s if self.calibration_s is not None else context.attention_s
        return calibrate(
            placement,
            tokens_ED,
            context.topology,
            overlap_degree=self.degree(context),
            budget=self.budget,
            cost=context.cost,
            latency_budget_s=np.inf if limit_s is None else limit_s,
            rule=self.dispatch_rule,
        )


def ThemisRM(
    budget: int = 2, overlap_degree: int | None = None, reshard_interval: int = 100, calibration: bool = True
) -> Themis:
    """Themis with re-materialisation: replicas of at most two layers live at a time."""
    return Themis(budget, overlap_degree, reshard_interval, calibration, rematerialize=True)
