"""Experts of transformers models, through the one interface that all its families share (transformers 5).

A family's experts module gets its tokens with the router's choice and weights, `experts(hidden_states, top_k_index,
top_k_weights)`, and says by flags how its matrices lie. So one layer serves them all; router, shared experts and
everything dense stay the family's own code. Nothing here imports transformers: the flags are what is asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from themis.core.errors import ConfigError
from themis.moe.chunk import ChunkLayout
from themis.moe.dispatch import DispatchCall, Dispatcher, LocalDispatcher
from themis.moe.experts import ExpertBank, Weights
from themis.moe.grouped import grouped_linear
from themis.moe.order import SortedOrder

#: The child of a family's experts module that holds the experts one by one, in the stacked tensors' stead.
BANK = "owned"

_LAYER = "_themis_layer"
_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")


def is_interface_experts(module: nn.Module) -> bool:
    """Whether `module` is an experts module behind transformers' experts interface."""
    return hasattr(module, "_apply_gate") and all(hasattr(module, flag) for flag in _FLAGS)


def interface_layer(module: nn.Module) -> InterfaceLayer | None:
    """The layer that has taken over `module`, None before that."""
    layer = module.__dict__.get(_LAYER)
    return layer if isinstance(layer, InterfaceLayer) else None


@final
class InterfaceLayer:
    """A family's experts module as a layer: its router has chosen; Order to I-Order are left to do.

    The stacked parameters [E, ...] of `module` make way for one ParameterDict an expert, `<module>.owned.<e>.<name>`,
    each with the shape of its slice; what all experts share (a norm) stays where it is.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        parameters = dict(module.named_parameters(recurse=False))
        _check(name, module, parameters)
        self._stacked = parameters
        self._dtype = parameters["down_proj"].dtype
        self.width = int(parameters["down_proj"].shape[2 if module.is_transposed else 1])
        layout = ChunkLayout({n: tuple(p.shape[1:]) for n, p in parameters.items()})
        num_experts = parameters["down_proj"].shape[0]
        slices = [
            {n: nn.Parameter(p.detach()[e], requires_grad=p.requires_grad) for n, p in parameters.items()}
            for e in range(num_experts)
        ]
        self.experts = ExpertBank(layout, slices)
        self.dispatcher: Dispatcher = LocalDispatcher(self.experts)
        #: int64 [E, D]: each rank's tokens for each expert in the latest call.
        self.tokens_ED = np.zeros((num_experts, 1), dtype=np.int64)
        self._order = SortedOrder()
        # Weakly, as the module will hold this layer.
        self._module = weakref.ref(module)

    def install(self) -> list[nn.Parameter]:
        """Take over the module's parameters and its forward, on this one module; its class stays as it is.

        Returns the stacked parameters, which are no longer the model's.
        """
        module = self._module()
        assert module is not None
        for name in self.experts.layout.shapes:
            delattr(module, name)
        module.add_module(BANK, self.experts.train(module.training))
        module.__dict__[_LAYER] = self
        module.forward = torch.compiler.disable(self.forward)  # a compiled block breaks its graph around it
        stacked, self._stacked = self._stacked, {}
        return list(stacked.values())

    @torch.no_grad()
    def initialise(self, init_weights: Callable[[], None], device: torch.device) -> bool:
        """Have `init_weights` draw the module's stacked parameters; the experts still in the bank keep theirs.

        The whole layer is there meanwhile, so that the values do not depend on who owns what. False where it left
        any of them as they were.
        """
        module = self._module()
        assert module is not None
        shapes = self.experts.layout.shapes
        for name, shape in shapes.items():
            whole = torch.full((self.experts.num_experts, *shape), torch.nan, dtype=self._dtype, device=device)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=False))
        init_weights()
        drawn = not any(bool(getattr(module, name).isnan().any()) for name in shapes)
        for e in self.experts.held:
            for name, parameter in self.experts.expert(e).items():
                parameter.copy_(getattr(module, name)[e])
        for name in shapes:
            delattr(module, name)
        return drawn

    @contextmanager
    def masked(self) -> Iterator[None]:
        """Within it, the module shows stacked parameters again, empty ones that transformers takes for initialised."""
        module = self._module()
        assert module is not None
        for name in self.experts.layout.shapes:
            empty = torch.empty(0, dtype=self._dtype)
            empty._is_hf_initialized = True  # type: ignore[attr-defined]
            setattr(module, name, empty)
        try:
            yield
        finally:
            for name in self.experts.layout.shapes:
                delattr(module, name)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [..., M], the router's choice int64 [..., K] and weights [..., K]; [..., M] back.

        An index of E or more, as some routers mark a choice that is not to be computed, adds nothing.
        """
        num_experts = self.experts.num_experts
        tokens_TM = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts_TK = top_k_index.reshape(-1, top_k_index.shape[-1])
        weights_TK = top_k_weights.reshape(experts_TK.shape)
        skipped_TK = experts_TK >= num_experts
        weights_TK = weights_TK.masked_fill(skipped_TK, 0.0)
        call = self.dispatcher.begin(tokens_TM)
        chosen_TK = call.choose(*experts_TK.shape)
        experts_TK = experts_TK.clamp(max=num_experts - 1) if chosen_TK is None else chosen_TK
        ordered = self._order.plan(experts_TK, num_experts)
        self.tokens_ED = call.announce(experts_TK, ordered.counts_E)
        rows_AM = self._pass_experts(call, self._order.order(tokens_TM, ordered))
        return self._order.restore(rows_AM, ordered, weights_TK).view_as(hidden_states)

    def _pass_experts(self, call: DispatchCall, rows_AM: Tensor) -> Tensor:
        rows_AM = call.dispatch(rows_AM)
        return call.combine(self._compute(rows_AM, call.counts(), call.weights()))

    def _compute(self, rows_AM: Tensor, counts_S: Sequence[int], weights_S: Sequence[Weights]) -> Tensor:
        if not weights_S:
            return rows_AM  # no expert is here, so no row either, of the width that leaves an expert
        module: Any = self._module()
        up_AH = self._linear(rows_AM, counts_S, weights_S, "gate_up_proj" if module.has_gate else "up_proj")
        hidden_AH = module._apply_gate(up_AH) if module.has_gate else module.act_fn(up_AH)
        out_AM = self._linear(hidden_AH, counts_S, weights_S, "down_proj")
        return module.post_expert_norm(out_AM) if module.has_post_expert_norm else out_AM

    def _linear(self, rows_AM: Tensor, counts_S: Sequence[int], weights_S: Sequence[Weights], name: str) -> Tensor:
        module: Any = self._module()
        matrices_S = [weights[name] if module.is_transposed else weights[name].t() for weights in weights_S]
        biases_S = [weights[f"{name}_bias"] for weights in weights_S] if module.has_bias else None
        # A family's own gate may compute in another type than its matrices.
        return grouped_linear(rows_AM.to(matrices_S[0].dtype), counts_S, matrices_S, biases_S)


def _check(name: str, module: Any, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse, by name and with the reason, experts that the interface does not express."""
    what = f"the experts {name!r} ({type(module).__name__})"
    projections = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    wanted = [*projections, *(f"{p}_bias" for p in projections if module.has_bias)]
    if sorted(parameters) != sorted(wanted):
        raise ConfigError(f"{what} have the parameters {sorted(parameters)}; by their flags they would be {wanted}")
    if getattr(module, "_is_expert_parallel", False):
        raise ConfigError(f"{what} are expert-parallel already; load the model without an expert-parallel plan")
    if len(types := {str(parameter.dtype) for parameter in parameters.values()}) > 1:
        raise ConfigError(f"{what} have parameters of the types {sorted(types)}; give them one")
    for key, parameter in parameters.items():
        if not parameter.is_floating_point() or torch.finfo(parameter.dtype).bits < 16:
            raise ConfigError(f"{what} hold {key} as {parameter.dtype}; load the model unquantised, in 16 bits or more")
