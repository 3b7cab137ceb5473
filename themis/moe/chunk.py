"""An expert as one chunk: its parameters side by side in one contiguous span (Themis paper, section 3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import final

from torch import Tensor

#: Each parameter starts at a multiple of this many elements, as CUDA's grouped GEMM wants 16-byte strides in bf16.
ALIGNMENT = 8


@final
@dataclass(frozen=True)
class ChunkLayout:
    """Names and shapes of one expert's parameters, in the order in which they lie in its chunk."""

    shapes: Mapping[str, tuple[int, ...]]

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The first element of each parameter."""
        offsets, position = {}, 0
        for name, shape in self.shapes.items():
            offsets[name] = position
            position += -(-prod(shape) // ALIGNMENT) * ALIGNMENT
        return offsets

    @cached_property
    def numel(self) -> int:
        """Elements of a chunk, padding included."""
        last = list(self.shapes)[-1]
        return self.offsets[last] + -(-prod(self.shapes[last]) // ALIGNMENT) * ALIGNMENT

    def views(self, chunk: Tensor) -> dict[str, Tensor]:
        """Each parameter as a view into the flat tensor `chunk` of `numel` elements."""
        return {
            name: chunk[self.offsets[name] : self.offsets[name] + prod(shape)].view(shape)
            for name, shape in self.shapes.items()
        }
