"""One pass of one layer in the runtime: gather, route, compute, release, gather again, reduce (see docs/design.md)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.comm.all_to_all import all_to_all
from themis.comm.collectives import gather_counts
from themis.core.placement import Placement
from themis.core.plan import TransferPlan
from themis.fssdp.autograd import join, materialize
from themis.fssdp.replicas import Replicas
from themis.fssdp.rows import RowRoute
from themis.moe.dispatch import DispatchCall
from themis.moe.experts import Weights

if TYPE_CHECKING:
    from themis.fssdp.sharded_layer import ShardedLayer


class CallState(Enum):
    """Where a call stands. A recomputed call goes back from ROUTED to PLACED, its decisions kept."""

    PLACED = auto()  # the placement is chosen, its replicas are on their way
    ROUTED = auto()  # counts are known, replicas are here, every row knows its way
    REDUCED = auto()  # gradients are on their way home


@final
@dataclass(frozen=True)
class Decision:
    """What was decided for one pass: counts int64 [E, D], the placement, and the dispatch plan int64 [E, D, D].

    transfers: those of all short-lived replicas, which gradients take backwards, and re-materialisation once more;
    first_gathers: those that ran before the experts, of the prediction and of what calibration added to it;
    kept_transfers: those of persistent replicas, whose gradients take them backwards and forwards.
    """

    tokens_ED: NDArray[np.int64]
    placement: Placement
    route_EDD: NDArray[np.int64]
    transfers: TransferPlan
    first_gathers: tuple[TransferPlan, ...]
    kept_transfers: TransferPlan


@final
class LayerCall(DispatchCall):
    """One pass of `layer` under `placement`; `key` tells a recomputed pass from others (see Executor)."""

    def __init__(self, layer: ShardedLayer, placement: Placement, key: object) -> None:
        self.layer = layer
        self.key = key
        self.placement = placement
        self.state = CallState.PLACED
        self.previous: weakref.ref[LayerCall] | None = None
        self.recomputing = False
        self.counted = False
        self.tokens_ED: NDArray[np.int64] | None = None
        self.route_EDD: NDArray[np.int64] | None = None
        self._experts_TK: Tensor | None = None
        self._rows: RowRoute | None = None
        self._token: Tensor | None = None
        self._row_dtype: torch.dtype | None = None
        self.replicas = Replicas(layer, placement)
        self.replicas.issue_gather()

    def decision(self) -> Decision:
        """The decisions of a pass whose counts are known."""
        assert self.tokens_ED is not None
        assert self.route_EDD is not None
        replicas = self.replicas
        return Decision(
            self.tokens_ED,
            self.placement,
            self.route_EDD,
            replicas.plan,
            tuple(replicas.first_gathers),
            self.layer.kept_transfers(),
        )

    def choose(self, num_tokens: int, top_k: int) -> Tensor | None:
        """The experts of the forward when recomputing, the policy's where it forces them, else None."""
        if self._experts_TK is not None:
            return self._experts_TK
        forced_TK = self.layer.policy.force(num_tokens, top_k, self.layer.shard.experts.num_experts)
        return None if forced_TK is None else torch.from_numpy(forced_TK).to(self.layer.mesh.device)

    def announce(self, experts_TK: Tensor, counts_E: Tensor) -> NDArray[np.int64]:
        """Exchange counts, calibrate, await the replicas, plan the rows' ways. Recomputation keeps the decisions."""
        assert self.state is CallState.PLACED, self.state
        layer = self.layer
        layer.clock.stop(self.recomputing)
        if self.tokens_ED is None:
            counts_DE = gather_counts(layer.mesh, counts_E.cpu().numpy())
            self.tokens_ED = np.ascontiguousarray(counts_DE.T)
            self._experts_TK = experts_TK
            context = layer.context()
            self.placement = layer.checked(layer.policy.calibrate(self.placement, self.tokens_ED, context))
            self.replicas.change(self.placement)
            self.route_EDD = layer.policy.route(self.placement, self.tokens_ED, context)
            self._rows = RowRoute.of(self.route_EDD, layer.mesh.rank, self.replicas.slots, layer.mesh.device)
        self.replicas.ensure()
        self.state = CallState.ROUTED
        return self.tokens_ED

    def dispatch(self, rows_AM: Tensor) -> Tensor:
        """Rows to the devices of the plan, in the type the experts compute in."""
        assert self._rows is not None
        assert self.state is CallState.ROUTED, self.state
        self._row_dtype = rows_AM.dtype
        rows_AM = self._rows.leaving.apply(rows_AM.to(self.layer.shard.param_dtype))
        rows_AM = all_to_all(self.layer.mesh, rows_AM, self._rows.send_D, self._rows.receive_D)
        return self._rows.arriving.apply(rows_AM)

    def counts(self) -> Sequence[int]:
        """Rows of each local slot."""
        assert self._rows is not None
        return self._rows.counts_S

    def weights(self) -> Sequence[Weights]:
        """The parameters of each local slot: owned experts and replicas, by ascending expert."""
        assert self.state is CallState.ROUTED, self.state
        slots = self.replicas.weights()
        if torch.is_grad_enabled():
            self.layer.count_load(self)
        names = list(self.layer.shard.layout.shapes)
        flat = [weights[name] for weights in slots for name in names]
        self._token, outputs = materialize(self, self.layer.anchor, flat)
        step = len(names)
        return [dict(zip(names, outputs[s * step : (s + 1) * step], strict=True)) for s in range(len(slots))]

    def combine(self, rows_AM: Tensor) -> Tensor:
        """Computed rows back to where they came from."""
        assert self._rows is not None
        assert self._token is not None
        assert self._row_dtype is not None
        rows_AM = join(self, rows_AM, self._token)
        self._token = None
        self.layer.after_experts(self)
        rows_AM = self._rows.arriving.undo(rows_AM)
        rows_AM = all_to_all(self.layer.mesh, rows_AM, self._rows.receive_D, self._rows.send_D)
        return self._rows.leaving.undo(rows_AM).to(self._row_dtype)

    def recompute(self) -> None:
        """Start the pass anew for activation checkpointing; routing and placement stay those of the forward."""
        assert self.tokens_ED is not None, "only a finished forward can be recomputed"
        self.recomputing = True
        self.state = CallState.PLACED
        self.replicas.issue_gather()

    def before_expert_backward(self) -> None:
        """Have the replicas in place; see autograd.py."""
        self.replicas.ensure()

    def after_expert_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients home; see autograd.py."""
        assert self.state is not CallState.PLACED, self.state
        self.state = CallState.REDUCED
        self._token = None  # a recomputation that stopped early has left it
        self.layer.reduce(self, gradients)
