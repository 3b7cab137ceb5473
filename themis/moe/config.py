"""What defines one MoE layer."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Literal, final

from themis.core.errors import require


@final
@dataclass(frozen=True)
class MoEConfig:
    """One MoE layer: `width` M, `expert_hidden` H, `num_experts` E, `top_k` K.

    experts: "gpt" (GELU, two matrices) or "swiglu" (three); bias: biases in "gpt" experts; shared_hidden: hidden
    width of a shared expert that every token passes, 0 for none; normalize_weights, noise: see SoftmaxGate.
    """

    width: int
    expert_hidden: int
    num_experts: int
    top_k: int
    experts: Literal["gpt", "swiglu"] = "gpt"
    bias: bool = True
    shared_hidden: int = 0
    normalize_weights: bool = True
    noise: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "expert_hidden", "num_experts", "top_k"):
            _require_whole(name, getattr(self, name), 1)
        _require_whole("shared_hidden", self.shared_hidden, 0)
        require(self.experts in ("gpt", "swiglu"), "experts", self.experts, "'gpt' or 'swiglu'")
        require(self.top_k <= self.num_experts, "top_k", self.top_k, f"at most num_experts ({self.num_experts})")


def _require_whole(name: str, value: object, least: int) -> None:
    good = not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least
    require(good, name, value, f"a whole number, {least} or more")
