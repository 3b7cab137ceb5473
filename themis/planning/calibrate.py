"""Calibration (section 4.2): more replicas after the gate, with exact counts, where they pay."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from themis.core.cost import LayerCost
from themis.core.errors import require
from themis.core.placement import Placement, owner_mask
from themis.core.plan import TransferPlan
from themis.core.topology import Topology
from themis.planning.compiled import ints, whole
from themis.planning.dispatch import dispatch
from themis.planning.materialize import extend
from themis.planning.transfers import transfers


def calibrate(
    placement: Placement,
    tokens_ED: ArrayLike,
    topology: Topology,
    *,
    overlap_degree: int,
    budget: int,
    cost: LayerCost,
    latency_budget_s: float,
    rule: str = "local-first",
) -> Placement:
    """`placement` with further replicas if they pay, else `placement` itself, the same object.

    tokens_ED: int [E, D], the gate's counts; overlap_degree t and budget m as in `materialize`; cost: the layer's
    constants; latency_budget_s: the most seconds that the added SparseAllGather and SparseReduceScatter may take;
    rule: the dispatch rule that both placements are judged by.

    The unspent budget is m less the replicas a device holds already, each device by itself (none where it holds more
    than m). Algorithm 1 shares out these slots and the replicas that its top t experts have already, by exact load,
    and adds what an expert lacks; nothing placed is withdrawn, so over both rounds up to 2t distinct experts may be
    replicated. The t that bounds the overlap bounds the added ones alone, and they are not hidden: their whole
    transfer time, SpAG and SpRS, is set against the layer time saved. Raises ConfigError as `dispatch` does, and on a
    latency budget that is negative or not a number.
    """
    counts_ED = ints(tokens_ED, "tokens_ED", 2)
    slots = whole(budget, "budget", 0)
    whole(overlap_degree, "overlap_degree", 0)
    good = not math.isnan(latency_budget_s) and latency_budget_s >= 0
    require(good, "latency_budget_s", latency_budget_s, "zero or more seconds")
    held_ED = placement.placement_ED
    held_D = held_ED.sum(axis=0) - np.bincount(placement.owner_E, minlength=placement.num_devices)
    now_s = cost.layer_s(dispatch(counts_ED, held_ED, topology, rule=rule, cost=cost), topology)
    wanted_ED = extend(
        held_ED,
        counts_ED.sum(axis=1),
        topology,
        overlap_degree=overlap_degree,
        budget=slots,
        free_D=slots - held_D,
    )
    if np.array_equal(wanted_ED, held_ED):
        return placement
    added_s = 2 * cost.transfer_s(added_transfers(placement, wanted_ED, topology), topology)
    if added_s > latency_budget_s:
        return placement
    then_s = cost.layer_s(dispatch(counts_ED, wanted_ED, topology, rule=rule, cost=cost), topology)
    return placement.merge(wanted_ED) if now_s - then_s > added_s else placement


def added_transfers(
    placement: Placement,
    placement_ED: NDArray[np.bool_],
    topology: Topology,
    *,
    expert_bytes: int | None = None,
    piece_bytes: int = 262144,
) -> TransferPlan:
    """The transfers of only those copies that `placement_ED` [E, D] has beyond `placement`; as `transfers` otherwise.

    The owners supply them: copies that arrived before are not sources, so this SparseAllGather can be issued while
    the first is still under way.
    """
    new_ED = np.asarray(placement_ED) & ~placement.placement_ED
    kept_ED = owner_mask(placement.owner_E, placement.num_devices)
    return transfers(placement.owner_E, new_ED | kept_ED, topology, expert_bytes=expert_bytes, piece_bytes=piece_bytes)
