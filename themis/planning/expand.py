"""FlexMoE's rule (SIGMOD 2023): replicas that stay, changed one at a time by expanding, shrinking and migrating."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from themis.core.cost import LayerCost, link_tokens
from themis.core.placement import Placement
from themis.core.topology import Topology
from themis.planning.transfers import transfers


def adjust(
    held: Placement,
    load_E: NDArray[np.float64],
    topology: Topology,
    cost: LayerCost,
    *,
    slots_D: NDArray[np.int64],
    threshold: float,
) -> Placement:
    """`held` changed step by step while the busiest device exceeds `threshold` times the mean, or `held` itself.

    load_E: float [E], a copy of an expert takes an even part; slots_D: int [D], copies that a device may hold, owners
    included. A step gives the expert of the most load a copy (ties: lower index) a further copy, on the least-loaded
    device with a free slot, or in the slot of the copy that has the least load, of an expert with several; where that
    does not lower `placement_s`, a copy on the busiest device moves to the least-loaded device with a free slot. The
    first step that lowers nothing is the last. Where an owner's own copy goes, the lowest device left becomes owner.
    """
    placed_ED = held.placement_ED.copy()
    now_s = placement_s(placed_ED, load_E, topology, cost)
    for _ in range(placed_ED.size):
        load_D = device_load(placed_ED, load_E)
        if load_D.max() <= threshold * load_D.mean():
            break
        tried = (
            (placement_s(step_ED, load_E, topology, cost), step_ED) for step_ED in _steps(placed_ED, load_E, slots_D)
        )
        better = next(((then_s, step_ED) for then_s, step_ED in tried if then_s < now_s), None)
        if better is None:
            break
        now_s, placed_ED = better
    return held if np.array_equal(placed_ED, held.placement_ED) else Placement(_owners(held, placed_ED), placed_ED)


def device_load(placed_ED: NDArray[np.bool_], load_E: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [D]: what each device computes when the copies of an expert share its load evenly."""
    return (load_E / placed_ED.sum(axis=1)) @ placed_ED  # type: ignore[no-any-return]


def placement_s(
    placed_ED: NDArray[np.bool_], load_E: NDArray[np.float64], topology: Topology, cost: LayerCost
) -> float:
    """Seconds of a layer: slowest device, four AlltoAlls of tokens that come from all devices alike, and the copies'
    gradients, to one of them and back."""
    load_D = device_load(placed_ED, load_E)
    traffic_DD = np.broadcast_to(load_D / topology.num_devices, (topology.num_devices,) * 2)
    intra, inter = link_tokens(traffic_DD, topology)
    slowest_s = max(topology.intra.seconds(intra * cost.token_bytes), topology.inter.seconds(inter * cost.token_bytes))
    owner_E = placed_ED.argmax(axis=1)
    sync_s = 2 * cost.transfer_s(transfers(owner_E, placed_ED, topology, expert_bytes=cost.expert_bytes), topology)
    return float(load_D.max()) * cost.expert_s_per_token + cost.ALL_TO_ALLS * slowest_s + sync_s


def _steps(
    placed_ED: NDArray[np.bool_], load_E: NDArray[np.float64], slots_D: NDArray[np.int64]
) -> Iterator[NDArray[np.bool_]]:
    """The step to try, and the one to try next."""
    copies_E, load_D = placed_ED.sum(axis=1), device_load(placed_ED, load_E)
    free_D = placed_ED.sum(axis=0) < slots_D
    share_E = load_E / copies_E
    hot = int(np.argmax(np.where(copies_E < load_D.size, share_E, -1.0)))
    lacking_D = ~placed_ED[hot]
    if (to := _least(load_D, lacking_D & free_D)) is not None:
        yield _with(placed_ED, (hot, to, True))
    elif lacking_D.any():
        # A copy makes room where the hot expert is not: that of the least load, on the least-loaded such device.
        can_go_E = (copies_E > 1) & (placed_ED & lacking_D).any(axis=1)
        if can_go_E.any():
            cold = int(np.argmin(np.where(can_go_E, share_E, np.inf)))
            to = _least(load_D, placed_ED[cold] & lacking_D)
            assert to is not None
            yield _with(placed_ED, (cold, to, False), (hot, to, True))
    busiest = int(load_D.argmax())
    for e in np.argsort(-np.where(placed_ED[:, busiest], share_E, -1.0), kind="stable"):
        if placed_ED[e, busiest] and (to := _least(load_D, ~placed_ED[e] & free_D)) is not None:
            yield _with(placed_ED, (e, busiest, False), (e, to, True))


def _least(load_D: NDArray[np.float64], among_D: NDArray[np.bool_]) -> int | None:
    return int(np.argmin(np.where(among_D, load_D, np.inf))) if among_D.any() else None


def _with(placed_ED: NDArray[np.bool_], *changes: tuple[int, int, bool]) -> NDArray[np.bool_]:
    step_ED = placed_ED.copy()
    for e, d, there in changes:
        step_ED[e, d] = there
    return step_ED


def _owners(held: Placement, placed_ED: NDArray[np.bool_]) -> NDArray[np.int64]:
    experts_E = np.arange(held.num_experts)
    return np.where(placed_ED[experts_E, held.owner_E], held.owner_E, placed_ED.argmax(axis=1))
