"""The correction after the gate: other replicas, where the counts show that the prediction was off."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.core.cost import LayerCost
from themis.core.placement import Placement
from themis.core.topology import Topology
from themis.planning.compiled import bools, compiled, floats, ints
from themis.planning.joint.estimate import estimate, make_state
from themis.planning.joint.refine import count_holders
from themis.planning.joint.search import place
from themis.planning.joint.terms import Terms

#: Exact counts must make the layer slower than predicted by more than this part.
WORSE = 1.05


def correct(
    placement: Placement,
    tokens_ED: NDArray[np.int64],
    predicted_ED: NDArray[np.float64] | None,
    topology: Topology,
    cost: LayerCost,
    *,
    window_s: float,
    budget: int,
    estimates: int,
) -> NDArray[np.bool_] | None:
    """bool [E, D]: a placement that replaces `placement` after the gate, or None where it stays.

    tokens_ED: int [E, D], the gate's counts; predicted_ED: float [E, D], what `placement` was made for, None for
    nothing. Where the counts make the estimated time exceed the predicted one by more than `WORSE`, placements are
    planned for the counts, once as if copies were free and once as if all were exposed. One is adopted if its time,
    with the copies it adds, exposed in forward, and what backward does not hide of all copies, is below the present
    one's. Copies that it drops make room for those it adds.
    """
    owner_E, exact_ED = placement.owner_E, np.asarray(tokens_ED, dtype=np.float64)
    terms = Terms.of(topology, cost, np.inf)
    now_s = seconds(placement.placement_ED, exact_ED, owner_E, topology, terms)
    if predicted_ED is not None and predicted_ED.any():
        # The predicted step may have had more or fewer tokens.
        scale = exact_ED.sum() / predicted_ED.sum()
        if now_s <= WORSE * scale * seconds(placement.placement_ED, predicted_ED, owner_E, topology, terms):
            return None
    best_ED, best_s = None, now_s + _exposed(placement, placement.placement_ED, topology, terms, window_s)
    for window in (np.inf, 0.0):
        wanted_ED = place(
            owner_E,
            exact_ED,
            topology,
            cost,
            window_s=window,
            budget=budget,
            previous_ED=placement.placement_ED,
            estimates=estimates,
        )
        then_s = seconds(wanted_ED, exact_ED, owner_E, topology, terms)
        then_s += _exposed(placement, wanted_ED, topology, terms, window_s)
        if then_s < best_s:
            best_ED, best_s = wanted_ED, then_s
    return best_ED


def seconds(
    placement_ED: NDArray[np.bool_],
    tokens_ED: NDArray[np.float64],
    owner_E: NDArray[np.int64],
    topology: Topology,
    terms: Terms,
) -> float:
    """Estimated seconds of a layer, no copying counted, for tokens float [E, D]."""
    return float(
        _seconds(
            bools(placement_ED, "placement_ED", 2),
            floats(tokens_ED, "tokens_ED", 2),
            ints(owner_E, "owner_E", 1),
            topology.devices_per_node,
            terms.array(),
        )
    )


@compiled
def _seconds(hold_ED: Any, tokens_ED: Any, owner_E: Any, local: Any, terms_6: Any) -> Any:
    num_experts, devices = tokens_ED.shape
    nodes = devices // local
    supply_EN, count_EN = np.zeros((num_experts, nodes)), np.zeros((num_experts, nodes), dtype=np.int64)
    for d in range(devices):
        supply_EN[:, d // local] += tokens_ED[:, d]
    count_holders(hold_ED, local, count_EN)
    order_E = np.argsort(-supply_EN.sum(axis=1), kind="mergesort")
    state = make_state(num_experts, nodes, devices)
    return estimate(hold_ED, count_EN, supply_EN, tokens_ED, order_E, owner_E, local, terms_6, state)


def _exposed(
    placement: Placement, wanted_ED: NDArray[np.bool_], topology: Topology, terms: Terms, window_s: float
) -> float:
    """Seconds that copying adds from now on: additions to `placement` in forward, all copies in backward beyond 2 W."""
    added_s = _copying(placement.placement_ED, wanted_ED, topology, terms)
    all_s = _copying(placement.placement_ED & ~placement.replicas_ED, wanted_ED, topology, terms)
    return added_s + max(0.0, all_s - 2 * window_s)


def _copying(before_ED: NDArray[np.bool_], after_ED: NDArray[np.bool_], topology: Topology, terms: Terms) -> float:
    shape = (-1, topology.num_nodes, topology.devices_per_node)
    new_ED = after_ED & ~before_ED
    new_EN = after_ED.reshape(shape).any(axis=2) & ~before_ED.reshape(shape).any(axis=2)
    return max(terms.node_copy_s * int(new_EN.sum(axis=0).max()), terms.device_copy_s * int(new_ED.sum(axis=0).max()))
