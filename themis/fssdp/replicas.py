"""The parameters one call computes with: kept chunks and short-lived replicas of others (section 3.1)."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor

from themis.comm.communicator import Work
from themis.comm.sparse import sparse_all_gather
from themis.core.placement import Placement
from themis.core.plan import TransferPlan
from themis.moe.experts import Weights

if TYPE_CHECKING:
    from themis.fssdp.sharded_layer import ShardedLayer


class ReplicaState(Enum):
    """Whether the replicas of a call have memory and content."""

    ABSENT = auto()  # no memory is held
    GATHERING = auto()  # SparseAllGather is under way
    READY = auto()  # content is in place


@final
class Replicas:
    """Chunks by expert for `placement` on this rank.

    Views into the chunks outlive `release`, which takes the memory away under them; `issue_gather` brings it back in
    the same storage, so tensors that autograd saved in the forward are whole again for the backward.
    """

    def __init__(self, layer: ShardedLayer, placement: Placement) -> None:
        self._layer = layer
        self._placement = placement
        self._rank = layer.mesh.rank
        self._plan = layer.transfers(layer.shard.held, placement)
        #: The transfers that were run before the experts: of the placement, then of what calibration added.
        self.first_gathers: list[TransferPlan] = [self._plan]
        self._works: list[Work] = []
        self._chunks: dict[int, Tensor] = {}
        self._buffers: list[Tensor] = []
        self.state = ReplicaState.ABSENT

    @property
    def slots(self) -> list[int]:
        """The experts that this rank computes, ascending."""
        return [int(e) for e in np.flatnonzero(self._placement.placement_ED[:, self._rank])]

    @property
    def plan(self) -> TransferPlan:
        """The transfers of all short-lived replicas, calibration's additions included."""
        return self._plan

    @property
    def num_bytes(self) -> int:
        """Bytes of memory now held for replicas and for kept chunks in another type."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)

    def issue_gather(self) -> None:
        """Start SparseAllGather, unless the replicas are here or on their way."""
        if self.state is not ReplicaState.ABSENT:
            return
        if self._buffers:
            for buffer in self._buffers:
                buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
        else:
            self._allocate(self.slots)
        self._fill_kept()
        self._gather(self._plan)

    def change(self, placement: Placement) -> None:
        """Hold the copies of `placement`; gathering of those that are new starts at once.

        They take the places of those that `placement` lacks: gathers run one after another, so what arrives there first
        is overwritten.
        """
        if placement is self._placement:
            return
        assert self.state is not ReplicaState.ABSENT
        addition = self._layer.transfers(self._placement, placement)
        self.first_gathers.append(addition)
        before = set(self.slots)
        self._placement, self._plan = placement, self._layer.transfers(self._layer.shard.held, placement)
        room = [self._chunks.pop(e) for e in sorted(before - set(self.slots))]
        added = [e for e in self.slots if e not in before]
        self._chunks |= dict(zip(added, room, strict=False))
        self._allocate(added[len(room) :])
        self._gather(addition)

    def ensure(self) -> None:
        """Return once every replica is in place; starts gathering where nobody has."""
        self.issue_gather()
        if self.state is ReplicaState.GATHERING:
            self._layer.record("gather_awaited")
            for work in self._works:
                work.wait()
            self._works = []
            self.state = ReplicaState.READY

    def forget(self) -> None:
        """Let go of the chunks for good; tensors that autograd saved keep their memory until the graph is freed."""
        assert self.state is ReplicaState.READY, self.state
        self._buffers, self._chunks = [], {}
        self.state = ReplicaState.ABSENT

    def release(self) -> None:
        """Give the memory back; kept chunks in the master's own type are not held here and stay."""
        assert self.state is ReplicaState.READY, self.state
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)
        self.state = ReplicaState.ABSENT

    def weights(self) -> list[Weights]:
        """The parameters of each slot, by name."""
        assert self.state is ReplicaState.READY, self.state
        layout = self._layer.shard.layout
        return [layout.views(self._chunks[e]) for e in self.slots]

    def _allocate(self, experts: list[int]) -> None:
        """Memory for those of `experts` whose chunk is not a kept master itself: one buffer, a row an expert."""
        shard = self._layer.shard
        casts = shard.param_dtype != shard.master_dtype
        stored = [e for e in experts if casts or not shard.held.placement_ED[e, self._rank]]
        if stored:
            buffer = torch.empty(len(stored), shard.layout.numel, dtype=shard.param_dtype, device=shard.device)
            self._buffers.append(buffer)
            self._chunks |= dict(zip(stored, buffer.unbind(0), strict=True))

    @torch.no_grad()
    def _fill_kept(self) -> None:
        """Kept chunks: the master itself, or its copy in `param_dtype`, made anew as the master may have changed."""
        shard = self._layer.shard
        for e in shard.kept:
            if e in self._chunks and shard.param_dtype != shard.master_dtype:
                self._chunks[e].data.copy_(shard.chunk(e))
            else:
                self._chunks[e] = shard.chunk(e)

    def _gather(self, plan: TransferPlan) -> None:
        self.state = ReplicaState.GATHERING
        if plan.num_transfers:
            self._layer.record("gather_issued")
            name = f"sparse_all_gather of layer {self._layer.index}"
            self._works.append(sparse_all_gather(self._layer.communicator, plan, self._chunks, name=name))
