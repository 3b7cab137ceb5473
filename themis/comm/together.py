"""Work that may take any rank any time, such as a disk's: the others wait for as long as it is alive."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from themis.comm.collectives import all_reduce_sum
from themis.comm.mesh import Mesh

#: How often ranks hear of each other.
_POLL_S = 0.2
_DONE, _FAILED = 1, 2


def work_together(mesh: Mesh, action: Callable[[], None] | None) -> tuple[int, ...]:
    """Run `action` on every rank that has one and return when all are done; the ranks where it failed. A collective.

    It runs in a thread, while ranks hear of each other now and then: so it may take longer than the mesh's limit,
    and a rank that dies is still noticed within it (PeerError). Where it failed, its error is raised.
    """
    if mesh.world_size == 1:
        if action is not None:
            action()
        return ()
    failure: list[BaseException] = []

    def run() -> None:
        try:
            if action is not None:
                action()
        except BaseException as error:
            failure.append(error)

    worker = threading.Thread(target=run, name="themis-work", daemon=True)
    worker.start()
    while True:
        worker.join(_POLL_S)
        states_D = torch.zeros(mesh.world_size, device=mesh.device)
        if not worker.is_alive():
            states_D[mesh.rank] = _FAILED if failure else _DONE
        states = all_reduce_sum(mesh, states_D).tolist()
        if all(states):
            break
    if failure:
        raise failure[0]
    return tuple(rank for rank, state in enumerate(states) if state == _FAILED)
