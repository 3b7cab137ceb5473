"""Checkpoints on disk: whole or absent, whatever happens while one is written."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from themis.comm.mesh import Mesh
from themis.core.errors import CheckpointError
from themis.testing.ranks import run_ranks
from themis.train import checkpoint
from themis.train.saver import Saver


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "model.w": torch.full((3, 4), float(step)),
        "optim.w.step": torch.tensor(float(step)),
        "model.count": torch.tensor([step], dtype=torch.int64),
        "model.half": torch.full((2,), step, dtype=torch.bfloat16),
    }


def save(directory: Path, step: int, keep: int = 2, **changes) -> Path:
    content = changes.pop("content", None) or tensors(step)
    mesh = changes.pop("mesh", None) or alone()
    return checkpoint.save(directory, step, content, {"note": "n"}, {"random": "r"}, mesh=mesh, keep=keep)


def alone() -> Mesh:
    return Mesh.create(device=torch.device("cpu"))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_round_trip_and_pruning(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert names(tmp_path) == ["latest", "step-000002", "step-000003"]
    assert (tmp_path / "latest").read_text() == "step-000003\n"
    found, damaged = checkpoint.find(tmp_path)
    assert (found.step, found.record["note"], damaged) == (3, "n", [])
    assert found.rank_record(0) == {"random": "r"}
    assert found.rank_record(1) is None
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors(3).items()}
    checkpoint.load(found, target)
    assert all(torch.equal(target[name], tensor) for name, tensor in tensors(3).items())


def test_the_same_step_can_be_written_again(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 1, content=tensors(9))
    target = {"model.w": torch.zeros(3, 4)}
    checkpoint.load(checkpoint.find(tmp_path)[0], target)
    assert target["model.w"].unique().tolist() == [9.0]


@pytest.mark.parametrize("victim", ["trainer.json", "rank-00000.json", "shard"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_one_is_found_out(tmp_path, victim, damage):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    path = next(path for path in newest.iterdir() if path.name.startswith(victim))
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[-3] ^= 1
        path.write_bytes(content)
    found, damaged = checkpoint.find(tmp_path)
    assert found.step == 1
    assert len(damaged) == 1
    assert "step-000002" in damaged[0]
    checkpoint.set_aside(tmp_path, found.step)
    assert names(tmp_path) == ["damaged-step-000002", "latest", "step-000001"]


def test_nothing_to_go_on_from(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint.find(tmp_path)
    (save(tmp_path, 1) / "trainer.json").write_text("nonsense")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint in .*trainer\.json is changed"):
        checkpoint.find(tmp_path)


def test_what_does_not_fit_is_named(tmp_path):
    found = checkpoint.check(save(tmp_path, 1))
    with pytest.raises(CheckpointError, match=r"model\.w is \[3, 4\] there and \[4, 3\] here"):
        checkpoint.load(found, {"model.w": torch.zeros(4, 3)})
    with pytest.raises(CheckpointError, match=r"it lacks model\.v"):
        checkpoint.load(found, {"model.v": torch.zeros(1)})


@pytest.mark.parametrize("where", ["write_sealed", "ShardWriter", "_publish"])
def test_a_full_disk_leaves_the_earlier_ones(tmp_path, monkeypatch, where):
    save(tmp_path, 1)

    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, where, refuse)
        with pytest.raises(CheckpointError, match=r"step-000002' cannot be written: No space left on device"):
            save(tmp_path, 2)
    assert checkpoint.find(tmp_path)[0].step == 1
    save(tmp_path, 3)  # and what was left half done is cleared away
    assert names(tmp_path) == ["latest", "step-000001", "step-000003"]


def test_a_kill_while_one_is_replaced_leaves_it(tmp_path, monkeypatch):
    """The only one there is, and the disk full between the two names."""
    save(tmp_path, 1)
    replace = os.replace

    def refuse(source, target):
        if Path(source).suffix == ".tmp":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        with pytest.raises(CheckpointError, match="Input/output error"):
            save(tmp_path, 1, content=tensors(9))
    assert names(tmp_path) == ["latest", "replaced-step-000001", "step-000001.tmp"]
    assert checkpoint.find(tmp_path)[0].step == 1
    assert names(tmp_path) == ["latest", "step-000001", "step-000001.tmp"]


def _save_and_die(rank: int, directory: Path, delay_s: float, asynchronous: bool) -> None:
    import threading

    def kill() -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    saver = Saver(directory, alone(), keep=2, asynchronous=asynchronous)
    for step in range(2, 1000):
        saver.save(step, tensors(step), {}, {})


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("delay_s", [0.05, 0.11, 0.17, 0.23])
def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path, delay_s, asynchronous):
    save(tmp_path, 1)
    outcome = run_ranks(1, _save_and_die, tmp_path, delay_s, asynchronous, return_errors=True)[0]
    assert outcome.signal == signal.SIGKILL
    found, damaged = checkpoint.find(tmp_path)
    assert damaged == []
    target = {"model.w": torch.zeros(3, 4)}
    checkpoint.load(found, target)
    assert target["model.w"].unique().tolist() == [float(found.step)]


def _save_on_rank(rank: int, directory: Path) -> list[str]:
    content = {
        "model.dense": torch.ones(5),
        **{f"model.expert.{e}": torch.full((2,), float(e)) for e in (rank, rank + 2)},
    }
    save(directory, 1, content=content, mesh=Mesh.create(timeout_s=20))
    found = checkpoint.check(directory / "step-000001")
    other = 1 - rank
    target = {"model.dense": torch.zeros(5), f"model.expert.{other}": torch.zeros(2)}
    checkpoint.load(found, target)
    return [str(target["model.dense"].tolist()), str(target[f"model.expert.{other}"].tolist())]


def test_ranks_hold_different_tensors_and_may_swap_them(tmp_path):
    answers = run_ranks(2, _save_on_rank, tmp_path)
    assert answers[0][1] == "[1.0, 1.0]"
    assert answers[1][1] == "[0.0, 0.0]"
    assert answers[0][0] == answers[1][0] == "[1.0, 1.0, 1.0, 1.0, 1.0]"
    found = checkpoint.find(tmp_path)[0]
    assert sorted(checkpoint.stored(found)) == ["model.dense", *(f"model.expert.{e}" for e in range(4))]
