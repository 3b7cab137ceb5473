"""The optimizer and the course of its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from themis.train.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the parameters this rank holds; only matrices decay: no embedding, bias or norm."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        decays = parameter.dim() >= 2 and id(parameter) not in embeddings
        # The fused kernel takes a group at once, and refuses sharded (DTensor) beside plain parameters.
        key = (config.weight_decay if decays else 0.0, isinstance(parameter, DTensor))
        groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW(
        [{"params": parameters, "weight_decay": decay} for (decay, _), parameters in groups.items()],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of step `step`, counted from 0: a linear warm-up, then half a cosine down to final_lr * lr."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    low = config.final_lr * config.lr
    return low + (config.lr - low) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the learning rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
