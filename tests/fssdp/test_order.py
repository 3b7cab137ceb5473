"""When collectives are issued and awaited, by exact lists of events."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import nn

import themis
from tests.fssdp.harness import WIDTH, Case, build, make_tokens, scripted
from themis.core.topology import Topology
from themis.fssdp import executor_of
from themis.moe import MoEConfig
from themis.policies import Themis, ThemisRM
from themis.testing.models import rank_loss
from themis.testing.ranks import run_ranks

Event = tuple[str, int]


def _case(rematerialize: bool, **changes: object) -> Case:
    policy = scripted(1, density=1.0, rematerialize_replicas=rematerialize, reshard_every=0)
    options = {"num_layers": 3, "topology": Topology(1, 2), "tokens_SD": [[5, 4]], **changes}
    return Case(config=MoEConfig(WIDTH, 8, 4, 2), policy=policy, **options)


def _parallel(case: Case) -> nn.Module:
    return themis.parallelize(build(case), case.topology, policy=case.policy, timeout_s=20.0)


def _record(model: nn.Module) -> list[Event]:
    events: list[Event] = []
    for layer in executor_of(model).layers:
        layer.recorders.append(lambda name, index: events.append((name, index)))
    for index, block in enumerate(model.blocks):
        block.attention.register_forward_pre_hook(lambda *_, i=index: events.append(("attention_start", i)))
        block.moe.gate.register_forward_hook(lambda *_, i=index: events.append(("gate_done", i)))
        block.attention.register_full_backward_hook(lambda *_, i=index: events.append(("attention_backward_end", i)))
    return events


def _events_of_one_step(rank: int, case: Case) -> list[Event]:
    model = _parallel(case)
    events = _record(model)
    output_TM, losses = model(make_tokens(case, 0, rank).requires_grad_())
    (rank_loss(output_TM) + losses).backward()
    executor_of(model).close()
    return events


def _forward(layer: int) -> list[Event]:
    names = ("gather_issued", "attention_start", "gate_done", "gather_awaited")
    return [(name, layer) for name in names]


def test_themis_gathers_before_attention_awaits_after_the_gate_and_reduces_before_its_backward_ends() -> None:
    expected = [*_forward(0), *_forward(1), *_forward(2)]
    for layer in (2, 1, 0):
        expected += [("reduce_issued", layer), ("attention_backward_end", layer)]
    assert run_ranks(2, _events_of_one_step, _case(False)) == [expected, expected]


def test_rm_frees_after_the_forward_and_gathers_again_one_block_ahead() -> None:
    expected = [*_forward(0), ("released", 0), *_forward(1), ("released", 1), *_forward(2)]
    expected += [("gather_issued", 1), ("reduce_issued", 2), ("attention_backward_end", 2), ("gather_awaited", 1)]
    expected += [("gather_issued", 0), ("reduce_issued", 1), ("attention_backward_end", 1), ("gather_awaited", 0)]
    expected += [("reduce_issued", 0), ("attention_backward_end", 0)]
    assert run_ranks(2, _events_of_one_step, _case(True)) == [expected, expected]


@pytest.mark.parametrize("checkpointing", ["plain", "reentrant"])
def test_a_recomputed_block_of_rm_finds_its_replicas_on_the_way(checkpointing: str) -> None:
    events = run_ranks(2, _events_of_one_step, _case(True, checkpointing=checkpointing))[0]
    gathers = [layer for name, layer in events if name == "gather_issued"]
    assert sorted(gathers) == [0, 0, 1, 1, 2] if checkpointing == "plain" else sorted(gathers) == [0, 0, 1, 1, 2, 2]
    for layer in (0, 1):
        second = [i for i, event in enumerate(events) if event == ("gather_issued", layer)][1]
        assert second < events.index(("attention_backward_end", layer + 1))


def _issue_order(rank: int, policy: object) -> list[str]:
    case = Case(
        config=MoEConfig(WIDTH, 8, 6, 2),
        policy=policy,
        num_layers=3,
        topology=Topology(2, 2),
        tokens_SD=[[5, 0, 3, 9]] * 5,
    )
    model = _parallel(case)
    draw = random.Random(rank)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: time.sleep(draw.random() * 0.01))
            module.register_full_backward_hook(lambda *_: time.sleep(draw.random() * 0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        output_TM, losses = model(make_tokens(case, step, rank))
        (rank_loss(output_TM) + losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    executor = executor_of(model)
    issued = list(executor.communicator.issued)
    executor.close()
    return issued


@pytest.mark.parametrize("policy", [Themis(2, 3, 2), ThemisRM(2, 3, 2), scripted(7)], ids=["themis", "rm", "scripted"])
def test_one_issue_order_on_all_ranks_under_random_delays(policy: object) -> None:
    orders = run_ranks(4, _issue_order, policy)
    assert len(orders[0]) > 20
    assert all(order == orders[0] for order in orders)
