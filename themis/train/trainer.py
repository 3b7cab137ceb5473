"""The training loop on one rank: a step, what it measured, and when to evaluate, record and save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from themis.comm.beats import Channel
from themis.core.errors import ThemisError
from themis.fssdp import LayerReport, clip_grad_norm_, step_report
from themis.fssdp.executor import Executor
from themis.models import LanguageModel, LMOutput, ModelConfig, TransformersLM
from themis.train.config import RunConfig
from themis.train.data import Corpus
from themis.train.evaluate import compute_context, held_out_loss, inputs_and_targets
from themis.train.meter import Meter
from themis.train.metrics import StepMetrics
from themis.train.optim import learning_rate, set_learning_rate
from themis.train.sampling import split


@final
@dataclass(frozen=True)
class Hooks:
    """What the loop calls: `check` before a step, `log` with its metrics, `record` where routing is due, `save`.

    `stops` is asked after each step and answers alike on all ranks.
    """

    log: Callable[[StepMetrics], None]
    record: Callable[[int], None]
    save: Callable[[int], None]
    check: Callable[[], None]
    stops: Callable[[], bool]


@final
class Trainer:
    """Trains `model`, which was parallelised, with `optimizer` on `corpus`."""

    def __init__(
        self,
        config: RunConfig,
        model: LanguageModel,
        executor: Executor,
        optimizer: torch.optim.Optimizer,
        corpus: Corpus,
    ) -> None:
        self.config = config
        self.model = model
        self.executor = executor
        self.optimizer = optimizer
        self.corpus = corpus

    def run(self, first_step: int, hooks: Hooks) -> int:
        """Train from `first_step` steps done to the configured number; returns how many are done. A collective."""
        config, log = self.config, self.config.log
        meter = Meter(self.executor)
        self.model.train()
        for step in range(first_step + 1, config.steps + 1):
            hooks.check()
            began_s = time.perf_counter()
            losses, grad_norm = self.step(step - 1)
            meter.add(config.batch.sequences * config.model.sequence_length, time.perf_counter() - began_s)
            last = step == config.steps
            evaluates = last or _due(step, log.evaluate_every)
            if last or evaluates or _due(step, log.every):
                metrics = meter.read(step, losses, self.optimizer.param_groups[0]["lr"], grad_norm, self._reports())
                if evaluates:
                    value = held_out_loss(self.model, self.corpus, config, self.executor.mesh)
                    metrics = replace(metrics, held_out_loss=value)
                    meter.restart()
                hooks.log(metrics)
            if _due(step, log.routing_every):
                hooks.record(step)
            stops = hooks.stops()
            if last or stops or _due(step, config.checkpoint.every):
                hooks.save(step)
                meter.restart()
            if stops:
                return step
        return max(first_step, config.steps)

    def step(self, done: int) -> tuple[Tensor, float]:
        """One optimizer step after `done` steps: (loss, cross-entropy, auxiliary, z) of this rank [4], gradient norm.

        The first are this rank's shares: their sum over ranks is that of the whole batch.
        """
        config = self.config
        set_learning_rate(self.optimizer, learning_rate(done, config.steps, config.optimizer))
        self.optimizer.zero_grad(set_to_none=True)
        losses = torch.zeros(4, dtype=torch.float64)
        for part in range(config.batch.accumulation):
            losses += self._micro_batch(done, part)
        norm = float(clip_grad_norm_(self.model, config.optimizer.max_grad_norm))
        if not math.isfinite(norm):
            raise ThemisError(f"the gradient norm is {norm} at step {done + 1}; lower optimizer.lr or resume and skip")
        self.optimizer.step()
        if isinstance(self.model, TransformersLM):
            self.model.update_router_biases()
        return losses, norm

    def _micro_batch(self, done: int, part: int) -> Tensor:
        """Forward and backward of one micro-batch's share of this rank; returns its part of the four losses.

        The micro-batch is the same whatever the number of ranks. Its loss is the mean over all of its tokens; data
        parallelism takes the mean over ranks of each rank's gradient, so a rank weighs in with its share of the tokens
        times the number of ranks.
        """
        config, mesh = self.config, self.executor.mesh
        total = config.batch.sequences
        rows = split(total, config.batch.accumulation, part)
        mine = split(len(rows), mesh.world_size, mesh.rank)
        length = config.model.sequence_length
        windows = self.corpus.batch((rows[row] for row in mine), done, total, length, config.seed)
        tokens_BS, targets_BS = inputs_and_targets(windows, config.model.vocab_size, mesh.device)
        with compute_context(config, mesh.device):
            output = self.model(tokens_BS, targets_BS)
        token_share, batch_share = len(mine) * mesh.world_size / total, len(rows) / total
        loss = token_share * output.cross_entropy + batch_share * router_loss(output, config.model)
        with mesh.operation(Channel.DENSE, "backward"):  # whose gradients DDP reduces
            loss.backward()
        terms = [
            loss,
            token_share * output.cross_entropy,
            batch_share * output.aux_loss,
            batch_share * output.z_loss,
        ]
        return torch.stack([term.detach() for term in terms]).to("cpu", torch.float64) / mesh.world_size

    def _reports(self) -> list[LayerReport]:
        return step_report(self.model)


def router_loss(output: LMOutput, config: ModelConfig) -> Tensor:
    """The weighted router losses of `output`."""
    assert output.aux_loss is not None
    assert output.z_loss is not None
    return config.aux_loss_weight * output.aux_loss + config.z_loss_weight * output.z_loss


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
