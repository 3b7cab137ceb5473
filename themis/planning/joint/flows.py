"""Shares that minimise a layer's time under a placement, from exact counts: node-to-device flows.

As in `balance`, the sum over devices of load^2 / 2 plus prices on what travels is lowered block by block, a block being
the tokens of one expert from one node, and prices fall round by round. Two things differ. A device's own tokens are
free and its node-mates' cost a price of their own; and the two prices follow what each round shows: the links that do
not bind get cheaper. So traffic goes where links are idle, which counts most where uplinks are as fast as devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from themis.planning.compiled import compiled
from themis.planning.joint.links import layer_terms, polish
from themis.planning.joint.water import pour

#: Prices by round, as parts of the mean device load: from one at which only what must moves, to nearly none.
PRICES = 0.5 ** np.arange(7)
PRICES.setflags(write=False)
SWEEPS = 1
#: A price falls by no more than this a round.
CHEAPER = 0.5


@compiled
def _holders(placement_ED: Any) -> Any:
    num_experts, devices = placement_ED.shape
    holder_EH, count_E = np.zeros((num_experts, devices), dtype=np.int64), np.zeros(num_experts, dtype=np.int64)
    for e in range(num_experts):
        for d in range(devices):
            if placement_ED[e, d]:
                holder_EH[e, count_E[e]] = d
                count_E[e] += 1
    return holder_EH, count_E


@compiled
def _sweep(
    order_E: Any, holder_EH: Any, count_E: Any, supply_EN: Any, tokens_ED: Any, local: Any, near: Any, far: Any,
    flow_END: Any, load_D: Any, scratch_3D: Any,
) -> None:  # fmt: skip
    """Pour every block of the copied experts anew, at the price `near` of a node-mate's tokens and `far` of others'."""
    base_H, own_H, share_H = scratch_3D
    for e in order_E:
        count = count_E[e]
        if count <= 1:
            continue
        for n in range(supply_EN.shape[1]):
            if supply_EN[e, n] <= 0:
                continue
            for i in range(count):
                d = holder_EH[e, i]
                load_D[d] -= flow_END[e, n, d]
                at_home = d // local == n
                base_H[i] = load_D[d] if at_home else load_D[d] + far
                # What comes from other nodes crosses the uplink alone: no further price once it is there.
                own_H[i] = tokens_ED[e, d] if at_home else np.inf
            pour(base_H, own_H, count, supply_EN[e, n], near, share_H)
            for i in range(count):
                flow_END[e, n, holder_EH[e, i]] = share_H[i]
                load_D[holder_EH[e, i]] += share_H[i]


@compiled
def flows(tokens_ED: Any, placement_ED: Any, owner_E: Any, local: Any, terms_6: Any, prices_P: Any) -> Any:
    """float64 [E, N, D]: how many tokens of each node each holder is to compute."""
    num_experts, devices = tokens_ED.shape
    nodes = devices // local
    holder_EH, count_E = _holders(placement_ED)
    supply_EN = np.zeros((num_experts, nodes))
    for e in range(num_experts):
        for d in range(devices):
            supply_EN[e, d // local] += tokens_ED[e, d]
    flow_END, load_D = np.zeros((num_experts, nodes, devices)), np.zeros(devices)
    for e in range(num_experts):
        flow_END[e, :, owner_E[e]] = supply_EN[e]
    busiest_3, scratch_3D = np.zeros(3), np.zeros((3, devices))
    layer_terms(flow_END, tokens_ED, local, load_D, busiest_3)
    best_END = flow_END.copy()
    best_s = terms_6[0] * busiest_3[0] + max(terms_6[1] * busiest_3[1], terms_6[2] * busiest_3[2])
    for e in range(num_experts):
        if count_E[e] > 1:
            load_D[owner_E[e]] -= supply_EN[e].sum()
            flow_END[e, :, owner_E[e]] = 0
    order_E = np.argsort(-supply_EN.sum(axis=1), kind="mergesort")
    mean = supply_EN.sum() / devices
    near, far = min(1.0, terms_6[2] / (local * terms_6[1])), 1.0
    for price in prices_P:
        for _ in range(SWEEPS):
            _sweep(
                order_E, holder_EH, count_E, supply_EN, tokens_ED, local, price * mean * near, price * mean * far,
                flow_END, load_D, scratch_3D,
            )  # fmt: skip
        layer_terms(flow_END, tokens_ED, local, load_D, busiest_3)
        across_s, inside_s = terms_6[1] * busiest_3[1], terms_6[2] * busiest_3[2]
        layer_s = terms_6[0] * busiest_3[0] + max(across_s, inside_s)
        if layer_s < best_s:
            best_s = layer_s
            best_END[:] = flow_END
        if across_s > inside_s:
            near *= max(CHEAPER, inside_s / across_s)
        elif inside_s > 0:
            far *= max(CHEAPER, across_s / inside_s)
        near, far = near / max(near, far), far / max(near, far)
    polish(holder_EH, count_E, tokens_ED, local, terms_6, best_END, load_D)
    return best_END
