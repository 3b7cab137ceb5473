"""Plain expert parallelism, and its Uniform variant, the reference that routing skew cannot touch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.policies.base import Policy


@final
@dataclass(frozen=True)
class EP(Policy):
    """Every expert runs at its owner, and owners never change.

    uniform: the gate's choice is replaced by an even round robin over the experts ("Uniform" in section 5.1); the
    combination weights stay the gate's. It changes what the model learns: for speed comparisons only.
    """

    uniform: bool = False

    @property
    def name(self) -> str:
        """See Policy."""
        return "uniform" if self.uniform else "ep"

    def force(self, num_tokens: int, top_k: int, num_experts: int) -> NDArray[np.int64] | None:
        """For Uniform: assignment number i goes to expert i mod E, so a token's experts differ."""
        if not self.uniform:
            return None
        return (np.arange(num_tokens * top_k, dtype=np.int64) % num_experts).reshape(num_tokens, top_k)


def Uniform() -> EP:
    """EP with an even assignment that ignores the gate."""
    return EP(uniform=True)
