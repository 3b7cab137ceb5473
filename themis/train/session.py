"""A run from its configuration to its summary, on one rank: builds the parts, resumes, trains, closes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import final

import numpy as np
import torch

from themis.comm.collectives import all_reduce_sum, barrier
from themis.comm.mesh import Mesh
from themis.comm.together import work_together
from themis.core.errors import CheckpointError, ConfigError
from themis.core.files import replace_text
from themis.fssdp import MixedPrecision, parallelize, step_report
from themis.fssdp.api import executor_of
from themis.fssdp.executor import Executor
from themis.models import LanguageModel, build
from themis.train import checkpoint as checkpoints
from themis.train.checkpoint import Checkpoint
from themis.train.config import RunConfig, save_config
from themis.train.data import Corpus, is_prepared, open_corpus, prepare
from themis.train.evaluate import sample_text
from themis.train.metrics import MetricsLog, RoutingLog, StepMetrics, Summary, read_lines, summarise
from themis.train.observer import Observer, Silent
from themis.train.optim import build_optimizer
from themis.train.ranks import Place
from themis.train.run_lock import exclusive
from themis.train.saver import Saver
from themis.train.state import (
    allocate_optimizer_state,
    model_tensors,
    optimizer_tensors,
    random_record,
    reshard,
    restore_random,
)
from themis.train.stopping import RunStopped, StopRequest
from themis.train.trainer import Hooks, Trainer


def run(
    config: RunConfig,
    run_dir: Path,
    place: Place,
    observer: Observer,
    *,
    resume: bool,
    stop: StopRequest | None = None,
) -> Summary | None:
    """Train as `config` says, writing into `run_dir`; a collective. Returns the summary on rank 0, None elsewhere.

    With `resume` the run goes on from its newest whole checkpoint. Asked to `stop`, on any rank, it ends after the
    step under way, with a checkpoint, in RunStopped. ConfigError for data that does not fit, CheckpointError,
    PeerError.
    """
    watcher = observer if place.rank == 0 else Silent()
    with exclusive(run_dir) if place.rank == 0 else nullcontext():
        return _run(config, run_dir, place, watcher, stop or StopRequest(), resume=resume)


def _run(
    config: RunConfig, run_dir: Path, place: Place, observer: Observer, stop: StopRequest, *, resume: bool
) -> Summary | None:
    observer.preparing("building the model")
    model = build_model(config, place)
    executor = executor_of(model)
    try:
        observer.preparing("opening the data")
        corpus = shared_corpus(config, run_dir, executor.mesh)
        session = Session(config, run_dir, model, executor, corpus, observer, stop)
        if resume:
            observer.preparing("reading the checkpoint")
        return session.train(session.resume() if resume else 0)
    finally:
        executor.close()


def shared_corpus(config: RunConfig, run_dir: Path, mesh: Mesh) -> Corpus:
    """The corpus, which rank 0 tokenises into the run directory, however long that takes; checked against the model.

    A collective: the others look in now and then, so that a dead rank 0 is noticed. ConfigError on every rank where
    one cannot see what rank 0 has written.
    """
    directory = run_dir / "data"
    if work_together(mesh, (lambda: prepare(config.data, directory)) if mesh.rank == 0 else None):
        raise ConfigError("rank 0 could not prepare the data")
    if not is_prepared(config.data, directory):
        raise ConfigError(
            f"rank {mesh.rank} finds no prepared data in {str(directory)!r}; give --run-dir on a file system that "
            "all nodes share"
        )
    corpus = open_corpus(config.data, directory)
    corpus.check(config.model.sequence_length, config.model.vocab_size)
    return corpus


def build_model(config: RunConfig, place: Place) -> LanguageModel:
    """The model, parallelised; its values do not depend on the number of ranks. A collective.

    Afterwards every rank draws from a random stream of its own.
    """
    model = build(config.model, getattr(torch, config.parallel.dtype))
    torch.manual_seed(config.seed)
    bf16 = config.parallel.compute == "bf16"
    parallelize(
        model,
        place.topology,
        policy=config.policy.build(),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if bf16 else None,
        dense=config.parallel.dense,
        device=place.device,
        timeout_s=config.parallel.timeout_s,
    )
    torch.manual_seed(config.seed + 1 + place.rank)
    return model


@final
class Session:
    """One run's parts on one rank."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        model: LanguageModel,
        executor: Executor,
        corpus: Corpus,
        observer: Observer,
        stop: StopRequest,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.model = model
        self.executor = executor
        self.corpus = corpus
        self.observer = observer
        self.stop = stop
        self.mesh: Mesh = executor.mesh
        self.optimizer: torch.optim.Optimizer | None = None

    def resume(self) -> int:
        """Take up the newest whole checkpoint; returns its step. A collective.

        Owners come first, so that the optimizer is built over the experts that this rank will hold.
        """
        found = self._agreed_checkpoint()
        self.executor.load_state_dict(found.record["executor"])
        self.optimizer = build_optimizer(self.model, self.config.optimizer)
        allocate_optimizer_state(self.model, self.optimizer, checkpoints.stored(found))
        checkpoints.load(found, self._tensors(self.optimizer))
        mine = found.rank_record(self.mesh.rank)
        if mine is not None and found.world_size == self.mesh.world_size:
            restore_random(mine["random"], self.mesh.device)
        else:  # another number of ranks has no streams to continue: start new ones that no earlier step has used
            torch.manual_seed(self.config.seed + 1 + self.mesh.rank + 1_000_003 * found.step)
        return found.step

    def train(self, first_step: int) -> Summary | None:
        """Train after `first_step` steps, evaluate, sample, summarise. A collective. RunStopped."""
        leads = self.mesh.rank == 0
        optimizer = self.optimizer or build_optimizer(self.model, self.config.optimizer)
        trainer = Trainer(self.config, self.model, self.executor, optimizer, self.corpus)
        if not leads:
            with self._saver() as saver:
                save_mine = partial(self._save, saver, optimizer=optimizer)
                hooks = Hooks(_ignore_metrics, _ignore_step, save_mine, saver.check, self._stops)
                done = trainer.run(first_step, hooks)
            self._require_all(done)
            if self.config.log.sample_tokens:
                sample_text(self.model, self.corpus, self.config, self.mesh)
            return None
        save_config(self.config, self.run_dir / "config.json")
        metrics_log = MetricsLog(self.run_dir, first_step, tensorboard=self.config.log.tensorboard)
        routing_log = RoutingLog(self.run_dir, first_step, self.mesh.world_size)

        def log(metrics: StepMetrics) -> None:
            metrics_log.write(metrics)
            self.observer.stepped(metrics)

        def record(step: int) -> None:
            routing_log.add(step, np.stack([report.tokens_ED for report in step_report(self.model)]))

        def save(step: int) -> None:
            routing_log.write()
            self._save(saver, step, optimizer)

        self.observer.started(self.config, self.run_dir, first_step, self.mesh.world_size)
        self.observer.preparing("the first step, which loads what is compiled")
        try:
            with self._saver() as saver:
                done = trainer.run(first_step, Hooks(log, record, save, saver.check, self._stops))
        finally:
            metrics_log.close()
        self._require_all(done)
        return self._finish()

    def _stops(self) -> bool:
        return self.stop.agreed(self.mesh)

    def _require_all(self, done: int) -> None:
        """RunStopped where steps are left; once every rank is here, as the first that ends takes the others along."""
        if done < self.config.steps:
            barrier(self.mesh)
            raise RunStopped(done, str(self.run_dir))

    def _finish(self) -> Summary:
        prompt, text = "", ""
        if self.config.log.sample_tokens:
            prompt, text = sample_text(self.model, self.corpus, self.config, self.mesh)
        summary = summarise(read_lines(self.run_dir / "metrics.jsonl"), str(self.run_dir))
        record = {**asdict(summary), "prompt": prompt, "sample": text}
        replace_text(self.run_dir / "summary.json", json.dumps(record, indent=2) + "\n")
        self.observer.finished(summary, prompt, text)
        return summary

    def _saver(self) -> Saver:
        settings = self.config.checkpoint
        directory = self.run_dir / "checkpoints"
        return Saver(directory, self.mesh, keep=settings.keep, asynchronous=settings.asynchronous)

    def _save(self, saver: Saver, step: int, optimizer: torch.optim.Optimizer) -> None:
        saver.save(
            step,
            self._tensors(optimizer),
            {"executor": self.executor.state_dict(), "config": asdict(self.config)},
            {"random": random_record(self.mesh.device)},
        )

    def _tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        reshard(self.model)
        return {**model_tensors(self.model), **optimizer_tensors(self.model, optimizer)}

    def _agreed_checkpoint(self) -> Checkpoint:
        """The checkpoint that rank 0 finds whole, however long reading it takes; the others take its word for the step.

        CheckpointError on every rank where there is none.
        """
        directory = self.run_dir / "checkpoints"
        mine: list[Checkpoint] = []
        look = partial(self._find_whole, directory, mine)
        if work_together(self.mesh, look if self.mesh.rank == 0 else None):
            raise CheckpointError(f"rank 0 found no whole checkpoint in {str(directory)!r}")
        step = all_reduce_sum(self.mesh, torch.tensor([found.step for found in mine] or [0]))
        return mine[0] if mine else checkpoints.open_whole(directory, int(step))

    def _find_whole(self, directory: Path, into: list[Checkpoint]) -> None:
        found, damaged = checkpoints.find(directory)
        checkpoints.set_aside(directory, found.step)
        for line in damaged:
            self.observer.noticed(f"{line}; going on from step {found.step}")
        into.append(found)


def _ignore_metrics(metrics: StepMetrics) -> None:
    """Other ranks write no metrics."""


def _ignore_step(step: int) -> None:
    """Other ranks record no routing."""
