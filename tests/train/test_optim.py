"""The optimizer's groups, and the learning rate's course."""

from __future__ import annotations

import itertools

import pytest
import torch

from themis.models import GPTMoE, GPTMoEConfig
from themis.train.config import OptimizerConfig
from themis.train.optim import build_optimizer, learning_rate, set_learning_rate


def test_only_matrices_decay():
    model = GPTMoE(GPTMoEConfig(width=8, num_heads=2, num_layers=1, num_experts=2, expert_hidden=8))
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    decay_of = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay_of) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        decays = name.endswith((".w1", ".w2", "gate.weight", "qkv.weight", "out.weight"))
        assert decay_of[id(parameter)] == (0.3 if decays else 0.0), name


def test_no_decay_at_all_is_one_group():
    model = torch.nn.Linear(2, 2)
    assert len(build_optimizer(model, OptimizerConfig(weight_decay=0.0)).param_groups) == 1


def test_learning_rate():
    config = OptimizerConfig(lr=2.0, final_lr=0.1, warmup_steps=4)
    rates = [learning_rate(step, 104, config) for step in range(105)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert max(rates) == rates[4] == 2.0
    assert rates[54] == pytest.approx(1.1)
    assert rates[104] == pytest.approx(0.2)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))


def test_a_run_shorter_than_its_warm_up():
    assert learning_rate(2, 3, OptimizerConfig(lr=1.0, warmup_steps=10)) == pytest.approx(0.3)


def test_every_group_gets_the_rate():
    optimizer = build_optimizer(torch.nn.Linear(2, 2), OptimizerConfig())
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
