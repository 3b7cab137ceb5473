"""What begins to train too late is refused by name; what comes in time is averaged over the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import themis
from tests.fssdp.harness import WIDTH
from themis.core.errors import ConfigError
from themis.core.topology import Topology
from themis.moe import MoEConfig
from themis.policies import EP
from themis.testing.models import TinyMoE, rank_loss
from themis.testing.ranks import run_ranks

PAIR = Topology(1, 2)


def _model() -> TinyMoE:
    torch.manual_seed(0)
    return TinyMoE(MoEConfig(WIDTH, 8, 4, 2), 2).double()


def _tokens(seed: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _loss(model: TinyMoE, seed: int) -> torch.Tensor:
    output_TM, losses = model(_tokens(seed))
    return rank_loss(output_TM) + losses


def _add(model: TinyMoE) -> None:
    model.blocks[1].register_parameter("extra", nn.Parameter(torch.zeros(3, dtype=torch.float64)))


def _replace(model: TinyMoE) -> None:
    model.blocks[1].attention.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64))


def _unfreeze(model: TinyMoE) -> None:
    model.requires_grad_(True)


LATE: dict[str, tuple[str, str, Any, str]] = {
    # frozen before (all, the first block or nothing), dense, what happens after the first forward, the name
    "added": ("", "replicate", _add, "blocks.1.extra"),
    "added, sharded": ("", "fully_shard", _add, "blocks.1.extra"),
    "replaced": ("", "replicate", _replace, "blocks.1.attention.weight"),
    "unfrozen": ("blocks.0.attention", "replicate", _unfreeze, "blocks.0.attention.weight"),
    "unfrozen, sharded": ("blocks.0.attention", "fully_shard", _unfreeze, "blocks.0.attention.weight"),
    "experts": ("blocks.0.moe.experts", "none", _unfreeze, "b1 of expert"),
}


def _refused(rank: int, frozen: str, dense: Any, change: Any) -> str:
    model = _model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    themis.parallelize(model, PAIR, policy=EP(), dense=dense, timeout_s=15.0)
    _loss(model, rank).backward()
    _loss(model, rank).backward()  # nothing has changed yet
    change(model)
    with torch.no_grad():
        if change is not _add:
            _loss(model, rank)  # evaluation needs no average
    with pytest.raises(ConfigError) as caught:
        _loss(model, rank)
    return str(caught.value)


@pytest.mark.parametrize("case", LATE)
def test_what_trains_too_late_is_refused(case: str) -> None:
    frozen, dense, change, name = LATE[case]
    for line in run_ranks(2, _refused, frozen, dense, change):
        assert line.startswith(name)
        assert "would not be averaged" in line


def _refused_at_once(rank: int, dense: Any) -> str:
    model = _model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." in name or dense == "fully_shard")
    themis.parallelize(model, PAIR, policy=EP(), dense=dense, timeout_s=15.0)
    if dense == "fully_shard":
        _add(model)
    else:
        model.requires_grad_(True)  # there was nothing dense that DDP could have been asked to average
    with pytest.raises(ConfigError) as caught:
        _loss(model, rank)
    return str(caught.value)


@pytest.mark.parametrize("dense", ["replicate", "fully_shard"])
def test_what_is_too_late_in_the_first_forward(dense: str) -> None:
    for line in run_ranks(2, _refused_at_once, dense):
        assert "would not be averaged" in line


def _averaged(rank: int, dense: Any) -> list[torch.Tensor]:
    """Gradients of what was frozen at first and is unfrozen before the first forward, an evaluation between."""
    model = _model()
    model.blocks[0].attention.requires_grad_(False)
    themis.parallelize(model, PAIR, policy=EP(), dense=dense, timeout_s=15.0)
    model.blocks[0].attention.requires_grad_(True)
    with torch.no_grad():
        _loss(model.eval(), rank)
    _loss(model.train(), rank).backward()
    gradients: list[Any] = [parameter.grad for parameter in model.blocks[0].attention.parameters()]
    return [gradient.full_tensor() if dense == "fully_shard" else gradient for gradient in gradients]


@pytest.mark.parametrize("dense", ["replicate", "fully_shard"])
def test_what_comes_in_time_is_averaged(dense: str) -> None:
    first, second = run_ranks(2, _averaged, dense)
    alone = _model()
    output_TM, losses = alone(torch.cat([_tokens(0), _tokens(1)]))
    (rank_loss(output_TM) + losses).backward()
    for a, b, parameter in zip(first, second, alone.blocks[0].attention.parameters(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, parameter.grad, rtol=1e-9, atol=1e-12)
