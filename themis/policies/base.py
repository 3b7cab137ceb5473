"""What a policy decides: owners, replicas before the gate, replicas after it, and how tokens are split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.cost import LayerCost
from themis.core.placement import Placement
from themis.core.topology import Topology
from themis.planning import dispatch


@final
@dataclass(frozen=True)
class LayerContext:
    """What a policy may know of a layer: the cluster, the layer's costs, and the window its transfers hide in.

    attention_s: seconds of the attention that runs before the layer, None while it has not been measured. Only for
    policies that plan by source, predicted_ED: float64 [E, D], predicted tokens of each device, None before the first
    observation; previous: the placement of the last iteration, None before the first.
    """

    topology: Topology
    cost: LayerCost
    attention_s: float | None = None
    predicted_ED: NDArray[np.float64] | None = None
    previous: Placement | None = None


class Policy(ABC):
    """A maker of plans. All methods are pure: same input, same output on every rank.

    The runtime and the simulator ask in this order: `rearrange` between iterations, then for each layer `place` before
    its attention, `force` in its gate, `calibrate` and `route` once the gate's counts are known. What a policy leaves
    alone is plain expert parallelism's answer.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name by which the command line knows the policy."""

    @property
    def rematerialize(self) -> bool:
        """Whether replicas are freed after the forward and gathered again for the backward (section 3.1)."""
        return False

    @property
    def prediction_window(self) -> int:
        """Iterations that the predicted load averages over."""
        return 5

    @property
    def plans_by_source(self) -> bool:
        """Whether contexts must tell what each device sends, and the last placement."""
        return False

    @property
    def dispatch_rule(self) -> str:
        """The rule of `planning.dispatch` that `route` follows, or a name of its own that is none of these."""
        return "local-first"

    def replicas_per_device(self) -> int | None:
        """The most short-lived replicas a device holds of one layer, for memory estimates; None for no bound."""
        return 0

    def persistent_replicas_per_device(self) -> int:
        """The most replicas a device keeps of one layer from iteration to iteration, with their optimizer states."""
        return 0

    def rearrange(
        self, iteration: int, load_LE: NDArray[np.float64] | None, held_L: Sequence[Placement], context: LayerContext
    ) -> Sequence[Placement]:
        """The persistent placements for the iterations from `iteration` on, one a layer: owners, and replicas to keep.

        load_LE [L, E] is the predicted load, None before the first observation; held_L are the present placements. A
        layer that answers with the very placement it has stays; `held_L` itself leaves all. What a device newly holds
        travels to it before the iteration with its optimizer state.
        """
        del iteration, load_LE, context
        return held_L

    def place(self, held: Placement, load_E: NDArray[np.float64] | None, context: LayerContext) -> Placement:
        """The placement to gather before the gate, from the predicted load [E], None where none is known yet.

        It contains `held`, the layer's persistent placement, and has the same owners.
        """
        del load_E, context
        return held

    def force(self, num_tokens: int, top_k: int, num_experts: int) -> NDArray[np.int64] | None:
        """int64 [T, K] experts that the gate must take, or None where the gate chooses."""
        del num_tokens, top_k, num_experts
        return None

    def calibrate(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> Placement:
        """The placement to compute with, now that the counts int64 [E, D] are known.

        It contains the layer's persistent placement. Replicas that it adds are gathered before the tokens leave; those
        that it leaves out make room.
        """
        del tokens_ED, context
        return placement

    def route(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> NDArray[np.int64]:
        """int64 [E, source, destination]: how many tokens of each source go to which copy."""
        return dispatch(tokens_ED, placement.placement_ED, context.topology, rule=self.dispatch_rule, cost=context.cost)


def is_due(iteration: int, interval: int) -> bool:
    """Whether something that happens every `interval` iterations, 0 for never, happens before `iteration`."""
    return interval > 0 and iteration > 0 and iteration % interval == 0
