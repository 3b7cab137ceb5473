"""Order and I-Order: tokens laid out expert by expert, and back with their weights applied (FSMoE, section 3.1).

Rows (suffix A) are the T * K assignments: one row a token and chosen expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor


@final
class _Rows(torch.autograd.Function):
    """rows[a] = source[index[a] // fan]; each source row appears `fan` times, found again through `inverse`."""

    @staticmethod
    def forward(ctx: Any, source_XM: Tensor, index_A: Tensor, inverse_A: Tensor, fan: int) -> Tensor:
        ctx.save_for_backward(inverse_A)
        ctx.fan = fan
        return source_XM.index_select(0, index_A // fan if fan > 1 else index_A)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (inverse_A,) = ctx.saved_tensors
        grad_AM = grads[0].index_select(0, inverse_A)
        if ctx.fan > 1:
            # Gathering and adding beats scattering: no two threads meet on a row, and the order of addition is fixed.
            grad_AM = grad_AM.unflatten(0, (-1, ctx.fan)).sum(dim=1)
        return grad_AM, None, None, None


def permute_rows(rows_AM: Tensor, index_A: Tensor, inverse_A: Tensor) -> Tensor:
    """rows_AM[index_A], differentiable; `inverse_A` is the inverse permutation."""
    return _Rows.apply(rows_AM, index_A, inverse_A, 1)  # type: ignore[no-any-return, no-untyped-call]


def invert(index_A: Tensor) -> Tensor:
    """The inverse of the permutation `index_A`."""
    inverse_A = torch.empty_like(index_A)
    inverse_A[index_A] = torch.arange(index_A.numel(), device=index_A.device)
    return inverse_A


@final
@dataclass(frozen=True)
class Ordered:
    """An expert-major layout: sorted row a is assignment `index_A[a]`; `counts_E` int64 [E] rows an expert."""

    counts_E: Tensor
    index_A: Tensor
    inverse_A: Tensor
    top_k: int


@final
class SortedOrder:
    """Dropless order by a stable sort: an expert's rows keep the order of their tokens."""

    def plan(self, experts_TK: Tensor, num_experts: int) -> Ordered:
        """The layout for the choices `experts_TK` int64 [T, K]."""
        flat_A = experts_TK.reshape(-1)
        index_A = torch.argsort(flat_A, stable=True)
        counts_E = torch.bincount(flat_A, minlength=num_experts)
        return Ordered(counts_E, index_A, invert(index_A), experts_TK.shape[1])

    def order(self, tokens_TM: Tensor, ordered: Ordered) -> Tensor:
        """Tokens [T, M] to rows [A, M], expert by expert."""
        return _Rows.apply(tokens_TM, ordered.index_A, ordered.inverse_A, ordered.top_k)  # type: ignore[no-any-return, no-untyped-call]

    def restore(self, rows_AM: Tensor, ordered: Ordered, weights_TK: Tensor) -> Tensor:
        """Rows [A, M] back to tokens [T, M], each the sum of its K rows times `weights_TK` [T, K]."""
        rows_TKM = permute_rows(rows_AM, ordered.inverse_A, ordered.index_A).unflatten(0, (-1, ordered.top_k))
        dtype = torch.promote_types(rows_TKM.dtype, weights_TK.dtype)
        with torch.autocast(rows_AM.device.type, enabled=False):  # which would round the weights
            tokens_T1M = torch.bmm(weights_TK.to(dtype).unsqueeze(1), rows_TKM.to(dtype))
        return tokens_T1M.squeeze(1).to(rows_AM.dtype)
