"""The MoE layer: Gate, Order, Dispatch, Experts, Combine, I-Order (FSMoE, section 3.1)."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from themis.core.errors import reject
from themis.moe.config import MoEConfig
from themis.moe.dispatch import DispatchCall, Dispatcher, LocalDispatcher
from themis.moe.experts import Experts, GPTExperts, SwiGLUExperts
from themis.moe.gates import SoftmaxGate
from themis.moe.hooks import Hooks
from themis.moe.losses import load_balancing_loss, router_z_loss
from themis.moe.order import SortedOrder


class MoEOutput(NamedTuple):
    """hidden: like the input; aux_loss, z_loss: this rank's shares (see losses.py), scalars of the graph."""

    hidden: Tensor
    aux_loss: Tensor
    z_loss: Tensor


def build_experts(config: MoEConfig, num_experts: int, hidden: int) -> Experts:
    """Experts of the kind that `config` names."""
    if config.experts == "swiglu":
        return SwiGLUExperts(num_experts, config.width, hidden)
    return GPTExperts(num_experts, config.width, hidden, bias=config.bias)


@final
class MoELayer(nn.Module):
    """A dropless MoE layer over [..., M]. Its `dispatcher` decides where the experts are.

    Losses come back beside the output rather than by a side door, so that every kind of activation checkpointing
    keeps their gradients.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = SoftmaxGate(
            config.width,
            config.num_experts,
            config.top_k,
            normalize_weights=config.normalize_weights,
            noise=config.noise,
        )
        self.order = SortedOrder()
        self.experts = build_experts(config, config.num_experts, config.expert_hidden)
        self.shared = build_experts(config, 1, config.shared_hidden) if config.shared_hidden else None
        self.hooks = Hooks()
        self.dispatcher: Dispatcher = LocalDispatcher(self.experts)

    @property
    def width(self) -> int:
        """M."""
        return self.config.width

    @torch.compiler.disable  # exchanges with peers are no part of a graph
    def forward(self, x: Tensor, mask: Tensor | None = None) -> MoEOutput:
        """x [..., M]; mask bool [...] is false for padding, which passes no expert, counts nowhere and gives zero.

        Raises ConfigError on an x of another width and on a mask of another type or shape.
        """
        if x.shape[-1:] != (self.config.width,):
            reject("x", f"of shape {tuple(x.shape)}", f"[..., {self.config.width}], the layer's width last")
        flat_TM = x.reshape(-1, x.shape[-1])
        if mask is None:
            hidden_TM, aux_loss, z_loss = self._forward_tokens(flat_TM)
            return MoEOutput(hidden_TM.view_as(x), aux_loss, z_loss)
        if mask.dtype != torch.bool or mask.shape != x.shape[:-1]:
            reject("mask", f"{mask.dtype} of shape {tuple(mask.shape)}", f"torch.bool of shape {tuple(x.shape[:-1])}")
        kept_T = mask.reshape(-1).nonzero().squeeze(1)
        hidden_TM, aux_loss, z_loss = self._forward_tokens(flat_TM.index_select(0, kept_T))
        padded_TM = torch.zeros_like(flat_TM).index_copy(0, kept_T, hidden_TM.to(flat_TM.dtype))
        return MoEOutput(padded_TM.view_as(x), aux_loss, z_loss)

    def _forward_tokens(self, tokens_TM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens_TM = self.hooks.run("before_moe_start", tokens_TM)
        call = self.dispatcher.begin(tokens_TM)
        top_k = self.config.top_k
        assignment = self.gate(tokens_TM, call.choose(tokens_TM.shape[0], top_k))
        ordered = self.order.plan(assignment.experts_TK, self.config.num_experts)
        tokens_ED = call.announce(assignment.experts_TK, ordered.counts_E)
        rows_AM = self._pass_experts(call, self.order.order(tokens_TM, ordered))
        hidden_TM = self.order.restore(rows_AM, ordered, assignment.weights_TK)
        if self.shared is not None:
            hidden_TM = hidden_TM + self.shared(tokens_TM, [tokens_TM.shape[0]], self.shared.weights())
        hidden_TM = self.hooks.run("before_moe_end", hidden_TM.to(tokens_TM.dtype))
        aux_loss = load_balancing_loss(assignment.probs_TE, tokens_ED, top_k)
        return hidden_TM, aux_loss, router_z_loss(assignment.logits_TE, tokens_ED, top_k)

    def _pass_experts(self, call: DispatchCall, rows_AM: Tensor) -> Tensor:
        rows_AM = call.dispatch(self.hooks.run("before_dispatch", rows_AM))
        rows_AM = self.hooks.run("after_dispatch", rows_AM)
        rows_AM = self.experts(rows_AM, call.counts(), call.weights())
        rows_AM = call.combine(self.hooks.run("before_combine", rows_AM))
        return self.hooks.run("after_combine", rows_AM)
