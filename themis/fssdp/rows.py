"""Where each row goes: from a dispatch plan to permutations and AlltoAll splits on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.moe.order import invert, permute_rows

Ints = NDArray[np.int64]


def transpose_segments(length_XY: Ints) -> Ints:
    """The permutation from x-major to y-major order of rows that lie in runs of `length_XY[x, y]`."""
    start_XY = np.cumsum(length_XY.ravel()).reshape(length_XY.shape) - length_XY
    length_YX, start_YX = length_XY.T.ravel(), start_XY.T.ravel()
    offset_YX = np.cumsum(length_YX) - length_YX
    return np.repeat(start_YX - offset_YX, length_YX) + np.arange(int(length_YX.sum()))


@final
@dataclass(frozen=True)
class Permutation:
    """A permutation of rows and its inverse; `apply` does nothing where it is the identity."""

    index_A: Tensor | None
    inverse_A: Tensor | None

    @classmethod
    def of(cls, index_A: Ints, device: torch.device) -> Permutation:
        """From a NumPy index."""
        if bool((np.diff(index_A) == 1).all()):
            return cls(None, None)
        tensor_A = torch.from_numpy(index_A).to(device)
        return cls(tensor_A, invert(tensor_A))

    def apply(self, rows_AM: Tensor) -> Tensor:
        """Rows in the new order, differentiable."""
        if self.index_A is None or self.inverse_A is None:
            return rows_AM
        return permute_rows(rows_AM, self.index_A, self.inverse_A)

    def undo(self, rows_AM: Tensor) -> Tensor:
        """Rows in the old order, differentiable."""
        if self.index_A is None or self.inverse_A is None:
            return rows_AM
        return permute_rows(rows_AM, self.inverse_A, self.index_A)


@final
@dataclass(frozen=True)
class RowRoute:
    """One rank's part of a dispatch plan.

    leaving: expert-major to destination-major; send_D, receive_D: rows to and from each rank; arriving: source-major
    to slot-major; counts_S: rows of each local slot.
    """

    leaving: Permutation
    send_D: list[int]
    receive_D: list[int]
    arriving: Permutation
    counts_S: list[int]

    @classmethod
    def of(cls, route_EDD: Ints, rank: int, slots: list[int], device: torch.device) -> RowRoute:
        """The part of `rank`, whose local slots hold the experts `slots` (ascending), in route_EDD [E, from, to]."""
        send_ED = route_EDD[:, rank, :]
        receive_SD = route_EDD[slots, :, rank]
        return cls(
            leaving=Permutation.of(transpose_segments(send_ED), device),
            send_D=send_ED.sum(axis=0).tolist(),
            receive_D=receive_SD.sum(axis=0).tolist(),
            arriving=Permutation.of(transpose_segments(receive_SD.T), device),
            counts_S=receive_SD.sum(axis=1).tolist(),
        )
