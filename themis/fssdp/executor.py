"""The executor: runs the FSSDP workflow of one model on one rank (Themis paper, section 4.1; docs/design.md).

Concurrency in one place. Forward: a hook before each block issues SparseAllGather(l) on the communicator's queue; the
layer awaits it after its gate. Backward: the experts' backward of layer l issues, in this order, the second
SparseAllGather(l - 1) where replicas were freed, and SparseReduceScatter(l); both run under the attention's backward.
A callback at the end of autograd's pass awaits the reductions and adds them to the owners' gradients. Every rank runs
the same layers in the same order, so it fills its queue in the same order.

An iteration ends with the first optimizer step after a counted pass. Owners move only at the start of a training
forward, when no gradient or replica is under way.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.comm.collectives import all_reduce_max
from themis.comm.communicator import Communicator
from themis.comm.mesh import Mesh
from themis.core.errors import ConfigError
from themis.core.placement import Placement, shard_only
from themis.fssdp.call import LayerCall
from themis.fssdp.optimizers import OptimizerWatch
from themis.fssdp.reshard import move_experts
from themis.fssdp.sharded_layer import ShardedLayer
from themis.moe.dispatch import DispatchCall, Dispatcher
from themis.planning import LoadPredictor
from themis.policies import Policy

#: The attention's time is agreed once, after this many iterations: the first ones warm up.
ATTENTION_ITERATIONS = 5


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread, as it is when a checkpointed block is recomputed."""
    return torch._C._current_graph_task_id() != -1


