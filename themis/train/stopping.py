"""Ending a run before its last step, with a checkpoint: asked of any rank, done by all after the same step."""

from __future__ import annotations

import threading
from typing import final

import torch

from themis.comm.collectives import all_reduce_max
from themis.comm.mesh import Mesh
from themis.core.errors import ThemisError


@final
class RunStopped(ThemisError):
    """The run ended early because that was asked for; its state after `step` steps is on disk."""

    def __init__(self, step: int, run_dir: str) -> None:
        super().__init__(f"stopped after step {step}, which is saved; continue with --resume {run_dir}")
        self.step = step


@final
class StopRequest:
    """A wish that the run ends soon. Any thread, or a signal's handler, may express it."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def ask(self) -> None:
        """Have the run end after the step under way."""
        self._asked.set()

    def agreed(self, mesh: Mesh) -> bool:
        """Whether any rank was asked; the same on all ranks. A collective."""
        return bool(all_reduce_max(mesh, torch.tensor([int(self._asked.is_set())])))
