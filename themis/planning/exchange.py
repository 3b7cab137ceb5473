"""SmartMoE's online rule (ATC 2023): experts change places between slots, as many on each device as before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def exchange_owners(owner_E: NDArray[np.int64], load_E: NDArray[np.float64], num_devices: int) -> NDArray[np.int64]:
    """int64 [E]: owners of lower maximum load, or `owner_E` itself where the rule finds none.

    Experts by descending load (ties: lower index), each to the least-loaded device that has a slot left (ties: the
    expert's own device, then the lower index); a device has as many slots as `owner_E` gives it experts.
    """
    slots_D = np.bincount(owner_E, minlength=num_devices)
    now_D = np.bincount(owner_E, weights=load_E, minlength=num_devices)
    new_E, load_D = np.empty_like(owner_E), np.zeros(num_devices)
    for e in np.argsort(-load_E, kind="stable"):
        least = load_D[slots_D > 0].min()
        best_D = np.flatnonzero((slots_D > 0) & (load_D == least))
        new_E[e] = owner_E[e] if owner_E[e] in best_D else best_D[0]
        slots_D[new_E[e]] -= 1
        load_D[new_E[e]] += load_E[e]
    return new_E if load_D.max() < now_D.max() else owner_E
