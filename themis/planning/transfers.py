"""Transfer plans of the sparse collectives (sections 3.2 and 3.3): who sends which piece of which chunk, and when."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from themis.core.errors import ConfigError, reject
from themis.core.placement import check_owner
from themis.core.plan import TransferPlan
from themis.core.topology import Topology
from themis.planning.compiled import bools, compiled, ints, whole

#: A chunk is cut into no more pieces than this: each piece is a message to every receiver.
MAX_PIECES = 64
#: So many rounds at most does a chunk go out in, where bytes allow. Hops of successive rounds overlap, so that the two
#: later hops add 2 / rounds of the first one's time instead of twice all of it.
MAX_ROUNDS = 8


def transfers(
    owner_E: ArrayLike,
    placement_ED: NDArray[np.bool_],
    topology: Topology,
    *,
    expert_bytes: int | None = None,
    piece_bytes: int = 262144,
) -> TransferPlan:
    """The transfers that turn the shard placement P into P', and backwards the gradients' way home (section 3.3).

    owner_E: int [E]; placement_ED: bool [E, D], contains the owners; expert_bytes: bytes of a chunk on the wire, if
    known; piece_bytes: about the least worth sending as a message of its own.

    Each piece enters each new node once, and each receiver takes in each piece once: |dP| * Psi bytes in all,
    Psi between nodes for each newly entered node. A chunk is cut into pieces that go out to different nodes and
    devices, which then exchange them, so that nobody sends many copies of a chunk however many replicas there are.
    One round of pieces makes each node and each receiver an entry; with `expert_bytes` there are as many rounds (at
    most 8) as pieces of `piece_bytes` allow, a stage apart, so that later hops of one overlap earlier hops of the
    next, and fewer pieces where the chunk is too small for a round. A chunk whose receivers its owner can all serve
    at once (one on its node, one on one other) stays whole. Raises ConfigError on arguments that do not fit together.
    """
    owners_E, placed_ED = ints(owner_E, "owner_E", 1), bools(placement_ED, "placement_ED", 2)
    if placed_ED.shape[1] != topology.num_devices:
        reject("placement_ED", f"of shape {placed_ED.shape}", f"[E, D] with D = {topology.num_devices}")
    most_pieces, whole_rounds = MAX_PIECES, 1
    if expert_bytes is not None:
        most_pieces = max(1, whole(expert_bytes, "expert_bytes", 1) // whole(piece_bytes, "piece_bytes", 1))
        whole_rounds = MAX_ROUNDS
    good, pieces_E, rows_5X = _transfers(
        owners_E, placed_ED, topology.num_nodes, topology.devices_per_node, min(most_pieces, MAX_PIECES), whole_rounds
    )
    if not good:
        check_owner(owners_E, topology.num_devices)
        raise ConfigError(
            "placement_ED lacks an expert at its owner; it must be [E, D] and contain the shard placement"
        )
    return TransferPlan(topology.num_devices, owners_E, pieces_E, *rows_5X)


@compiled
def _pieces(first_N, home, most_pieces, most_rounds):  # type: ignore[no-untyped-def]
    """(pieces, pieces a round, nodes newly entered) of a chunk with first_N[n+1] - first_N[n] receivers on node n."""
    entered = widest = 0
    for n in range(first_N.size - 1):
        size = first_N[n + 1] - first_N[n]
        if n != home and size > 0:
            entered += 1
            widest = max(widest, size)
    at_home = first_N[home + 1] - first_N[home]
    if at_home <= 1 and entered <= 1 and widest <= 1:
        return 1, 1, entered
    if entered == 0:
        per_round = at_home
    else:
        turns = max(widest, (at_home + entered - 1) // entered)
        per_round = entered * max(1, min(turns, most_pieces // entered))
    per_round = min(per_round, most_pieces)
    return per_round * max(1, min(most_rounds, most_pieces // per_round)), per_round, entered


@compiled
def _receivers(placed_D, owner, local, receiver_R, first_N):  # type: ignore[no-untyped-def]
    """Fill receiver_R with the added holders by node, and first_N with where each node's begin; returns how many."""
    count = 0
    for d in range(placed_D.size):
        if d % local == 0:
            first_N[d // local] = count
        if placed_D[d] and d != owner:
            receiver_R[count] = d
            count += 1
    first_N[first_N.size - 1] = count
    return count


@compiled
def _emit(row_5X, at, stage, expert, piece, source, entry, receiver_R, first, last):  # type: ignore[no-untyped-def]
    """Rows for `piece` entering a node: source to entry, then entry to the node's other receivers; the next free row.

    A node is receivers first..last-1; its entry is receiver number `entry`.
    """
    through = receiver_R[entry]
    for i in range(first - 1, last):
        if i == entry:
            continue
        row_5X[0, at] = stage if i < first else stage + 1
        row_5X[1, at] = expert
        row_5X[2, at] = piece
        row_5X[3, at] = source if i < first else through
        row_5X[4, at] = through if i < first else receiver_R[i]
        at += 1
    return at


@compiled
def _chunk(row_5X, at, expert, owner, home, receiver_R, first_N, pieces, per_round, entered):  # type: ignore[no-untyped-def]
    """Append the rows of all pieces of one chunk; returns the next free row.

    The expert's index shifts all turns, so that many small chunks spread over nodes and devices as pieces do.
    """
    for piece in range(pieces):
        stage = piece // per_round
        if first_N[home + 1] > first_N[home]:
            first, last = first_N[home], first_N[home + 1]
            at = _emit(
                row_5X,
                at,
                stage,
                expert,
                piece,
                owner,
                first + (piece + expert) % (last - first),
                receiver_R,
                first,
                last,
            )
        if entered == 0:
            continue
        turn = piece // entered + expert
        lead, gate = (piece + expert) % entered, -1
        number = 0
        for n in range(first_N.size - 1):  # the leading node's entry gets the piece from the owner
            if n != home and first_N[n + 1] > first_N[n]:
                if number == lead:
                    first, last = first_N[n], first_N[n + 1]
                    gate = first + turn % (last - first)
                    at = _emit(row_5X, at, stage, expert, piece, owner, gate, receiver_R, first, last)
                number += 1
        number = 0
        for n in range(first_N.size - 1):  # and hands it on to the other nodes' entries
            if n != home and first_N[n + 1] > first_N[n]:
                if number != lead:
                    first, last = first_N[n], first_N[n + 1]
                    entry = first + turn % (last - first)
                    at = _emit(row_5X, at, stage + 1, expert, piece, receiver_R[gate], entry, receiver_R, first, last)
                number += 1
    return at


@compiled
def _transfers(owner_E, placement_ED, num_nodes, local, most_pieces, most_rounds):  # type: ignore[no-untyped-def]
    """(whether the arguments are good, pieces_E, rows [stage, expert, piece, source, destination] by stage)."""
    num_experts, num_devices = placement_ED.shape
    pieces_E, per_round_E = np.ones(num_experts, dtype=np.int64), np.ones(num_experts, dtype=np.int64)
    entered_E = np.zeros(num_experts, dtype=np.int64)
    receiver_R, first_N = np.empty(num_devices, dtype=np.int64), np.zeros(num_nodes + 1, dtype=np.int64)
    num_rows = num_stages = 0
    if owner_E.size == 0 or owner_E.size != num_experts:
        return False, pieces_E, np.empty((5, 0), dtype=np.int64)
    for e in range(num_experts):
        owner = owner_E[e]
        if not 0 <= owner < num_devices or not placement_ED[e, owner]:
            return False, pieces_E, np.empty((5, 0), dtype=np.int64)
        count = _receivers(placement_ED[e], owner, local, receiver_R, first_N)
        if count > 0:
            pieces_E[e], per_round_E[e], entered_E[e] = _pieces(first_N, owner // local, most_pieces, most_rounds)
            num_rows += pieces_E[e] * count
            num_stages = max(num_stages, pieces_E[e] // per_round_E[e] + 2)
    row_5X = np.empty((5, num_rows), dtype=np.int64)
    at = 0
    for e in range(num_experts):
        owner = owner_E[e]
        if _receivers(placement_ED[e], owner, local, receiver_R, first_N) > 0:
            at = _chunk(
                row_5X, at, e, owner, owner // local, receiver_R, first_N, pieces_E[e], per_round_E[e], entered_E[e]
            )
    next_S = np.zeros(num_stages + 1, dtype=np.int64)  # a stable counting sort by stage
    for x in range(num_rows):
        next_S[row_5X[0, x] + 1] += 1
    for s in range(num_stages):
        next_S[s + 1] += next_S[s]
    sorted_5X = np.empty((5, num_rows), dtype=np.int64)
    for x in range(num_rows):
        place = next_S[row_5X[0, x]]
        next_S[row_5X[0, x]] += 1
        for column in range(5):
            sorted_5X[column, place] = row_5X[column, x]
    return True, pieces_E, sorted_5X
