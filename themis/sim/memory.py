"""Memory a device by kind, and the batch at which it runs out (section 5.4)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import final

from themis.policies import Policy
from themis.sim.workload import ModelShape, Workload

#: Adam in mixed precision: fp32 master weight and two moments (section 2.3).
OPTIMIZER_BYTES = 12


def moved_bytes(model: ModelShape) -> int:
    """Of an expert that moves with its optimizer state: 7 times its parameters in bf16 (section 2.3)."""
    return model.expert_parameters * (model.element_bytes + OPTIMIZER_BYTES)


@final
@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the fullest device. `experts_*`: owned experts and persistent slots; replicas: ephemeral ones."""

    dense_parameters: float
    dense_gradients: float
    dense_optimizer: float
    expert_parameters: float
    expert_gradients: float
    expert_optimizer: float
    replica_parameters: float
    replica_gradients: float
    activations: float

    @property
    def total(self) -> float:
        """All kinds together."""
        return float(sum(asdict(self).values()))

    @property
    def parameters(self) -> float:
        """The MoE layers' parameters, replicas included."""
        return self.expert_parameters + self.replica_parameters

    @property
    def model_states(self) -> float:
        """The MoE layers' parameters, gradients and optimizer states (figure 12): no activations, no dense part."""
        gradients = self.expert_gradients + self.replica_gradients
        return self.parameters + gradients + self.expert_optimizer


@final
@dataclass(frozen=True)
class Peak:
    """The most that any device had in any iteration.

    routed_tokens: token-expert pairs computed, summed over layers; layer_tokens: those of one layer; replicas: the
    ephemeral ones, summed over layers; layer_replicas: those of one layer.
    """

    routed_tokens: float = 0.0
    layer_tokens: float = 0.0
    replicas: float = 0.0
    layer_replicas: float = 0.0


def memory_use(workload: Workload, policy: Policy, peak: Peak) -> MemoryUse:
    """Memory of the fullest device under `policy`, at the `peak` that a simulation saw.

    Owners hold E/D experts a layer, rounded up, and what the policy reserves for persistent replicas has gradients and
    optimizer states too. Ephemeral replicas live in every layer from forward to backward, or in two at a time with
    re-materialisation; their gradients in two layers at a time, until they are home.
    """
    model = workload.model
    slots = -(-model.num_experts // workload.cluster.num_devices) + policy.persistent_replicas_per_device()
    held = slots * model.num_layers * model.expert_parameters
    size = model.element_bytes
    two = min(2, model.num_layers)
    two_layers = min(two * peak.layer_replicas, peak.replicas) * model.expert_parameters * size
    all_layers = peak.replicas * model.expert_parameters * size
    return MemoryUse(
        dense_parameters=model.dense_parameters * size,
        dense_gradients=model.dense_parameters * size,
        dense_optimizer=model.dense_parameters * OPTIMIZER_BYTES,
        expert_parameters=held * size,
        expert_gradients=held * size,
        expert_optimizer=held * OPTIMIZER_BYTES,
        replica_parameters=two_layers if policy.rematerialize else all_layers,
        replica_gradients=two_layers,
        activations=activation_bytes(workload, peak),
    )


def activation_bytes(workload: Workload, peak: Peak) -> float:
    """What the forward keeps for the backward, no recomputation, fused attention, bf16.

    A token and block: two norms' inputs and outputs, q, k and v, the attention's output, its projection, shared
    experts; the copies that come back from its K experts, for the weighted sum. A token at an expert: its input, the
    first products, the activation and the output; while a layer's experts go backwards, the gradients of these too. The
    head: logits, their softmax in fp32, their gradient.
    """
    model, size = workload.model, workload.model.element_bytes
    branches = 2 if model.gated else 1
    shared = model.shared_hidden * (branches + 1)
    block = 6 * model.width + model.cache_width + model.score_width + shared + model.top_k * model.width
    expert = 2 * model.width + (branches + 1) * model.expert_hidden
    resident = workload.tokens * block * model.num_layers * size
    head = workload.tokens * model.vocabulary * (4 + 2 * size)
    return resident + (peak.routed_tokens + peak.layer_tokens) * expert * size + head
