"""SparseAllGather and SparseReduceScatter: the transport that executes a TransferPlan (Themis paper, section 3.3).

A plan cuts chunks into pieces and says which rank passes which piece on to whom. SparseAllGather walks the rows
forwards: a rank forwards a piece as soon as it has it, so pieces stream through the stages and no rank sends whole
copies to many. SparseReduceScatter walks the same rows backwards: a rank adds what comes back of a piece to its own
and returns the sum, so each node that a chunk entered sends one partial sum out again.

With Gloo every receive is posted at the start and every piece goes out the moment it is complete; a message is told
by its tag, the number of its row. NCCL has no tags and wants messages in groups: there the plan runs stage by stage.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from themis.comm import collectives
from themis.comm.beats import Channel
from themis.comm.communicator import Communicator, Work
from themis.comm.mesh import Mesh
from themis.comm.schedule import Message, RankSchedule
from themis.core.errors import ConfigError
from themis.core.plan import TransferPlan


def sparse_all_gather(
    communicator: Communicator,
    plan: TransferPlan,
    chunks: Mapping[int, Tensor],
    *,
    name: str = "sparse_all_gather",
    count_as: str = "sparse_all_gather",
) -> Work:
    """Fill the replicas of `plan` from their owners (section 3.3). Asynchronous: wait on the Work before use.

    `chunks` maps each expert that this rank sends or receives to its flat contiguous tensor, of the same length and
    type on all ranks that hold the expert. Owners' chunks are read, replicas' are overwritten without autograd
    noticing. All ranks call it, also those with nothing to move. `name` is told where a peer is missing; bytes
    count as `count_as`. ConfigError on chunks that do not fit.
    """
    mesh = communicator.mesh
    messages = _messages(mesh, plan, chunks)

    def gather() -> None:
        with mesh.operation(Channel.SPARSE, name) as deadline:
            if mesh.device.type == "cuda":
                _gather_in_stages(mesh, messages)
            else:
                _gather_streaming(mesh, messages, deadline)
        _count(mesh, count_as, messages.sends)

    return communicator.submit(name, gather)


def sparse_reduce_scatter(
    communicator: Communicator,
    plan: TransferPlan,
    chunks: Mapping[int, Tensor],
    *,
    name: str = "sparse_reduce_scatter",
    count_as: str = "sparse_reduce_scatter",
) -> Work:
    """Sum each expert's chunks over all its holders into its owner's (section 3.3). Asynchronous, as above.

    The owner's chunk ends as the sum, its own content included; a replica's content is unspecified afterwards. The
    order of additions is fixed by the plan, so equal inputs give equal sums.
    """
    mesh = communicator.mesh
    messages = _messages(mesh, plan, chunks)

    def reduce() -> None:
        with mesh.operation(Channel.SPARSE, name) as deadline:
            if mesh.device.type == "cuda":
                _reduce_in_stages(mesh, messages)
            else:
                _reduce_streaming(mesh, messages, deadline)
        _count(mesh, count_as, messages.receives)

    return communicator.submit(name, reduce)


def _messages(mesh: Mesh, plan: TransferPlan, chunks: Mapping[int, Tensor]) -> RankSchedule:
    if plan.num_devices != mesh.world_size:
        raise ConfigError(f"plan is for {plan.num_devices} device(s); the mesh has {mesh.world_size} rank(s)")
    return RankSchedule.of(plan, mesh.rank, chunks)


def _gather_streaming(mesh: Mesh, messages: RankSchedule, deadline: float) -> None:
    # Pieces to pass on are awaited first: one that only has to be here in the end must not hold them up.
    incoming = sorted(messages.receives, key=lambda m: m.piece not in messages.sends_of)
    arriving = [_receive(mesh, m, m.data) for m in incoming]
    leaving = [_send(mesh, m) for m in messages.sends if m.piece not in messages.received]
    for message, pending in zip(incoming, arriving, strict=True):
        collectives.await_message(pending, deadline)
        leaving += [_send(mesh, m) for m in messages.sends_of.get(message.piece, ())]
    for pending in leaving:
        collectives.await_message(pending, deadline)


def _reduce_streaming(mesh: Mesh, messages: RankSchedule, deadline: float) -> None:
    """Backwards: what was a send is now a receive of a partial sum, and each piece received once now goes back."""
    # Again what goes on comes first; what ends here, at the owner, may wait.
    returning = messages.sends[::-1]
    returning.sort(key=lambda m: m.piece not in messages.received)
    buffers = _buffers(returning)
    arriving = [_receive(mesh, m, buffer) for m, buffer in zip(returning, buffers, strict=True)]
    missing = {piece: len(sends) for piece, sends in messages.sends_of.items()}
    leaving = [_send(mesh, m) for m in reversed(messages.receives) if m.piece not in missing]
    for message, buffer, pending in zip(returning, buffers, arriving, strict=True):
        collectives.await_message(pending, deadline)
        message.data.add_(buffer)
        missing[message.piece] -= 1
        if not missing[message.piece] and message.piece in messages.received:
            leaving.append(_send(mesh, messages.received[message.piece]))
    for pending in leaving:
        collectives.await_message(pending, deadline)


def _send(mesh: Mesh, message: Message) -> collectives.Pending:
    return collectives.post_send(mesh.sparse_group, message.data, message.peer, message.row)


def _receive(mesh: Mesh, message: Message, target: Tensor) -> collectives.Pending:
    return collectives.post_receive(mesh.sparse_group, target, message.peer, message.row)


def _buffers(messages: list[Message]) -> list[Tensor]:
    """Room for one incoming piece a message; one allocation for all of a type."""
    sizes: dict[torch.dtype, int] = {}
    for message in messages:
        sizes[message.data.dtype] = sizes.get(message.data.dtype, 0) + message.data.numel()
    rest = {dtype: torch.empty(size, dtype=dtype, device=messages[0].data.device) for dtype, size in sizes.items()}
    buffers = []
    for message in messages:
        numel, dtype = message.data.numel(), message.data.dtype
        buffers.append(rest[dtype][:numel])
        rest[dtype] = rest[dtype][numel:]
    return buffers


def _gather_in_stages(mesh: Mesh, messages: RankSchedule) -> None:
    for sends, receives in messages.stages():
        collectives.grouped([(m.peer, m.data) for m in sends], [(m.peer, m.data) for m in receives], mesh.sparse_group)


def _reduce_in_stages(mesh: Mesh, messages: RankSchedule) -> None:
    for sends, receives in reversed(messages.stages()):
        returning = sends[::-1]
        buffers = _buffers(returning)
        collectives.grouped(
            [(m.peer, m.data) for m in receives[::-1]],
            [(m.peer, buffer) for m, buffer in zip(returning, buffers, strict=True)],
            mesh.sparse_group,
        )
        for message, buffer in zip(returning, buffers, strict=True):
            message.data.add_(buffer)


def _count(mesh: Mesh, collective: str, sent: list[Message]) -> None:
    for message in sent:
        mesh.traffic.add(collective, mesh.topology.link_class(mesh.rank, message.peer), message.data.nbytes)
