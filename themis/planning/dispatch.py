"""Token dispatch (Algorithm 3, section 4.4): how many tokens each device sends to each copy of each expert."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from themis.core.cost import LayerCost
from themis.core.errors import ConfigError, reject, require
from themis.core.topology import Topology
from themis.planning.balance import balance, default_cost
from themis.planning.compiled import bools, compiled, ints

#: The rules by which `dispatch` splits tokens among the holders of their expert.
RULES = ("local-first", "balanced", "even")


def dispatch(
    tokens_ED: ArrayLike,
    placement_ED: NDArray[np.bool_],
    topology: Topology,
    *,
    rule: str = "local-first",
    cost: LayerCost | None = None,
) -> NDArray[np.int64]:
    """The dispatch plan R of one layer.

    tokens_ED: int [E, D], the tokens of source d for expert e; placement_ED: bool [E, D], who holds each expert.

    rule "local-first" (Algorithm 3): a device that holds an expert serves its own tokens; the others' go evenly to
    the holders on their node, or to all holders where their node has none. Even means integers that differ by at most
    one; the odd tokens go to the holders from number (source mod holders) on.
    rule "balanced": the integer shares that minimise the layer's predicted time, the slowest device's experts plus
    the most loaded link, by `cost` (by default, `balance.default_cost`: devices balanced first, traffic second). Its
    predicted time never exceeds that of "local-first".
    rule "even": each source's tokens of an expert go evenly to all its holders, wherever they are.

    Returns int64 [E, source, destination], whose sum over destinations is exactly `tokens_ED`. Raises ConfigError on
    negative counts, on tokens for an expert that no device holds, and on shapes that do not fit the topology.
    """
    counts_ED, placed_ED = ints(tokens_ED, "tokens_ED", 2), bools(placement_ED, "placement_ED", 2)
    if placed_ED.shape != counts_ED.shape or placed_ED.shape[1] != topology.num_devices:
        raise ConfigError(
            f"tokens_ED has shape {counts_ED.shape} and placement_ED {placed_ED.shape}; "
            f"both must be [E, D] with D = {topology.num_devices}"
        )
    if rule not in RULES:
        require(False, "rule", rule, f"one of {', '.join(RULES)}")
    local = topology.devices_per_node
    good, route_EDD = _even(counts_ED, placed_ED) if rule == "even" else _local_first(counts_ED, placed_ED, local)
    if not good:
        if (counts_ED < 0).any():
            reject("tokens_ED", "negative somewhere", "zero or more tokens")
        lonely = int(np.flatnonzero(~placed_ED.any(axis=1) & (counts_ED.sum(axis=1) > 0))[0])
        raise ConfigError(f"placement_ED has no holder of expert {lonely}, which has tokens; it must contain the owner")
    if rule == "balanced":
        return balance(counts_ED, placed_ED, route_EDD, topology, cost or default_cost(topology))
    return route_EDD  # type: ignore[no-any-return]


@compiled
def _even(tokens_ED, placement_ED):  # type: ignore[no-untyped-def]
    """(whether the arguments are good, route_EDD); see `dispatch`."""
    num_experts, num_devices = tokens_ED.shape
    route_EDD = np.zeros((num_experts, num_devices, num_devices), dtype=np.int64)
    holder_H = np.empty(num_devices, dtype=np.int64)
    for e in range(num_experts):
        size = 0
        for d in range(num_devices):
            holder_H[size] = d
            size += placement_ED[e, d]
        for source in range(num_devices):
            tokens = tokens_ED[e, source]
            if tokens < 0 or (tokens > 0 and size == 0):
                return False, route_EDD
            if tokens > 0:
                each, odd = tokens // size, tokens % size
                for i in range(size):
                    route_EDD[e, source, holder_H[(source + i) % size]] = each + (1 if i < odd else 0)
    return True, route_EDD


@compiled
def _local_first(tokens_ED, placement_ED, local):  # type: ignore[no-untyped-def]
    """(whether the arguments are good, route_EDD); see `dispatch`."""
    num_experts, num_devices = tokens_ED.shape
    route_EDD = np.zeros((num_experts, num_devices, num_devices), dtype=np.int64)
    holder_H = np.empty(num_devices, dtype=np.int64)
    for e in range(num_experts):
        num_holders = 0
        for d in range(num_devices):
            holder_H[num_holders] = d
            num_holders += placement_ED[e, d]
        first = last = 0  # the holders on the source's node are holder_H[first:last]
        for source in range(num_devices):
            if source % local == 0:
                first = last
                while last < num_holders and holder_H[last] < source + local:
                    last += 1
            tokens = tokens_ED[e, source]
            if tokens <= 0 or num_holders == 0:
                if tokens != 0:
                    return False, route_EDD
            elif placement_ED[e, source]:
                route_EDD[e, source, source] = tokens
            else:
                begin, size = (first, last - first) if last > first else (0, num_holders)
                each, odd = tokens // size, tokens % size
                for i in range(size):
                    route_EDD[e, source, holder_H[begin + (source + i) % size]] = each + (1 if i < odd else 0)
    return True, route_EDD
