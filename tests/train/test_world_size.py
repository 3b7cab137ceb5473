"""Checkpoints do not know the world size: saved on four ranks of uneven ownership, taken up on one to four."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import themis
from tests.train.harness import small_config, write_text
from themis.core.placement import shard_only
from themis.core.topology import Topology
from themis.fssdp.api import executor_of
from themis.testing.families import build_tiny
from themis.testing.ranks import run_ranks
from themis.train import checkpoint
from themis.train.config import CheckpointConfig, PolicyConfig, RunConfig
from themis.train.observer import Silent
from themis.train.ranks import Place
from themis.train.session import Session, build_model, shared_corpus
from themis.train.state import allocate_optimizer_state, model_tensors, optimizer_tensors
from themis.train.stopping import StopRequest

SAVED, LAST = 4, 14
#: Layer by expert; rank 1 owns nothing in the first layer, ranks 0 and 2 nothing in the second.
UNEVEN = np.array([[0, 0, 0, 2], [1, 3, 3, 3]])
OTHER = np.array([[3, 1, 3, 3], [0, 0, 2, 0]])
#: Layer, expert and device of replicas that are kept beside the owners.
KEPT = [[0, 0, 2], [0, 1, 3], [1, 3, 1]]

State = dict[str, np.ndarray]


@dataclass
class Trained:
    """What a rank had when it began to train, and what it saved on its way."""

    first_step: int
    state: State
    executor: dict[str, Any]
    saved: dict[int, State]


def train(
    rank: int, world_size: int, config: RunConfig, run_dir: Path, owner_LE: np.ndarray | None, resume: bool
) -> Trained:
    """A run on one rank, whose experts lie at `owner_LE`, with the replicas KEPT where it begins."""
    place = Place(rank, world_size, torch.device("cpu"), Topology(1, world_size))
    model = build_model(config, place)
    executor = executor_of(model)
    corpus = shared_corpus(config, run_dir, executor.mesh)
    session = Session(config, run_dir, model, executor, corpus, Silent(), StopRequest())
    if resume and owner_LE is not None:  # as if other owners had been saved
        take_up = executor.load_state_dict
        executor.load_state_dict = lambda saved: take_up({**saved, "owner_LE": owner_LE})  # type: ignore[method-assign]
    first_step = session.resume() if resume else 0
    if not resume and owner_LE is not None:
        kept_LED = np.zeros((*owner_LE.shape, world_size), dtype=bool)
        kept_LED[tuple(np.transpose(KEPT))] = True
        executor.rearrange([shard_only(owner_LE[i], world_size).merge(kept_LED[i]) for i in range(len(owner_LE))])
    state, plans = state_of(session) if resume else {}, executor.state_dict()
    saved: dict[int, State] = {}
    tensors = session._tensors

    def save_and_tell(saver: Any, step: int, optimizer: torch.optim.Optimizer) -> None:
        saved[step] = {name: value.numpy().copy() for name, value in tensors(optimizer).items()}
        Session._save(session, saver, step, optimizer)

    session._save = save_and_tell  # type: ignore[method-assign]
    session.train(first_step)
    executor.close()
    return Trained(first_step, state, plans, saved)


def state_of(session: Session) -> State:
    assert session.optimizer is not None
    return {name: value.numpy().copy() for name, value in session._tensors(session.optimizer).items()}


def merged(states: list[State]) -> State:
    """What all ranks hold, by global name; what several hold is the same."""
    whole: State = {}
    for state in states:
        for name, value in state.items():
            np.testing.assert_array_equal(whole.setdefault(name, value), value, err_msg=name)
    return whole


def losses(run_dir: Path) -> np.ndarray:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, LAST + 1))
    return np.array([line["loss"] for line in lines])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunConfig, list[Trained]]:
    """Four ranks to the end; plans depend on loads alone, so that what differs later is rounding."""
    directory = tmp_path_factory.mktemp("whole")
    config = small_config(
        write_text(directory),
        steps=LAST,
        policy=PolicyConfig(budget=1, overlap_degree=2, reshard_interval=0, calibration=False),
        checkpoint=CheckpointConfig(every=SAVED, keep=9),
    )
    config = replace(config, log=replace(config.log, evaluate_every=0))
    run_dir = directory / "run"
    run_dir.mkdir()
    return run_dir, config, run_ranks(4, train, 4, config, run_dir, UNEVEN, False)


def test_what_is_saved_is_whole_and_uneven(whole):
    _, _, trained = whole
    assert [trained[rank].executor["owner_LE"] for rank in range(4)] == [UNEVEN.tolist()] * 4
    assert [trained[rank].executor["kept_replicas"] for rank in range(4)] == [KEPT] * 4
    assert "optim.blocks.1.moe.experts.3.w1.exp_avg" in trained[1].saved[SAVED]
    assert not [name for name in trained[1].saved[SAVED] if ".0.moe.experts." in name]
    assert not [name for name in trained[2].saved[SAVED] if ".1.moe.experts." in name]
    names = merged([one.saved[SAVED] for one in trained])
    for layer in range(2):
        for expert in range(4):
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert f"optim.blocks.{layer}.moe.experts.{expert}.w1.{key}" in names


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_resumes_on_any_number_of_ranks(whole, tmp_path, world_size):
    run_dir, config, trained = whole
    again_dir = tmp_path / "again"
    shutil.copytree(run_dir, again_dir)
    for path in (again_dir / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > SAVED:
            shutil.rmtree(path)
    owner_LE = OTHER if world_size == 4 else None
    again = run_ranks(world_size, train, world_size, config, again_dir, owner_LE, True)
    assert {one.first_step for one in again} == {SAVED}

    expected = merged([one.saved[SAVED] for one in trained])
    found = merged([one.state for one in again])
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)

    record = checkpoint.check(again_dir / f"checkpoints/step-{SAVED:06d}").record["executor"]
    for one in again:
        for key in ("iteration", "predictor", "attention_s"):
            assert one.executor[key] == record[key]
        assert np.max(one.executor["owner_LE"]) < world_size
    assert len(record["predictor"]["loads"]) == SAVED
    if world_size == 4:
        assert again[0].executor["owner_LE"] == OTHER.tolist()
        assert again[0].executor["kept_replicas"] == KEPT
        assert "model.blocks.1.moe.experts.3.w1" in again[1].state
    np.testing.assert_allclose(losses(again_dir), losses(run_dir), rtol=0, atol=1e-10)


def _with_model(rank: int, act: Callable[..., State], directory: Path) -> State:
    """`act` on a parallelized DeepSeek-V3 and its optimizer."""
    model = themis.parallelize(build_tiny("deepseek_v3", dtype=torch.float64), timeout_s=30.0)
    optimizer = torch.optim.AdamW(model.parameters())
    state = act(model, optimizer, directory)
    executor_of(model).close()
    return state


def biases(model: torch.nn.Module) -> list[torch.Tensor]:
    found = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(found) == 2
    return found


def _train_and_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> State:
    executor = executor_of(model)
    tokens_BS = torch.arange(16).reshape(2, 8) + executor.mesh.rank
    model(tokens_BS).logits.square().mean().backward()
    optimizer.step()
    for number, bias in enumerate(biases(model)):  # as training with a balancing bias does, the same on all ranks
        bias.copy_(torch.linspace(-1, 1, bias.numel(), dtype=bias.dtype) * (number + 1))
    tensors = {**model_tensors(model), **optimizer_tensors(model, optimizer)}
    checkpoint.save(directory, 1, tensors, {"executor": executor.state_dict()}, {}, mesh=executor.mesh, keep=1)
    return {name: value.numpy().copy() for name, value in tensors.items()}


def _load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> State:
    found = checkpoint.check(directory / "step-000001")
    executor_of(model).load_state_dict(found.record["executor"])
    before = [bias.clone() for bias in biases(model)]
    allocate_optimizer_state(model, optimizer, checkpoint.stored(found))
    tensors = {**model_tensors(model), **optimizer_tensors(model, optimizer)}
    checkpoint.load(found, tensors)
    assert not any(torch.equal(bias, old) for bias, old in zip(biases(model), before, strict=True))
    return {name: value.numpy().copy() for name, value in tensors.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_transformers_model_and_its_router_biases(tmp_path, world_size):
    build_tiny("deepseek_v3")  # imports transformers once, before the ranks are forked
    saved = merged(run_ranks(3, _with_model, _train_and_save, tmp_path))
    loaded = merged(run_ranks(world_size, _with_model, _load, tmp_path))
    assert set(loaded) == set(saved)
    for name, value in saved.items():
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)
    for number in range(2):
        bias = loaded[next(name for name in loaded if f"layers.{number}." in name and name.endswith("correction_bias"))]
        assert bias.min() == -(number + 1)
