"""The only callers of torch.distributed's collectives and group creation. A world of one never gets that far."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from themis.comm.beats import Channel
from themis.comm.launch import Launch
from themis.core.errors import ConfigError, require

if TYPE_CHECKING:
    from themis.comm.mesh import Mesh

#: A point-to-point operation under way; `None` is what torch returns for a send to a rank outside the group.
Pending = Any


def init_process_group(launch: Launch | None, *, device: torch.device, timeout_s: float = 60.0) -> None:
    """Make torch's default process group as torchrun's environment says (`Launch.from_environment`).

    Nothing happens without `launch`, nor where there is such a group already. Gloo carries host memory; NCCL comes
    beside it when `device` is a CUDA device. ConfigError when the ranks cannot meet: port in use, unknown host, peers
    that do not come within `timeout_s`.
    """
    if launch is None or dist.is_initialized():
        return
    interface = launch.loopback_interface()
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    where = f"{launch.host}:{launch.port} (MASTER_ADDR:MASTER_PORT)"
    try:
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"tcp://{launch.host}:{launch.port}",
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise ConfigError(f"port {launch.port} is in use; set MASTER_PORT to a free one") from error
        raise ConfigError(
            f"rank {launch.rank} of {launch.world_size} could not meet its peers at {where} within {timeout_s:g} s: "
            f"{text.splitlines()[0]}; check that every rank was started and reaches that address"
        ) from error


def end_process_group() -> None:
    """End torch's default process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def default_rank_and_size() -> tuple[int, int]:
    """Rank and size of torch's default process group; (0, 1) where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def default_device() -> torch.device:
    """This process's CUDA device, unless there is none or the default group cannot use it; else the CPU."""
    usable = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in dist.get_backend_config())
    return torch.device("cuda", torch.cuda.current_device()) if usable else torch.device("cpu")


def mesh_store(rank: int) -> Store:
    """The default group's store under a prefix of its own; the n-th call on every rank yields the same prefix."""
    store = _get_default_store()
    number = store.add(f"themis/meshes/{rank}", 1)
    return PrefixStore(f"themis/mesh{number}", store)


def new_group(device: torch.device, timeout_s: float, *, control: bool) -> Any:
    """A process group of all ranks: NCCL for CUDA, else Gloo; the control group carries host memory too."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl" if control else "nccl"
    return dist.new_group(timeout=timedelta(seconds=timeout_s), backend=backend)


def destroy_group(group: Any) -> None:
    """End a group of `new_group`."""
    dist.destroy_process_group(group)


def gather_counts(mesh: Mesh, counts: ArrayLike) -> NDArray[np.int64]:
    """int64 [D, n]: the `counts` [n] of every rank, the same n on all. Blocks; through host memory.

    A small AlltoAll in which every rank sends all others the same: one hop, where Gloo's gather takes D - 1.
    """
    counts_n = np.ascontiguousarray(counts, dtype=np.int64)
    require(counts_n.ndim == 1, "counts", f"of shape {counts_n.shape}", "an array of shape [n]")
    if mesh.world_size == 1:
        return counts_n[None].copy()
    sent = torch.from_numpy(np.tile(counts_n, mesh.world_size))
    received = torch.empty_like(sent)
    with mesh.operation(Channel.CONTROL, "counts"):
        dist.all_to_all_single(received, sent, group=mesh.control_group)
    for peer in range(mesh.world_size):
        mesh.traffic.add("counts", mesh.topology.link_class(mesh.rank, peer), counts_n.nbytes)
    return received.numpy().reshape(mesh.world_size, counts_n.size)


def all_to_all_rows(mesh: Mesh, rows_AM: Tensor, send_D: Sequence[int], receive_D: Sequence[int]) -> Tensor:
    """Uneven AlltoAll of rows: the first send_D[0] rows go to rank 0, and so on; returns [sum(receive_D), ...].

    Rows come back ordered by source. `rows_AM` may have any type and any number of dimensions from one up; counts may
    be zero. No gradients here; `all_to_all` has them. Blocks on the CPU, is queued on the current stream on CUDA.
    """
    send, receive = [int(n) for n in send_D], [int(n) for n in receive_D]
    for name, counts in (("send_D", send), ("receive_D", receive)):
        require(len(counts) == mesh.world_size and min(counts) >= 0, name, counts, f"{mesh.world_size} counts >= 0")
    require(sum(send) == rows_AM.shape[0], "send_D", f"{send}, {sum(send)} rows", f"{rows_AM.shape[0]} rows, as given")
    if mesh.world_size == 1:
        require(receive == send, "receive_D", receive, f"{send}, what is sent, in a world of one")
        return rows_AM
    received = rows_AM.new_empty((sum(receive), *rows_AM.shape[1:]))
    with mesh.operation(Channel.TOKENS, "all_to_all"):
        dist.all_to_all_single(received, rows_AM.contiguous(), receive, send, group=mesh.token_group)
    row_bytes = rows_AM[:1].numel() * rows_AM.element_size() if rows_AM.shape[0] else 0
    for peer, num_rows in enumerate(send):
        mesh.traffic.add("all_to_all", mesh.topology.link_class(mesh.rank, peer), num_rows * row_bytes)
    return received


def all_reduce_sum(mesh: Mesh, tensor: Tensor) -> Tensor:
    """Sum `tensor` over all ranks, in place; returns it."""
    return _all_reduce(mesh, tensor, dist.ReduceOp.SUM)


def all_reduce_max(mesh: Mesh, tensor: Tensor) -> Tensor:
    """The elementwise maximum of `tensor` over all ranks, in place; returns it."""
    return _all_reduce(mesh, tensor, dist.ReduceOp.MAX)


def _all_reduce(mesh: Mesh, tensor: Tensor, operator: Any) -> Tensor:
    if mesh.world_size > 1:
        with mesh.operation(Channel.CONTROL, "all_reduce"):
            dist.all_reduce(tensor, op=operator, group=mesh.control_group)
    return tensor


def barrier(mesh: Mesh) -> None:
    """Return when every rank has come here."""
    if mesh.world_size > 1:
        with mesh.operation(Channel.CONTROL, "barrier"):
            dist.all_reduce(torch.zeros(1), group=mesh.control_group)


def gather_objects(mesh: Mesh, channel: Channel, name: str, value: Any) -> list[Any] | None:
    """On rank 0 every rank's `value`, by rank; None on the others. Blocks; through host memory.

    As the two below: torch pickles the values for their way, so only what ranks of one run make goes here.
    """
    if mesh.world_size == 1:
        return [value]
    values = [None] * mesh.world_size if mesh.rank == 0 else None
    with mesh.operation(channel, name):
        dist.gather_object(value, values, dst=0, group=mesh.groups[channel])
    return values


def scatter_objects(mesh: Mesh, channel: Channel, name: str, values: list[Any] | None) -> Any:
    """This rank's of the `values` that rank 0 gives, one a rank; the others give None. Blocks."""
    if mesh.world_size == 1:
        assert values is not None
        return values[0]
    received: list[Any] = [None]
    with mesh.operation(channel, name):
        dist.scatter_object_list(received, values, src=0, group=mesh.groups[channel])
    return received[0]


