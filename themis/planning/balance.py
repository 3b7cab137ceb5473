"""The balanced dispatch rule, our own: shares that minimise a layer's predicted time.

How tokens split among an expert's holders is a convex problem. For a price p, in tokens, on leaving the node, the
kernel lowers the sum over devices of load^2 / 2 plus p times the tokens that leave their node. Its blocks are the
tokens of one expert from one node; one block's best split, all else fixed, is a water level over the holders, found
exactly in integers, and going round the blocks converges. At the optimum tokens leave a node only where the loads
differ by more than p. Prices fall from prohibitive to zero, each starting from the last split; the split with the
least predicted time wins, and local-first stands if none beats it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from themis.core.cost import LayerCost
from themis.core.topology import Topology
from themis.planning.compiled import compiled

#: As a plain constant, which kernels can see.
ALL_TO_ALLS = LayerCost.ALL_TO_ALLS
#: Prices of leaving a node, as fractions 2^-k of the mean device load, k below this, and then zero.
NUM_PRICES = 7
#: One token of the default cost: 4,096 values of two bytes.
TOKEN_BYTES = 8192
#: Times round all blocks at one price, at most.
MAX_SWEEPS = 4
#: A price is done when a round moves fewer than one token in so many.
SETTLED = 512
#: Prices fall no further once the busiest device exceeds the mean by less than one part in so many.
EVEN = 512


def default_cost(topology: Topology) -> LayerCost:
    """The cost that `dispatch` assumes where none is given: experts and traffic weigh alike.

    A device computes a token in the time in which the token makes its four crossings at that device's share of the
    bandwidth that binds, as wide experts do (Phi-3.5-MoE on 400 Gb/s a node is near). Balance then comes first where
    local-first leaves a straggler, and traffic where the devices are even.
    """
    crossing_s = LayerCost.ALL_TO_ALLS * TOKEN_BYTES / topology.ingress_bytes_per_s
    return LayerCost(topology.devices_per_node * crossing_s, token_bytes=TOKEN_BYTES, expert_bytes=1)


def balance(
    tokens_ED: NDArray[np.int64],
    placement_ED: NDArray[np.bool_],
    route_EDD: NDArray[np.int64],
    topology: Topology,
    cost: LayerCost,
) -> NDArray[np.int64]:
    """A dispatch plan int64 [E, D, D] of least predicted `cost`, no worse than the local-first plan `route_EDD`.

    The arguments are what `dispatch` has checked. `route_EDD` is rewritten in place where a better split is found.
    """
    intra, inter = topology.intra, topology.inter
    constants_6 = np.array(
        [
            cost.expert_s_per_token,
            cost.token_bytes,
            intra.latency_s,
            intra.bytes_per_s,
            inter.latency_s,
            inter.bytes_per_s,
        ]
    )
    constants_6.setflags(write=False)
    _balance(tokens_ED, placement_ED, route_EDD, topology.devices_per_node, int(tokens_ED.sum()), constants_6)
    return route_EDD


@compiled
def _fill_level(base_H, tokens, turn, share_H):  # type: ignore[no-untyped-def]
    """Split `tokens` (one or more) over holders that stand at `base_H` so that the lowest rise to one level.

    The odd tokens go to the holders that get any, from number (turn mod their count) on.
    """
    size = base_H.size
    total, count = tokens, size
    for h in range(size):
        share_H[h] = 1
        total += base_H[h]
    dropped = True
    while dropped:  # whoever stands at or above the level gets nothing, which lowers the level
        dropped = False
        bound, members = total, count
        for h in range(size):
            if share_H[h] == 1 and base_H[h] * members >= bound:
                share_H[h] = 0
                total -= base_H[h]
                count -= 1
                dropped = True
    level = total // count
    odd, behind = total - level * count, turn % count
    seen = 0  # the holder with this number is (seen - behind) places after the first that may get an odd token
    for h in range(size):
        if share_H[h] == 1:
            place = seen - behind if seen >= behind else seen - behind + count
            share_H[h] = level - base_H[h] + (1 if place < odd else 0)
            seen += 1


@compiled
def _split(copied_R, tokens_ED, placement_ED, local):  # type: ignore[no-untyped-def]
    """Holders and supplies of the experts `copied_R`: holder_RH and node_RH (-1 beyond), size_R, supply_RN."""
    num_devices = placement_ED.shape[1]
    size_R = np.zeros(copied_R.size, dtype=np.int64)
    widest = 0
    for r in range(copied_R.size):
        for d in range(num_devices):
            size_R[r] += placement_ED[copied_R[r], d]
        widest = max(widest, size_R[r])
    holder_RH = np.full((copied_R.size, widest), -1, dtype=np.int64)
    node_RH = np.full((copied_R.size, widest), -1, dtype=np.int64)
    supply_RN = np.zeros((copied_R.size, num_devices // local), dtype=np.int64)
    for r in range(copied_R.size):
        filled = 0
        for d in range(num_devices):
            supply_RN[r, d // local] += tokens_ED[copied_R[r], d]
            if placement_ED[copied_R[r], d]:
                holder_RH[r, filled] = d
                node_RH[r, filled] = d // local
                filled += 1
    return holder_RH, node_RH, size_R, supply_RN


@compiled
def _sweep(share_RNH, load_D, holder_RH, node_RH, size_R, supply_RN, price):  # type: ignore[no-untyped-def]
    """Once round all blocks at `price`, in place; returns how many tokens changed their holder, counted twice."""
    changed = 0
    widest = holder_RH.shape[1]
    base_H, level_H = np.empty(widest, dtype=np.int64), np.empty(widest, dtype=np.int64)
    for r in range(size_R.size):
        size = size_R[r]
        for n in range(supply_RN.shape[1]):
            if supply_RN[r, n] == 0:
                continue
            for h in range(size):
                base_H[h] = load_D[holder_RH[r, h]] - share_RNH[r, n, h] + (0 if node_RH[r, h] == n else price)
            _fill_level(base_H[:size], supply_RN[r, n], n, level_H[:size])
            for h in range(size):
                moved = level_H[h] - share_RNH[r, n, h]
                if moved != 0:
                    changed += abs(moved)
                    load_D[holder_RH[r, h]] += moved
                    share_RNH[r, n, h] = level_H[h]
    return changed


@compiled
def _realise(route_DD, tokens_D, holder_H, size, share_NH, local):  # type: ignore[no-untyped-def]
    """Add one expert's tokens to `route_DD` by `share_NH`: holders keep their own, the rest goes in index order."""
    left_G, share_H = np.empty(local, dtype=np.int64), np.empty(size, dtype=np.int64)
    for n in range(share_NH.shape[0]):
        for inside in range(local):
            left_G[inside] = tokens_D[n * local + inside]
        for h in range(size):
            share_H[h] = share_NH[n, h]
            inside = holder_H[h] - n * local
            if 0 <= inside < local:
                kept = min(left_G[inside], share_H[h])
                route_DD[holder_H[h], holder_H[h]] += kept
                left_G[inside] -= kept
                share_H[h] -= kept
        h = 0
        for inside in range(local):
            while left_G[inside] > 0:
                while share_H[h] == 0:
                    h += 1
                sent = min(left_G[inside], share_H[h])
                route_DD[n * local + inside, holder_H[h]] += sent
                left_G[inside] -= sent
                share_H[h] -= sent


