"""The joint planner: placements are constructed in several ways, the best is refined move by move."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from themis.core.cost import LayerCost
from themis.core.topology import Topology
from themis.planning.compiled import bools, compiled, floats, ints
from themis.planning.joint.construct import construct
from themis.planning.joint.estimate import estimate, make_state
from themis.planning.joint.refine import count_holders, refine
from themis.planning.joint.terms import Terms

#: Estimates a plan may cost.
ESTIMATES = 250
#: Experts that a node takes in, as tried, up to its slots; and how full devices are packed, as parts of the mean.
FOREIGN = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64])
TARGETS = np.array([1.0, 1.08, 1.2])
for _grid in (FOREIGN, TARGETS):
    _grid.setflags(write=False)


def place(
    owner_E: ArrayLike,
    tokens_ED: ArrayLike,
    topology: Topology,
    cost: LayerCost,
    *,
    window_s: float,
    budget: int | NDArray[np.int64],
    previous_ED: NDArray[np.bool_] | None = None,
    estimates: int = ESTIMATES,
) -> NDArray[np.bool_]:
    """bool [E, D]: the placement of least estimated layer time, the owners' included.

    owner_E: int [E]; tokens_ED: float [E, D], predicted tokens by source device; window_s: seconds of copying that
    attention hides in forward; budget: copies a device may hold, the same on all or int [D]; previous_ED: a placement
    to start from too, such as the last iteration's; estimates: how many the search may cost. By the estimate it is
    never worse than the owners alone. Deterministic.
    """
    owners_E, counts_ED = ints(owner_E, "owner_E", 1), floats(tokens_ED, "tokens_ED", 2)
    budget_D = np.broadcast_to(np.asarray(budget, dtype=np.int64), topology.num_devices).copy()
    budget_D.setflags(write=False)
    start_ED = np.zeros(counts_ED.shape, dtype=np.bool_) if previous_ED is None else previous_ED
    terms_6 = Terms.of(topology, cost, window_s).array()
    return _place(  # type: ignore[no-any-return]
        owners_E,
        counts_ED,
        topology.devices_per_node,
        terms_6,
        budget_D,
        bools(start_ED, "previous_ED", 2),
        estimates,
        FOREIGN,
        TARGETS,
    )


@compiled
def _place(
    owner_E: Any, tokens_ED: Any, local: Any, terms_6: Any, budget_D: Any, previous_ED: Any, estimates: Any,
    foreign_F: Any, targets_T: Any,
) -> Any:  # fmt: skip
    num_experts, devices = tokens_ED.shape
    nodes = devices // local
    supply_EN = np.zeros((num_experts, nodes))
    for d in range(devices):
        supply_EN[:, d // local] += tokens_ED[:, d]
    order_E = np.argsort(-supply_EN.sum(axis=1), kind="mergesort")
    mean = supply_EN.sum() / devices
    state = make_state(num_experts, nodes, devices)
    count_EN = np.zeros((num_experts, nodes), dtype=np.int64)
    best_ED, hold_ED = np.zeros(tokens_ED.shape, dtype=np.bool_), np.zeros(tokens_ED.shape, dtype=np.bool_)
    for e in range(num_experts):
        best_ED[e, owner_E[e]] = True
    count_holders(best_ED, local, count_EN)
    best_s = estimate(best_ED, count_EN, supply_EN, tokens_ED, order_E, owner_E, local, terms_6, state)
    spent = 1
    if _fits(previous_ED, owner_E, budget_D):
        hold_ED[:] = previous_ED
        count_holders(hold_ED, local, count_EN)
        then_s = estimate(hold_ED, count_EN, supply_EN, tokens_ED, order_E, owner_E, local, terms_6, state)
        spent += 1
        if then_s < best_s:
            best_s = then_s
            best_ED[:] = hold_ED
    slots = budget_D.max()
    for spread in range(slots + 1):
        for foreign in foreign_F:
            if foreign > min(slots * local, num_experts):
                break
            for target in targets_T:
                if spent >= estimates:
                    break
                construct(supply_EN, tokens_ED, owner_E, budget_D, foreign, spread, target * mean, hold_ED)
                count_holders(hold_ED, local, count_EN)
                then_s = estimate(hold_ED, count_EN, supply_EN, tokens_ED, order_E, owner_E, local, terms_6, state)
                spent += 1
                if then_s < best_s:
                    best_s = then_s
                    best_ED[:] = hold_ED
    count_holders(best_ED, local, count_EN)
    refine(
        best_ED, count_EN, supply_EN, tokens_ED, order_E, owner_E, local, terms_6, budget_D, state, best_s,
        estimates - spent,
    )  # fmt: skip
    return best_ED


@compiled
def _fits(hold_ED: Any, owner_E: Any, budget_D: Any) -> Any:
    """Whether `hold_ED` contains the owners and keeps to the budgets."""
    good = True
    for e in range(owner_E.size):
        good &= hold_ED[e, owner_E[e]]
    for d in range(budget_D.size):
        good &= hold_ED[:, d].sum() - (owner_E == d).sum() <= budget_D[d]
    return good