def share_objects(mesh: Mesh, channel: Channel, name: str, value: Any) -> list[Any]:
    """Every rank's `value`, by rank, on all ranks. Blocks."""
    if mesh.world_size == 1:
        return [value]
    values: list[Any] = [None] * mesh.world_size
    with mesh.operation(channel, name):
        dist.all_gather_object(values, value, group=mesh.groups[channel])
    return values


def exchange(mesh: Mesh, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
    """Point-to-point messages (rank, contiguous tensor) on the control group; every rank calls it, also with nothing.

    Messages between two ranks match in order; one to oneself is copied. Received tensors are filled in place.
    Blocks on the CPU; on CUDA it is queued on the current stream. Counted as "reshard".
    """
    own = zip(
        [tensor for rank, tensor in receives if rank == mesh.rank],
        [tensor for rank, tensor in sends if rank == mesh.rank],
        strict=True,
    )
    for target, source in own:
        target.data.copy_(source)
    if mesh.world_size == 1:
        return
    with mesh.operation(Channel.CONTROL, "exchange"):
        outgoing = [(rank, tensor) for rank, tensor in sends if rank != mesh.rank and tensor.numel()]
        incoming = [(rank, tensor) for rank, tensor in receives if rank != mesh.rank and tensor.numel()]
        grouped(outgoing, incoming, mesh.control_group)
    for rank, tensor in outgoing:
        mesh.traffic.add("reshard", mesh.topology.link_class(mesh.rank, rank), tensor.nbytes)


def grouped(sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], group: Any) -> None:
    """Issue the messages together and wait for them (on CUDA: make the current stream wait)."""
    operations = [dist.P2POp(dist.isend, tensor.data, group=group, group_peer=rank) for rank, tensor in sends]
    operations += [dist.P2POp(dist.irecv, tensor.data, group=group, group_peer=rank) for rank, tensor in receives]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def post_send(group: Any, tensor: Tensor, destination: int, tag: int) -> Pending:
    """Begin to send contiguous `tensor`; it must stay as it is until the send has been awaited."""
    return dist.isend(tensor, group=group, group_dst=destination, tag=tag)


def post_receive(group: Any, tensor: Tensor, source: int, tag: int) -> Pending:
    """Begin to receive into contiguous `tensor`."""
    return dist.irecv(tensor, group=group, group_src=source, tag=tag)


def await_message(pending: Pending, deadline: float) -> None:
    """Wait for a posted message until `deadline` (time.monotonic); RuntimeError of the backend if it is missed."""
    pending.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
