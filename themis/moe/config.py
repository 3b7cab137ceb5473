"""What defines one MoE layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from themis.core.errors import is_whole, require


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
            require(is_whole(getattr(self, name), 1), name, getattr(self, name), "a whole number, 1 or more")
        hidden = self.shared_hidden
        require(is_whole(hidden, 0), "shared_hidden", hidden, "a whole number, 0 or more")
        require(self.experts in ("gpt", "swiglu"), "experts", self.experts, "'gpt' or 'swiglu'")
        require(self.top_k <= self.num_experts, "top_k", self.top_k, f"at most num_experts ({self.num_experts})")
