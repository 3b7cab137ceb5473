"""What users do to a parallelized model beside plain training: the result is right, or one clear line refuses it."""

from __future__ import annotations

import copy
import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import themis
from tests.fssdp.harness import WIDTH, scripted
from themis.comm.collectives import barrier
from themis.core.errors import ConfigError
from themis.core.topology import Topology
from themis.fssdp import executor_of, expert_parameters
from themis.moe import MoEConfig
from themis.policies import EP
from themis.testing.models import TinyMoE, rank_loss
from themis.testing.ranks import run_ranks

PAIR = Topology(1, 2)


def _model(checkpointing: str = "none", dtype: torch.dtype = torch.float64) -> TinyMoE:
    torch.manual_seed(0)
    return TinyMoE(MoEConfig(WIDTH, 8, 4, 2), 2, checkpointing=checkpointing).to(dtype)


def _tokens(count: int, seed: int, checkpointing: str = "none") -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    x_TM = torch.randn(count, WIDTH, generator=draw, dtype=torch.float64)
    return x_TM.requires_grad_(checkpointing == "reentrant")


def _loss(model: TinyMoE, x_TM: torch.Tensor) -> torch.Tensor:
    output_TM, losses = model(x_TM)
    return rank_loss(output_TM) + losses


def _gradients(model: TinyMoE) -> dict[str, Any]:
    """All gradients by name; dense ones, which nobody has reduced, averaged over the ranks of dense="none"."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if dist.is_initialized() and ".experts." not in name:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        gradients[name] = gradient.numpy()
    return gradients


def _assert_union(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for name, value in alone.items():
        for held in [gradients[name] for gradients in ranks if name in gradients]:
            np.testing.assert_allclose(held, value, rtol=1e-9, atol=1e-9, err_msg=name)
    assert set(alone) == set().union(*ranks)


def _two_passes_on_rank(rank: int, checkpointing: str) -> dict[str, Any]:
    model = themis.parallelize(_model(checkpointing), PAIR, policy=scripted(3), dense="none", timeout_s=15.0)
    losses = [_loss(model, _tokens((4, 0)[rank], seed, checkpointing)) for seed in (1, 2)]
    for loss in losses:
        loss.backward()
    gradients = _gradients(model)
    executor_of(model).close()
    return gradients


@pytest.mark.parametrize("checkpointing", ["none", "plain", "reentrant"])
def test_backwards_may_follow_all_forwards_even_on_a_rank_without_tokens(checkpointing: str) -> None:
    alone = _model()
    for seed in (1, 2):
        output_TM, losses = alone(_tokens(4, seed))
        (rank_loss(output_TM) / 2 + losses).backward()
    _assert_union(run_ranks(2, _two_passes_on_rank, checkpointing), _gradients(alone))


def _train_on_after_an_error(rank: int) -> dict[str, Any]:
    policy = scripted(2, rematerialize_replicas=True)
    model = themis.parallelize(_model(), PAIR, policy=policy, dense="none", timeout_s=15.0)

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("not today")

    handle = model.blocks[0].attention.weight.register_hook(refuse)
    with pytest.raises(ValueError, match="not today"):
        _loss(model, _tokens(4, rank)).backward()
    handle.remove()
    model.zero_grad()
    _loss(model, _tokens(4, rank)).backward()
    gradients = _gradients(model)
    executor_of(model).close()
    return gradients


def test_a_backward_that_raises_leaves_nothing_behind() -> None:
    alone = _model()
    output_TM, losses = alone(torch.cat([_tokens(4, 0), _tokens(4, 1)]))
    (torch.stack([rank_loss(part) for part in output_TM.split(4)]).mean() + losses).backward()
    _assert_union(run_ranks(2, _train_on_after_an_error), _gradients(alone))


def _replicate_refuses(rank: int, how: str) -> str:
    checkpointing = "reentrant" if how == "reentrant" else "none"
    model = themis.parallelize(_model(checkpointing), PAIR, policy=EP(), timeout_s=15.0)
    first, second = (_loss(model, _tokens(4, seed + rank, checkpointing)) for seed in (1, 3))
    if how == "reentrant":
        refused = first + second
    else:
        second.backward(retain_graph=True)
        refused = second if how == "twice" else first
    with pytest.raises(ConfigError) as caught:
        refused.backward()
    return str(caught.value)


@pytest.mark.parametrize("how", ["twice", "late", "reentrant"])
def test_what_ddp_would_not_average_is_refused(how: str) -> None:
    for line in run_ranks(2, _replicate_refuses, how):
        assert "each forward takes one backward" in line


def _train_experts_alone(rank: int) -> list[bool]:
    model = _model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." in name)
    themis.parallelize(model, PAIR, policy=EP(), timeout_s=15.0)
    _loss(model, _tokens(4, rank)).backward()
    return [parameter.grad is not None for parameter in expert_parameters(model)]


def test_dense_parameters_may_all_be_frozen() -> None:
    for filled in run_ranks(2, _train_experts_alone):
        assert filled
        assert all(filled)


def _cast_afterwards(rank: int) -> str:
    model = themis.parallelize(_model(dtype=torch.float32), PAIR, policy=EP(), dense="none", timeout_s=15.0)
    model.double()
    with pytest.raises(ConfigError) as caught:
        model(_tokens(4, rank))
    return str(caught.value)


def test_a_cast_after_parallelize_is_refused() -> None:
    for line in run_ranks(2, _cast_afterwards):
        assert "before themis.parallelize" in line


def _passes_without_backward(rank: int) -> list[int]:
    model = themis.parallelize(_model(), PAIR, policy=scripted(4, reshard_every=0), timeout_s=15.0).eval()
    with torch.no_grad():
        for seed in range(10):
            model(_tokens(4, seed))
    return [len(layer._open) for layer in executor_of(model).layers]


def test_evaluation_leaves_nothing_behind() -> None:
    for open_L in run_ranks(2, _passes_without_backward):
        assert max(open_L) <= 1


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"policy": "ep"}, "policy is 'ep'; it must be a policy such as"),
        ({"policy": themis.Themis}, "it must be a policy such as"),
        ({"topology": (2, 4)}, r"topology is \(2, 4\); it must be a themis Topology"),
        ({"mixed_precision": torch.bfloat16}, "mixed_precision is torch.bfloat16; it must be"),
        ({"dense": "ddp"}, "dense is 'ddp'; it must be one of"),
    ],
)
def test_arguments_of_the_wrong_kind(arguments: dict, wanted: str) -> None:
    model = TinyMoE(MoEConfig(WIDTH, 8, 4, 2), 1)
    with pytest.raises(ConfigError, match=wanted):
        themis.parallelize(model, **arguments)
    themis.parallelize(model)  # nothing was changed


def test_meta_parameters_and_copies_are_refused() -> None:
    with torch.device("meta"):
        model = TinyMoE(MoEConfig(WIDTH, 8, 4, 2), 1)
    with pytest.raises(ConfigError, match="meta device"):
        themis.parallelize(model)
    model = themis.parallelize(TinyMoE(MoEConfig(WIDTH, 8, 4, 2), 1))
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(model)


def _threads_after_forgetting(rank: int) -> int:
    for _ in range(3):
        model = themis.parallelize(TinyMoE(MoEConfig(WIDTH, 8, 4, 2), 1))
        model(torch.randn(3, WIDTH))
        barrier(executor_of(model).mesh)
        del model
        gc.collect()
    deadline = time.monotonic() + 5
    while (left := sum(t.name.startswith("themis") for t in threading.enumerate())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_a_forgotten_model_leaves_no_thread() -> None:
    assert run_ranks(2, _threads_after_forgetting) == [0, 0]
