"""Exact-load placement after the gate, as UltraEP has it (arXiv 2606.04101)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import is_whole, require
from themis.core.placement import Placement
from themis.planning.exact_load import exact_load
from themis.planning.quotas import route_quotas
from themis.policies.base import LayerContext, Policy


@final
@dataclass(frozen=True)
class ExactLoad(Policy):
    """Replicas and token quotas together, from the gate's counts; nothing is predicted and no transfer is hidden.

    budget: replicas a device and layer; min_tokens: the fewest tokens a replica is made for. From the paper: bisection
    of the smallest maximum load to 1 % of the mean, quotas and replicas assigned together, 1,024 tokens a replica. Its
    copies stay inside an NVLink domain; here a node comes first, and other nodes where it has no room. The greedy
    assignment under a given maximum is ours, as the paper does not give its own.
    """

    budget: int = 2
    min_tokens: int = 1024

    def __post_init__(self) -> None:
        require(is_whole(self.budget, 0), "budget", self.budget, "a whole number, 0 or more replicas a device")
        require(is_whole(self.min_tokens, 1), "min_tokens", self.min_tokens, "a whole number, 1 or more tokens")

    @property
    def name(self) -> str:
        """See Policy."""
        return "exact-load"

    @property
    def dispatch_rule(self) -> str:
        """By quotas."""
        return "quotas"

    def replicas_per_device(self) -> int:
        """The budget."""
        return self.budget

    def calibrate(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> Placement:
        """Replicas where the quotas have tokens."""
        quota_ED = self._quotas(placement, tokens_ED, context)
        return placement.merge(quota_ED > 0) if (placement.placement_ED < (quota_ED > 0)).any() else placement

    def route(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> NDArray[np.int64]:
        """By the quotas, which are computed again."""
        return route_quotas(tokens_ED, self._quotas(placement, tokens_ED, context), context.topology)

    def _quotas(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> NDArray[np.int64]:
        topology = context.topology
        return exact_load(placement.owner_E, tokens_ED, topology, budget=self.budget, min_tokens=self.min_tokens)
