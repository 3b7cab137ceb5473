"""Saves a run's checkpoints, on the training's own thread or in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, final

import torch
from torch import Tensor

from themis.comm.beats import Channel
from themis.comm.mesh import Mesh
from themis.core.errors import CheckpointError, PeerError
from themis.train import checkpoint as checkpoints
from themis.train.sealed import Record
from themis.train.state import HostCopies


@final
class Saver:
    """Writes checkpoints of one run into `directory` and keeps the newest `keep`. All ranks make it and call it alike.

    Asynchronous, a save holds training up only while the tensors are copied into host memory, and while the save
    before is not done; a thread writes and publishes the copy meanwhile, over a process group of its own. What goes
    wrong there is raised here, on the caller's thread, by the next `check`, `save`, `wait` or end of the `with` block:
    CheckpointError, PeerError. The copy's memory stays until the Saver goes. Do not fork while a save is under way.
    """

    def __init__(self, directory: Path, mesh: Mesh, *, keep: int, asynchronous: bool) -> None:
        self._directory = directory
        self._mesh = mesh
        self._keep = keep
        self._copies = HostCopies() if asynchronous else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        #: Seconds that saves have held the caller up.
        self.blocked_s = 0.0
        mesh.open(Channel.SAVING)

    def save(self, step: int, tensors: dict[str, Tensor], record: Record, rank_record: Record) -> None:
        """Save `step`, see `checkpoint.save`. The tensors may change afterwards; the records must not."""
        began_s = time.perf_counter()
        self.wait()
        content = tensors if self._copies is None else self._copies.take(tensors)
        job = partial(
            checkpoints.save,
            self._directory,
            step,
            content,
            record,
            rank_record,
            mesh=self._mesh,
            keep=self._keep,
        )
        if self._copies is None:
            job()
        else:
            # A daemon: a process that fails must not wait for a disk or a peer in order to end.
            self._thread = threading.Thread(target=self._work, args=(job,), name="themis-saver", daemon=True)
            self._thread.start()
        self.blocked_s += time.perf_counter() - began_s

    def check(self) -> None:
        """Raise what went wrong with a save in the background; does not wait for one that is under way."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Return once the save under way, if any, is on disk; raise what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the save under way. After an error, no longer than peers are waited for; it stays absent then.

        A peer that ended because a checkpoint could not be written is not the error to tell.
        """
        if error is None:
            self.wait()
            return
        if self._thread is not None:
            self._thread.join(self._mesh.timeout_s)
        if isinstance(error, PeerError) and isinstance(self._error, CheckpointError):
            raise self._error from error

    def _work(self, job: Callable[[], object]) -> None:
        if self._mesh.device.type == "cuda":
            torch.cuda.set_device(self._mesh.device)  # each thread starts on the first one
        try:
            job()
        except BaseException as error:
            self._error = error
