"""How much memory a rank needs, by kind: plain arithmetic over a configuration, no model is built."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import final

import numpy as np

from themis.core.errors import require
from themis.core.placement import even_owner
from themis.models import GPTMoEConfig
from themis.train.config import RunConfig

#: AdamW keeps two moments of each parameter, and a float32 counter of each tensor.
_MOMENTS = 2
_COUNTER_BYTES = 4


@final
@dataclass(frozen=True)
class Count:
    """Elements and tensors of some parameters."""

    elements: int
    tensors: int

    def __add__(self, other: Count) -> Count:
        return Count(self.elements + other.elements, self.tensors + other.tensors)

    def times(self, number: int) -> Count:
        """`number` such sets."""
        return Count(self.elements * number, self.tensors * number)


@final
@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. Activations are not in it: they depend on the batch, not on who owns what.

    buckets_bytes: what torch's DDP reduces dense gradients through; replicas_bytes: the most that materialised
    replicas take, with every slot of the budget in use; copies_bytes: in mixed precision, the owned experts once more
    in the type that is computed in.
    """

    dense_parameters_bytes: int
    expert_parameters_bytes: int
    dense_gradients_bytes: int
    expert_gradients_bytes: int
    optimizer_bytes: int
    buckets_bytes: int
    replicas_bytes: int
    copies_bytes: int

    @property
    def total_bytes(self) -> int:
        """All kinds together."""
        return sum(asdict(self).values())


def expert_count(config: GPTMoEConfig, hidden: int) -> Count:
    """Parameters of one expert of the given hidden width."""
    width = config.width
    if config.experts == "swiglu":
        return Count(3 * width * hidden, 3)
    bias = Count(hidden + width, 2) if config.bias else Count(0, 0)
    return Count(2 * width * hidden, 2) + bias


def dense_count(config: GPTMoEConfig) -> Count:
    """Parameters of the whole model but its routed experts."""
    width = config.width
    norm = Count(2 * width, 2)
    attention = Count(4 * width * width, 2) + (Count(4 * width, 2) if config.bias else Count(0, 0))
    router = Count(config.num_experts * width, 1).times(2 if config.router_noise else 1)
    shared = expert_count(config, config.shared_hidden) if config.shared_hidden else Count(0, 0)
    block = norm.times(2) + attention + router + shared
    embeddings = Count((config.vocab_size + config.sequence_length) * width, 2)
    head = Count(0, 0) if config.tie_embeddings else Count(config.vocab_size * width, 1)
    return block.times(config.num_layers) + embeddings + norm + head


def total_parameters(config: GPTMoEConfig) -> int:
    """Parameters of the model."""
    experts = expert_count(config, config.expert_hidden).times(config.num_experts * config.num_layers)
    return (dense_count(config) + experts).elements


def active_parameters(config: GPTMoEConfig) -> int:
    """Parameters that one token meets."""
    experts = expert_count(config, config.expert_hidden).times(config.top_k * config.num_layers)
    return (dense_count(config) + experts).elements


def rank_memory(config: RunConfig, world_size: int, rank: int = 0) -> Memory:
    """Memory of `rank` of `world_size` with experts dealt out evenly; rank 0 owns the most.

    Dense parameters are whole on every rank, or an even share of them with parallel.dense "fully_shard" (torch shards
    whole rows, so that a rank may hold a little more).
    """
    require(world_size >= 1, "world_size", world_size, "1 or more")
    require(0 <= rank < world_size, "rank", rank, f"between 0 and {world_size - 1}")
    model = config.model
    sharded = config.parallel.dense == "fully_shard" and world_size > 1
    element_bytes = 8 if config.parallel.dtype == "float64" else 4
    compute_bytes = 2 if config.parallel.compute == "bf16" else element_bytes
    dense = dense_count(model)
    dense_elements = -(-dense.elements // world_size) if sharded else dense.elements
    owned = int(np.sum(even_owner(model.num_experts, world_size) == rank))
    expert = expert_count(model, model.expert_hidden)
    experts = expert.times(owned * model.num_layers)
    policy = config.policy.build()
    replicas = min(policy.replicas_per_device(), model.num_experts - owned) if world_size > 1 else 0
    # Themis-RM frees them after the forward; while one layer's backward ends, those of the layer before come back.
    layers = min(2, model.num_layers) if policy.rematerialize else model.num_layers
    counters = (dense.tensors + experts.tensors) * _COUNTER_BYTES
    return Memory(
        dense_parameters_bytes=dense_elements * element_bytes,
        expert_parameters_bytes=experts.elements * element_bytes,
        dense_gradients_bytes=dense_elements * element_bytes,
        expert_gradients_bytes=experts.elements * element_bytes,
        optimizer_bytes=_MOMENTS * (dense_elements + experts.elements) * element_bytes + counters,
        buckets_bytes=dense.elements * element_bytes if world_size > 1 and not sharded else 0,
        replicas_bytes=replicas * layers * expert.elements * compute_bytes,
        copies_bytes=owned * layers * expert.elements * compute_bytes if compute_bytes != element_bytes else 0,
    )
