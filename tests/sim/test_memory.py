"""Memory by kind, from first principles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from themis.policies import EP, Themis, ThemisRM
from themis.sim.efficiency import CLUSTERS
from themis.sim.memory import Peak, activation_bytes, memory_use, moved_bytes
from themis.sim.workload import Workload, paper_model

WORK = Workload(paper_model("phi-3.5-moe", CLUSTERS["b"]), CLUSTERS["b"], 1)
EXPERT = 3 * 4096 * 6400


def test_sixteen_bytes_a_parameter():
    use = memory_use(WORK, EP(), Peak(1000.0))
    assert use.expert_parameters == 2 * 8 * EXPERT
    assert use.expert_gradients == use.expert_parameters
    assert use.expert_optimizer == 6 * use.expert_parameters
    assert use.model_states == 16 * 8 * EXPERT
    assert use.dense_parameters == 2 * WORK.model.dense_parameters
    assert use.replica_parameters == use.replica_gradients == 0
    assert use.total == pytest.approx(use.model_states + 8 * use.dense_parameters + use.activations)


def test_replicas_live_in_all_layers_or_in_two():
    peak = Peak(1000.0, 200.0, replicas=16.0, layer_replicas=2.0)
    themis, rm = memory_use(WORK, Themis(budget=2), peak), memory_use(WORK, ThemisRM(budget=2), peak)
    assert themis.replica_parameters == 2 * 16 * EXPERT
    assert rm.replica_parameters == 2 * 4 * EXPERT
    assert themis.replica_gradients == rm.replica_gradients == 2 * 4 * EXPERT
    assert themis.expert_optimizer == rm.expert_optimizer == memory_use(WORK, EP(), peak).expert_optimizer


def test_activations_grow_with_tokens_and_with_the_fullest_device():
    none, some = activation_bytes(WORK, Peak()), activation_bytes(WORK, Peak(1000.0, 100.0))
    token_at_expert = 2 * (2 * 4096 + 3 * 6400)
    assert some - none == 1100 * token_at_expert
    assert activation_bytes(replace(WORK, batch=2), Peak()) == 2 * none


def test_a_moved_expert_is_seven_times_its_parameters():
    assert moved_bytes(WORK.model) == 7 * WORK.model.expert_bytes
