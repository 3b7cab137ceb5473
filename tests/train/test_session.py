"""Whole runs: the same on any number of ranks, the same after a resume."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.harness import small_config, train_on_ranks, write_text
from themis.core.topology import Topology
from themis.testing.ranks import RankError, run_ranks
from themis.train import checkpoint as checkpoints
from themis.train.config import BatchConfig, PolicyConfig
from themis.train.metrics import Summary
from themis.train.observer import Silent
from themis.train.ranks import Place
from themis.train.session import run
from themis.train.shards import ShardWriter
from themis.train.trainer import Trainer

EXACT = 1e-9


def losses(lines: list[dict[str, Any]]) -> np.ndarray:
    return np.array([[line[name] for name in ("loss", "cross_entropy", "aux_loss", "grad_norm")] for line in lines])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """One process, no replicas."""
    directory = tmp_path_factory.mktemp("reference")
    config = small_config(write_text(directory), policy=PolicyConfig(name="ep"))
    return directory, train_on_ranks(1, config, directory / "run")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("policy", ["ep", "themis", "themis-rm"])
def test_losses_do_not_depend_on_ranks_or_policy(reference, tmp_path, world_size, policy):
    directory, expected = reference
    config = small_config(directory / "text.txt")
    lines = train_on_ranks(world_size, replace(config, policy=replace(config.policy, name=policy)), tmp_path / "run")
    np.testing.assert_allclose(losses(lines), losses(expected), rtol=EXACT)
    held_out = [line["held_out_loss"] for line in lines if line["held_out_loss"] is not None]
    assert held_out == pytest.approx([line["held_out_loss"] for line in expected if line["held_out_loss"]], rel=EXACT)


def test_more_ranks_than_sequences(reference, tmp_path):
    """Some ranks train on nothing, in some micro-batches."""
    directory, _ = reference
    config = small_config(directory / "text.txt", batch=BatchConfig(sequences=3, accumulation=2), steps=3)
    one = train_on_ranks(1, config, tmp_path / "one")
    four = train_on_ranks(4, config, tmp_path / "four")
    np.testing.assert_allclose(losses(four), losses(one), rtol=EXACT)


def test_cross_entropy_does_not_depend_on_accumulation(reference, tmp_path):
    directory, _ = reference
    config = small_config(directory / "text.txt", steps=1)
    whole = train_on_ranks(1, replace(config, batch=BatchConfig(8, 1)), tmp_path / "whole")
    parts = train_on_ranks(1, replace(config, batch=BatchConfig(8, 3)), tmp_path / "parts")
    assert parts[0]["cross_entropy"] == pytest.approx(whole[0]["cross_entropy"], rel=EXACT)


def test_what_a_run_leaves(reference):
    directory, lines = reference
    run_dir = directory / "run"
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "checkpoints",
        "config.json",
        "data",
        "metrics.jsonl",
        "routing.npz",
        "summary.json",
    ]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[0]["cross_entropy"] == pytest.approx(np.log(256), abs=0.2)
    assert lines[-1]["cross_entropy"] < lines[0]["cross_entropy"] - 1
    with np.load(run_dir / "routing.npz") as routing:
        assert routing["iteration"].tolist() == [2, 4, 6, 8]
        assert routing["tokens"].shape == (4, 2, 4, 1)
        assert routing["tokens"].dtype == np.int32
        # The last micro-batch of the step: four sequences of 16 tokens, two experts each.
        assert (routing["tokens"].sum(axis=(2, 3)) == 4 * 16 * 2).all()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert set(summary) == {*Summary.__dataclass_fields__, "prompt", "sample"}
    assert len(summary["sample"]) >= 1


def resumed(run_dir: Path, target: Path, world_size: int, config, last_step: int) -> list[dict[str, Any]]:
    """A copy of a finished run, with what came after `last_step` taken away but for its metrics, run on to the end."""
    shutil.copytree(run_dir, target)
    for path in (target / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > last_step:
            shutil.rmtree(path)
    return train_on_ranks(world_size, config, target, resume=True)


@pytest.mark.parametrize(("world_size", "asynchronous"), [(1, True), (2, True), (2, False)])
def test_resume_continues_exactly(reference, tmp_path, world_size, asynchronous):
    """Bit for bit, router noise (random streams), re-sharding and owners included."""
    directory, _ = reference
    config = small_config(directory / "text.txt")
    config = replace(config, checkpoint=replace(config.checkpoint, asynchronous=asynchronous))
    config = replace(config, model=replace(config.model, router_noise=True))
    whole = train_on_ranks(world_size, config, tmp_path / "whole")
    again = resumed(tmp_path / "whole", tmp_path / "again", world_size, config, 4)
    assert [line["step"] for line in again] == list(range(1, 9))
    np.testing.assert_array_equal(losses(again), losses(whole))
    assert [line["bytes_sent"] for line in again[4:]] == [line["bytes_sent"] for line in whole[4:]]
    with np.load(tmp_path / "whole/routing.npz") as first, np.load(tmp_path / "again/routing.npz") as second:
        np.testing.assert_array_equal(first["tokens"], second["tokens"])


def test_resume_at_a_resharding_step(reference, tmp_path):
    directory, _ = reference
    config = small_config(directory / "text.txt")
    config = replace(config, policy=replace(config.policy, reshard_interval=4))
    whole = train_on_ranks(2, config, tmp_path / "whole")
    again = resumed(tmp_path / "whole", tmp_path / "again", 2, config, 4)
    np.testing.assert_array_equal(losses(again), losses(whole))
    assert [line["imbalance_before_L"] for line in again] == [line["imbalance_before_L"] for line in whole]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_resume_on_another_number_of_ranks(reference, tmp_path, before, after):
    directory, expected = reference
    config = small_config(directory / "text.txt")
    train_on_ranks(before, config, tmp_path / "whole")
    again = resumed(tmp_path / "whole", tmp_path / "again", after, config, 4)
    np.testing.assert_allclose(losses(again), losses(expected), rtol=EXACT)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(reference, tmp_path):
    directory, expected = reference
    config = small_config(directory / "text.txt")
    train_on_ranks(2, config, tmp_path / "run")
    shard = next((tmp_path / "run/checkpoints/step-000008").glob("shard-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    again = train_on_ranks(2, config, tmp_path / "run", resume=True)
    np.testing.assert_allclose(losses(again), losses(expected), rtol=EXACT)
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["damaged-step-000008", "latest", "step-000004", "step-000008"]


def _resume_slowly(rank: int, config, run_dir: Path) -> None:
    find = checkpoints.find

    def find_slowly(directory: Path):
        time.sleep(1.5 * config.parallel.timeout_s)
        return find(directory)

    checkpoints.find = find_slowly  # type: ignore[assignment]  # in this forked process alone
    run(config, run_dir, Place(rank, 2, torch.device("cpu"), Topology(1, 2)), Silent(), resume=True)


@pytest.mark.parametrize("damage", [False, True])
def test_reading_a_checkpoint_may_take_longer_than_peers_wait(reference, tmp_path, damage):
    directory, _ = reference
    config = small_config(directory / "text.txt", steps=4)
    train_on_ranks(2, config, tmp_path / "run")
    config = replace(config, steps=5, parallel=replace(config.parallel, timeout_s=4.0))
    if damage:
        (tmp_path / "run/checkpoints/step-000004/trainer.json").unlink()
    outcomes = run_ranks(2, _resume_slowly, config, tmp_path / "run", timeout_s=50.0, return_errors=True)
    if not damage:
        assert [outcome.error for outcome in outcomes] == [None, None]
        return
    assert all("CheckpointError" in str(outcome) for outcome in outcomes)
    assert "trainer.json is unreadable" in str(outcomes[0])


def test_a_checkpoint_of_another_model_is_refused(reference, tmp_path):
    directory, _ = reference
    config = small_config(directory / "text.txt", steps=4)
    train_on_ranks(1, config, tmp_path / "run")
    wider = replace(config, model=replace(config.model, expert_hidden=32))
    with pytest.raises(RankError, match=r"does not fit the model: model\.blocks\.0"):
        train_on_ranks(1, wider, tmp_path / "run", resume=True)


def _die_in_step_three(rank: int, config, run_dir: Path) -> None:
    step = Trainer.step

    def step_or_die(trainer: Trainer, done: int):
        if rank == 1 and done == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(trainer, done)

    Trainer.step = step_or_die  # type: ignore[method-assign]  # in this forked process alone
    run(config, run_dir, Place(rank, 3, torch.device("cpu"), Topology(1, 3)), Silent(), resume=False)


def test_a_dead_peer_is_named_within_the_time_limit(reference, tmp_path):
    directory, _ = reference
    config = small_config(directory / "text.txt")
    config = replace(config, parallel=replace(config.parallel, timeout_s=5.0))
    began_s = time.monotonic()
    outcomes = run_ranks(3, _die_in_step_three, config, tmp_path, timeout_s=40.0, return_errors=True)
    assert time.monotonic() - began_s < 20
    assert outcomes[1].signal == signal.SIGKILL
    for rank in (0, 2):
        assert "PeerError" in outcomes[rank].error
        assert "rank 1 " in outcomes[rank].error.strip().splitlines()[-1]


def _lose_the_disk(rank: int, config, run_dir: Path, step: int) -> None:
    write = ShardWriter.write

    def refuse(writer: ShardWriter):
        if rank == 1 and writer._folder.stem == f"step-{step:06d}":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(writer)

    ShardWriter.write = refuse  # type: ignore[method-assign]  # in this forked process alone
    run(config, run_dir, Place(rank, 2, torch.device("cpu"), Topology(1, 2)), Silent(), resume=False)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("step", [4, 8])
def test_a_save_that_fails_ends_the_run(reference, tmp_path, asynchronous, step):
    """In the middle of training or at its end, on every rank, for its own reason."""
    directory, _ = reference
    config = small_config(directory / "text.txt")
    config = replace(config, checkpoint=replace(config.checkpoint, asynchronous=asynchronous))
    outcomes = run_ranks(2, _lose_the_disk, config, tmp_path, step, timeout_s=40.0, return_errors=True)
    for outcome in outcomes:
        line = outcome.error.strip().splitlines()[-1]
        assert "CheckpointError" in line
        assert line.endswith(f"step-{step:06d}' cannot be written: rank 1: No space left on device")
    assert not (tmp_path / "summary.json").exists()
    assert not (tmp_path / f"checkpoints/step-{step:06d}").exists()


def test_bf16_trains(reference, tmp_path):
    directory, expected = reference
    config = small_config(directory / "text.txt")
    config = replace(config, parallel=replace(config.parallel, dtype="float32", compute="bf16"))
    lines = train_on_ranks(2, config, tmp_path / "run")
    np.testing.assert_allclose(losses(lines)[:, 1], losses(expected)[:, 1], rtol=0.03)


def test_checkpointed_blocks_change_nothing(reference, tmp_path):
    directory, expected = reference
    config = small_config(directory / "text.txt")
    config = replace(config, model=replace(config.model, checkpoint_blocks=True))
    np.testing.assert_allclose(losses(train_on_ranks(2, config, tmp_path / "run")), losses(expected), rtol=EXACT)


def test_sharded_dense_parameters_change_nothing(reference, tmp_path):
    """Saved as shards and read back as shards; experts stay out of it."""
    directory, expected = reference
    config = small_config(directory / "text.txt")
    config = replace(config, parallel=replace(config.parallel, dense="fully_shard"))
    np.testing.assert_allclose(losses(train_on_ranks(2, config, tmp_path / "run")), losses(expected), rtol=EXACT)
    again = resumed(tmp_path / "run", tmp_path / "again", 2, config, 4)
    np.testing.assert_allclose(losses(again), losses(expected), rtol=EXACT)
