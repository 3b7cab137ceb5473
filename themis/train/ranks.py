"""Joining the other ranks: what torchrun's environment says, and torch's default process group over it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch

from themis.comm.collectives import end_process_group, init_process_group
from themis.comm.launch import Launch
from themis.core.errors import ConfigError
from themis.core.topology import Topology
from themis.train.config import ParallelConfig


@final
@dataclass(frozen=True)
class Place:
    """Where this process stands: its rank of `world_size`, its device, and the cluster as the plans see it."""

    rank: int
    world_size: int
    device: torch.device
    topology: Topology


@contextmanager
def joined(config: ParallelConfig) -> Iterator[Place]:
    """Within it, torch's process group is ready where there are several ranks, and `config`'s device is current.

    ConfigError where the environment, the devices, the port or absent peers do not allow it.
    """
    launch = Launch.from_environment()
    rank, world_size, local_rank = (launch.rank, launch.world_size, launch.local_rank) if launch else (0, 1, 0)
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    local_size = int(text) if text.isdigit() and int(text) else world_size
    topology = config.topology(world_size, local_size)
    device = choose_device(config.device, local_rank, local_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_process_group(launch, device=device, timeout_s=config.timeout_s)
    try:
        yield Place(rank, world_size, device, topology)
    finally:
        end_process_group()


def choose_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """The device of a local rank: CUDA where wanted, or where "auto" finds one for each of the `local_size` ranks."""
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and count < local_size:
        raise ConfigError(
            f"parallel.device is 'cuda' with {local_size} rank(s) here; there are {count} CUDA devices: "
            "start fewer ranks or use parallel.device cpu"
        )
    return torch.device("cuda", local_rank) if count >= local_size else torch.device("cpu")
