"""The slow plain reference of an MoE layer: a loop over tokens' experts, no sorting, no groups, no ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from themis.moe.layer import MoELayer, MoEOutput


def moe_reference(layer: MoELayer, x: Tensor) -> MoEOutput:
    """What `layer` must give for x [..., M]: every expert on its own tokens, weighted and summed; plain autograd."""
    tokens_TM = x.reshape(-1, x.shape[-1])
    assignment = layer.gate(tokens_TM)
    hidden_TM = torch.zeros_like(tokens_TM)
    counts: list[int] = []
    for e, weights in enumerate(layer.experts.weights()):
        token_A, choice_A = (assignment.experts_TK == e).nonzero(as_tuple=True)
        counts.append(token_A.numel())
        rows_AM = _expert(layer, tokens_TM[token_A], dict(weights))
        weighted_AM = rows_AM * assignment.weights_TK[token_A, choice_A, None].to(rows_AM.dtype)
        hidden_TM = hidden_TM.index_add(0, token_A, weighted_AM)
    if layer.shared is not None:
        hidden_TM = hidden_TM + _expert(layer, tokens_TM, dict(layer.shared.weights()[0]))
    share_E = torch.tensor(counts, dtype=assignment.probs_TE.dtype) / max(sum(counts), 1)
    num_tokens = max(tokens_TM.shape[0], 1)
    aux_loss = layer.config.num_experts * (share_E * assignment.probs_TE.sum(0) / num_tokens).sum()
    z_loss = torch.logsumexp(assignment.logits_TE, 1).square().sum() / num_tokens
    return MoEOutput(hidden_TM.view_as(x), aux_loss, z_loss)


def _expert(layer: MoELayer, rows_AM: Tensor, weights: dict[str, Tensor]) -> Tensor:
    if layer.config.experts == "swiglu":
        return (torch.nn.functional.silu(rows_AM @ weights["w_gate"]) * (rows_AM @ weights["w_up"])) @ weights["w_down"]
    hidden_AH = rows_AM @ weights["w1"] + weights.get("b1", torch.zeros((), dtype=rows_AM.dtype))
    return torch.nn.functional.gelu(hidden_AH) @ weights["w2"] + weights.get("b2", torch.zeros((), dtype=rows_AM.dtype))
