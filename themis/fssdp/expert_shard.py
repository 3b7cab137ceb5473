"""One layer's shard on one rank: the experts it keeps, each a contiguous chunk (Themis paper, section 3.1)."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from themis.core.errors import ConfigError
from themis.core.placement import Placement
from themis.fssdp.precision import MixedPrecision
from themis.moe.experts import ExpertBank


@final
class ExpertShard:
    """Keeps `experts` down to those of `rank` in `held`, their parameters views into one chunk each.

    `held`, the same on every rank, says who owns each expert and who keeps a replica of it from iteration to
    iteration, which steps as the owner's does; FSSDP keeps none. The parameters keep their identity, so an optimizer
    built before may go on with those that stay; parameters on the meta device make way for new ones on `device`, whose
    values are yet to come.
    """

    def __init__(
        self,
        experts: ExpertBank,
        held: Placement,
        rank: int,
        precision: MixedPrecision,
        device: torch.device,
    ) -> None:
        self.experts = experts
        self.layout = experts.layout
        self.held = held
        self.rank = rank
        sample = next(iter(experts.parameters()))
        self.master_dtype, self.device = sample.dtype, device
        self.param_dtype = precision.param_dtype or self.master_dtype
        self.reduce_dtype = precision.reduce_dtype or self.master_dtype
        self.trainable = {name: parameter.requires_grad for name, parameter in experts.expert(0).items()}
        self._chunks: dict[int, Tensor] = {}
        for e in range(experts.num_experts):
            if not held.placement_ED[e, rank]:
                delattr(experts, str(e))
            elif sample.is_meta:
                self.take(e, torch.zeros(self.layout.numel, dtype=self.master_dtype, device=device))
            else:
                self._chunks[e] = self._gather_into_chunk(e)

    @property
    def owner_E(self) -> NDArray[np.int64]:
        """int64 [E]: the owners."""
        return self.held.owner_E

    @property
    def kept(self) -> list[int]:
        """The experts of this shard, ascending: owned ones and persistent replicas."""
        return sorted(self._chunks)

    @property
    def owned(self) -> list[int]:
        """The experts that this rank owns, ascending."""
        return [e for e in self.kept if self.owner_E[e] == self.rank]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one chunk on the wire, the paper's Psi."""
        return self.layout.numel * self.param_dtype.itemsize

    def chunk(self, e: int) -> Tensor:
        """The master chunk of a kept expert, flat."""
        chunk = self._chunks[e]
        name, parameter = next(iter(self.experts.expert(e).items()))
        if parameter.data_ptr() != self.layout.views(chunk)[name].data_ptr():
            # The user put other memory under the parameters; they are the truth.
            if (parameter.dtype, parameter.device) != (self.master_dtype, self.device):
                raise ConfigError(
                    f"the model is now {parameter.dtype} on {parameter.device}; it was parallelized as "
                    f"{self.master_dtype} on {self.device}: cast and move it before themis.parallelize"
                )
            chunk = self._chunks[e] = self._gather_into_chunk(e)
        return chunk

    def compute_chunk(self, e: int) -> Tensor:
        """The chunk of a kept expert in `param_dtype`: the master itself where the types agree, else a copy."""
        return self.chunk(e).to(self.param_dtype)

    def parameters(self, e: int) -> dict[str, nn.Parameter]:
        """The parameters of a kept expert by name."""
        return dict(self.experts.expert(e).items())

    def add_gradient(self, e: int, gradient: Tensor) -> None:
        """Add the flat `gradient` of a kept expert, in `reduce_dtype`, to the gradients of its parameters."""
        views = self.layout.views(gradient.to(self.master_dtype))
        for name, parameter in self.parameters(e).items():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = views[name]
            else:
                parameter.grad.add_(views[name])

    def give(self, e: int) -> None:
        """Let go of a kept expert; others have it."""
        del self._chunks[e]
        delattr(self.experts, str(e))

    def take(self, e: int, chunk: Tensor) -> dict[str, nn.Parameter]:
        """Keep expert `e` from now on, with the flat master `chunk`; its new parameters come back by name."""
        self._chunks[e] = chunk
        parameters = {
            name: nn.Parameter(view, requires_grad=self.trainable[name])
            for name, view in self.layout.views(chunk).items()
        }
        self.experts.add_module(str(e), nn.ParameterDict(parameters))
        return parameters

    @torch.no_grad()
    def _gather_into_chunk(self, e: int) -> Tensor:
        parameters = self.parameters(e)
        sample = next(iter(parameters.values()))
        chunk = torch.zeros(self.layout.numel, dtype=sample.dtype, device=sample.device)
        for name, view in self.layout.views(chunk).items():
            view.copy_(parameters[name])
            parameters[name].data = view
        return chunk
