"""What a language model returns, and its losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LMOutput(NamedTuple):
    """logits [B, S, V]; the rest are scalars of the graph, None without targets.

    loss = cross_entropy + aux_loss_weight * aux_loss + z_loss_weight * z_loss. cross_entropy is the mean over this
    rank's tokens; aux_loss and z_loss are means over layers of this rank's shares (see themis.moe.losses): their
    mean over ranks is that of all tokens together.
    """

    logits: Tensor
    loss: Tensor | None = None
    cross_entropy: Tensor | None = None
    aux_loss: Tensor | None = None
    z_loss: Tensor | None = None


def with_losses(
    logits_BSV: Tensor,
    targets_BS: Tensor,
    aux_losses: list[Tensor],
    z_losses: list[Tensor],
    *,
    aux_loss_weight: float,
    z_loss_weight: float,
) -> LMOutput:
    """The output with its losses, of which the routers' are one a layer; never computed below float32."""
    wide_TV = logits_BSV.flatten(0, 1).to(torch.promote_types(logits_BSV.dtype, torch.float32))
    total = F.cross_entropy(wide_TV, targets_BS.flatten(), reduction="sum")
    cross_entropy = total / max(targets_BS.numel(), 1)
    aux_loss, z_loss = torch.stack(aux_losses).mean(), torch.stack(z_losses).mean()
    loss = cross_entropy + aux_loss_weight * aux_loss + z_loss_weight * z_loss
    return LMOutput(logits_BSV, loss, cross_entropy, aux_loss, z_loss)
