"""Slow, plain references of the balanced dispatch rule: the same descent by sorting, and the true optimum by an LP."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from themis.core.cost import LayerCost
from themis.core.topology import Topology
from themis.planning.balance import EVEN, MAX_SWEEPS, NUM_PRICES, SETTLED
from themis.planning.reference import dispatch_reference

Shares = dict[tuple[int, int], list[int]]


def balance_reference(
    tokens_ED: NDArray[np.int64], placement_ED: NDArray[np.bool_], topology: Topology, cost: LayerCost
) -> NDArray[np.int64]:
    """As `dispatch` with rule "balanced": int64 [E, D, D]."""
    best_EDD = dispatch_reference(tokens_ED, placement_ED, topology)
    best_s = cost.layer_s(best_EDD, topology)
    copied = [e for e in range(tokens_ED.shape[0]) if placement_ED[e].sum() > 1 and tokens_ED[e].sum() > 0]
    if not copied:
        return best_EDD
    holders = {e: [int(h) for h in np.flatnonzero(placement_ED[e])] for e in copied}
    supply_EN = tokens_ED.reshape(tokens_ED.shape[0], topology.num_nodes, -1).sum(axis=2)
    total = int(tokens_ED.sum())
    load_D = best_EDD.sum(axis=(0, 1)) - best_EDD[copied].sum(axis=(0, 1))
    share: Shares = {(e, n): [0] * len(holders[e]) for e in copied for n in range(topology.num_nodes)}
    prices = [total + 1, *(total // (topology.num_devices * 2**k) for k in range(1, NUM_PRICES)), 0]
    for price in prices:
        for _ in range(MAX_SWEEPS):
            moved = 0
            for e, n in share:
                moved += _settle(share, e, n, holders[e], load_D, int(supply_EN[e, n]), price, topology)
            if moved * SETTLED <= total:
                break
        route_EDD = best_EDD.copy()
        for e in copied:
            route_EDD[e] = _realise(
                tokens_ED[e], holders[e], [share[e, n] for n in range(topology.num_nodes)], topology
            )
        route_s = cost.layer_s(route_EDD, topology)
        if route_s < best_s:
            best_s, best_EDD = route_s, route_EDD
        if (int(load_D.max()) * topology.num_devices - total) * EVEN <= total:
            break
    return best_EDD


def _settle(
    share: Shares,
    e: int,
    n: int,
    holders: list[int],
    load_D: NDArray[np.int64],
    tokens: int,
    price: int,
    topology: Topology,
) -> int:
    """Split one block anew, in place; returns how many tokens were taken and given."""
    if tokens == 0:
        return 0
    base = [
        int(load_D[h]) - before + (0 if topology.node_of_D[h] == n else price)
        for h, before in zip(holders, share[e, n], strict=True)
    ]
    lowest = sorted(range(len(base)), key=lambda i: base[i])
    count = 1
    while count < len(base) and base[lowest[count]] * count < tokens + sum(base[i] for i in lowest[:count]):
        count += 1
    level, odd = divmod(tokens + sum(base[i] for i in lowest[:count]), count)
    members = sorted(lowest[:count])
    new = [0] * len(base)
    for place, i in enumerate(members[n % count :] + members[: n % count]):
        new[i] = level - base[i] + (place < odd)
    moved = sum(abs(after - before) for after, before in zip(new, share[e, n], strict=True))
    for h, after, before in zip(holders, new, share[e, n], strict=True):
        load_D[h] += after - before
    share[e, n] = new
    return moved


def _realise(
    tokens_D: NDArray[np.int64], holders: list[int], shares: list[list[int]], topology: Topology
) -> NDArray[np.int64]:
    """int64 [D, D]: the tokens of one expert by source and destination, own tokens first, then one by one in order."""
    route_DD = np.zeros((tokens_D.size, tokens_D.size), dtype=np.int64)
    for n, share in enumerate(shares):
        wanted = dict(zip(holders, share, strict=True))
        sources = [d for d in range(tokens_D.size) if topology.node_of_D[d] == n]
        for d in sources:
            route_DD[d, d] = min(int(tokens_D[d]), wanted.get(d, 0))
        senders = [d for d in sources for _ in range(int(tokens_D[d] - route_DD[d, d]))]
        takers = [h for h in holders for _ in range(wanted[h] - int(route_DD[h, h]) if h in sources else wanted[h])]
        for source, taker in zip(senders, takers, strict=True):
            route_DD[source, taker] += 1
    return route_DD


def optimal_layer_s(
    tokens_ED: NDArray[np.int64], placement_ED: NDArray[np.bool_], topology: Topology, cost: LayerCost
) -> float:
    """The least seconds any (fractional) split of the placement can take, latencies left out: a linear program."""
    node_of_D, wire_s = topology.node_of_D, cost.ALL_TO_ALLS * cost.token_bytes
    flows = [(int(e), int(d), int(h)) for e, d in np.argwhere(tokens_ED > 0) for h in np.flatnonzero(placement_ED[e])]
    slowest, busiest = len(flows), len(flows) + 1  # two more variables: seconds of devices and of links
    entries: dict[tuple[str, int], list[tuple[int, float]]] = {}
    sources: dict[tuple[int, int], int] = {}
    for x, (e, d, h) in enumerate(flows):
        sources.setdefault((e, d), len(sources))
        entries.setdefault(("compute", h), [(slowest, -1.0)]).append((x, cost.expert_s_per_token))
        if node_of_D[d] != node_of_D[h]:
            ends, seconds = (("out", int(node_of_D[d])), ("in", int(node_of_D[h]))), wire_s / topology.inter.bytes_per_s
        else:
            ends, seconds = (("send", d), ("receive", h)), wire_s / topology.intra.bytes_per_s if d != h else 0.0
        for end in ends:
            entries.setdefault(end, [(busiest, -1.0)]).append((x, seconds))
    triples = [(row, x, value) for row, columns in enumerate(entries.values()) for x, value in columns]
    rows, columns, values = (list(part) for part in zip(*triples, strict=True))
    shape = len(entries), len(flows) + 2
    given = coo_array(
        (np.ones(len(flows)), ([sources[e, d] for e, d, _ in flows], range(len(flows)))), (len(sources), shape[1])
    )
    solved = linprog(
        c=[0.0] * len(flows) + [1.0, 1.0],
        A_ub=coo_array((values, (rows, columns)), shape).toarray(),
        b_ub=np.zeros(shape[0]),
        A_eq=given.toarray(),
        b_eq=[float(tokens_ED[e, d]) for e, d in sources],
    )
    assert solved.fun is not None, solved.message
    return float(solved.fun)
