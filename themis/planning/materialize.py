"""Sparse materialisation (Algorithm 1, section 4.2): which experts get replicas this iteration, and where."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from themis.core.errors import ConfigError, reject, require
from themis.core.load import check_load
from themis.core.placement import check_owner
from themis.core.topology import Topology
from themis.planning.compiled import bools, compiled, floats, ints, whole


def materialize(
    owner_E: ArrayLike, load_E: ArrayLike, topology: Topology, *, overlap_degree: int, budget: int
) -> NDArray[np.bool_]:
    """The placement P' of one layer: its owners and the replicas that even out its load (Algorithm 1).

    owner_E: int [E], the owner device of each expert; load_E: [E], the expected tokens of each expert at any scale;
    overlap_degree t: at most this many distinct experts get replicas; budget m: at most this many replicas a device.

    Returns bool [E, D], which contains the owners. The heaviest t experts share the D * m slots in proportion to
    their load; each copy goes to the node that holds the fewest copies of its expert, there to the device with the
    most free slots. What an expert cannot use (it is everywhere already, or no device with a slot lacks it) goes to
    the next. Ties go to the lower index. Raises ConfigError on arguments that do not fit together.
    """
    owners_E, loads_E = ints(owner_E, "owner_E", 1), floats(load_E, "load_E", 1)
    degree, slots = whole(overlap_degree, "overlap_degree", 0), whole(budget, "budget", 0)
    good, placement_ED = _materialize(
        owners_E, loads_E, topology.num_nodes, topology.devices_per_node, degree, min(slots, owners_E.size)
    )
    if not good:
        _explain(owners_E, loads_E, topology)
    return placement_ED  # type: ignore[no-any-return]


def extend(
    placement_ED: NDArray[np.bool_],
    load_E: ArrayLike,
    topology: Topology,
    *,
    overlap_degree: int,
    budget: int,
    free_D: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """`placement_ED` [E, D] with the copies Algorithm 1 still adds where device d has `free_D[d]` slots left.

    load_E: [E], exact loads. The copies that are there already count towards each expert's share of the slots, so
    that an expert already copied as often as its load asks for gets no more. Otherwise as `materialize`.
    """
    placed_ED, loads_E = bools(placement_ED, "placement_ED", 2), floats(check_load(load_E, "load_E", 1), "load_E", 1)
    if placed_ED.shape != (loads_E.size, topology.num_devices):
        reject("placement_ED", f"of shape {placed_ED.shape}", f"({loads_E.size}, {topology.num_devices}), [E, D]")
    degree, slots = whole(overlap_degree, "overlap_degree", 0), whole(budget, "budget", 0)
    slots_left_D = np.maximum(ints(free_D, "free_D", 1), 0)
    extended_ED = placed_ED.copy()
    _fill(extended_ED, loads_E, slots_left_D, topology.num_nodes, topology.devices_per_node, degree, min(slots, degree))
    return extended_ED


def overlap_degree(attention_s: float, bytes_per_s: float, expert_bytes: int) -> int:
    """How many chunks a link takes in while attention runs: t = floor(T_attn * bw / Psi) (section 4.2).

    attention_s: forward time of the attention before the layer, seconds; bytes_per_s: the bandwidth that binds
    (`Topology.ingress_bytes_per_s`); expert_bytes: one chunk, Psi. Raises ConfigError unless all are positive
    (attention_s may be zero) and finite.
    """
    require(math.isfinite(attention_s) and attention_s >= 0, "attention_s", attention_s, "zero or more seconds")
    require(math.isfinite(bytes_per_s) and bytes_per_s > 0, "bytes_per_s", bytes_per_s, "above zero and finite")
    require(expert_bytes > 0, "expert_bytes", expert_bytes, "above zero bytes")
    return int(attention_s * bytes_per_s / expert_bytes)


def _explain(owner_E: NDArray[np.int64], load_E: NDArray[np.float64], topology: Topology) -> None:
    """Raise the error that the kernel saw; the checks are slow, so they run only once something is wrong."""
    check_owner(owner_E, topology.num_devices)
    check_load(load_E, "load_E", 1)
    raise ConfigError(f"load_E has {load_E.size} loads; it must have one for each of the {owner_E.size} experts")


@compiled
def _heaviest(load_E, count):  # type: ignore[no-untyped-def]
    """The `count` heaviest experts by load, descending, ties to the lower index; experts with no load left out."""
    top_T = np.empty(count, dtype=np.int64)
    filled = 0
    for e in range(load_E.size):
        load = load_E[e]
        if load <= 0.0 or (filled == count and (count == 0 or load <= load_E[top_T[filled - 1]])):
            continue
        if filled < count:
            filled += 1
        at = filled - 1
        while at > 0 and load_E[top_T[at - 1]] < load:
            top_T[at] = top_T[at - 1]
            at -= 1
        top_T[at] = e
    return top_T[:filled]


@compiled
def _share(load_E, top_T, num_slots):  # type: ignore[no-untyped-def]
    """int64 [T]: `num_slots` split among the experts `top_T` in proportion to load, by largest remainder."""
    share_T = np.zeros(top_T.size, dtype=np.int64)
    total = 0.0
    for i in range(top_T.size):
        total += load_E[top_T[i]]
    remainder_T = np.empty(top_T.size, dtype=np.float64)
    left = num_slots
    for i in range(top_T.size):
        exact = num_slots * (load_E[top_T[i]] / total)
        share_T[i] = math.floor(exact)
        remainder_T[i] = exact - share_T[i]
        left -= share_T[i]
    # Rounding error may leave a slot more or less than there are experts: the loop ends when none is left.
    while left > 0 and top_T.size > 0:
        best = 0
        for i in range(1, top_T.size):
            if remainder_T[i] > remainder_T[best]:
                best = i
        share_T[best] += 1
        remainder_T[best] -= 1.0
        left -= 1
    return share_T


@compiled
def _best_device(placed_D, free_D, first, last):  # type: ignore[no-untyped-def]
    """Of the devices first..last-1, the one with most free slots that lacks the expert; -1 if there is none."""
    best = -1
    for d in range(first, last):
        if not placed_D[d] and free_D[d] > 0 and (best < 0 or free_D[d] > free_D[best]):
            best = d
    return best


@compiled
def _spread(placed_D, free_D, wanted, num_nodes, local):  # type: ignore[no-untyped-def]
    """Give `wanted` more copies of one expert to devices (in place); returns how many found a device.

    A copy costs one look at each node and at the devices of the node it goes to, never at all devices.
    """
    copies_N = np.zeros(num_nodes, dtype=np.int64)
    best_N = np.empty(num_nodes, dtype=np.int64)
    for n in range(num_nodes):
        for d in range(n * local, (n + 1) * local):
            copies_N[n] += placed_D[d]
        best_N[n] = _best_device(placed_D, free_D, n * local, (n + 1) * local)
    for copy in range(wanted):
        node = -1
        for n in range(num_nodes):
            if best_N[n] >= 0 and (
                node < 0
                or copies_N[n] < copies_N[node]
                or (copies_N[n] == copies_N[node] and free_D[best_N[n]] > free_D[best_N[node]])
            ):
                node = n
        if node < 0:
            return copy
        placed_D[best_N[node]] = True
        free_D[best_N[node]] -= 1
        copies_N[node] += 1
        best_N[node] = _best_device(placed_D, free_D, node * local, (node + 1) * local)
    return wanted


@compiled
def _fill(placement_ED, load_E, free_D, num_nodes, local, degree, budget):  # type: ignore[no-untyped-def]
    """Algorithm 1 from the copies in `placement_ED` on, in place; `free_D` slots are used up."""
    num_experts, num_devices = placement_ED.shape
    degree = min(degree, num_experts)
    top_T = _heaviest(load_E, degree)
    there_T = np.zeros(top_T.size, dtype=np.int64)
    slots = 0
    for d in range(num_devices):
        slots += free_D[d]
    if slots == 0 or top_T.size == 0:
        return
    for i in range(top_T.size):
        for d in range(num_devices):
            there_T[i] += placement_ED[top_T[i], d]
        slots += there_T[i] - 1
    share_T = np.full(top_T.size, num_devices - 1, dtype=np.int64)
    if degree > budget:
        share_T = _share(load_E, top_T, slots)
    unused = 0
    for i in range(top_T.size):
        wanted = share_T[i] - (there_T[i] - 1) + unused
        room = num_devices - there_T[i]
        placed = 0
        if wanted > 0:
            placed = _spread(placement_ED[top_T[i]], free_D, min(wanted, room), num_nodes, local)
        unused = max(0, wanted - placed)


@compiled
def _materialize(owner_E, load_E, num_nodes, local, degree, budget):  # type: ignore[no-untyped-def]
    """(whether the arguments are good, placement_ED); see `materialize`."""
    num_devices = num_nodes * local
    placement_ED = np.zeros((owner_E.size, num_devices), dtype=np.bool_)
    if owner_E.size == 0 or owner_E.size != load_E.size:
        return False, placement_ED
    for e in range(owner_E.size):
        if not (0 <= owner_E[e] < num_devices and 0.0 <= load_E[e] < math.inf):
            return False, placement_ED
        placement_ED[e, owner_E[e]] = True
    degree = min(degree, owner_E.size)
    budget = min(budget, degree)
    free_D = np.full(num_devices, budget, dtype=np.int64)
    _fill(placement_ED, load_E, free_D, num_nodes, local, degree, budget)
    return True, placement_ED
