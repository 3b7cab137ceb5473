"""Devices, links and clusters, as the simulator sees them; a host's own profile file is read into the same values."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import ConfigError, is_whole, require
from themis.core.topology import Link, Topology


@final
@dataclass(frozen=True)
class Device:
    """What one device achieves (not its peak): FLOP/s of dense blocks and of experts' grouped GEMMs; memory."""

    name: str
    flops_per_s: float
    grouped_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name != "name":
                value = getattr(self, item.name)
                good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
                require(good, f"device.{item.name}", value, "a number above zero")


@final
@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    intra: a device's link inside its node, each direction; inter: the node's uplink, each direction. plan_s: planning
    that nothing hides, seconds a layer. devices_per_uplink: 0 where a node's devices share the whole uplink (any device
    may use all of it); else the uplink is split evenly into parts that so many neighbouring devices share, as cards on
    their PCIe switch are.
    """

    name: str
    num_nodes: int
    devices_per_node: int
    device: Device
    intra: Link
    inter: Link
    plan_s: float = 0.0
    devices_per_uplink: int = 0

    def __post_init__(self) -> None:
        for name in ("num_nodes", "devices_per_node"):
            require(is_whole(getattr(self, name), 1), name, getattr(self, name), "a whole number, 1 or more")
        number = isinstance(self.plan_s, int | float) and not isinstance(self.plan_s, bool)
        require(number and self.plan_s >= 0, "plan_s", self.plan_s, "zero or more seconds")
        shared = self.devices_per_uplink
        good = is_whole(shared, 0) and (shared == 0 or self.devices_per_node % shared == 0)
        require(good, "devices_per_uplink", shared, f"0, or a divisor of devices_per_node ({self.devices_per_node})")

    @property
    def num_devices(self) -> int:
        """D."""
        return self.num_nodes * self.devices_per_node

    @property
    def topology(self) -> Topology:
        """The cluster as the planners see it."""
        return Topology(self.num_nodes, self.devices_per_node, intra=self.intra, inter=self.inter)

    def uplink_s(self, bytes_D: NDArray[np.float64]) -> float:
        """Seconds the busiest uplink takes when each device sends (or each receives) `bytes_D` [D] across it."""
        share = self.devices_per_uplink or self.devices_per_node
        busiest = float(bytes_D.reshape(-1, share).sum(axis=1).max())
        return busiest * (self.devices_per_node / share) / self.inter.bytes_per_s

    def of_nodes(self, num_nodes: int) -> Cluster:
        """The same nodes, more or fewer of them."""
        return replace(self, num_nodes=num_nodes)


def read_profile(path: Path) -> Cluster:
    """The cluster that a JSON profile describes; ConfigError in one line for what is missing or wrong.

    {"name", "num_nodes", "devices_per_node", "intra": {"latency_s", "bytes_per_s"}, "inter": {…},
    "device": {as `Device`}}, and if wanted "plan_s", "devices_per_uplink". All are achieved speeds, not peaks.
    """
    if not path.is_file():
        raise ConfigError(f"profile {str(path)!r} does not exist; give a cluster (a, b) or a JSON profile file")
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile {str(path)!r} is no JSON file: {error}") from None
    where = f"profile {str(path)!r}"
    values = _record(raw, where, Cluster)
    for name in ("intra", "inter"):
        values[name] = Link(**_record(values[name], f"{where}, {name}", Link))
    values["device"] = Device(**_record(values["device"], f"{where}, device", Device))
    return Cluster(**values)


def _record(raw: object, where: str, kind: type) -> dict[str, Any]:
    known = {item.name for item in fields(kind)}
    optional = {"plan_s", "devices_per_uplink"}
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} is {type(raw).__name__}; it must be an object with {', '.join(sorted(known))}")
    if missing := sorted(known - optional - raw.keys()):
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(raw.keys() - known):
        raise ConfigError(
            f"{where} has {', '.join(unknown)}, which nothing reads; known are {', '.join(sorted(known))}"
        )
    if kind is Link:
        for name, value in raw.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            require(number, f"{where}, {name}", value, "a number")
    return dict(raw)
