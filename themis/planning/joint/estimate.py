"""The time of a layer under a placement, quickly: a node's tokens stay there where they can, then devices level out."""

from __future__ import annotations

from typing import Any

import numpy as np

from themis.planning.compiled import compiled
from themis.planning.joint.water import pour

#: Prices of a node-mate's tokens in the two rounds of levelling, as parts of the mean device load.
NEAR_PRICES = (0.1, 0.01)
#: Levelling ends when a round moves less than this part of the mean device load.
SETTLED = 0.01
#: Nodes whose loads differ by less than this part are level.
LEVEL = 1e-3


@compiled
def make_state(num_experts: Any, nodes: Any, devices: Any) -> Any:
    """What `estimate` writes: tokens served [E, N] by node and [E, D] by device, loads [D] and [N], uplinks [2, N]."""
    return (
        np.zeros((num_experts, nodes)),
        np.zeros((num_experts, devices)),
        np.zeros(devices),
        np.zeros(nodes),
        np.zeros((2, nodes)),
        np.zeros((3, devices)),
        np.zeros(devices, dtype=np.int64),
    )


@compiled
def _serve(count_EN: Any, supply_EN: Any, order_E: Any, served_EN: Any, node_N: Any, cross_2N: Any) -> None:
    """Nodes serve what they hold; the rest goes to the least-loaded node that holds it."""
    nodes = supply_EN.shape[1]
    node_N[:] = 0
    cross_2N[:] = 0
    for e in order_E:
        for n in range(nodes):
            served_EN[e, n] = supply_EN[e, n] if count_EN[e, n] > 0 else 0.0
            node_N[n] += served_EN[e, n]
    for e in order_E:
        for n in range(nodes):
            if count_EN[e, n] > 0 or supply_EN[e, n] <= 0:
                continue
            best = -1
            for q in range(nodes):
                if count_EN[e, q] > 0 and (best < 0 or node_N[q] < node_N[best]):
                    best = q
            served_EN[e, best] += supply_EN[e, n]
            node_N[best] += supply_EN[e, n]
            cross_2N[0, best] += supply_EN[e, n]
            cross_2N[1, n] += supply_EN[e, n]


@compiled
def _level(count_EN: Any, order_E: Any, served_EN: Any, node_N: Any, cross_2N: Any, cap: Any) -> None:
    """Move load from the fullest to the emptiest node as long as no uplink carries more than `cap`."""
    for _ in range(2 * node_N.size):
        full, empty = np.argmax(node_N), np.argmin(node_N)
        wanted = min((node_N[full] - node_N[empty]) / 2, cap - cross_2N[1, full], cap - cross_2N[0, empty])
        if wanted <= LEVEL * node_N[full]:
            return
        moved = 0.0
        for e in order_E:
            if count_EN[e, full] > 0 and count_EN[e, empty] > 0:
                part = min(served_EN[e, full], wanted - moved)
                served_EN[e, full] -= part
                served_EN[e, empty] += part
                moved += part
        if moved == 0:
            return
        node_N[full] -= moved
        node_N[empty] += moved
        cross_2N[1, full] += moved
        cross_2N[0, empty] += moved


@compiled
def _fill_node(
    first: Any, local: Any, hold_ED: Any, copies_E: Any, amount_E: Any, tokens_ED: Any, order_E: Any, mean: Any,
    flow_ED: Any, load_D: Any, scratch_3D: Any, at_H: Any,
) -> None:  # fmt: skip
    """Split what a node serves over its devices, evenly and with few tokens between them."""
    base_H, own_H, share_H = scratch_3D
    for e in order_E:
        for d in range(first, first + local):
            flow_ED[e, d] = 0.0
            if copies_E[e] == 1 and hold_ED[e, d]:
                flow_ED[e, d] = amount_E[e]
                load_D[d] += amount_E[e]
    for price in NEAR_PRICES:
        moved = 0.0
        for e in order_E:
            if copies_E[e] < 2 or amount_E[e] <= 0:
                continue
            count = 0
            for d in range(first, first + local):
                if hold_ED[e, d]:
                    load_D[d] -= flow_ED[e, d]
                    base_H[count], own_H[count], at_H[count] = load_D[d], tokens_ED[e, d], d
                    count += 1
            pour(base_H, own_H, count, amount_E[e], price * mean, share_H)
            for i in range(count):
                moved += abs(share_H[i] - flow_ED[e, at_H[i]])
                flow_ED[e, at_H[i]] = share_H[i]
                load_D[at_H[i]] += share_H[i]
        if moved < SETTLED * mean:
            return


