"""Dispatch and Combine: how sorted rows reach the experts and come back (FSMoE, section 3.1).

A layer asks its Dispatcher to `begin` a call; the call then carries one pass of rows through the layer. One process
that holds every expert uses LocalDispatcher; `themis.parallelize` puts another in its place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from themis.moe.experts import ExpertBank, Weights


class DispatchCall(ABC):
    """One pass of one layer. The methods are called once each, in the order in which they stand here."""

    @abstractmethod
    def choose(self, num_tokens: int, top_k: int) -> Tensor | None:
        """int64 [T, K] experts that the gate must take, or None where the gate is free to choose."""

    @abstractmethod
    def announce(self, experts_TK: Tensor, counts_E: Tensor) -> NDArray[np.int64]:
        """Tell all ranks how many rows go to each expert; int64 [E, D] of everyone's rows comes back."""

    @abstractmethod
    def dispatch(self, rows_AM: Tensor) -> Tensor:
        """Expert-major rows of this rank to the slot-major rows that this rank computes."""

    @abstractmethod
    def counts(self) -> Sequence[int]:
        """Rows of each local slot, in the order of `weights`."""

    @abstractmethod
    def weights(self) -> Sequence[Weights]:
        """The parameters of each local slot."""

    @abstractmethod
    def combine(self, rows_AM: Tensor) -> Tensor:
        """Computed slot-major rows back to the expert-major rows of the rank they came from."""


class Dispatcher(ABC):
    """Begins a DispatchCall for each pass of its layer."""

    @abstractmethod
    def begin(self, tokens_TM: Tensor) -> DispatchCall:
        """A call for the tokens [T, M] of this rank."""


class DispatchedLayer(Protocol):
    """What the runtime needs of a layer: its experts, the width M of their tokens, and a dispatcher to replace."""

    dispatcher: Dispatcher

    @property
    def experts(self) -> ExpertBank:
        """Their parameters."""

    @property
    def width(self) -> int:
        """M."""


@final
class LocalDispatcher(Dispatcher):
    """Every expert is here: rows stay where they are."""

    def __init__(self, experts: ExpertBank) -> None:
        self.experts = experts

    def begin(self, tokens_TM: Tensor) -> DispatchCall:
        """See Dispatcher."""
        del tokens_TM
        return _LocalCall(self.experts)


@final
class _LocalCall(DispatchCall):
    def __init__(self, experts: ExpertBank) -> None:
        self.experts = experts
        self.counts_E: list[int] = []

    def choose(self, num_tokens: int, top_k: int) -> Tensor | None:
        del num_tokens, top_k
        return None

    def announce(self, experts_TK: Tensor, counts_E: Tensor) -> NDArray[np.int64]:
        del experts_TK
        self.counts_E = counts_E.tolist()
        return np.asarray(self.counts_E, dtype=np.int64)[:, None]

    def dispatch(self, rows_AM: Tensor) -> Tensor:
        return rows_AM

    def counts(self) -> Sequence[int]:
        return self.counts_E

    def weights(self) -> Sequence[Weights]:
        return self.experts.weights()

    def combine(self, rows_AM: Tensor) -> Tensor:
        return rows_AM
