"""Plans as frozen values: what the runtime executes and the simulator prices."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import ConfigError
from themis.core.topology import LinkClass, Topology

Ints = NDArray[np.int64]


@final
@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Who sends which piece of which chunk to whom, in stages (section 3.3).

    Each expert's chunk is cut into `pieces_E[e]` near-equal pieces. Row x says: in stage `stage_X[x]`, device
    `source_X[x]` sends piece `piece_X[x]` of expert `expert_X[x]` to device `destination_X[x]`. Rows are sorted by
    stage. A source holds the piece before it sends it: it owns the expert, or received the piece in an earlier
    stage. For SparseAllGather the rows run forwards; for SparseReduceScatter they run backwards, each destination
    returning to its source the sum of its own gradient and of all that came back to it, so that per piece the rows
    form a tree rooted at the owner.
    """

    num_devices: int
    owner_E: Ints
    pieces_E: Ints
    stage_X: Ints
    expert_X: Ints
    piece_X: Ints
    source_X: Ints
    destination_X: Ints

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name != "num_devices":
                array = np.array(getattr(self, item.name), dtype=np.int64)
                array.setflags(write=False)
                object.__setattr__(self, item.name, array)
        lengths = {a.size for a in (self.stage_X, self.expert_X, self.piece_X, self.source_X, self.destination_X)}
        if len(lengths) != 1 or self.owner_E.size != self.pieces_E.size:
            raise ConfigError("the columns of a TransferPlan differ in length; each row needs all five values")
        if np.any(np.diff(self.stage_X) < 0):
            raise ConfigError("the rows of a TransferPlan must be sorted by stage")

    @property
    def num_transfers(self) -> int:
        """X, the number of rows."""
        return int(self.stage_X.size)

    @property
    def num_stages(self) -> int:
        """How many stages there are; 0 for an empty plan."""
        return int(self.stage_X[-1]) + 1 if self.stage_X.size else 0

    def span(self, row: int, numel: int) -> tuple[int, int]:
        """The half-open range of elements that `row` carries of a chunk of `numel` elements."""
        piece, pieces = int(self.piece_X[row]), int(self.pieces_E[self.expert_X[row]])
        return numel * piece // pieces, numel * (piece + 1) // pieces

    def bytes_by_link(self, topology: Topology, numel: int, element_bytes: int) -> dict[LinkClass, int]:
        """Bytes that cross each link class when chunks have `numel` elements of `element_bytes` bytes."""
        pieces_X = self.pieces_E[self.expert_X]
        elements_X = numel * (self.piece_X + 1) // pieces_X - numel * self.piece_X // pieces_X
        crosses_X = topology.node_of_D[self.source_X] != topology.node_of_D[self.destination_X]
        inter = int(elements_X[crosses_X].sum()) * element_bytes
        return {LinkClass.INTRA: int(elements_X.sum()) * element_bytes - inter, LinkClass.INTER: inter}
