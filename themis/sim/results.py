"""What simulated iterations add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.sim.memory import MemoryUse, Peak
from themis.sim.timeline import KINDS, LaneTime, LayerTimes, Timeline
from themis.sim.traffic import LinkLoads


@final
@dataclass(frozen=True, eq=False)
class PricedLayer:
    """One layer of one iteration: its times, and what is counted. tokens_D: computed at each device; replicas_D:
    ephemeral ones held there; moved: bytes by collective, None for one that did not run."""

    times: LayerTimes
    tokens_D: NDArray[np.float64]
    replicas_D: NDArray[np.int64]
    moved: dict[str, LinkLoads | None]


@final
@dataclass(frozen=True, eq=False)
class Result:
    """Means over the measured iterations.

    spent_s: seconds an iteration by kind, summing to iteration_s; layer_s [L]; sparse_s: sparse collectives, hidden
    or not; quiet_s: iterations without rearrangement alone; bytes_moved: an iteration, by collective and link class;
    imbalance: busiest over mean device; memory: of the fullest device.
    """

    policy: str
    iteration_s: float
    tokens_per_s: float
    spent_s: dict[str, float]
    layer_s: NDArray[np.float64]
    sparse_s: float
    quiet_s: float
    bytes_moved: dict[str, float]
    imbalance: float
    peak: Peak
    memory: MemoryUse
    memory_limit: int

    @property
    def out_of_memory(self) -> bool:
        """Whether the fullest device lacks memory."""
        return self.memory.total > self.memory_limit


@final
@dataclass
class Totals:
    """Sums over simulated iterations; `Result` has the means."""

    seconds: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    layer_s: list[float] = field(default_factory=list)
    sparse_s: float = 0.0
    bytes_moved: dict[str, float] = field(default_factory=dict)
    imbalance: float = 0.0
    peak: Peak = field(default_factory=Peak)

    def add(self, timeline: Timeline, moves: LaneTime, layers: Sequence[PricedLayer]) -> None:
        """Add an iteration."""
        self.seconds.append(timeline.now_s)
        if moves.total_s == 0:
            self.quiet.append(timeline.now_s)
        self.sparse_s += timeline.sparse_s
        for kind, seconds in timeline.spent_s.items():
            self.spent_s[kind] += seconds
        before = self.layer_s or [0.0] * len(layers)
        self.layer_s = [a + b for a, b in zip(before, timeline.layer_s, strict=True)]
        tokens_LD = np.stack([layer.tokens_D for layer in layers])
        replicas_LD = np.stack([layer.replicas_D for layer in layers])
        self.imbalance += float((tokens_LD.max(axis=1) / tokens_LD.mean(axis=1)).mean())
        self.peak = Peak(
            max(self.peak.routed_tokens, float(tokens_LD.sum(axis=0).max())),
            max(self.peak.layer_tokens, float(tokens_LD.max())),
            max(self.peak.replicas, float(replicas_LD.sum(axis=0).max())),
            max(self.peak.layer_replicas, float(replicas_LD.max())),
        )
        self._count("rearrangement", moves.loads)
        for layer in layers:
            for name, loads in layer.moved.items():
                self._count(name, loads)

    def _count(self, name: str, loads: LinkLoads | None) -> None:
        for link in ("intra", "inter"):
            moved = 0.0 if loads is None else float(getattr(loads, link))
            self.bytes_moved[f"{name}_{link}"] = self.bytes_moved.get(f"{name}_{link}", 0.0) + moved

    def result(self, policy: str, tokens: int, memory: MemoryUse, memory_limit: int) -> Result:
        """The means; `tokens` are those of all devices in an iteration."""
        count = len(self.seconds)
        iteration_s = sum(self.seconds) / count
        return Result(
            policy=policy,
            iteration_s=iteration_s,
            tokens_per_s=tokens / iteration_s,
            spent_s={kind: seconds / count for kind, seconds in self.spent_s.items()},
            layer_s=np.array(self.layer_s) / count,
            sparse_s=self.sparse_s / count,
            quiet_s=sum(self.quiet) / len(self.quiet) if self.quiet else iteration_s,
            bytes_moved={name: moved / count for name, moved in self.bytes_moved.items()},
            imbalance=self.imbalance / count,
            peak=self.peak,
            memory=memory,
            memory_limit=memory_limit,
        )