@compiled
def _largest(values_X):  # type: ignore[no-untyped-def]
    """The largest of counts, 0 if there are none."""
    largest = 0
    for x in range(values_X.size):
        largest = max(largest, values_X[x])
    return largest


@compiled
def _seconds(traffic_DD, local, constants_6):  # type: ignore[no-untyped-def]
    """The layer's predicted seconds, the same arithmetic as LayerCost.layer_s."""
    num_devices = traffic_DD.shape[0]
    num_nodes = num_devices // local
    # computed at a device; sent, then received, by a device inside its node; and by a node
    load_D, link_X = np.zeros(num_devices, dtype=np.int64), np.zeros(2 * num_devices, dtype=np.int64)
    uplink_X = np.zeros(2 * num_nodes, dtype=np.int64)
    for source in range(num_devices):
        home = source // local
        for n in range(num_nodes):
            sent = 0
            for destination in range(n * local, (n + 1) * local):
                load_D[destination] += traffic_DD[source, destination]
                sent += traffic_DD[source, destination]
            if n != home:
                uplink_X[home] += sent
                uplink_X[num_nodes + n] += sent
            else:
                link_X[source] = sent - traffic_DD[source, source]
                for destination in range(n * local, (n + 1) * local):
                    if destination != source:
                        link_X[num_devices + destination] += traffic_DD[source, destination]
    expert_s_per_token, token_bytes, intra_latency_s, intra_bytes_per_s, inter_latency_s, inter_bytes_per_s = (
        constants_6
    )
    intra_bytes, inter_bytes = _largest(link_X) * token_bytes, _largest(uplink_X) * token_bytes
    intra_s = intra_latency_s + intra_bytes / intra_bytes_per_s if intra_bytes > 0 else 0.0
    inter_s = inter_latency_s + inter_bytes / inter_bytes_per_s if inter_bytes > 0 else 0.0
    return _largest(load_D) * expert_s_per_token + ALL_TO_ALLS * max(intra_s, inter_s)