@final
class Executor:
    """Drives the layers of one model on one rank."""

    def __init__(
        self,
        mesh: Mesh,
        communicator: Communicator,
        policy: Policy,
        layers: Sequence[ShardedLayer],
        watch: OptimizerWatch,
    ) -> None:
        self.mesh = mesh
        self.communicator = communicator
        self.policy = policy
        self.layers = list(layers)
        self.layers[-1].is_last = True
        self.predictor = LoadPredictor(policy.prediction_window)
        self._source_predictor = LoadPredictor(policy.prediction_window)
        self.iteration = 0
        self.watch = watch
        self._begun_iteration = 0
        self._timed_iterations = 0
        self._predicted_LE: NDArray[np.float64] | None = None
        self._pending: dict[int, LayerCall] = {}
        self._latest: weakref.ref[LayerCall] | None = None
        self._finishing_task = -1
        for layer in self.layers:
            layer.on_backward = self._queue_finish

    @property
    def owner_LE(self) -> NDArray[np.int64]:
        """int64 [L, E]: the owners of all layers' experts."""
        return np.stack([layer.shard.owner_E for layer in self.layers])

    @property
    def replica_bytes(self) -> int:
        """Bytes now held by replicas on this rank, all layers together."""
        return sum(layer.replica_bytes for layer in self.layers)

    def begin_forward(self, training: bool) -> None:
        """A forward of the whole model starts: between iterations, owners may move."""
        if in_backward():
            return
        self._latest = None
        self._pending.clear()
        for layer in self.layers:
            layer.drop_reductions()
        if training and torch.is_grad_enabled() and self._begun_iteration != self.iteration:
            self._agree_on_attention()
            self._begin_iteration()

    @property
    def held_L(self) -> list[Placement]:
        """The persistent placements of all layers: owners, and replicas that stay."""
        return [layer.shard.held for layer in self.layers]

    def rearrange(self, held_L: Sequence[Placement]) -> None:
        """Have experts, with the states of all watched optimizers, lie as `held_L` says. A collective."""
        if all(new is held for new, held in zip(held_L, self.held_L, strict=True)):
            return
        before = self._kept_parameters()
        move_experts(self.layers, held_L, self.watch.optimizers(), self.mesh)
        kept = {id(parameter) for parameter in self._kept_parameters()}
        self.watch.moved_away(parameter for parameter in before if id(parameter) not in kept)

    def set_owners(self, owner_LE: NDArray[np.int64]) -> None:
        """Have each expert lie at its owner in `owner_LE` [L, E] alone; see `rearrange`."""
        self.rearrange([shard_only(owner_E, self.mesh.world_size) for owner_E in owner_LE])

    def begin_block(self, layer: ShardedLayer, key: object) -> None:
        """The block of `layer` starts: its replicas set out (prefetch), under the attention that runs next."""
        layer.clock.start()
        self._pending[layer.index] = self._begin(layer, key)

    def take_call(self, layer: ShardedLayer) -> LayerCall:
        """The call for the pass that reaches `layer` now; begun here where no block announced it."""
        call = self._pending.pop(layer.index, None)
        return call if call is not None else self._begin(layer, None)

    def end_iteration(self) -> None:
        """The optimizer has stepped: what was counted becomes one observation of the load."""
        counted_LED = np.stack([layer.counted_ED for layer in self.layers])
        if not counted_LED.any():
            return
        self.predictor.observe(counted_LED.sum(axis=2))
        self._predicted_LE = self.predictor.predict()
        if self.policy.plans_by_source:
            self._predict_sources(counted_LED)
        self.iteration += 1
        for layer in self.layers:
            layer.counted_ED[:] = 0
            layer.end_iteration()

    def _predict_sources(self, counted_LED: NDArray[np.int64]) -> None:
        layers, experts, devices = counted_LED.shape
        self._source_predictor.observe(counted_LED.reshape(layers, experts * devices))
        predicted = self._source_predictor.predict()
        assert predicted is not None
        for layer, predicted_ED in zip(self.layers, predicted.reshape(layers, experts, devices), strict=True):
            layer.predicted_ED = predicted_ED

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs, as JSON-able values; the experts' content is the model's and the optimizer's own."""
        return {
            "iteration": self.iteration,
            "owner_LE": self.owner_LE.tolist(),
            "kept_replicas": np.argwhere(np.stack([held.replicas_ED for held in self.held_L])).tolist(),
            "predictor": self.predictor.state_dict(),
            "attention_s": [layer.attention_s for layer in self.layers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up `state`; a collective, as experts move to their owners. Call it before building the optimizer."""
        owner_LE = np.asarray(state["owner_LE"], dtype=np.int64)
        if owner_LE.shape != self.owner_LE.shape:
            raise ConfigError(f"owner_LE of the state has shape {owner_LE.shape}; the model's is {self.owner_LE.shape}")
        self.rearrange(self._saved_placements(owner_LE, state.get("kept_replicas", [])))
        self.iteration = int(state["iteration"])
        self.predictor.load_state_dict(state["predictor"])
        self._predicted_LE = self.predictor.predict()
        for layer, attention_s in zip(self.layers, state["attention_s"], strict=True):
            layer.attention_s = attention_s
        # Now, while no optimizer holds anything that would have to move along.
        self._begin_iteration()

    def close(self) -> None:
        """Stop watching optimizers and end the communicator and the mesh."""
        self.watch.close()
        self.communicator.close()
        self.mesh.close()

    def _saved_placements(self, owner_LE: NDArray[np.int64], kept: Sequence[Sequence[int]]) -> list[Placement]:
        devices = self.mesh.world_size
        if max([owner_LE.max(), *(device for _, _, device in kept)]) >= devices:
            return self.held_L  # saved by more ranks: start from even owners here
        kept_LED = np.zeros((*owner_LE.shape, devices), dtype=np.bool_)
        for layer, e, device in kept:
            kept_LED[layer, e, device] = True
        return [
            shard_only(owner_E, devices).merge(kept_ED) for owner_E, kept_ED in zip(owner_LE, kept_LED, strict=True)
        ]

    def _kept_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for layer in self.layers for parameter in layer.shard.experts.parameters()]

    def _begin(self, layer: ShardedLayer, key: object) -> LayerCall:
        if in_backward():
            call = layer.find_call(key)
            if call is not None:
                call.recompute()
                return call
        load_E = None if self._predicted_LE is None else self._predicted_LE[layer.index]
        training = layer.shard.experts.training
        call = layer.open_call(load_E, key, keep=training and not torch.is_grad_enabled())
        call.previous, self._latest = self._latest, weakref.ref(call)
        return call

    def _queue_finish(self) -> None:
        # By task, as one that raises never calls back, and a reentrant checkpoint's runs inside another.
        task = torch._C._current_graph_task_id()
        if self._finishing_task != task:
            self._finishing_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        self._finishing_task = -1
        for layer in reversed(self.layers):
            layer.finish_reductions()

    def _begin_iteration(self) -> None:
        """Move the owners where the policy wants them for the iteration that begins."""
        self._begun_iteration = self.iteration
        context = self.layers[0].context()
        self.rearrange(self.policy.rearrange(self.iteration, self._predicted_LE, self.held_L, context))

    def _agree_on_attention(self) -> None:
        """Every rank must plan with the same window: the slowest rank's, measured once."""
        means = [layer.clock.mean_s() for layer in self.layers]
        self._timed_iterations += 1
        if self._timed_iterations < ATTENTION_ITERATIONS or self.layers[0].attention_s is not None:
            return
        seconds_L = torch.tensor([mean or 0.0 for mean in means], dtype=torch.float64, device=self.mesh.device)
        all_reduce_max(self.mesh, seconds_L)
        for layer, attention_s in zip(self.layers, seconds_L.tolist(), strict=True):
            layer.attention_s = attention_s


@final
class SparseDispatcher(Dispatcher):
    """Lets a layer's passes run through the executor."""

    def __init__(self, executor: Executor, layer: ShardedLayer) -> None:
        self._executor = executor
        self._layer = layer

    def begin(self, tokens_TM: Tensor) -> DispatchCall:
        """See Dispatcher."""
        del tokens_TM
        return self._executor.take_call(self._layer)
