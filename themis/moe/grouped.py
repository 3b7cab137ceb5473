"""Grouped GEMM: rows sorted by expert, each group times its own matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor


def grouped_linear(
    rows_AM: Tensor, counts_S: Sequence[int], weights_S: Sequence[Tensor], biases_S: Sequence[Tensor] | None = None
) -> Tensor:
    """[A, M] rows to [A, N]: the next counts_S[s] rows times weights_S[s] [M, N], plus biases_S[s] [N].

    Differentiable in rows, weights and biases. A group without rows takes part with a zero gradient. Under
    torch.autocast all of them are cast as for torch.nn.functional.linear.
    """
    rows_AM, *parameters = _autocast([rows_AM, *weights_S, *(biases_S or ())])
    return _GroupedLinear.apply(rows_AM, tuple(counts_S), len(weights_S), *parameters)  # type: ignore[no-any-return, no-untyped-call]


def _autocast(tensors: list[Tensor]) -> list[Tensor]:
    """What autocast does to the arguments of torch's own GEMMs; it cannot see into a Function."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [t if t.dtype == torch.float64 else t.to(dtype) for t in tensors]


@final
class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_AM: Tensor, counts_S: tuple[int, ...], num_slots: int, *parameters: Tensor) -> Tensor:
        weights_S, biases_S = parameters[:num_slots], parameters[num_slots:]
        ctx.save_for_backward(rows_AM, *weights_S)
        ctx.counts_S, ctx.has_bias = counts_S, bool(biases_S)
        width = weights_S[0].shape[1] if weights_S else rows_AM.shape[1]
        out_AN = rows_AM.new_empty(rows_AM.shape[0], width)
        _multiply(rows_AM, counts_S, weights_S, out_AN)
        if biases_S:
            for out_GN, bias_N in zip(out_AN.split(counts_S), biases_S, strict=True):
                out_GN.add_(bias_N)
        return out_AN

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows_AM, *weights_S = ctx.saved_tensors
        grad_AN = grads[0].contiguous()
        grad_weights: list[Tensor | None] = [None] * len(weights_S)
        grad_biases: list[Tensor | None] = [None] * (len(weights_S) if ctx.has_bias else 0)
        if any(ctx.needs_input_grad[3:]):
            for s, (rows_GM, grad_GN) in enumerate(
                zip(rows_AM.split(ctx.counts_S), grad_AN.split(ctx.counts_S), strict=True)
            ):
                grad_weights[s] = rows_GM.t() @ grad_GN
                if ctx.has_bias:
                    grad_biases[s] = grad_GN.sum(dim=0)
        grad_AM = None
        if ctx.needs_input_grad[0]:
            grad_AM = torch.empty_like(rows_AM)
            _multiply(grad_AN, ctx.counts_S, [w.t() for w in weights_S], grad_AM)
        return grad_AM, None, None, *grad_weights, *grad_biases


def _multiply(rows_AM: Tensor, counts_S: Sequence[int], weights_S: Sequence[Tensor], out_AN: Tensor) -> None:
    """out = rows times each group's matrix: one grouped kernel on CUDA in bf16, elsewhere one GEMM a group."""
    if rows_AM.is_cuda and rows_AM.dtype == torch.bfloat16 and len(weights_S) > 1:
        stacked_SMN = _as_stack(weights_S)
        if stacked_SMN is not None:
            ends_S = torch.tensor(counts_S, device=rows_AM.device).cumsum(0).to(torch.int32)
            out_AN.copy_(torch.nn.functional.grouped_mm(rows_AM, stacked_SMN, offs=ends_S))
            return
    for rows_GM, weight_MN, out_GN in zip(rows_AM.split(counts_S), weights_S, out_AN.split(counts_S), strict=True):
        if rows_GM.shape[0]:
            torch.mm(rows_GM, weight_MN, out=out_GN)


def _as_stack(weights_S: Sequence[Tensor]) -> Tensor | None:
    """One strided [S, M, N] view over matrices that lie at equal steps in one storage; else None."""
    first, second = weights_S[0], weights_S[1]
    step = second.storage_offset() - first.storage_offset()
    regular = all(
        w.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and w.storage_offset() == first.storage_offset() + s * step
        and w.stride() == first.stride()
        for s, w in enumerate(weights_S)
    )
    if not regular or step <= 0:
        return None
    return first.as_strided((len(weights_S), *first.shape), (step, *first.stride()))
