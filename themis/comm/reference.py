"""Slow plain references of the sparse collectives: one process, all devices' chunks at hand, NumPy (section 3.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Chunks = Mapping[int, NDArray[np.generic]]


def sparse_all_gather_reference(
    owner_E: NDArray[np.int64], placement_ED: NDArray[np.bool_], chunks_D: Sequence[Chunks]
) -> list[dict[int, NDArray[np.generic]]]:
    """For each device, the chunk of every expert it holds under `placement_ED`, as its owner has it."""
    num_experts, num_devices = placement_ED.shape
    return [
        {e: chunks_D[int(owner_E[e])][e].copy() for e in range(num_experts) if placement_ED[e, device]}
        for device in range(num_devices)
    ]


def sparse_reduce_scatter_reference(
    owner_E: NDArray[np.int64], placement_ED: NDArray[np.bool_], chunks_D: Sequence[Chunks]
) -> list[dict[int, NDArray[np.generic]]]:
    """For each device, the chunk of every expert it owns, summed over all devices that hold it."""
    num_experts, num_devices = placement_ED.shape
    sums_D: list[dict[int, NDArray[np.generic]]] = [{} for _ in range(num_devices)]
    for expert in range(num_experts):
        holders = np.flatnonzero(placement_ED[expert]).tolist()
        sums_D[int(owner_E[expert])][expert] = np.sum([chunks_D[device][expert] for device in holders], axis=0)
    return sums_D


def all_to_all_reference(
    rows_D: Sequence[NDArray[np.generic]], send_DD: NDArray[np.int64]
) -> list[NDArray[np.generic]]:
    """What each device receives when device s sends send_DD[s, d] of its rows, in order, to device d."""
    num_devices = len(rows_D)
    begin_DD = np.cumsum(send_DD, axis=1) - send_DD
    return [
        np.concatenate([rows_D[s][begin_DD[s, d] : begin_DD[s, d] + send_DD[s, d]] for s in range(num_devices)])
        for d in range(num_devices)
    ]
