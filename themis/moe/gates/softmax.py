"""Softmax top-K routing in the manner of Switch (K = 1) and Mixtral (K > 1)."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from themis.moe.gates.base import Assignment, Gate


def top_k_lowest_index(scores_TE: Tensor, top_k: int) -> Tensor:
    """int64 [T, K]: the K best experts of each row, best first; of equal scores the lower index wins.

    torch.topk breaks ties arbitrarily, so a stable sort decides where the K-th score is shared.
    """
    num_experts = scores_TE.shape[1]
    # On CUDA the look for ties would make the host wait, and the sort is cheap.
    if top_k < num_experts and not scores_TE.is_cuda:
        best_TJ, index_TJ = scores_TE.topk(top_k + 1, dim=1)
        if not bool((best_TJ[:, 1:] == best_TJ[:, :-1]).any()):
            return index_TJ[:, :top_k]
    return torch.sort(scores_TE, dim=1, descending=True, stable=True).indices[:, :top_k]


@final
class SoftmaxGate(Gate):
    """p = softmax(W x) in float32 or wider; the K largest win, ties to the lower index.

    normalize_weights: divide the K weights by their sum (Mixtral). It never acts at K = 1, where it would make every
    weight 1 and starve the router of gradient.
    noise: add N(0, 1) * softplus(W_noise x) to the logits while training (GShard; FSMoE section 3.1).
    """

    def __init__(
        self, width: int, num_experts: int, top_k: int, *, normalize_weights: bool = True, noise: bool = False
    ) -> None:
        super().__init__(num_experts, top_k)
        self.normalize_weights = normalize_weights and top_k > 1
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.noise_weight = nn.Parameter(torch.empty(num_experts, width)) if noise else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the scores' matrix from N(0, 0.02); no noise at first but for softplus(0)."""
        nn.init.normal_(self.weight, std=0.02)
        if self.noise_weight is not None:
            nn.init.zeros_(self.noise_weight)

    def forward(self, tokens_TM: Tensor, experts_TK: Tensor | None = None) -> Assignment:
        """See Gate. Scores are never computed below float32, whatever autocast or the tokens' type say."""
        dtype = torch.promote_types(tokens_TM.dtype, torch.float32)
        with torch.autocast(tokens_TM.device.type, enabled=False):
            wide_TM = tokens_TM.to(dtype)
            logits_TE = F.linear(wide_TM, self.weight.to(dtype))
            if self.noise_weight is not None and self.training:
                scale_TE = F.softplus(F.linear(wide_TM, self.noise_weight.to(dtype)))
                logits_TE = logits_TE + torch.randn_like(scale_TE) * scale_TE
            probs_TE = logits_TE.softmax(dim=1)
            if experts_TK is None:
                experts_TK = top_k_lowest_index(logits_TE.detach(), self.top_k)
            if self.normalize_weights:
                # p over the sum of the K chosen p, from the logits: given experts may all have a p that underflows.
                weights_TK = logits_TE.gather(1, experts_TK).softmax(dim=1)
            else:
                weights_TK = probs_TE.gather(1, experts_TK)
        return Assignment(experts_TK, weights_TK, logits_TE, probs_TE)
