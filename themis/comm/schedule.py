"""One rank's part of a TransferPlan: what it sends and receives, as views of its chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import numpy as np
from torch import Tensor

from themis.core.errors import ConfigError
from themis.core.plan import TransferPlan

#: A piece of a chunk: (expert, piece).
Piece = tuple[int, int]


@final
@dataclass(frozen=True, eq=False)
class Message:
    """One row of the plan from the view of one of its two ends; `data` is the piece, a view of the chunk."""

    row: int
    stage: int
    piece: Piece
    peer: int
    data: Tensor


@final
@dataclass(frozen=True, eq=False)
class RankSchedule:
    """All messages of one rank in the plan's order, empty pieces left out.

    sends_of: the sends of each piece; received: the one message by which a piece arrives, none for owned pieces.
    """

    sends: list[Message]
    receives: list[Message]
    sends_of: dict[Piece, list[Message]] = field(default_factory=dict)
    received: dict[Piece, Message] = field(default_factory=dict)

    @staticmethod
    def of(plan: TransferPlan, rank: int, chunks: Mapping[int, Tensor]) -> RankSchedule:
        """The part of `rank` in `plan`, over its `chunks` by expert; ConfigError when a chunk is missing or unfit."""
        sends = _messages(plan, np.flatnonzero(plan.source_X == rank), plan.destination_X, chunks)
        receives = _messages(plan, np.flatnonzero(plan.destination_X == rank), plan.source_X, chunks)
        schedule = RankSchedule(sends, receives)
        for message in sends:
            schedule.sends_of.setdefault(message.piece, []).append(message)
        for message in receives:
            schedule.received[message.piece] = message
        return schedule

    def stages(self) -> list[tuple[list[Message], list[Message]]]:
        """Sends and receives of each stage in which this rank takes part, in order."""
        numbers = sorted({message.stage for message in (*self.sends, *self.receives)})
        return [
            ([m for m in self.sends if m.stage == number], [m for m in self.receives if m.stage == number])
            for number in numbers
        ]


def _messages(
    plan: TransferPlan,
    rows: np.ndarray[tuple[int], np.dtype[np.intp]],
    peer_X: np.ndarray,
    chunks: Mapping[int, Tensor],
) -> list[Message]:
    messages = []
    for row in rows.tolist():
        expert = int(plan.expert_X[row])
        chunk = _flat(chunks, expert)
        begin, end = plan.span(row, chunk.numel())
        if end > begin:
            piece = (expert, int(plan.piece_X[row]))
            messages.append(Message(row, int(plan.stage_X[row]), piece, int(peer_X[row]), chunk[begin:end]))
    return messages


def _flat(chunks: Mapping[int, Tensor], expert: int) -> Tensor:
    """The chunk without its autograd history: writes to it must not count as a change of a saved tensor."""
    if expert not in chunks:
        raise ConfigError(f"chunks lacks expert {expert}, which this rank sends or receives; it has {sorted(chunks)}")
    chunk = chunks[expert]
    if chunk.dim() != 1 or not chunk.is_contiguous():
        raise ConfigError(f"chunks[{expert}] has shape {tuple(chunk.shape)}; it must be flat and contiguous")
    return chunk.data
