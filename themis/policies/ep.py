"""Plain expert parallelism, and its Uniform variant, the reference that routing skew cannot touch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.placement import Placement
from themis.policies.base import LayerContext, Policy, place_owners_only, route_to_owners


@final
@dataclass(frozen=True)
class EP(Policy):
    """Every expert runs at its owner, and owners never change.

    uniform: the gate's choice is replaced by an even round robin over the experts ("Uniform" in section 5.1); the
    combination weights stay the gate's. It changes what the model learns: for speed comparisons only.
    """

    uniform: bool = False

    @property
    def name(self) -> str:
        """See Policy."""
        return "uniform" if self.uniform else "ep"

    @property
    def rematerialize(self) -> bool:
        """Never: there is nothing to gather."""
        return False

    def replicas_per_device(self) -> int:
        """None."""
        return 0

    def reshard(
        self, iteration: int, load_LE: NDArray[np.float64] | None, owner_LE: NDArray[np.int64], context: LayerContext
    ) -> NDArray[np.int64]:
        """The owners stay."""
        del iteration, load_LE, context
        return owner_LE

    def place(self, owner_E: NDArray[np.int64], load_E: NDArray[np.float64] | None, context: LayerContext) -> Placement:
        """The owners alone."""
        del load_E
        return place_owners_only(owner_E, context)

    def force(self, num_tokens: int, top_k: int, num_experts: int) -> NDArray[np.int64] | None:
        """For Uniform: assignment number i goes to expert i mod E, so a token's experts differ."""
        if not self.uniform:
            return None
        return (np.arange(num_tokens * top_k, dtype=np.int64) % num_experts).reshape(num_tokens, top_k)

    def calibrate(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> Placement:
        """The placement stays."""
        del tokens_ED, context
        return placement

    def route(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> NDArray[np.int64]:
        """Every token to the owner."""
        del context
        return route_to_owners(placement.owner_E, tokens_ED)


def Uniform() -> EP:
    """EP with an even assignment that ignores the gate."""
    return EP(uniform=True)
