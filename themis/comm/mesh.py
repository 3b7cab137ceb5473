"""A rank's view of the cluster: who it is, what it sits on, and the process groups it talks over."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch

from themis.comm import collectives
from themis.comm.beats import Channel, Heartbeat
from themis.comm.blame import MISSED_BEATS, diagnose
from themis.comm.traffic import Traffic
from themis.core.errors import ConfigError, PeerError, require
from themis.core.topology import Topology


@final
@dataclass(frozen=True, eq=False)
class Mesh:
    """One rank of the cluster, passed explicitly to whatever communicates.

    Tokens, sparse collectives, dense gradients and small exchanges each have a process group of their own (saving too,
    once it is opened), so that none queues behind another and ranks need agree on the order only within a group. In a
    world of one there are no groups and nothing is sent. Every wait on a peer ends within `timeout_s` seconds, with a
    PeerError that names the ranks at fault; the last part of that time, `diagnosis_s`, is kept for finding them.
    """

    rank: int
    world_size: int
    topology: Topology
    device: torch.device
    timeout_s: float
    groups: dict[Channel, Any]
    heartbeat: Heartbeat | None
    traffic: Traffic = field(default_factory=Traffic)
    #: Seconds spent so far in the operations of each channel; on the CPU these block their caller.
    spent_s: dict[Channel, float] = field(default_factory=lambda: dict.fromkeys(Channel, 0.0))

    @staticmethod
    def create(
        topology: Topology | None = None, *, device: torch.device | None = None, timeout_s: float = 60.0
    ) -> Mesh:
        """The mesh over torch's default process group, or a world of one where there is none. All ranks call it.

        Without `topology`, the environment's LOCAL_WORLD_SIZE says how many ranks a node has, if it divides the
        world size; else all ranks form one node. `device` defaults to this process's CUDA device where there is one
        and the group can use it, else to the CPU. ConfigError when topology and world size disagree; PeerError when
        a rank fails to join in time.
        """
        require(timeout_s > 0, "timeout_s", timeout_s, "above zero seconds")
        rank, world_size = collectives.default_rank_and_size()
        topology = topology or _topology_from_environment(world_size)
        if topology.num_devices != world_size:
            raise ConfigError(
                f"topology has {topology.num_nodes} x {topology.devices_per_node} = {topology.num_devices} devices "
                f"but there are {world_size} rank(s); make nodes times devices per node equal the number of ranks"
            )
        device = device or collectives.default_device()
        if world_size == 1:
            return Mesh(rank, world_size, topology, device, timeout_s, {}, None)
        beat_s = _beat_s(timeout_s)
        heartbeat = Heartbeat(collectives.mesh_store(rank), rank, world_size, beat_s)
        operation_s = timeout_s - _diagnosis_s(timeout_s)
        try:
            channels: list[Channel] = [channel for channel in Channel if channel is not Channel.SAVING]
            groups = {c: collectives.new_group(device, operation_s, control=c is Channel.CONTROL) for c in channels}
        except RuntimeError as error:
            failure = diagnose(heartbeat, Channel.CONTROL, "joining the process groups", str(error))
            heartbeat.stop()
            raise failure from error
        mesh = Mesh(rank, world_size, topology, device, timeout_s, groups, heartbeat)
        # A mesh that is forgotten without `close` leaves no thread behind.
        weakref.finalize(mesh, heartbeat.stop).atexit = False
        collectives.barrier(mesh)  # a rank that hurries on and leaves must not cut off one that still connects
        return mesh

    def open(self, channel: Channel) -> None:
        """Give `channel` a process group over host memory, unless it has one. A collective; PeerError."""
        if self.world_size > 1 and channel not in self.groups:
            with self.operation(Channel.CONTROL, f"opening {channel.value}"):
                host = torch.device("cpu")
                self.groups[channel] = collectives.new_group(host, self.operation_s, control=False)

    @property
    def token_group(self) -> Any:
        """The process group of the token AlltoAll; None in a world of one."""
        return self.groups.get(Channel.TOKENS)

    @property
    def sparse_group(self) -> Any:
        """The process group of the sparse collectives; None in a world of one."""
        return self.groups.get(Channel.SPARSE)

    @property
    def dense_group(self) -> Any:
        """The process group of dense gradients, to be handed to DDP; None in a world of one."""
        return self.groups.get(Channel.DENSE)

    @property
    def control_group(self) -> Any:
        """The process group of small exchanges and re-sharding; None in a world of one."""
        return self.groups.get(Channel.CONTROL)

    @property
    def operation_s(self) -> float:
        """Seconds after which an operation with peers counts as failed."""
        return self.timeout_s - _diagnosis_s(self.timeout_s)

    @contextmanager
    def operation(self, channel: Channel, name: str) -> Iterator[float]:
        """Within it, this rank takes part in operation `name` of `channel`; yields its deadline (time.monotonic).

        A RuntimeError of the backend inside becomes a PeerError that names the ranks at fault.
        """
        began_s = time.monotonic()
        deadline = began_s + self.operation_s
        if self.heartbeat is None:
            yield deadline
            return
        self.heartbeat.begin(channel, name)
        try:
            yield deadline
        except PeerError:
            raise
        except RuntimeError as error:
            raise diagnose(self.heartbeat, channel, name, str(error).splitlines()[0]) from error
        self.heartbeat.end(channel)
        self.spent_s[channel] += time.monotonic() - began_s

    def close(self) -> None:
        """Leave: end the heartbeat and the process groups, once every rank is done. A second call does nothing."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        while self.groups:
            _, group = self.groups.popitem()
            collectives.destroy_group(group)


def _beat_s(timeout_s: float) -> float:
    return min(1.0, timeout_s / 20)


def _diagnosis_s(timeout_s: float) -> float:
    return (MISSED_BEATS + 2) * _beat_s(timeout_s)


def _topology_from_environment(world_size: int) -> Topology:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    local = int(text) if text.isdigit() else 0
    if local and world_size % local == 0:
        return Topology(world_size // local, local)
    return Topology(1, world_size)
