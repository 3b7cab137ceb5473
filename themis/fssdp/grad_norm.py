"""Gradient clipping over dense parameters that every rank has and experts that one rank owns."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from themis.comm.collectives import all_reduce_max, all_reduce_sum
from themis.comm.mesh import Mesh
from themis.core.errors import require


def total_gradient_norm(
    dense: list[nn.Parameter], owned: list[nn.Parameter], mesh: Mesh, norm_type: float = 2.0
) -> Tensor:
    """The norm of all gradients of the model, the same scalar on every rank; a collective.

    Dense gradients are equal on all ranks and count once; each expert's counts once, at its owner. A rank may own
    nothing. A sharded dense gradient (DTensor) is taken whole.
    """
    require(norm_type > 0, "norm_type", norm_type, "above zero, or inf")
    dense_norm = _norm(dense, norm_type, mesh.device)
    owned_norm = _norm(owned, norm_type, mesh.device)
    if math.isinf(norm_type):
        return torch.maximum(dense_norm, all_reduce_max(mesh, owned_norm))
    owned_power = all_reduce_sum(mesh, owned_norm.pow(norm_type))
    return (dense_norm.pow(norm_type) + owned_power).pow(1.0 / norm_type)


def _norm(parameters: list[nn.Parameter], norm_type: float, device: torch.device) -> Tensor:
    """In float64, so that the sum does not depend on how the experts are spread over ranks."""
    norms = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        norm = torch.linalg.vector_norm(gradient, norm_type, dtype=_wide(gradient.dtype))
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).to(torch.float64))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
