"""A placement built from predicted tokens: which experts each node takes in, and where in the node copies go."""

from __future__ import annotations

from typing import Any

import numpy as np

from themis.planning.compiled import compiled


@compiled
def construct(
    supply_EN: Any, tokens_ED: Any, owner_E: Any, budget_D: Any, foreign: Any, spread: Any, target: Any, hold_ED: Any
) -> None:
    """Write a placement into `hold_ED`, bool [E, D].

    Every node takes in the `foreign` experts of most tokens of its own that live elsewhere. On each device then the
    `spread` experts of most own tokens, among those its node has, get a copy. Then the node's experts are packed, the
    largest first: the holders fill up to `target` tokens, and what is left makes a copy on the least-loaded device
    with a slot, again and again. budget_D: int [D], copies a device may hold.
    """
    num_experts, nodes = supply_EN.shape
    devices = budget_D.size
    local = devices // nodes
    hold_ED[:] = False
    for e in range(num_experts):
        hold_ED[e, owner_E[e]] = True
    free_D, load_D = budget_D.copy(), np.zeros(devices)
    for n in range(nodes):
        order_E = np.argsort(-supply_EN[:, n], kind="mergesort")
        wanted_E = np.zeros(num_experts, dtype=np.bool_)
        taken = 0
        for e in order_E:
            at_home = owner_E[e] // local == n
            wanted_E[e] = at_home or (taken < foreign and supply_EN[e, n] > 0)
            taken += wanted_E[e] and not at_home
        left_E = np.where(wanted_E, supply_EN[:, n], 0.0)
        _spread(n * local, local, tokens_ED, wanted_E, spread, hold_ED, free_D, load_D, left_E)
        for e in order_E:
            if left_E[e] > 0:
                _pack(n * local, local, left_E[e], target, hold_ED[e], free_D, load_D)


@compiled
def _spread(
    first: Any, local: Any, tokens_ED: Any, wanted_E: Any, spread: Any, hold_ED: Any, free_D: Any, load_D: Any,
    left_E: Any,
) -> None:  # fmt: skip
    for _ in range(spread):
        for d in range(first, first + local):
            best = -1
            for e in range(wanted_E.size):
                open_ = wanted_E[e] and not hold_ED[e, d] and tokens_ED[e, d] > 0
                if open_ and (best < 0 or tokens_ED[e, d] > tokens_ED[best, d]):
                    best = e
            if best >= 0 and free_D[d] > 0:
                hold_ED[best, d] = True
                free_D[d] -= 1
                load_D[d] += tokens_ED[best, d]
                left_E[best] -= tokens_ED[best, d]


@compiled
def _pack(first: Any, local: Any, amount: Any, target: Any, hold_D: Any, free_D: Any, load_D: Any) -> None:
    left, holders = amount, 0
    for d in range(first, first + local):
        if hold_D[d]:
            part = min(left, max(0.0, target - load_D[d]))
            load_D[d] += part
            left -= part
            holders += 1
    while left > 0:
        best = -1
        for d in range(first, first + local):
            if free_D[d] > 0 and not hold_D[d] and (best < 0 or load_D[d] < load_D[best]):
                best = d
        # A second copy only where there is room to gain; the first brings the tokens home in any case.
        if best < 0 or (holders > 0 and load_D[best] >= target):
            break
        hold_D[best] = True
        free_D[best] -= 1
        holders += 1
        part = min(left, max(0.0, target - load_D[best]))
        load_D[best] += part
        left -= part
    if holders > 0:
        for d in range(first, first + local):
            if hold_D[d]:
                load_D[d] += left / holders
