"""Expert loads: how they are checked, and how imbalance is measured."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from themis.core.errors import reject


def check_load(load: ArrayLike, name: str, num_dims: int) -> NDArray[np.float64]:
    """`load` as a C-contiguous float64 array of `num_dims` dimensions, finite and not negative; else ConfigError."""
    array = np.asarray(load, dtype=np.float64, order="C")
    if array.ndim != num_dims:
        reject(name, f"of shape {array.shape}", f"an array of {num_dims} dimension(s)")
    if array.size and not (array.min() >= 0.0 and np.isfinite(array.max())):
        reject(name, "negative, infinite or not a number somewhere", "finite and not negative")
    return array


def imbalance(load_X: ArrayLike) -> float:
    """The busiest over the mean, 1.0 when all are equal and when there is no load at all."""
    array_X = np.asarray(load_X, dtype=np.float64)
    mean = float(array_X.mean()) if array_X.size else 0.0
    return float(array_X.max()) / mean if mean > 0 else 1.0


def device_load(route_EDD: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [D]: tokens that each destination computes under a dispatch plan `route_EDD`."""
    return np.asarray(route_EDD.sum(axis=(0, 1)))


def owner_load(load_E: ArrayLike, owner_E: NDArray[np.int64], num_devices: int) -> NDArray[np.float64]:
    """float64 [D]: the load of each device when every expert runs at its owner, as under plain EP."""
    load_D = np.zeros(num_devices)
    np.add.at(load_D, owner_E, np.asarray(load_E, dtype=np.float64))
    return load_D
