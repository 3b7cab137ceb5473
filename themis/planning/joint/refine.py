"""Moves that better a placement: on one device after another, an addition, a removal, or one for the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from themis.planning.compiled import compiled
from themis.planning.joint.estimate import estimate

#: A move counts if it lowers the estimate by this part.
BETTER = 1e-6
#: Experts that are tried on a device by each of three reasons, and copies that make room for them.
ADDS, DROPS = 2, 3


@compiled
def count_holders(hold_ED: Any, local: Any, count_EN: Any) -> None:
    """Count each node's holders of each expert anew."""
    count_EN[:] = 0
    for e in range(hold_ED.shape[0]):
        for d in range(hold_ED.shape[1]):
            count_EN[e, d // local] += hold_ED[e, d]


@compiled
def _set(hold_ED: Any, count_EN: Any, local: Any, e: Any, d: Any, held: Any) -> None:
    if e >= 0:
        hold_ED[e, d] = held
        count_EN[e, d // local] += 1 if held else -1


@compiled
def refine(
    hold_ED: Any, count_EN: Any, supply_EN: Any, tokens_ED: Any, order_E: Any, owner_E: Any, local: Any, terms_6: Any,
    budget_D: Any, state: Any, now_s: Any, estimates: Any,
) -> None:  # fmt: skip
    """The best of a few additions, removals and exchanges on each device; until none helps or `estimates` are spent."""
    devices = hold_ED.shape[1]
    served_EN, flow_ED = state[0], state[1]
    adds_A, drops_A = np.empty(3 * ADDS, dtype=np.int64), np.empty(DROPS + 1, dtype=np.int64)
    quiet, d = 0, -1
    while quiet < devices and estimates > 0:
        d = (d + 1) % devices
        estimate(hold_ED, count_EN, supply_EN, tokens_ED, order_E, owner_E, local, terms_6, state)
        estimates -= 1
        adds = _best_adds(d, local, hold_ED, count_EN, supply_EN, tokens_ED, served_EN, adds_A)
        drops = _least_used(d, hold_ED, flow_ED, owner_E, drops_A)
        full = hold_ED[:, d].sum() - (owner_E == d).sum() >= budget_D[d]
        best_s, best_add, best_drop = now_s * (1 - BETTER), -1, -1
        for j in range(drops + 1):
            drop = drops_A[j] if j < drops else -1
            _set(hold_ED, count_EN, local, drop, d, False)
            for i in range(-1, adds):
                add = adds_A[i] if i >= 0 else -1
                if (add < 0 and drop < 0) or (drop < 0 and full):
                    continue
                _set(hold_ED, count_EN, local, add, d, True)
                then_s = estimate(hold_ED, count_EN, supply_EN, tokens_ED, order_E, owner_E, local, terms_6, state)
                estimates -= 1
                _set(hold_ED, count_EN, local, add, d, False)
                if then_s < best_s:
                    best_s, best_add, best_drop = then_s, add, drop
            _set(hold_ED, count_EN, local, drop, d, True)
        if best_add < 0 and best_drop < 0:
            quiet += 1
            continue
        quiet, now_s = 0, best_s
        _set(hold_ED, count_EN, local, best_drop, d, False)
        _set(hold_ED, count_EN, local, best_add, d, True)


@compiled
def _best_adds(
    d: Any, local: Any, hold_ED: Any, count_EN: Any, supply_EN: Any, tokens_ED: Any, served_EN: Any, adds_A: Any
) -> Any:
    """Experts worth a copy on device d: those its node sends away, those its node computes most of a copy, its own."""
    n, found = d // local, 0
    for reason in range(3):
        for _ in range(ADDS):
            best, most = -1, 0.0
            for e in range(hold_ED.shape[0]):
                if hold_ED[e, d] or e in adds_A[:found]:
                    continue
                if reason == 0:
                    worth = supply_EN[e, n] if count_EN[e, n] == 0 else 0.0
                elif reason == 1:
                    worth = served_EN[e, n] / count_EN[e, n] if count_EN[e, n] > 0 else 0.0
                else:
                    worth = tokens_ED[e, d]
                if worth > most:
                    best, most = e, worth
            if best >= 0:
                adds_A[found] = best
                found += 1
    return found


@compiled
def _least_used(d: Any, hold_ED: Any, flow_ED: Any, owner_E: Any, drops_A: Any) -> Any:
    """The copies on device d that compute least."""
    found = 0
    for _ in range(DROPS):
        best = -1
        for e in range(hold_ED.shape[0]):
            open_ = hold_ED[e, d] and owner_E[e] != d and e not in drops_A[:found]
            if open_ and (best < 0 or flow_ED[e, d] < flow_ED[best, d]):
                best = e
        if best >= 0:
            drops_A[found] = best
            found += 1
    return found