@compiled
def _inside(
    hold_ED: Any, supply_EN: Any, served_EN: Any, tokens_ED: Any, flow_ED: Any, owner_E: Any, local: Any
) -> Any:
    """(tokens over the busiest device link, most copies on a device, most experts new to a node)."""
    num_experts, devices = hold_ED.shape
    link, copies = 0.0, 0
    for d in range(devices):
        tokens, held = 0.0, 0
        for e in range(num_experts):
            if hold_ED[e, d]:
                held += owner_E[e] != d
                beyond = flow_ED[e, d] - tokens_ED[e, d]
                if beyond > 0:  # of which the part from other nodes came over the uplink
                    n = d // local
                    tokens += beyond * min(1.0, supply_EN[e, n] / served_EN[e, n])
        link, copies = max(link, tokens), max(copies, held)
    return link, copies


@compiled
def _new_to_node(count_EN: Any, owner_E: Any, local: Any) -> Any:
    most = 0
    for n in range(count_EN.shape[1]):
        new = 0
        for e in range(owner_E.size):
            new += count_EN[e, n] > 0 and owner_E[e] // local != n
        most = max(most, new)
    return most


@compiled
def estimate(
    hold_ED: Any, count_EN: Any, supply_EN: Any, tokens_ED: Any, order_E: Any, owner_E: Any, local: Any, terms_6: Any,
    state: Any,
) -> Any:  # fmt: skip
    """Seconds of the layer by `Terms`, exposed copying included.

    hold_ED: bool [E, D]; count_EN: int [E, N], holders on each node; supply_EN, tokens_ED: float, predicted tokens;
    order_E: experts by descending load. Nodes level out freely where that pays by itself, else as far as uplinks have
    room. Where device links take longer than uplinks, tokens are taken to change over until both take as long.
    """
    served_EN, flow_ED, load_D, node_N, cross_2N, scratch_3D, at_H = state
    compute_s, inter_s, intra_s, node_copy_s, device_copy_s, window_s = terms_6
    devices, nodes = hold_ED.shape[1], supply_EN.shape[1]
    _serve(count_EN, supply_EN, order_E, served_EN, node_N, cross_2N)
    cap = np.inf if compute_s > local * inter_s else cross_2N.max()
    _level(count_EN, order_E, served_EN, node_N, cross_2N, cap)
    load_D[:] = 0
    mean = node_N.sum() / devices
    for n in range(nodes):
        _fill_node(
            n * local, local, hold_ED, count_EN[:, n], served_EN[:, n], tokens_ED, order_E, mean, flow_ED, load_D,
            scratch_3D, at_H,
        )  # fmt: skip
    link, copies = _inside(hold_ED, supply_EN, served_EN, tokens_ED, flow_ED, owner_E, local)
    across_s, inside_s = inter_s * cross_2N.max(), intra_s * link
    if inside_s > across_s and nodes > 1:
        exchange = local * inter_s / intra_s
        across_s = (exchange * inside_s + across_s) / (1 + exchange)
    copying_s = max(node_copy_s * _new_to_node(count_EN, owner_E, local), device_copy_s * copies)
    exposed_s = max(0.0, copying_s - window_s) + max(0.0, copying_s - 2 * window_s)
    return compute_s * load_D.max() + max(across_s, inside_s if nodes == 1 else 0.0) + exposed_s
