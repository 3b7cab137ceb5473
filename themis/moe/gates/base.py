"""The gate's contract: tokens in, an assignment of tokens to experts out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn


@final
@dataclass(frozen=True)
class Assignment:
    """Where each token goes and with what weight.

    experts_TK: int64, the K distinct experts of each token; weights_TK: their combination weights, part of the graph;
    logits_TE, probs_TE: router scores and their softmax in float32 or wider, part of the graph.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    logits_TE: Tensor
    probs_TE: Tensor


class Gate(nn.Module, ABC):
    """Assigns each token to `top_k` of `num_experts` experts."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k

    @abstractmethod
    def forward(self, tokens_TM: Tensor, experts_TK: Tensor | None = None) -> Assignment:
        """Score `tokens_TM`; where `experts_TK` is given, weigh those experts instead of choosing.

        Recomputation gives the choice of its forward, so that a tie or noise cannot route it differently.
        """

    @abstractmethod
    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
