"""Saving in the background: what is saved is the step's, and what goes wrong is told on the training's thread."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from themis.comm.mesh import Mesh
from themis.core.errors import CheckpointError, PeerError
from themis.testing.ranks import run_ranks
from themis.train import checkpoint
from themis.train.saver import Saver
from themis.train.shards import ShardWriter

LIMIT_S = 2.0


def alone() -> Mesh:
    return Mesh.create(device=torch.device("cpu"))


def saver_in(directory: Path, mesh: Mesh | None = None, *, keep: int = 2, asynchronous: bool = True) -> Saver:
    return Saver(directory, mesh or alone(), keep=keep, asynchronous=asynchronous)


def value_of(found: checkpoint.Checkpoint, name: str = "w") -> float:
    target = {name: torch.zeros(3)}
    checkpoint.load(found, target)
    assert target[name].unique().numel() == 1
    return float(target[name][0])


def slow_down(monkeypatch, seconds: float = 0.3) -> None:
    write = ShardWriter.write

    def slow(writer):
        time.sleep(seconds)
        return write(writer)

    monkeypatch.setattr(ShardWriter, "write", slow)


def refuse(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_step_is_saved_and_not_what_came_after(tmp_path, monkeypatch):
    slow_down(monkeypatch)
    weight = torch.full((3,), 1.0)
    with saver_in(tmp_path) as saver:
        began_s = time.perf_counter()
        saver.save(1, {"w": weight}, {"note": 1}, {"mine": 2})
        assert time.perf_counter() - began_s < 0.2
        weight.fill_(2.0)
        assert not (tmp_path / "step-000001").exists()
        saver.check()
        saver.wait()
        found, damaged = checkpoint.find(tmp_path)
        assert (value_of(found), found.record["note"], found.rank_record(0), damaged) == (1.0, 1, {"mine": 2}, [])
        assert saver.blocked_s < 0.2


def test_a_save_at_every_step_waits_for_the_one_before(tmp_path, monkeypatch):
    slow_down(monkeypatch, 0.05)
    weight = torch.zeros(3)
    with saver_in(tmp_path, keep=3) as saver:
        for step in range(1, 7):
            weight.fill_(step)
            saver.save(step, {"w": weight}, {}, {})
            assert sum(thread.name == "themis-saver" for thread in threading.enumerate()) == 1
    steps = [4, 5, 6]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-00000{step}" for step in steps]
    assert [value_of(checkpoint.check(tmp_path / f"step-00000{step}")) for step in steps] == steps


def test_the_same_step_twice(tmp_path):
    with saver_in(tmp_path) as saver:
        for value in (1.0, 2.0):
            saver.save(1, {"w": torch.full((3,), value)}, {}, {})
    assert value_of(checkpoint.find(tmp_path)[0]) == 2.0


def test_the_newest_that_is_whole_is_taken_and_the_rest_pruned(tmp_path):
    with saver_in(tmp_path) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"w": torch.full((3,), float(step))}, {}, {})
    next((tmp_path / "step-000003").glob("shard-*")).write_bytes(b"")
    found, damaged = checkpoint.find(tmp_path)
    assert (found.step, value_of(found), len(damaged)) == (2, 2.0, 1)
    assert not (tmp_path / "step-000001").exists()


@pytest.mark.parametrize("told_by", ["check", "save", "wait", "end"])
def test_a_full_disk_is_told_on_the_training_thread(tmp_path, monkeypatch, told_by):
    weight = {"w": torch.ones(3)}
    with saver_in(tmp_path) as saver:
        saver.save(1, weight, {}, {})
    monkeypatch.setattr(ShardWriter, "write", refuse)
    saver = saver_in(tmp_path)
    saver.save(2, weight, {}, {})
    saver._thread.join()
    tell = {
        "check": saver.check,
        "save": lambda: saver.save(3, weight, {}, {}),
        "wait": saver.wait,
        "end": lambda: saver.__exit__(None, None, None),
    }
    with pytest.raises(CheckpointError, match="step-000002' cannot be written: No space left on device"):
        tell[told_by]()
    assert checkpoint.find(tmp_path)[0].step == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_run_that_fails_lets_the_save_end(tmp_path, monkeypatch, error):
    slow_down(monkeypatch)

    def fail_after_a_save() -> None:
        with saver_in(tmp_path) as saver:
            saver.save(1, {"w": torch.ones(3)}, {}, {})
            raise error

    with pytest.raises(error):
        fail_after_a_save()
    assert value_of(checkpoint.find(tmp_path)[0]) == 1.0


def test_memory_is_kept_and_follows_what_is_saved(tmp_path):
    with saver_in(tmp_path) as saver:
        held = []
        for size in (3, 3, 5):
            saver.save(1, {"w": torch.ones(size), "count": torch.tensor(size)}, {}, {})
            held.append(saver._copies._held["w"].data_ptr())
            saver.wait()
        saver.save(2, {"v": torch.ones(3)}, {}, {})
        assert set(saver._copies._held) == {"v"}
    assert held[0] == held[1]
    assert list(checkpoint.stored(checkpoint.find(tmp_path)[0])) == ["v"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_lies_on_a_device_is_copied_before_the_call_returns(tmp_path):
    mesh = Mesh.create(device=torch.device("cuda", 0))
    weight = torch.ones(1 << 24, device="cuda")
    with saver_in(tmp_path, mesh) as saver:
        saver.save(1, {"w": weight, "step": torch.tensor(3.0)}, {}, {})
        assert saver._copies._held["w"].is_pinned()
        weight.fill_(2.0)
    target = {"w": torch.zeros(1 << 24)}
    checkpoint.load(checkpoint.find(tmp_path)[0], target)
    assert target["w"].unique().tolist() == [1.0]


def _fail_on_one(rank: int, directory: Path) -> str:
    mesh = Mesh.create(timeout_s=LIMIT_S)
    if rank == 1:
        ShardWriter.write = refuse  # type: ignore[method-assign]  # in this forked process alone
    try:
        with saver_in(directory, mesh) as saver:
            saver.save(1, {f"w{rank}": torch.ones(3)}, {}, {})
    except CheckpointError as error:
        return str(error)
    return ""


def test_one_ranks_full_disk_is_told_by_all(tmp_path):
    told = run_ranks(3, _fail_on_one, tmp_path, timeout_s=20.0)
    assert len(set(told)) == 1
    assert told[0].endswith("step-000001' cannot be written: rank 1: No space left on device")


def _misbehave_while_saving(rank: int, directory: Path, how: str) -> tuple[str, float]:
    mesh = Mesh.create(timeout_s=LIMIT_S)
    saver = saver_in(directory, mesh)
    content = {"dense": torch.ones(4), f"w{rank}": torch.full((3,), float(rank))}
    saver.save(1, content, {}, {})
    saver.wait()
    if rank == 1:

        def write(writer: ShardWriter) -> list[Path]:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(LIMIT_S + 1)
            return []

        ShardWriter.write = write  # type: ignore[method-assign]  # in this forked process alone
    began_s = time.monotonic()
    try:
        with saver:
            saver.save(2, content, {}, {})
            while rank != 1:  # training goes on
                saver.check()
                time.sleep(0.01)
    except PeerError as error:
        return str(error), time.monotonic() - began_s
    return "", 0.0


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dies", "writing step-000002 failed: rank 1 stopped responding"),
        ("is slow", "writing step-000002 failed: rank 1 has not come to it; it is after scattering plans"),
    ],
)
def test_a_rank_that_others_wait_for_is_named_within_the_limit(tmp_path, how, words):
    outcomes = run_ranks(3, _misbehave_while_saving, tmp_path, how, timeout_s=20.0, return_errors=True)
    for rank in (0, 2):
        message, waited_s = outcomes[rank].value
        assert message.startswith(words)
        assert waited_s < LIMIT_S + 1
    found, damaged = checkpoint.find(tmp_path)
    assert (found.step, value_of(found, "w2"), damaged) == (1, 2.0, [])


def _fail_because_of_a_save(rank: int, directory: Path) -> str:
    mesh = Mesh.create(timeout_s=LIMIT_S)
    ShardWriter.write = refuse  # type: ignore[method-assign]  # in this forked process alone
    try:
        with saver_in(directory, mesh) as saver:
            saver.save(1, {"w": torch.ones(3)}, {}, {})
            raise PeerError("counts failed: rank 1 has left", (1,))
    except CheckpointError as error:
        return str(error)


def test_a_failed_save_is_the_cause_of_a_peers_end(tmp_path):
    assert all("No space left" in told for told in run_ranks(2, _fail_because_of_a_save, tmp_path, timeout_s=20.0))
