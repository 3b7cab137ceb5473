"""One MoE layer in the runtime: its shard, its open calls, and the way of its gradients."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.comm.communicator import Communicator, Work
from themis.comm.mesh import Mesh
from themis.comm.sparse import sparse_all_gather, sparse_reduce_scatter
from themis.core.cost import LayerCost
from themis.core.errors import ConfigError
from themis.core.placement import Placement, shard_only
from themis.core.plan import TransferPlan
from themis.fssdp.call import CallState, Decision, LayerCall
from themis.fssdp.clock import AttentionClock
from themis.fssdp.expert_shard import ExpertShard
from themis.planning import added_transfers
from themis.policies import LayerContext, Policy

#: Forwards without a graph that may still be recomputed; more than any accumulation has micro-batches in flight.
KEPT_CALLS = 256

#: Pieces stream through the stages of a transfer between nodes; inside one node each only costs its overhead.
PIECE_BYTES = 256 * 1024
LOCAL_PIECE_BYTES = 4 * 1024 * 1024

#: Told of each event: its name and the layer's index.
Recorder = Callable[[str, int], None]


@final
class Reduction:
    """Gradients of kept experts on their way: complete once all `works` are done."""

    def __init__(self, shard: ExpertShard, gradients: dict[int, Tensor], works: Sequence[Work]) -> None:
        self._shard = shard
        self._gradients = gradients
        self._works = works

    def finish(self) -> None:
        """Wait for the replicas' gradients and add the sums to the parameters' gradients."""
        self.drop()
        for e, gradient in self._gradients.items():
            self._shard.add_gradient(e, gradient)

    def drop(self) -> None:
        """Wait for the replicas' gradients, and no more."""
        for work in self._works:
            work.wait()


