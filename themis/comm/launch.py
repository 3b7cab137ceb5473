"""What torchrun's environment says about this process, checked; used before the default process group is made."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from themis.core.errors import ConfigError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@final
@dataclass(frozen=True)
class Launch:
    """A process's place among its peers: rank, number of ranks, rank on its machine, and where they meet."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> Launch | None:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; None when nothing is set.

        ConfigError when some are missing, are no whole numbers or do not fit together.
        """
        environment = os.environ if environment is None else environment
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not environment.get(name)]
        if "RANK" in missing and "WORLD_SIZE" in missing:
            return None
        if missing:
            raise ConfigError(
                f"the environment sets {', '.join(n for n in names if n not in missing)} but not {', '.join(missing)}; "
                "start with torchrun, which sets all, or with none of them set"
            )
        rank, world_size = _whole(environment, "RANK"), _whole(environment, "WORLD_SIZE")
        if world_size < 1 or rank >= world_size:
            raise ConfigError(f"RANK is {rank} and WORLD_SIZE is {world_size}; RANK must be below WORLD_SIZE")
        port = _whole(environment, "MASTER_PORT")
        if not 0 < port < 65536:
            raise ConfigError(f"MASTER_PORT is {port}; it must be a port, 1 to 65535")
        local_rank = _whole(environment, "LOCAL_RANK") if environment.get("LOCAL_RANK") else rank
        return Launch(rank, world_size, local_rank, environment["MASTER_ADDR"], port)

    def loopback_interface(self) -> str | None:
        """The name of the loopback interface when the ranks meet over loopback, so that Gloo need not guess one."""
        if self.host not in _LOOPBACK:
            return None
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in ("lo", "lo0") if name in names), None)


def _whole(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r}; it must be a whole number, 0 or more")
    return int(text)
