"""The two points where a layer's call meets autograd.

`materialize` hands the experts' parameters to the layer, just before they are used. It is created after the dispatch
AlltoAll, so autograd, which runs the youngest ready node first, runs its backward before the AlltoAll's: gradients
start their way home at the first possible moment. `join` stands behind the experts: its backward comes before theirs,
which is where freed replicas must be back. It also ties every output to `materialize`, so that a rank whose experts
got no row runs the same collectives as all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor


class BackwardOwner(Protocol):
    """What the two functions call back."""

    def before_expert_backward(self) -> None:
        """Called before the experts' backward: parameters must be in place when it returns."""

    def after_expert_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Called with the gradient of each tensor given to `materialize`; None for one that was not used."""


def materialize(owner: BackwardOwner, anchor: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A token for `join`, and `tensors` as outputs of one autograd node that calls `owner` back.

    `anchor` is any leaf; whether it requires a gradient decides whether the outputs do.
    """
    token, *outputs = _Materialize.apply(owner, anchor, *tensors)  # type: ignore[no-untyped-call]
    return token, outputs


def join(owner: BackwardOwner, rows_AM: Tensor, token: Tensor) -> Tensor:
    """`rows_AM`, with a backward that first calls `owner` and always reaches `token`."""
    return _Join.apply(owner, rows_AM, token)  # type: ignore[no-any-return, no-untyped-call]


@final
class _Materialize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: BackwardOwner, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.owner = owner
        ctx.set_materialize_grads(False)
        # `.data` cuts the tie to the parameter: its gradient takes the owner's way, not autograd's.
        return (anchor.new_zeros(1), *(tensor.data for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.owner.after_expert_backward(grads[1:])
        return (None,) * (len(grads) + 1)


@final
class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: BackwardOwner, rows_AM: Tensor, token: Tensor) -> Tensor:
        ctx.owner = owner
        ctx.token = token.new_zeros(1)
        return rows_AM.view_as(rows_AM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.owner.before_expert_backward()
        return None, grads[0], ctx.token
