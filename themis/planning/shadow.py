"""FasterMoE's rule (PPoPP 2022, section 4): which experts to copy to every device once the gate's counts are known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from themis.core.cost import LayerCost
from themis.core.topology import Topology
from themis.planning.compiled import compiled, ints
from themis.planning.transfers import transfers

#: As a plain constant, which kernels can see.
ALL_TO_ALLS = LayerCost.ALL_TO_ALLS


def shadow(
    owner_E: NDArray[np.int64], tokens_ED: NDArray[np.int64], topology: Topology, cost: LayerCost
) -> NDArray[np.bool_]:
    """bool [E]: the experts to shadow.

    owner_E: int [E]; tokens_ED: int [E, D]. Experts are tried by descending load (ties: lower index). One is accepted
    if the predicted time falls when its tokens stay where they are and its chunk is broadcast and its gradient
    reduced; the first that does not pay ends the search. Predicted time: slowest device's experts, four AlltoAlls by
    their most loaded link, and twice a broadcast for each shadowed expert.
    """
    tokens_ED, owner_E = ints(tokens_ED, "tokens_ED", 2), ints(owner_E, "owner_E", 1)
    constants_6 = np.array(
        [
            cost.expert_s_per_token,
            cost.token_bytes,
            topology.intra.latency_s,
            topology.intra.bytes_per_s,
            topology.inter.latency_s,
            topology.inter.bytes_per_s,
        ]
    )
    return _shadow(  # type: ignore[no-any-return]
        owner_E, tokens_ED, topology.devices_per_node, constants_6, 2 * broadcast_s(topology, cost)
    )


def broadcast_s(topology: Topology, cost: LayerCost) -> float:
    """Seconds to bring one chunk from its owner to every device."""
    everywhere_ED = np.ones((1, topology.num_devices), dtype=np.bool_)
    owner_E = np.zeros(1, dtype=np.int64)
    return cost.transfer_s(transfers(owner_E, everywhere_ED, topology, expert_bytes=cost.expert_bytes), topology)


@compiled
def _add(expert, owner, sign, tokens_ED, local, load_D, links_4D):  # type: ignore[no-untyped-def]
    """Enter (sign 1) or take back (-1) the tokens that travel to the owner. links: out and in, intra and inter."""
    for source in range(tokens_ED.shape[1]):
        tokens = sign * tokens_ED[expert, source]
        if source == owner or tokens == 0:
            continue
        load_D[owner] += tokens
        load_D[source] -= tokens
        if source // local == owner // local:
            links_4D[0, source] += tokens
            links_4D[1, owner] += tokens
        else:
            links_4D[2, source // local] += tokens
            links_4D[3, owner // local] += tokens


@compiled
def _seconds(load_D, links_4D, constants_6):  # type: ignore[no-untyped-def]
    expert_s, token_bytes, intra_latency_s, intra, inter_latency_s, inter = constants_6
    worst_s = 0.0
    inside, across = links_4D[:2].max(), links_4D[2:].max()
    if inside > 0:
        worst_s = intra_latency_s + inside * token_bytes / intra
    if across > 0:
        worst_s = max(worst_s, inter_latency_s + across * token_bytes / inter)
    return load_D.max() * expert_s + ALL_TO_ALLS * worst_s


@compiled
def _shadow(owner_E, tokens_ED, local, constants_6, shadow_s):  # type: ignore[no-untyped-def]
    num_experts, num_devices = tokens_ED.shape
    chosen_E = np.zeros(num_experts, dtype=np.bool_)
    load_D = tokens_ED.sum(axis=0)
    links_4D = np.zeros((4, num_devices), dtype=np.int64)
    for e in range(num_experts):
        _add(e, owner_E[e], 1, tokens_ED, local, load_D, links_4D)
    now_s, shadows = _seconds(load_D, links_4D, constants_6), 0
    order_E = np.argsort(-tokens_ED.sum(axis=1), kind="mergesort")
    for e in order_E:
        _add(e, owner_E[e], -1, tokens_ED, local, load_D, links_4D)
        then_s = _seconds(load_D, links_4D, constants_6) + (shadows + 1) * shadow_s
        if then_s >= now_s:
            break
        now_s, shadows = then_s, shadows + 1
        chosen_E[e] = True
    return chosen_E
