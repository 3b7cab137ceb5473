"""The cluster as the planners see it: nodes of devices, and two classes of link (Themis paper, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import is_whole, require


class LinkClass(Enum):
    """What a byte crosses on its way: nothing, the links inside a node, or the node's uplink."""

    LOCAL = "local"
    INTRA = "intra"
    INTER = "inter"


@final
@dataclass(frozen=True)
class Link:
    """A link class: latency in seconds, bandwidth in bytes per second and direction."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        require(self.latency_s >= 0, "latency_s", self.latency_s, "zero or more seconds")
        require(self.bytes_per_s > 0, "bytes_per_s", self.bytes_per_s, "above zero")

    def seconds(self, num_bytes: float) -> float:
        """Time for one message of `num_bytes`; nothing to send takes no time."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes > 0 else 0.0


@final
@dataclass(frozen=True)
class Topology:
    """`num_nodes` nodes of `devices_per_node` devices each, numbered node by node.

    `intra` is each device's link inside its node, in each direction; `inter` is the node's uplink, in each
    direction, shared by its devices. The defaults are a GPU node's: 300 GB/s inside, 50 GB/s (400 Gb/s) a node.
    """

    num_nodes: int
    devices_per_node: int
    intra: Link = field(default=Link(latency_s=10e-6, bytes_per_s=300e9))
    inter: Link = field(default=Link(latency_s=20e-6, bytes_per_s=50e9))

    def __post_init__(self) -> None:
        for name in ("num_nodes", "devices_per_node"):
            value = getattr(self, name)
            require(is_whole(value, 1), name, value, "a whole number, 1 or more")

    @cached_property
    def num_devices(self) -> int:
        """D, the number of devices of the cluster."""
        return self.num_nodes * self.devices_per_node

    @cached_property
    def node_of_D(self) -> NDArray[np.int64]:
        """int64 [D]: the node of each device. Read-only."""
        nodes_D = np.arange(self.num_devices, dtype=np.int64) // self.devices_per_node
        nodes_D.setflags(write=False)
        return nodes_D

    def link_class(self, source: int, destination: int) -> LinkClass:
        """The class of the path from device `source` to device `destination`."""
        if source == destination:
            return LinkClass.LOCAL
        same_node = source // self.devices_per_node == destination // self.devices_per_node
        return LinkClass.INTRA if same_node else LinkClass.INTER

    @property
    def ingress_bytes_per_s(self) -> float:
        """The bandwidth that bounds how fast new chunks arrive (section 4.2).

        That is the node's uplink where there are several nodes and it is slower than a device's own link.
        """
        if self.num_nodes == 1:
            return self.intra.bytes_per_s
        return min(self.intra.bytes_per_s, self.inter.bytes_per_s)
