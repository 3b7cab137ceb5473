"""Who watches a run: the command line draws it, tests and scripts may ignore it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import final

from themis.train.config import RunConfig
from themis.train.metrics import StepMetrics, Summary


class Observer(ABC):
    """Told on rank 0 what happens."""

    @abstractmethod
    def preparing(self, what: str) -> None:
        """`what` begins, which takes a while, before the first step is logged."""

    @abstractmethod
    def started(self, config: RunConfig, run_dir: Path, step: int, world_size: int) -> None:
        """Training starts after `step` steps that were done before."""

    @abstractmethod
    def noticed(self, line: str) -> None:
        """Something a user should know, in a line."""

    @abstractmethod
    def stepped(self, metrics: StepMetrics) -> None:
        """A step was logged."""

    @abstractmethod
    def finished(self, summary: Summary, prompt: str, text: str) -> None:
        """The run is complete; the model continued `prompt` with `text`."""


@final
class Silent(Observer):
    """Watches and says nothing."""

    def preparing(self, what: str) -> None:
        """Nothing."""

    def started(self, config: RunConfig, run_dir: Path, step: int, world_size: int) -> None:
        """Nothing."""

    def noticed(self, line: str) -> None:
        """Nothing."""

    def stepped(self, metrics: StepMetrics) -> None:
        """Nothing."""

    def finished(self, summary: Summary, prompt: str, text: str) -> None:
        """Nothing."""
