"""A transformers model on several ranks against the same model in one process: outputs, gradients, norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from themis.fssdp import clip_grad_norm_, executor_of, parallelize
from themis.testing.families import build_tiny, output_of
from themis.testing.models import ScriptedPolicy

RANKS = 2


def batch(rank: int) -> Tensor:
    """Ranks differ in batch size, too."""
    return torch.randint(3, 128, (2 + rank, 7), generator=torch.Generator().manual_seed(rank))


def batch_loss(model: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
    """The output and a scalar of it, for the batch of `rank`."""
    output = output_of(model(input_ids=batch(rank)))
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=output.dtype)
    return output.detach(), (output * weights).sum()  # large gradients, so that differences show


def reference(family: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Each rank's output, and the gradients of the mean of the ranks' losses, by name."""
    model = build_tiny(family, dtype=dtype)
    outputs = []
    for rank in range(RANKS):
        output, loss = batch_loss(model, rank)
        (loss / RANKS).backward()
        outputs.append(output)
    return outputs, {name: parameter.grad for name, parameter in model.named_parameters()}


def difference(mine: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference, relative to entries above 1; no gradient counts as zero, NaN as infinite."""
    if mine is None and wanted is None:
        return 0.0
    shape_of = mine if wanted is None else wanted
    assert shape_of is not None
    zero = torch.zeros_like(shape_of)
    mine, wanted = zero if mine is None else mine, zero if wanted is None else wanted
    worst = float((mine - wanted).abs().max() / max(1.0, float(wanted.abs().max())))
    return math.inf if math.isnan(worst) else worst


def _wanted(name: str, gradients: dict[str, Tensor | None]) -> Tensor | None:
    """The reference's gradient of parameter `name`, an expert's being a slice of the stacked one."""
    if ".owned." not in name:
        return gradients[name]
    module, rest = name.split(".owned.")
    e, parameter = rest.split(".")
    stacked = gradients[f"{module}.{parameter}"]
    return None if stacked is None else stacked[int(e)]


def disagreement(
    rank: int,
    family: str,
    dtype: torch.dtype,
    *,
    rematerialize: bool = False,
    prepare: Callable[[Any], None] | None = None,
    **options: Any,
) -> tuple[float, set[int]]:
    """The worst difference of outputs, all gradients and their norm under random owners and replicas; owned experts.

    For each of RANKS ranks to call. prepare: what is done to the model before it is parallelized, with `options`.
    """
    outputs, gradients = reference(family, dtype)
    model: Any = build_tiny(family, dtype=dtype)
    if prepare is not None:
        prepare(model)
    parallelize(model, policy=ScriptedPolicy(3, rematerialize_replicas=rematerialize), **options)
    output, loss = batch_loss(model, rank)
    loss.backward()
    worst = difference(output, outputs[rank])
    owned = set()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        worst = max(worst, difference(_whole(gradient), _wanted(name, gradients)))
        if ".owned." in name:
            owned.add(int(name.split(".owned.")[1].split(".")[0]))
    norm = float(_whole(clip_grad_norm_(model, 1e9)))  # type: ignore[arg-type]
    wanted = torch.stack([g.double().norm() for g in gradients.values() if g is not None]).norm()
    worst = max(worst, abs(norm - float(wanted)) / max(1.0, float(wanted)))
    executor_of(model).close()
    return worst, owned


def _whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
