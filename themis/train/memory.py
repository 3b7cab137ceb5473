"""How much memory a rank needs, by kind: arithmetic over a configuration, nothing is allocated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import final

import numpy as np

from themis.core.errors import require
from themis.core.placement import even_owner
from themis.fssdp.adapters import find_sites
from themis.models import ModelConfig, build
from themis.models.tensors import stacked_shapes
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


@final
@dataclass(frozen=True)
class ModelCount:
    """A model's parameters: all but the routed experts, and one routed expert of a layer."""

    dense: Count
    expert: Count
    num_experts: int
    top_k: int
    num_layers: int

    @property
    def total(self) -> int:
        """Parameters of the model."""
        return self.dense.elements + self.expert.elements * self.num_experts * self.num_layers

    @property
    def active(self) -> int:
        """Parameters that one token meets."""
        return self.dense.elements + self.expert.elements * self.top_k * self.num_layers


def count(config: ModelConfig) -> ModelCount:
    """The parameters of the model that `config` describes, which is built for it on the meta device."""
    model = build(config)
    sites = find_sites(model)
    shapes = sites[0].layer.experts.layout.shapes
    foreign = stacked_shapes(sites)
    own = {id(p) for site in sites for p in site.layer.experts.parameters()}
    dense = [p for name, p in model.named_parameters() if name not in foreign and id(p) not in own]
    return ModelCount(
        dense=Count(sum(p.numel() for p in dense), len(dense)),
        expert=Count(sum(prod(shape) for shape in shapes.values()), len(shapes)),
        num_experts=sites[0].layer.experts.num_experts,
        top_k=config.top_k,
        num_layers=len(sites),
    )


def rank_memory(config: RunConfig, world_size: int, rank: int = 0, model: ModelCount | None = None) -> Memory:
    """Memory of `rank` of `world_size` with experts dealt out evenly; rank 0 owns the most.

    model: what `count` says of it, where that is known already. Replicas that a policy keeps count as experts.

    Dense parameters are whole on every rank, or an even share of them with parallel.dense "fully_shard" (torch shards
    whole rows, so that a rank may hold a little more).
    """
    require(world_size >= 1, "world_size", world_size, "1 or more")
    require(0 <= rank < world_size, "rank", rank, f"between 0 and {world_size - 1}")
    model = model or count(config.model)
    sharded = config.parallel.dense == "fully_shard" and world_size > 1
    element_bytes = 8 if config.parallel.dtype == "float64" else 4
    compute_bytes = 2 if config.parallel.compute == "bf16" else element_bytes
    dense = model.dense
    dense_elements = -(-dense.elements // world_size) if sharded else dense.elements
    owned = int(np.sum(even_owner(model.num_experts, world_size) == rank))
    expert = model.expert
    policy = config.policy.build()
    others = model.num_experts - owned if world_size > 1 else 0
    kept = min(policy.persistent_replicas_per_device(), others)
    experts = expert.times((owned + kept) * model.num_layers)
    bound = policy.replicas_per_device()
    replicas = others - kept if bound is None else min(bound, others - kept)
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
        copies_bytes=(owned + kept) * layers * expert.elements * compute_bytes if compute_bytes != element_bytes else 0,
    )
