"""Optimizers and the experts that move under them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import themis
from tests.fssdp.harness import WIDTH, scripted
from themis.core.errors import ConfigError
from themis.core.topology import Topology
from themis.fssdp import executor_of, expert_parameters
from themis.moe import MoEConfig
from themis.policies import EP, Policy
from themis.testing.models import TinyMoE, rank_loss
from themis.testing.ranks import run_ranks


def _model(policy: Policy) -> TinyMoE:
    torch.manual_seed(0)
    model = TinyMoE(MoEConfig(WIDTH, 8, 4, 2), 2)
    themis.parallelize(model, Topology(1, 2), policy=policy, timeout_s=15.0)
    return model


def _step(model: TinyMoE, *optimizers: torch.optim.Optimizer) -> None:
    output_TM, losses = model(torch.randn(4, WIDTH))
    (rank_loss(output_TM) + losses).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _move_to_a_rank_without_experts(rank: int) -> tuple[int, int, list[str]]:
    model = _model(EP())
    executor = executor_of(model)
    executor.set_owners(np.zeros((2, 4), dtype=np.int64))
    owned = expert_parameters(model)
    ids = {id(parameter) for parameter in owned}
    experts = torch.optim.SGD([{"params": owned}], lr=0.1, momentum=0.9)
    dense = torch.optim.AdamW([p for p in model.parameters() if id(p) not in ids])
    _step(model, experts, dense)
    executor.set_owners(np.array([[0, 1, 1, 0], [1, 0, 0, 1]]))
    held = [id(parameter) for parameter in expert_parameters(model)]
    counts = [
        [id(p) in held for group in o.param_groups for p in group["params"]].count(True) for o in (experts, dense)
    ]
    _step(model, experts, dense)
    keys = {key for parameter in expert_parameters(model) for key in experts.state[parameter]}
    executor.close()
    return counts[0] - len(held), counts[1], sorted(keys)


def test_an_expert_finds_its_optimizer_on_a_rank_that_had_none() -> None:
    for missing, misplaced, keys in run_ranks(2, _move_to_a_rank_without_experts):
        assert (missing, misplaced) == (0, 0)
        assert keys == ["momentum_buffer"]


def _replace_the_optimizer(rank: int) -> str:
    model = _model(scripted(2, reshard_every=1))
    _step(model, torch.optim.AdamW(model.parameters()))
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        _step(model, late)
    except ConfigError as error:
        return str(error)
    return ""


def test_an_optimizer_that_missed_a_move_is_refused() -> None:
    assert any("have left the model" in line for line in run_ranks(2, _replace_the_optimizer))


def _use_lbfgs(rank: int) -> str:
    model = _model(EP())
    with pytest.raises(ConfigError) as caught:
        _step(model, _lbfgs(model))
    return str(caught.value)


def _lbfgs(model: TinyMoE) -> Any:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    step = optimizer.step

    def closure() -> torch.Tensor:
        output_TM, losses = model(torch.ones(4, WIDTH))
        loss: torch.Tensor = rank_loss(output_TM) + losses
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.step = lambda: step(closure)  # type: ignore[method-assign, assignment, misc]
    return optimizer


def test_lbfgs_is_refused() -> None:
    for line in run_ranks(2, _use_lbfgs):
        assert "LBFGS" in line


def _freeze_then_move(rank: int) -> list[bool]:
    model = _model(EP())
    executor = executor_of(model)
    if rank == 0:
        model.blocks[0].moe.experts.expert(1).requires_grad_(False)
    executor.set_owners(np.array([[0, 1, 1, 1], [0, 0, 1, 1]]))
    experts = model.blocks[0].moe.experts
    frozen = [not p.requires_grad for p in experts.expert(1).values()] if rank == 1 else []
    executor.close()
    return frozen


def test_a_frozen_expert_stays_frozen_where_it_moves() -> None:
    _, frozen = run_ranks(2, _freeze_then_move)
    assert frozen == [True] * 4
