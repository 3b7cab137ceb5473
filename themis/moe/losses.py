"""Auxiliary losses of routing: load balancing and router z-loss, the same on any number of ranks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def load_balancing_loss(probs_TE: Tensor, tokens_ED: NDArray[np.int64], top_k: int) -> Tensor:
    """E * sum_i f_i * P_i (Switch; GShard) over all ranks' tokens, as this rank's share of it.

    f is each expert's share of all T * K assignments, counted over every rank by `tokens_ED` [E, D]; P is the mean
    probability over every rank's tokens. The loss is linear in P, so a rank can add up its own tokens `probs_TE`
    alone: the *mean over ranks* of the returned scalars, which data parallelism takes of all gradients, is exactly
    the loss of one process holding all tokens. Without any token the loss is zero, and still part of the graph.
    """
    num_experts, num_devices = tokens_ED.shape
    assignments = max(int(tokens_ED.sum()), 1)
    share_E = torch.as_tensor(tokens_ED.sum(axis=1) / assignments, dtype=probs_TE.dtype, device=probs_TE.device)
    mean_E = probs_TE.sum(dim=0) * (num_devices * top_k / assignments)
    loss: Tensor = num_experts * (share_E * mean_E).sum()
    return loss


def router_z_loss(logits_TE: Tensor, tokens_ED: NDArray[np.int64], top_k: int) -> Tensor:
    """The mean over all ranks' tokens of logsumexp(logits)^2 (ST-MoE): this rank's share, as in load_balancing_loss."""
    num_devices = tokens_ED.shape[1]
    assignments = max(int(tokens_ED.sum()), 1)
    loss: Tensor = logits_TE.logsumexp(dim=1).square().sum() * (num_devices * top_k / assignments)
    return loss
