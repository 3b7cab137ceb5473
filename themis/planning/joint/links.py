"""What flows load: devices, uplinks and device links; and moves that use what room links have."""

from __future__ import annotations

from typing import Any

import numpy as np

from themis.planning.compiled import compiled

#: Moves of less than this part of the mean device load are not worth making.
SETTLED = 0.002


@compiled
def link_terms(flow_END: Any, tokens_ED: Any, local: Any, load_D: Any, into_N: Any, out_N: Any, link_D: Any) -> None:
    """Of node-to-device flows [E, N, D]: tokens that each device computes, and that cross each uplink and link."""
    num_experts, nodes, devices = flow_END.shape
    load_D[:] = 0
    into_N[:] = 0
    out_N[:] = 0
    link_D[:] = 0
    for e in range(num_experts):
        for n in range(nodes):
            for d in range(devices):
                flow = flow_END[e, n, d]
                if flow > 0:
                    load_D[d] += flow
                    if d // local != n:
                        into_N[d // local] += flow
                        out_N[n] += flow
                    elif flow > tokens_ED[e, d]:
                        link_D[d] += flow - tokens_ED[e, d]


@compiled
def layer_terms(flow_END: Any, tokens_ED: Any, local: Any, load_D: Any, busiest_3: Any) -> None:
    """Device loads, and tokens of the busiest device, uplink and device link."""
    nodes, devices = flow_END.shape[1:]
    into_N, out_N, link_D = np.zeros(nodes), np.zeros(nodes), np.zeros(devices)
    link_terms(flow_END, tokens_ED, local, load_D, into_N, out_N, link_D)
    busiest_3[0] = load_D.max()
    busiest_3[1] = max(into_N.max(), out_N.max())
    busiest_3[2] = link_D.max()


@compiled
def _room(
    flow: Any, own_left: Any, n: Any, here: Any, there: Any, gap: Any, link: Any, into: Any, out: Any
) -> Any:  # fmt: skip
    """Tokens of node n that may move from a device on node `here` to one on `there` with room left on its links."""
    room = min(flow, gap / 2)
    if there == n:
        return min(room, max(0.0, own_left) + link)
    if there != here:
        room = min(room, into)
        if here == n:
            room = min(room, out)
    return room


@compiled
def polish(holder_EH: Any, count_E: Any, tokens_ED: Any, local: Any, terms_6: Any, flow_END: Any, load_D: Any) -> None:
    """Move load off the busiest device as long as no link takes longer than the one that binds already."""
    num_experts, nodes, devices = flow_END.shape
    into_N, out_N, link_D = np.zeros(nodes), np.zeros(nodes), np.zeros(devices)
    link_terms(flow_END, tokens_ED, local, load_D, into_N, out_N, link_D)
    bound_s = max(terms_6[1] * max(into_N.max(), out_N.max()), terms_6[2] * link_D.max())
    uplink, inside = bound_s / terms_6[1], bound_s / terms_6[2]
    least = SETTLED * load_D.sum() / devices
    for _ in range(2 * devices):
        hot = np.argmax(load_D)
        most, expert, node, to = least, -1, -1, -1
        for e in range(num_experts):
            for n in range(nodes):
                if count_E[e] <= 1 or flow_END[e, n, hot] < least:
                    continue
                for i in range(count_E[e]):
                    d = holder_EH[e, i]
                    room = _room(
                        flow_END[e, n, hot], tokens_ED[e, d] - flow_END[e, n, d], n, hot // local, d // local,
                        load_D[hot] - load_D[d], inside - link_D[d], uplink - into_N[d // local], uplink - out_N[n],
                    )  # fmt: skip
                    if room > most:
                        most, expert, node, to = room, e, n, d
        if expert < 0:
            return
        for d, change in ((hot, -most), (to, most)):
            before = flow_END[expert, node, d]
            flow_END[expert, node, d] = before + change
            load_D[d] += change
            if d // local != node:
                into_N[d // local] += change
                out_N[node] += change
            else:
                own = tokens_ED[expert, d]
                link_D[d] += max(0.0, before + change - own) - max(0.0, before - own)
