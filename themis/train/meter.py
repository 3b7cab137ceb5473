"""Adds up what the ranks measured between two lines of metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from themis.comm.beats import Channel
from themis.comm.collectives import all_reduce_sum
from themis.fssdp import LayerReport
from themis.fssdp.executor import Executor
from themis.train.metrics import Bytes, StepMetrics


@final
class Meter:
    """Tokens, seconds, bytes and exposed seconds since the last reading."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._tokens = 0
        self._seconds = 0.0
        self.restart()

    def restart(self) -> None:
        """Leave out the bytes and the waiting since the last reading: they were an evaluation's or a checkpoint's."""
        self._bytes = self._flat_bytes()
        self._waited_s = self._waits()

    def add(self, tokens: int, seconds: float) -> None:
        """Count one step of `tokens` tokens on all ranks."""
        self._tokens += tokens
        self._seconds += seconds

    def read(
        self, step: int, losses: Tensor, lr: float, grad_norm: float, reports: Sequence[LayerReport]
    ) -> StepMetrics:
        """The line of `step`, from this rank's share of the four losses [4]. A collective; the meter starts anew."""
        now = self._flat_bytes()
        moved = [float(now[key] - self._bytes[key]) for key in now]
        mesh = self._executor.mesh
        waits = self._waits()
        waited_s = [(waits[key] - self._waited_s[key]) / mesh.world_size for key in waits]
        sums = torch.tensor([*losses.tolist(), *waited_s, *moved], dtype=torch.float64)
        values = all_reduce_sum(mesh, sums).tolist()
        first_bytes = len(values) - len(moved)
        bytes_sent: Bytes = {}
        for (name, link), count in zip(now, values[first_bytes:], strict=True):
            bytes_sent.setdefault(name, {})[link] = round(count)
        metrics = StepMetrics(
            step=step,
            loss=values[0],
            cross_entropy=values[1],
            aux_loss=values[2],
            z_loss=values[3],
            lr=lr,
            grad_norm=grad_norm,
            tokens=self._tokens,
            tokens_per_s=self._tokens / self._seconds if self._seconds else 0.0,
            step_s=self._seconds,
            exposed_s=dict(zip(waits, values[4:first_bytes], strict=True)),
            imbalance_before_L=[report.imbalance_before for report in reports],
            imbalance_after_L=[report.imbalance_after for report in reports],
            replicas_L=[int(report.placement_ED.sum()) - len(report.placement_ED) for report in reports],
            bytes_sent=bytes_sent,
        )
        self._tokens, self._seconds = 0, 0.0
        self.restart()
        return metrics

    def _waits(self) -> dict[str, float]:
        mesh = self._executor.mesh
        return {
            "sparse_collectives": self._executor.communicator.blocked_s,
            "all_to_all": mesh.spent_s[Channel.TOKENS],
            "counts": mesh.spent_s[Channel.CONTROL],
        }

    def _flat_bytes(self) -> dict[tuple[str, str], int]:
        snapshot = self._executor.mesh.traffic.snapshot()
        return {(name, link): count for name, links in snapshot.items() for link, count in links.items()}
