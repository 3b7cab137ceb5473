"""Experts: the parameters of each and how a sorted batch passes through them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from themis.moe.chunk import ChunkLayout
from themis.moe.grouped import grouped_linear

Weights = Mapping[str, Tensor]


class ExpertBank(nn.Module):
    """The experts of one layer, no more than their parameters. Expert e is a ParameterDict under the name `str(e)`, so
    names do not depend on ranks.

    After `themis.parallelize` only the experts that this rank owns are left; `num_experts` stays that of the layer.
    """

    def __init__(self, layout: ChunkLayout, experts: Sequence[Weights]) -> None:
        super().__init__()
        self.num_experts = len(experts)
        self.layout = layout
        for e, parameters in enumerate(experts):
            self.add_module(str(e), nn.ParameterDict(parameters))

    def expert(self, e: int) -> nn.ParameterDict:
        """The parameters of expert `e`, which this rank must hold."""
        module = self._modules[str(e)]
        assert isinstance(module, nn.ParameterDict)
        return module

    @property
    def held(self) -> list[int]:
        """The experts whose parameters are here."""
        return [int(e) for e in self._modules]

    def weights(self) -> list[Weights]:
        """All experts' parameters, for one process that holds them all."""
        return [dict(self.expert(e).items()) for e in range(self.num_experts)]


class Experts(ExpertBank, ABC):
    """Experts that know how a sorted batch passes through them."""

    def __init__(self, num_experts: int, layout: ChunkLayout) -> None:
        shapes = layout.shapes
        super().__init__(
            layout, [{n: nn.Parameter(torch.empty(s)) for n, s in shapes.items()} for _ in range(num_experts)]
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every matrix from N(0, 1 / rows of the matrix); biases are zero.

        Experts that are not here are drawn as well and thrown away, so that values do not depend on who owns what.
        """
        held = self.held
        if not held:
            return
        like = next(self.parameters())
        for e in range(self.num_experts):
            for name, shape in self.layout.shapes.items():
                values = self.expert(e)[name] if e in held else torch.empty(shape, dtype=like.dtype, device=like.device)
                if len(shape) == 2:
                    nn.init.normal_(values, std=shape[0] ** -0.5)
                else:
                    nn.init.zeros_(values)

    @abstractmethod
    def forward(self, rows_AM: Tensor, counts_S: Sequence[int], weights_S: Sequence[Weights]) -> Tensor:
        """Rows [A, M] sorted by slot, counts_S[s] of them for the expert with parameters weights_S[s]; [A, M] back."""


def _pick(weights_S: Sequence[Weights], name: str) -> list[Tensor]:
    return [weights[name] for weights in weights_S]


@final
class GPTExperts(Experts):
    """gelu(x W1 + b1) W2 + b2; w1 [M, H], w2 [H, M]; the biases are optional."""

    def __init__(self, num_experts: int, width: int, hidden: int, *, bias: bool = True) -> None:
        shapes: dict[str, tuple[int, ...]] = {"w1": (width, hidden), "w2": (hidden, width)}
        if bias:
            shapes |= {"b1": (hidden,), "b2": (width,)}
        self.bias = bias
        super().__init__(num_experts, ChunkLayout(shapes))

    def forward(self, rows_AM: Tensor, counts_S: Sequence[int], weights_S: Sequence[Weights]) -> Tensor:
        """See Experts."""
        b1, b2 = (_pick(weights_S, "b1"), _pick(weights_S, "b2")) if self.bias else (None, None)
        hidden_AH = F.gelu(grouped_linear(rows_AM, counts_S, _pick(weights_S, "w1"), b1))
        return grouped_linear(hidden_AH, counts_S, _pick(weights_S, "w2"), b2)


@final
class SwiGLUExperts(Experts):
    """(silu(x Wg) * x Wu) Wd; w_gate, w_up [M, H], w_down [H, M]; no biases (Mixtral)."""

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        shapes = {"w_gate": (width, hidden), "w_up": (width, hidden), "w_down": (hidden, width)}
        super().__init__(num_experts, ChunkLayout(shapes))

    def forward(self, rows_AM: Tensor, counts_S: Sequence[int], weights_S: Sequence[Weights]) -> Tensor:
        """See Experts."""
        gate_AH = grouped_linear(rows_AM, counts_S, _pick(weights_S, "w_gate"))
        up_AH = grouped_linear(rows_AM, counts_S, _pick(weights_S, "w_up"))
        return grouped_linear(F.silu(gate_AH) * up_AH, counts_S, _pick(weights_S, "w_down"))
