"""A small MoE model and a policy that follows a script, for tests of placement independence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from themis.core.placement import Placement, shard_only
from themis.moe import MoEConfig, MoELayer
from themis.policies import LayerContext, Policy


@final
class TinyBlock(nn.Module):
    """A token-wise stand-in for attention, and an MoE layer."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.attention = nn.Linear(config.width, config.width)
        self.moe = MoELayer(config)

    def forward(self, x_TM: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, M] and the losses so far, both passed on."""
        x_TM = x_TM + torch.tanh(self.attention(x_TM))
        hidden_TM, aux_loss, z_loss = self.moe(x_TM)
        return x_TM + hidden_TM, losses + 0.1 * aux_loss + 0.01 * z_loss


@final
class TinyMoE(nn.Module):
    """A stack of blocks whose tokens never mix, so that one process can hold the tokens of all ranks at once.

    forward(x_TM) gives outputs [T, M] and the routing losses; `rank_loss` turns one rank's part into its loss.
    """

    def __init__(self, config: MoEConfig, num_layers: int, *, checkpointing: str = "none") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TinyBlock(config) for _ in range(num_layers))
        self.checkpointing = checkpointing

    def forward(self, x_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and routing losses for the tokens [T, M]."""
        losses = x_TM.new_zeros(())
        for block in self.blocks:
            if self.checkpointing == "none":
                x_TM, losses = block(x_TM, losses)
            else:
                x_TM, losses = checkpoint(block, x_TM, losses, use_reentrant=self.checkpointing == "reentrant")
        return x_TM, losses


def rank_loss(output_TM: Tensor) -> Tensor:
    """A rank's mean over its own tokens; zero, and part of the graph, without tokens."""
    return output_TM.square().sum() / max(output_TM.numel(), 1)


def skew_gates(model: TinyMoE, bias_LE: NDArray[np.float64]) -> None:
    """Add `bias_LE` [L, E] to the scores of tokens whose first feature is 1: a large negative one idles an expert."""
    with torch.no_grad():
        for block, bias_E in zip(model.blocks, bias_LE, strict=True):
            assert isinstance(block, TinyBlock)
            block.attention.weight[0].zero_()
            block.attention.bias[0] = 0.0
            block.moe.gate.weight[:, 0] = torch.as_tensor(bias_E)


@final
@dataclass(frozen=True)
class ScriptedPolicy(Policy):
    """Random owners, replicas and later additions, all drawn from `seed`: any plan must give the same result.

    density: chance that a device gets a replica of an expert, before the gate and, half of it, after it; kept: chance
    that it gets one for keeps.
    """

    seed: int
    density: float = 0.4
    kept: float = 0.0
    rematerialize_replicas: bool = False
    rule: str = "local-first"
    reshard_every: int = 2
    _drawn: list[int] = field(default_factory=lambda: [0], repr=False)

    @property
    def name(self) -> str:
        """See Policy."""
        return "scripted"

    @property
    def rematerialize(self) -> bool:
        """See Policy."""
        return self.rematerialize_replicas

    @property
    def dispatch_rule(self) -> str:
        """See Policy."""
        return self.rule

    def replicas_per_device(self) -> None:
        """Unbounded."""

    def persistent_replicas_per_device(self) -> int:
        """One or none, for nobody counts on it: random."""
        return int(self.kept > 0)

    def rearrange(
        self, iteration: int, load_LE: NDArray[np.float64] | None, held_L: Sequence[Placement], context: LayerContext
    ) -> Sequence[Placement]:
        """New random owners, with persistent replicas by `kept`, every `reshard_every` iterations."""
        del load_LE
        if not self.reshard_every or iteration % self.reshard_every:
            return held_L
        draw, devices = np.random.default_rng((self.seed, iteration)), context.topology.num_devices
        shape = len(held_L), held_L[0].num_experts
        owner_LE, kept_LED = draw.integers(0, devices, shape), draw.random((*shape, devices)) < self.kept
        return [
            shard_only(owner_E, devices).merge(kept_ED) for owner_E, kept_ED in zip(owner_LE, kept_LED, strict=True)
        ]

    def place(self, held: Placement, load_E: NDArray[np.float64] | None, context: LayerContext) -> Placement:
        """Random replicas."""
        del load_E, context
        return held.merge(self._draw().random(held.placement_ED.shape) < self.density)

    def calibrate(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> Placement:
        """More random replicas, or others; sometimes none."""
        del tokens_ED, context
        draw = self._draw()
        if draw.random() < 0.5:
            return placement
        added_ED = draw.random(placement.placement_ED.shape) < self.density / 2
        if self.kept == 0 and draw.random() < 0.5:
            stays_ED = draw.random(added_ED.shape) < 0.5
            placement = Placement(placement.owner_E, placement.placement_ED & (stays_ED | ~placement.replicas_ED))
        return placement.merge(added_ED)

    def _draw(self) -> np.random.Generator:
        self._drawn[0] += 1
        return np.random.default_rng((self.seed, self._drawn[0]))
