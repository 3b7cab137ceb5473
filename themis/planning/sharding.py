"""Heterogeneous sharding (Algorithm 2, section 4.3): which device owns each expert of each layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from themis.core.errors import reject
from themis.core.load import check_load
from themis.core.placement import check_owner
from themis.core.topology import Topology
from themis.planning.compiled import compiled, floats, ints, whole


def shard(
    load_LE: ArrayLike, topology: Topology, *, overlap_degree: int, current_LE: ArrayLike | None = None
) -> NDArray[np.int64]:
    """The owners of all layers' experts: underloaded experts spread evenly, overloaded ones in what is left.

    load_LE: [L, E], the expected tokens of each expert at any scale that all layers share; overlap_degree t: the
    heaviest t experts of a layer count as overloaded, for materialisation takes care of them; current_LE: int [L, E],
    today's owners, where overloaded experts stay if they can (those that must move, and all without `current_LE`, go
    where the underloaded ones would).

    Returns int64 [L, E]. Over all layers the devices own equally many experts, to within one (the first devices own
    one more). Each underloaded expert goes to its layer's least-loaded node with slots, there to the least-loaded
    device with slots; ties go to fewer slots, then to the lower index. Raises ConfigError on arguments that do not
    fit together.
    """
    loads_LE = floats(check_load(load_LE, "load_LE", 2), "load_LE", 2)
    if loads_LE.size == 0:
        reject("load_LE", f"of shape {loads_LE.shape}", "of shape [L, E] with a layer and an expert")
    if current_LE is None:
        owners_LE = ints(np.full(loads_LE.shape, -1), "current_LE", 2)
    else:
        owners_LE = ints(current_LE, "current_LE", 2)
        if owners_LE.shape != loads_LE.shape:
            reject("current_LE", f"of shape {owners_LE.shape}", f"{loads_LE.shape}, as load_LE")
        check_owner(owners_LE.ravel(), topology.num_devices, "current_LE")
    degree = whole(overlap_degree, "overlap_degree", 0)
    return _shard(  # type: ignore[no-any-return]
        loads_LE, owners_LE, min(degree, loads_LE.shape[1]), topology.num_nodes, topology.devices_per_node
    )


@compiled
def _descending(load_E, order_E):  # type: ignore[no-untyped-def]
    """Fill `order_E` with the indices of `load_E` by load, descending, ties to the lower index."""
    for e in range(load_E.size):
        at = e
        while at > 0 and load_E[order_E[at - 1]] < load_E[e]:
            order_E[at] = order_E[at - 1]
            at -= 1
        order_E[at] = e


@compiled
def _least_loaded(load_X, slots_X, first, last):  # type: ignore[no-untyped-def]
    """Of first..last-1 with slots: the least loaded, ties to fewer slots, then to the lower index."""
    best = -1
    for x in range(first, last):
        if slots_X[x] > 0 and (
            best < 0 or load_X[x] < load_X[best] or (load_X[x] == load_X[best] and slots_X[x] < slots_X[best])
        ):
            best = x
    return best


@compiled
def _settle(owner_LE, load_LE, load_LN, load_LD, slots_N, slots_D, layer, expert, device):  # type: ignore[no-untyped-def]
    """Put an expert on `device`, or on the least-loaded node's least-loaded device if `device` is -1."""
    local = slots_D.size // slots_N.size
    node = device // local
    if device < 0:
        node = _least_loaded(load_LN[layer], slots_N, 0, slots_N.size)
        device = _least_loaded(load_LD[layer], slots_D, node * local, (node + 1) * local)
    owner_LE[layer, expert] = device
    load_LN[layer, node] += load_LE[layer, expert]
    load_LD[layer, device] += load_LE[layer, expert]
    slots_N[node] -= 1
    slots_D[device] -= 1


@compiled
def _shard(load_LE, current_LE, degree, num_nodes, local):  # type: ignore[no-untyped-def]
    """Algorithm 2; `current_LE` is -1 where there is no owner yet."""
    num_layers, num_experts = load_LE.shape
    num_devices = num_nodes * local
    slots_D = np.full(num_devices, load_LE.size // num_devices, dtype=np.int64)
    slots_N = np.zeros(num_nodes, dtype=np.int64)
    for d in range(num_devices):
        slots_D[d] += 1 if d < load_LE.size % num_devices else 0
        slots_N[d // local] += slots_D[d]
    load_LN, load_LD = np.zeros((num_layers, num_nodes)), np.zeros((num_layers, num_devices))
    owner_LE = np.full(load_LE.shape, -1, dtype=np.int64)
    order_LE = np.empty(load_LE.shape, dtype=np.int64)
    heaviest_L = np.zeros(num_layers)
    for layer in range(num_layers):
        _descending(load_LE[layer], order_LE[layer])
        heaviest_L[layer] = load_LE[layer, order_LE[layer, degree]] if degree < num_experts else 0.0
    turn_L = np.empty(num_layers, dtype=np.int64)
    _descending(heaviest_L, turn_L)
    for turn in range(num_layers):
        for place in range(degree, num_experts):
            layer, expert = turn_L[turn], order_LE[turn_L[turn], place]
            _settle(owner_LE, load_LE, load_LN, load_LD, slots_N, slots_D, layer, expert, -1)
    # Overloaded experts: first those that may stay, then the rest, so that none is driven from its owner by another.
    for layer in range(num_layers):
        for place in range(degree):
            expert = order_LE[layer, place]
            device = current_LE[layer, expert]
            if device >= 0 and slots_D[device] > 0:
                _settle(owner_LE, load_LE, load_LN, load_LD, slots_N, slots_D, layer, expert, device)
    for layer in range(num_layers):
        for place in range(degree):
            expert = order_LE[layer, place]
            if owner_LE[layer, expert] < 0:
                _settle(owner_LE, load_LE, load_LN, load_LD, slots_N, slots_D, layer, expert, -1)
    return owner_LE
