"""transformers' Trainer on several ranks gives what it gives in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import themis
from themis.core.errors import ConfigError
from themis.fssdp import executor_of

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import transformers

from themis.testing.directories import stored_tensors
from themis.testing.families import build_tiny
from themis.testing.models import ScriptedPolicy
from themis.testing.ranks import run_ranks
from themis.train.transformers_trainer import ThemisTrainer


def _arguments(directory: Path, per_device: int, save_strategy: str = "no") -> Any:
    return transformers.TrainingArguments(
        output_dir=str(directory / "out"),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        max_grad_norm=0.05,
        logging_steps=1,
        use_cpu=True,
        save_strategy=save_strategy,
        eval_strategy="steps",
        eval_steps=2,
        report_to="none",
        disable_tqdm=True,
    )


def train(directory: Path, per_device: int, dense: Any = "replicate") -> None:
    """What each rank runs; rank 0 leaves the log, all leave the model."""
    arguments = _arguments(directory, per_device)
    model = build_tiny("mixtral", dtype=torch.float64)
    themis.parallelize(model, policy=ScriptedPolicy(2), dense=dense)
    draw = torch.Generator().manual_seed(0)
    windows = torch.randint(3, 128, (24, 9), generator=draw)
    data = [{"input_ids": window, "labels": window} for window in windows]
    trainer = ThemisTrainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train()
    trainer.save_model(str(directory / "model"))
    if arguments.process_index == 0:
        kept = ("loss", "grad_norm", "eval_loss")
        log = [{k: v for k, v in line.items() if k in kept} for line in trainer.state.log_history]
        (directory / "log.json").write_text(json.dumps(log))
    executor_of(model).close()


def _run(directory: Path, world_size: int, dense: str = "replicate") -> list[dict[str, float]]:
    directory.mkdir()
    call = f"train(Path({str(directory)!r}), {4 // world_size}, {dense!r})"
    code = f"from pathlib import Path; from {__name__} import train; {call}"
    script = directory / "run.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr
    log: list[dict[str, float]] = json.loads((directory / "log.json").read_text())
    return log


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    """Accumulation, clipping that bites, evaluation; the learning rate's course is Trainer's own."""
    alone, pair = _run(tmp_path / "alone", 1), _run(tmp_path / "pair", 2)
    sharded = _run(tmp_path / "sharded", 2, "fully_shard")
    assert len(alone) == len(pair) == 7  # four steps, two evaluations, the summary
    for wanted, *others in zip(alone, pair, sharded, strict=True):
        assert all(got == pytest.approx(wanted, rel=1e-4) for got in others)  # Trainer rounds what it logs
    before, after = stored_tensors(tmp_path / "alone/model"), stored_tensors(tmp_path / "pair/model")
    assert max(float((before[name] - after[name]).abs().max()) for name in before) < 1e-9


def test_what_trainer_cannot_save_is_refused(tmp_path: Path) -> None:
    model: Any = build_tiny("mixtral")
    with pytest.raises(ConfigError, match="not parallelized"):
        ThemisTrainer(model=model, args=_arguments(tmp_path, 1))
    themis.parallelize(model)
    with pytest.raises(ConfigError, match=r"save_strategy is 'steps'; .*give \"no\""):
        ThemisTrainer(model=model, args=_arguments(tmp_path, 1, "steps"), eval_dataset=[{}])
    plain = transformers.Trainer(model=model, args=_arguments(tmp_path, 1), eval_dataset=[{}])
    for save in (model.save_pretrained, plain.save_model):
        with pytest.raises(ConfigError, match=r"still in memory.*: call themis\.export\(model, path\).*ThemisTrainer"):
            save(str(tmp_path / "model"))
    executor_of(model).close()


def _wrapped(rank: int, directory: Path, how: str) -> None:
    model: Any = build_tiny("mixtral")
    window = torch.arange(3, 12)
    if how == "Trainer":
        arguments = _arguments(directory, 1)
        themis.parallelize(model)
        data = [{"input_ids": window, "labels": window}] * 4
        transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data).train()
    else:
        themis.parallelize(model)
        DistributedDataParallel(model)(input_ids=window[None])


@pytest.mark.parametrize("how", ["Trainer", "by hand"])
def test_a_second_data_parallelism_is_refused_in_the_first_step(tmp_path: Path, how: str) -> None:
    """Plain Trainer wraps the model in silence: experts of one rank would take the place of another's."""
    for outcome in run_ranks(2, _wrapped, tmp_path, how, return_errors=True):
        assert "the model runs inside DistributedDataParallel" in str(outcome)
        assert "ThemisTrainer" in str(outcome)
