"""Shard placements P and placements P' (Themis paper, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from themis.core.errors import ConfigError, reject, require


def check_owner(owner_E: ArrayLike, num_devices: int, name: str = "owner_E") -> NDArray[np.int64]:
    """`owner_E` as a C-contiguous int64 [E] array of devices below `num_devices`; else ConfigError."""
    array_E = np.asarray(owner_E, order="C")
    if array_E.ndim != 1 or array_E.size == 0:
        reject(name, f"of shape {array_E.shape}", "an array of shape [E], E >= 1")
    if array_E.dtype.kind not in "iu":
        reject(name, f"of type {array_E.dtype}", "whole numbers")
    if array_E.min() < 0 or array_E.max() >= num_devices:
        raise ConfigError(
            f"{name} names devices {array_E.min()} to {array_E.max()}; "
            f"they must lie between 0 and {num_devices - 1} on a topology of {num_devices} devices"
        )
    return array_E.astype(np.int64, copy=False)


def even_owner(num_experts: int, num_devices: int) -> NDArray[np.int64]:
    """int64 [E]: homogeneous sharding, contiguous runs of experts whose lengths differ by at most one."""
    require(num_experts >= 1, "num_experts", num_experts, "1 or more")
    require(num_devices >= 1, "num_devices", num_devices, "1 or more")
    count_D = np.full(num_devices, num_experts // num_devices, dtype=np.int64)
    count_D[: num_experts % num_devices] += 1
    return np.repeat(np.arange(num_devices, dtype=np.int64), count_D)


def owner_mask(owner_E: NDArray[np.int64], num_devices: int) -> NDArray[np.bool_]:
    """bool [E, D]: the shard placement P as a mask, one device an expert."""
    mask_ED = np.zeros((owner_E.size, num_devices), dtype=np.bool_)
    mask_ED[np.arange(owner_E.size), owner_E] = True
    return mask_ED


@final
@dataclass(frozen=True, eq=False)
class Placement:
    """One layer's owners P and the devices that hold each expert this iteration, P' (P is part of P').

    owner_E: int64 [E]; placement_ED: bool [E, D]. Both are read-only copies.
    """

    owner_E: NDArray[np.int64]
    placement_ED: NDArray[np.bool_]

    def __post_init__(self) -> None:
        placement_ED = np.array(self.placement_ED, dtype=np.bool_)
        if placement_ED.ndim != 2:
            reject("placement_ED", f"of shape {placement_ED.shape}", "an array of shape [E, D]")
        owner_E = np.array(check_owner(self.owner_E, placement_ED.shape[1]))
        if owner_E.size != placement_ED.shape[0] or not placement_ED[np.arange(owner_E.size), owner_E].all():
            raise ConfigError("placement_ED lacks an expert at its owner; it must contain the shard placement")
        for name, array in (("owner_E", owner_E), ("placement_ED", placement_ED)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.placement_ED.shape[0])

    @property
    def num_devices(self) -> int:
        """D."""
        return int(self.placement_ED.shape[1])

    @cached_property
    def replicas_ED(self) -> NDArray[np.bool_]:
        """bool [E, D]: the added replicas, P' without P."""
        return self.placement_ED & ~owner_mask(self.owner_E, self.num_devices)

    def merge(self, placement_ED: NDArray[np.bool_]) -> Placement:
        """This placement with the copies of `placement_ED` added."""
        return Placement(self.owner_E, self.placement_ED | placement_ED)

    def owned_by(self, device: int) -> list[int]:
        """The experts that `device` owns, ascending."""
        return [int(e) for e in np.flatnonzero(self.owner_E == device)]

    def replicas_at(self, device: int) -> list[int]:
        """The experts that `device` holds as replicas this iteration, ascending."""
        return [int(e) for e in np.flatnonzero(self.replicas_ED[:, device])]


def shard_only(owner_E: ArrayLike, num_devices: int) -> Placement:
    """The placement with no replica: every expert at its owner alone."""
    owners_E = check_owner(owner_E, num_devices)
    return Placement(owners_E, owner_mask(owners_E, num_devices))


def moved_owners(held_L: Sequence[Placement], owner_LE: NDArray[np.int64]) -> list[Placement]:
    """Placements with the owners `owner_LE` [L, E] and no replica; the very placement of `held_L` where none moves."""
    return [
        held if np.array_equal(held.owner_E, owner_E) else shard_only(owner_E, held.num_devices)
        for held, owner_E in zip(held_L, owner_LE, strict=True)
    ]