@compiled
def _copied(tokens_ED, placement_ED, fixed_DD, load_D):  # type: ignore[no-untyped-def]
    """int64 [R]: the experts with tokens and several holders; all others' tokens are added to fixed_DD and load_D."""
    num_experts, num_devices = tokens_ED.shape
    copied = np.empty(num_experts, dtype=np.int64)
    count = 0
    for e in range(num_experts):
        holders = tokens = last = 0
        for d in range(num_devices):
            tokens += tokens_ED[e, d]
            if placement_ED[e, d]:
                holders += 1
                last = d
        if holders > 1 and tokens > 0:
            copied[count] = e
            count += 1
        elif tokens > 0:
            load_D[last] += tokens
            for d in range(num_devices):
                fixed_DD[d, last] += tokens_ED[e, d]
    return copied[:count]


@compiled
def _add(sum_DD, route_DD, factor):  # type: ignore[no-untyped-def]
    """sum_DD = factor * sum_DD + route_DD, in place."""
    for source in range(sum_DD.shape[0]):
        for destination in range(sum_DD.shape[1]):
            sum_DD[source, destination] = factor * sum_DD[source, destination] + route_DD[source, destination]


@compiled
def _rewrite(route_EDD, tokens_ED, copied_R, holder_RH, size_R, share_RNH, local):  # type: ignore[no-untyped-def]
    """Set the routes of the experts `copied_R` to the split `share_RNH`."""
    for r in range(copied_R.size):
        e = copied_R[r]
        for source in range(route_EDD.shape[1]):
            for h in range(size_R[r]):
                route_EDD[e, source, holder_RH[r, h]] = 0
        _realise(route_EDD[e], tokens_ED[e], holder_RH[r], size_R[r], share_RNH[r], local)


@compiled
def _balance(tokens_ED, placement_ED, route_EDD, local, total, constants_6):  # type: ignore[no-untyped-def]
    """Rewrite the local-first plan `route_EDD` of `total` tokens to the best split found; see the module's text."""
    num_devices = tokens_ED.shape[1]
    fixed_DD, load_D = np.zeros((num_devices, num_devices), dtype=np.int64), np.zeros(num_devices, dtype=np.int64)
    copied_R = _copied(tokens_ED, placement_ED, fixed_DD, load_D)
    if copied_R.size == 0:
        return
    holder_RH, node_RH, size_R, supply_RN = _split(copied_R, tokens_ED, placement_ED, local)
    share_RNH = np.zeros((copied_R.size, supply_RN.shape[1], holder_RH.shape[1]), dtype=np.int64)
    traffic_DD = np.zeros((num_devices, num_devices), dtype=np.int64)
    _add(traffic_DD, fixed_DD, 0)
    for r in range(copied_R.size):
        _add(traffic_DD, route_EDD[copied_R[r]], 1)
    best_s, best_RNH = _seconds(traffic_DD, local, constants_6), share_RNH
    found = False
    price = total + 1
    for k in range(NUM_PRICES + 1):
        for _ in range(MAX_SWEEPS):
            if _sweep(share_RNH, load_D, holder_RH, node_RH, size_R, supply_RN, price) * SETTLED <= total:
                break
        _add(traffic_DD, fixed_DD, 0)
        for r in range(copied_R.size):
            _realise(traffic_DD, tokens_ED[copied_R[r]], holder_RH[r], size_R[r], share_RNH[r], local)
        split_s = _seconds(traffic_DD, local, constants_6)
        if split_s < best_s:
            best_s, best_RNH, found = split_s, share_RNH.copy(), True
        if (_largest(load_D) * num_devices - total) * EVEN <= total:
            break
        price = total // (num_devices * 2 ** (k + 1)) if k < NUM_PRICES - 1 else 0
    if found:
        _rewrite(route_EDD, tokens_ED, copied_R, holder_RH, size_R, best_RNH, local)
