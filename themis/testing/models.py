"""A small MoE model and a policy that follows a script, for tests of placement independence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from themis.core.placement import Placement, owner_mask
from themis.moe import MoEConfig, MoELayer
from themis.planning import dispatch
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

    density: chance that a device gets a replica of an expert, before the gate and, half of it, after it.
    """

    seed: int
    density: float = 0.4
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

    def replicas_per_device(self) -> int:
        """Unbounded; never asked for."""
        return 0

    def reshard(
        self, iteration: int, load_LE: NDArray[np.float64] | None, owner_LE: NDArray[np.int64], context: LayerContext
    ) -> NDArray[np.int64]:
        """New random owners every `reshard_every` iterations, also before the first."""
        del load_LE
        if not self.reshard_every or iteration % self.reshard_every:
            return owner_LE
        draw = np.random.default_rng((self.seed, iteration))
        return draw.integers(0, context.topology.num_devices, owner_LE.shape)

    def place(self, owner_E: NDArray[np.int64], load_E: NDArray[np.float64] | None, context: LayerContext) -> Placement:
        """Random replicas."""
        del load_E
        mask_ED = owner_mask(owner_E, context.topology.num_devices)
        return Placement(owner_E, mask_ED | (self._draw().random(mask_ED.shape) < self.density))

    def force(self, num_tokens: int, top_k: int, num_experts: int) -> NDArray[np.int64] | None:
        """The gate is free."""
        del num_tokens, top_k, num_experts
        return None

    def calibrate(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> Placement:
        """More random replicas; sometimes none."""
        del tokens_ED, context
        draw = self._draw()
        if draw.random() < 0.5:
            return placement
        return placement.merge(draw.random(placement.placement_ED.shape) < self.density / 2)

    def route(self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext) -> NDArray[np.int64]:
        """By the rule."""
        return dispatch(tokens_ED, placement.placement_ED, context.topology, rule=self.rule, cost=context.cost)

    def _draw(self) -> np.random.Generator:
        self._drawn[0] += 1
        return np.random.default_rng((self.seed, self._drawn[0]))