@final
class ShardedLayer:
    """What the calls of layer `index` share on this rank."""

    def __init__(
        self,
        index: int,
        shard: ExpertShard,
        policy: Policy,
        mesh: Mesh,
        communicator: Communicator,
        cost: LayerCost,
    ) -> None:
        self.index = index
        self.shard = shard
        self.policy = policy
        self.mesh = mesh
        self.communicator = communicator
        self.cost = cost
        self.clock = AttentionClock(mesh.device)
        self.anchor = torch.zeros(1, device=mesh.device, requires_grad=any(shard.trainable.values()))
        self.attention_s: float | None = None
        #: What each device is predicted to send, for policies that plan by source.
        self.predicted_ED: NDArray[np.float64] | None = None
        self.is_last = False
        self.recorders: list[Recorder] = []
        self._reductions: list[Reduction] = []
        self._kept_transfers: tuple[Placement, TransferPlan | None] = shard.held, None
        self.on_backward: Callable[[], None] = lambda: None
        #: Tokens of this iteration's counted passes by expert and rank; int64 [E, D].
        self.counted_ED: NDArray[np.int64] = np.zeros((shard.experts.num_experts, mesh.world_size), dtype=np.int64)
        #: The decisions of the last counted pass, for reports.
        self.last_decision: Decision | None = None
        self._open: list[weakref.ref[LayerCall]] = []
        # Reentrant checkpointing runs its forward without a graph, so nothing else would keep these calls alive.
        self._kept: deque[LayerCall] = deque(maxlen=KEPT_CALLS)

    def context(self) -> LayerContext:
        """What the policy may know."""
        previous = None if self.last_decision is None else self.last_decision.placement
        return LayerContext(self.mesh.topology, self.cost, self.attention_s, self.predicted_ED, previous)

    def checked(self, placement: Placement) -> Placement:
        """`placement`, which a policy has returned; ConfigError where it lacks what is kept."""
        if (self.shard.held.placement_ED & ~placement.placement_ED).any():
            raise ConfigError(
                f"policy {self.policy.name!r} placed layer {self.index} without an expert where it is kept; "
                "what `place` and `calibrate` return must contain the persistent placement"
            )
        return placement

    def transfers(self, before: Placement, after: Placement) -> TransferPlan:
        """The transfers, from the owners, of the copies by which `after` exceeds `before`."""
        topology = self.mesh.topology
        return added_transfers(
            before,
            after.placement_ED,
            topology,
            expert_bytes=self.shard.expert_bytes,
            piece_bytes=PIECE_BYTES if topology.num_nodes > 1 else LOCAL_PIECE_BYTES,
        )

    def kept_transfers(self) -> TransferPlan:
        """The transfers of the persistent replicas."""
        held, (known, plan) = self.shard.held, self._kept_transfers
        if plan is None or known is not held:
            plan = self.transfers(shard_only(held.owner_E, held.num_devices), held)
            self._kept_transfers = held, plan
        return plan

    def record(self, event: str) -> None:
        """Tell the recorders of `event`."""
        for recorder in self.recorders:
            recorder(event, self.index)

    def open_call(self, load_E: NDArray[np.float64] | None, key: object, keep: bool) -> LayerCall:
        """A new pass for the predicted load; `keep` holds on to it until the iteration's end."""
        call = LayerCall(self, self.checked(self.policy.place(self.shard.held, load_E, self.context())), key)
        self._open = [ref for ref in self._open if ref() is not None]
        self._open.append(weakref.ref(call))
        if keep:
            self._kept.append(call)
        return call

    def find_call(self, key: object) -> LayerCall | None:
        """The pass that is being recomputed: the youngest open one with this `key`, else the youngest of all."""
        alive = [call for ref in self._open if (call := ref()) is not None and call.tokens_ED is not None]
        matching = [call for call in alive if call.key == key]
        candidates = matching or alive
        return candidates[-1] if candidates else None

    @property
    def replica_bytes(self) -> int:
        """Bytes that replicas, and owned chunks in another type, hold in passes whose backward is still to come."""
        return sum(call.replicas.num_bytes for ref in self._open if (call := ref()) is not None)

    def end_iteration(self) -> None:
        """Forget passes that will see no backward."""
        self._kept.clear()
        self._open = [ref for ref in self._open if ref() is not None]

    def count_load(self, call: LayerCall) -> None:
        """Count the pass once, when it first takes part in training."""
        if call.counted or not self.shard.experts.training:
            return
        call.counted = True
        self.last_decision = call.decision()
        self.counted_ED += self.last_decision.tokens_ED

    def after_experts(self, call: LayerCall) -> None:
        """Free what the backward will gather again, or never need."""
        if not torch.is_grad_enabled():
            call.replicas.forget()
        elif self.policy.rematerialize and not self.is_last and not call.recomputing:
            # The last layer's backward comes next: it keeps what it has.
            call.replicas.release()
            self.record("released")

    def reduce(self, call: LayerCall, gradients: Sequence[Tensor | None]) -> None:
        """Issue SparseReduceScatter for the gradients of the pass, and the layer before's second SparseAllGather."""
        self.on_backward()
        chunks = self._gradient_chunks(call, gradients)
        previous = call.previous() if call.previous is not None else None
        if previous is not None and self.policy.rematerialize and previous.state is not CallState.REDUCED:
            previous.replicas.issue_gather()
        works = []
        if call.replicas.plan.num_transfers:
            self.record("reduce_issued")
            name = f"sparse_reduce_scatter of layer {self.index}"
            works.append(sparse_reduce_scatter(self.communicator, call.replicas.plan, chunks, name=name))
        works += self._all_reduce(chunks)
        kept = {e: chunks[e] for e in self.shard.kept}
        self._reductions.append(Reduction(self.shard, kept, works))
        if self.policy.rematerialize:
            call.replicas.release()
        else:
            call.replicas.forget()
        self._open = [ref for ref in self._open if ref() not in (None, call)]

    def finish_reductions(self) -> None:
        """Autograd's pass ends: have all gradients in place."""
        reductions, self._reductions = self._reductions, []
        for reduction in reductions:
            reduction.finish()

    def drop_reductions(self) -> None:
        """Forget the gradients of a backward that raised an error and so never ended."""
        reductions, self._reductions = self._reductions, []
        for reduction in reductions:
            reduction.drop()

    def _all_reduce(self, chunks: dict[int, Tensor]) -> list[Work]:
        """Persistent replicas' gradients to the owner, and the sum back to them: equal bits, so all step alike."""
        plan = self.kept_transfers()
        if not plan.num_transfers:
            return []
        name, count_as = f"all_reduce of persistent replicas of layer {self.index}", "all_reduce"
        return [
            sparse_reduce_scatter(self.communicator, plan, chunks, name=name, count_as=count_as),
            sparse_all_gather(self.communicator, plan, chunks, name=name, count_as=count_as),
        ]

    def _gradient_chunks(self, call: LayerCall, gradients: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Each slot's gradient as a chunk, divided by the ranks, as data parallelism averages; zero where idle."""
        shard, scale = self.shard, 1.0 / self.mesh.world_size
        names = list(shard.layout.shapes)
        chunks = {}
        for s, e in enumerate(call.replicas.slots):
            chunk = torch.empty(shard.layout.numel, dtype=shard.reduce_dtype, device=shard.device)
            views = shard.layout.views(chunk)
            for name, gradient in zip(names, gradients[s * len(names) : (s + 1) * len(names)], strict=True):
                if gradient is None:
                    views[name].zero_()
                elif gradient.dtype == chunk.dtype:
                    torch.mul(gradient, scale, out=views[name])
                else:
                    views[name].copy_(gradient).mul_(scale)
            chunks[e] = chunk
        return chunks
