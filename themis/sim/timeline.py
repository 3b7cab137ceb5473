"""One iteration in time: compute and the two network lanes of every device, what overlaps and what is left exposed.

Rules, all devices meeting at every AlltoAll:
forward of a layer: attention (with router and shared experts) runs while the SparseAllGather travels, the rest of it
is exposed; the exchange of counts; the dispatch plan; what calibration (or a policy after the gate) added is exposed
whole; AlltoAll, experts, AlltoAll.
backward of a layer: AlltoAll, experts at twice their forward time, AlltoAll; then the attention's backward, under which
the gradients' SparseReduceScatter runs and, with re-materialisation, before it the SparseAllGather of the layer below;
what does not fit is exposed. All-reductions of persistent replicas' gradients are exposed, as in FlexMoE's own model of
its time (computation + AlltoAll + synchronisation); those of dense gradients use what is idle of each lane under any
computation, and what is left at the end is exposed. Then the optimizer. A collective takes as long as
its busiest link; both lanes of one collective run at once; collectives that share a window add up lane by lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.sim.hardware import Cluster
from themis.sim.traffic import LinkLoads

#: What an iteration's time is split into, in the order it is shown.
KINDS = (
    "attention",
    "experts",
    "all_to_all",
    "waiting",
    "gather",
    "reduce",
    "all_reduce",
    "rearrangement",
    "optimizer",
    "plan",
    "counts",
)


@final
@dataclass(frozen=True)
class LaneTime:
    """Seconds that a collective keeps each lane busy; `loads`, in bytes, are kept for drawing."""

    intra_s: float = 0.0
    inter_s: float = 0.0
    loads: LinkLoads | None = field(default=None, compare=False, repr=False)

    @property
    def total_s(self) -> float:
        """How long it takes alone."""
        return max(self.intra_s, self.inter_s)

    def __add__(self, other: LaneTime) -> LaneTime:
        return LaneTime(self.intra_s + other.intra_s, self.inter_s + other.inter_s)

    def after(self, idle_s: float, busy: LaneTime) -> LaneTime:
        """What is left when `idle_s` seconds of computation pass, of which `busy` keeps the lanes from it."""
        return LaneTime(
            max(0.0, self.intra_s - max(0.0, idle_s - busy.intra_s)),
            max(0.0, self.inter_s - max(0.0, idle_s - busy.inter_s)),
        )


NOTHING = LaneTime()


def lane_time(loads: LinkLoads, cluster: Cluster) -> LaneTime:
    """How long `loads`, in bytes, keep the lanes busy: each lane its busiest link, and one latency where it is used."""
    intra_bytes = max(float(loads.intra_in_D.max()), float(loads.intra_out_D.max()))
    inter_s = max(cluster.uplink_s(loads.inter_in_D), cluster.uplink_s(loads.inter_out_D))
    return LaneTime(
        cluster.intra.seconds(intra_bytes), cluster.inter.latency_s + inter_s if inter_s > 0 else 0.0, loads
    )


def all_reduce_time(num_bytes: float, cluster: Cluster) -> LaneTime:
    """AllReduce of `num_bytes` over all devices as a ring: 2 (n - 1) / n of them cross each link in each direction."""
    nodes, local = cluster.num_nodes, cluster.devices_per_node
    intra = cluster.intra.seconds(2 * (local - 1) / local * num_bytes)
    return LaneTime(intra, cluster.inter.seconds(2 * (nodes - 1) / nodes * num_bytes))


@final
@dataclass(frozen=True, eq=False)
class LayerTimes:
    """One layer, priced. `experts_D` [D]: forward seconds of each device's experts; all others see module docstring.

    gather: before the gate; added: after it; regather: in backward (re-materialisation); reduce: ephemeral gradients
    home; sync: all-reduction of persistent replicas' gradients; dense: that of the layer's other gradients.
    """

    attention_s: float
    attention_backward_s: float
    counts_s: float
    plan_s: float
    all_to_all: LaneTime
    experts_D: NDArray[np.float64]
    gather: LaneTime = NOTHING
    added: LaneTime = NOTHING
    regather: LaneTime = NOTHING
    reduce: LaneTime = NOTHING
    sync: LaneTime = NOTHING
    dense: LaneTime = NOTHING


@final
@dataclass(frozen=True)
class Fixed:
    """What an iteration has besides its layers: head forward and backward, embedding and head gradients, optimizer."""

    head_s: float = 0.0
    head_backward_s: float = 0.0
    head: LaneTime = NOTHING
    optimizer_s: float = 0.0
    rearrangement: LaneTime = NOTHING


@final
@dataclass(frozen=True, eq=False)
class Event:
    """What a lane does: `seconds_D` [D] from `start_s` on; lane "compute", "intra" or "inter"."""

    lane: str
    name: str
    layer: int
    start_s: float
    seconds_D: NDArray[np.float64]


@final
class Timeline:
    """The clock of one iteration: advances by phases and adds up what each was spent on."""

    def __init__(self, cluster: Cluster, *, record: bool = False) -> None:
        self.now_s = 0.0
        self.spent_s = dict.fromkeys(KINDS, 0.0)
        self.layer_s: list[float] = []
        self.sparse_s = 0.0
        self.events: list[Event] = []
        self._cluster, self._record = cluster, record
        self._debt = NOTHING

    def run(self, layers: Sequence[LayerTimes], fixed: Fixed) -> None:
        """The whole iteration."""
        self.layer_s = [0.0] * len(layers)
        self._network("rearrange", fixed.rearrangement, -1)
        self._spend("rearrangement", fixed.rearrangement.total_s)
        for index, layer in enumerate(layers):
            start_s = self.now_s
            self._forward(index, layer)
            self.layer_s[index] += self.now_s - start_s
        self._compute("head", "attention", fixed.head_s, -1)
        self._compute("head backward", "attention", fixed.head_backward_s, -1)
        self._debt += fixed.head
        for index in reversed(range(len(layers))):
            start_s = self.now_s
            below = layers[index - 1].regather if index else NOTHING
            self._backward(index, layers[index], below)
            self.layer_s[index] += self.now_s - start_s
        self._network("AllReduce", self._debt, -1)
        self._spend("all_reduce", self._debt.total_s)
        self._debt = NOTHING
        self._compute("optimizer", "optimizer", fixed.optimizer_s, -1)

    def _forward(self, index: int, layer: LayerTimes) -> None:
        self._network("SpAG", layer.gather, index)
        self._compute("attention", "attention", layer.attention_s, index)
        self._spend("gather", max(0.0, layer.gather.total_s - layer.attention_s))
        self._spend("counts", layer.counts_s)
        self._spend("plan", layer.plan_s)
        self._network("SpAG added", layer.added, index)
        self._spend("gather", layer.added.total_s)
        self.sparse_s += layer.gather.total_s + layer.added.total_s
        self._all_to_all("dispatch", layer, index)
        self._experts("experts", layer.experts_D, index)
        self._all_to_all("combine", layer, index)

    def _backward(self, index: int, layer: LayerTimes, below: LaneTime) -> None:
        self._all_to_all("combine backward", layer, index)
        self._experts("experts backward", 2 * layer.experts_D, index)
        self._all_to_all("dispatch backward", layer, index)
        self._network("AllReduce of replicas", layer.sync, index)
        self._spend("all_reduce", layer.sync.total_s)
        window_s, both = layer.attention_backward_s, below + layer.reduce
        self._network("SpAG again", below, index - 1)
        self._network("SpRS", layer.reduce, index, delay_s=below.total_s)
        self._compute("attention backward", "attention", window_s, index, busy=both)
        exposed_s = max(0.0, both.total_s - window_s)
        gather_s = min(exposed_s, max(0.0, below.total_s - window_s))
        self._spend("gather", gather_s)
        self._spend("reduce", exposed_s - gather_s)
        self.sparse_s += below.total_s + layer.reduce.total_s
        self._debt += layer.dense

    def _spend(self, kind: str, seconds: float) -> None:
        self.spent_s[kind] += seconds
        self.now_s += seconds

    def _compute(self, name: str, kind: str, seconds: float, layer: int, busy: LaneTime = NOTHING) -> None:
        if self._record and seconds > 0:
            everyone_D = np.full(self._cluster.num_devices, seconds)
            self.events.append(Event("compute", name, layer, self.now_s, everyone_D))
        self._drain(seconds, busy)
        self._spend(kind, seconds)

    def _experts(self, name: str, seconds_D: NDArray[np.float64], layer: int) -> None:
        """The slowest device decides; a representative device works for the mean and waits for the rest."""
        slowest_s, mean_s = float(seconds_D.max()), float(seconds_D.mean())
        if self._record:
            self.events.append(Event("compute", name, layer, self.now_s, seconds_D))
        self._drain(slowest_s, NOTHING)
        self._spend("experts", mean_s)
        self._spend("waiting", slowest_s - mean_s)

    def _all_to_all(self, name: str, layer: LayerTimes, index: int) -> None:
        self._network(name, layer.all_to_all, index)
        self._spend("all_to_all", layer.all_to_all.total_s)

    def _drain(self, seconds: float, busy: LaneTime) -> None:
        """All-reductions go on while `seconds` of computation pass."""
        left = self._debt.after(seconds, busy)
        if self._record:
            done = LaneTime(self._debt.intra_s - left.intra_s, self._debt.inter_s - left.inter_s)
            self._network("AllReduce", done, -1, delay_s=busy.total_s)
        self._debt = left

    def _network(self, name: str, time: LaneTime, layer: int, delay_s: float = 0.0) -> None:
        """Write down what the lanes do; a device's own lane is busy for its own bytes."""
        if not self._record:
            return
        for lane, seconds in (("intra", time.intra_s), ("inter", time.inter_s)):
            if seconds <= 0:
                continue
            seconds_D = np.full(self._cluster.num_devices, seconds)
            if time.loads is not None:
                into_D, out_D = (getattr(time.loads, f"{lane}_{way}_D") for way in ("in", "out"))
                bytes_D = np.maximum(into_D, out_D)
                if lane == "inter":  # a device's share of its uplink
                    seconds_D = bytes_D * self._cluster.devices_per_node / self._cluster.inter.bytes_per_s
                else:
                    seconds_D = bytes_D / self._cluster.intra.bytes_per_s
                seconds_D = np.minimum(seconds_D, seconds)
            self.events.append(Event(lane, name, layer, self.now_s + delay_s, seconds_D))
