"""Models built on the meta device: memory for what a rank owns alone, the same values whatever the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import themis
from themis.core.errors import ConfigError
from themis.fssdp import FreshWeights, WeightSource, executor_of
from themis.fssdp.adapters import MoESite
from themis.models import GPTMoE, GPTMoEConfig
from themis.moe import MoEConfig
from themis.testing.models import ScriptedPolicy, TinyMoE
from themis.testing.ranks import run_ranks

pytest.importorskip("transformers")

from themis.testing.families import build_tiny, output_of

TOKENS = torch.arange(3, 17).view(2, 7)
#: qwen3_omni_moe initialises its experts with their parent.
KINDS = ["gpt_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_omni_moe"]


def _on_meta(kind: str) -> Any:
    if kind != "gpt_moe":
        return build_tiny(kind, device="meta")
    config = GPTMoEConfig(vocab_size=128, sequence_length=8, width=16, num_heads=2, num_layers=2, expert_hidden=24)
    with torch.device("meta"):
        return GPTMoE(config)


def _values(rank: int, kind: str) -> dict[str, Tensor]:
    model = _on_meta(kind)
    torch.manual_seed(7)
    themis.parallelize(model)
    values = {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    executor_of(model).close()
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_values_do_not_depend_on_the_ranks(kind: str) -> None:
    (alone,) = run_ranks(1, _values, kind)
    assert all(tensor.isfinite().all() for tensor in alone.values() if tensor.is_floating_point())
    for world_size in (2, 3, 10):  # ten: two ranks own no expert
        ranks = run_ranks(world_size, _values, kind)
        for values in ranks:
            assert all(torch.equal(tensor, alone[name]) for name, tensor in values.items())
        assert {name for values in ranks for name in values} == set(alone)


def _train(rank: int, world_size: int, kind: str) -> list[float]:
    """Losses of three steps on the same batch on every rank, experts moving after each."""
    model = _on_meta(kind)
    torch.manual_seed(7)
    themis.parallelize(model, policy=ScriptedPolicy(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        output = model(TOKENS).logits if kind == "gpt_moe" else output_of(model(input_ids=TOKENS))
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    executor_of(model).close()
    return losses


@pytest.mark.parametrize("kind", ["gpt_moe", "mixtral"])
def test_it_trains(kind: str) -> None:
    (alone,) = run_ranks(1, _train, 1, kind)
    for losses in run_ranks(2, _train, 2, kind):
        assert losses == pytest.approx(alone, rel=1e-5)


class _Ones(WeightSource):
    def fill(self, model: nn.Module, sites: Sequence[MoESite]) -> None:
        with torch.no_grad():
            for parameter in list(model.parameters())[int(self.skips) :]:
                parameter.fill_(1.0)

    skips = False


class _AllButOne(_Ones):
    skips = True


def test_a_source_of_ones_own() -> None:
    with torch.device("meta"):
        model = TinyMoE(MoEConfig(8, 8, 4, 2), 1)
    themis.parallelize(model, weights=_Ones())
    assert all((parameter == 1).all() for parameter in model.parameters())
    executor_of(model).close()


def test_what_cannot_start_is_refused() -> None:
    with torch.device("meta"):
        tiny = TinyMoE(MoEConfig(8, 8, 4, 2), 1)
    with pytest.raises(ConfigError, match=r"TinyMoE. is on the meta device and has no initialize_weights\(\)"):
        themis.parallelize(tiny)
    with torch.device("meta"):
        tiny = TinyMoE(MoEConfig(8, 8, 4, 2), 1)
    with pytest.raises(ConfigError, match="was given no value, or NaN"):
        themis.parallelize(tiny, weights=_AllButOne())
    with pytest.raises(ConfigError, match=r"weights is .*None with a model that has its values already"):
        themis.parallelize(TinyMoE(MoEConfig(8, 8, 4, 2), 1), weights=FreshWeights())
    mixed = TinyMoE(MoEConfig(8, 8, 4, 2), 1)
    mixed.extra = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ConfigError, match="'extra' on the meta device and other parameters elsewhere"):
        themis.parallelize(mixed)
    weights: Any = "a path"
    with pytest.raises(ConfigError, match="weights is 'a path'; it must be a themis WeightSource"):
        themis.parallelize(_on_meta("gpt_moe"), weights=weights)


def test_an_optimizer_built_before_is_refused() -> None:
    model = _on_meta("gpt_moe")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    themis.parallelize(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    optimizer.add_param_group({"params": [next(model.parameters())]})
    with pytest.raises(ConfigError, match="build it after themis"):
        optimizer.step()
    executor_of(model).close()
