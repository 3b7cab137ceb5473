"""The token AlltoAll with gradients (step 3 of an FSSDP iteration; Themis paper, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from themis.comm.collectives import all_to_all_rows
from themis.comm.mesh import Mesh


def all_to_all(mesh: Mesh, rows_AM: Tensor, send_D: Sequence[int], receive_D: Sequence[int]) -> Tensor:
    """Uneven AlltoAll of token rows: [sum(receive_D), M] from `rows_AM` [sum(send_D), M], ordered by source.

    Differentiable: gradients take the same way back. Ranks without rows take part all the same. If the rows need a
    gradient on one rank they must on all, for the way back is a collective too. ConfigError on counts that do not
    fit, PeerError when a peer fails.
    """
    if mesh.world_size == 1:
        return all_to_all_rows(mesh, rows_AM, send_D, receive_D)
    out: Tensor = _AllToAll.apply(rows_AM, mesh, list(send_D), list(receive_D))  # type: ignore[no-untyped-call]
    return out


@final
class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_AM: Tensor, mesh: Mesh, send_D: list[int], receive_D: list[int]) -> Tensor:
        ctx.mesh, ctx.send_D, ctx.receive_D = mesh, send_D, receive_D
        return all_to_all_rows(mesh, rows_AM, send_D, receive_D)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all_rows(ctx.mesh, grads[0], ctx.receive_D, ctx.send_D), None, None, None
