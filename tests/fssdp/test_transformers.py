"""Transformers models of every kind of experts, parallelized unchanged: the result is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import themis
from themis.core.errors import ConfigError
from themis.fssdp import executor_of
from themis.testing.models import ScriptedPolicy
from themis.testing.ranks import run_ranks

pytest.importorskip("transformers")

from themis.testing.families import FAMILIES, build_tiny, output_of

RANKS = 2
PARTLY_FLOAT32 = {"openai_privacy_filter", "nemotron_h", "muse_spark_text"}


def _batch(rank: int) -> Tensor:
    """Ranks differ in batch size, too."""
    return torch.randint(3, 128, (2 + rank, 7), generator=torch.Generator().manual_seed(rank))


def _loss(model: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
    output = output_of(model(input_ids=_batch(rank)))
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=output.dtype)
    return output.detach(), (output * weights).sum()  # large gradients, so that differences show


def _reference(family: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Each rank's output, and the gradients of the mean of the ranks' losses, by name."""
    model = build_tiny(family, dtype=dtype)
    outputs = []
    for rank in range(RANKS):
        output, loss = _loss(model, rank)
        (loss / RANKS).backward()
        outputs.append(output)
    return outputs, {name: parameter.grad for name, parameter in model.named_parameters()}


def _difference(mine: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference, relative to entries above 1; no gradient counts as zero."""
    if mine is None and wanted is None:
        return 0.0
    shape_of = mine if wanted is None else wanted
    assert shape_of is not None
    zero = torch.zeros_like(shape_of)
    mine, wanted = zero if mine is None else mine, zero if wanted is None else wanted
    return float((mine - wanted).abs().max() / max(1.0, float(wanted.abs().max())))


def _wanted(name: str, gradients: dict[str, Tensor | None]) -> Tensor | None:
    """The reference's gradient of parameter `name`, an expert's being a slice of the stacked one."""
    if ".owned." not in name:
        return gradients[name]
    module, rest = name.split(".owned.")
    e, parameter = rest.split(".")
    stacked = gradients[f"{module}.{parameter}"]
    return None if stacked is None else stacked[int(e)]


def _worst(
    rank: int, family: str, dtype: torch.dtype, rematerialize: bool, checkpointing: bool
) -> tuple[float, set[int]]:
    outputs, gradients = _reference(family, dtype)
    model: Any = build_tiny(family, dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
    themis.parallelize(model, policy=ScriptedPolicy(3, rematerialize_replicas=rematerialize))
    output, loss = _loss(model, rank)
    loss.backward()
    worst = _difference(output, outputs[rank])
    owned = set()
    for name, parameter in model.named_parameters():
        worst = max(worst, _difference(parameter.grad, _wanted(name, gradients)))
        if ".owned." in name:
            owned.add(int(name.split(".owned.")[1].split(".")[0]))
    norm = float(themis.clip_grad_norm_(model, 1e9))
    wanted = torch.stack([g.double().norm() for g in gradients.values() if g is not None]).norm()
    worst = max(worst, abs(norm - float(wanted)) / max(1.0, float(wanted)))
    executor_of(model).close()
    return worst, owned


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_experts_gives_the_result_of_one_process(family: str) -> None:
    results = run_ranks(RANKS, _worst, family, torch.float64, False, False)
    # Some families compute parts in float32 whatever the model's type, so that the order of additions shows.
    assert max(worst for worst, _ in results) < (1e-5 if family in PARTLY_FLOAT32 else 1e-9)
    assert set.union(*(owned for _, owned in results)) == set(range(8))


@pytest.mark.parametrize(("rematerialize", "checkpointing"), [(True, False), (False, True), (True, True)])
def test_rematerialisation_and_gradient_checkpointing(rematerialize: bool, checkpointing: bool) -> None:
    results = run_ranks(RANKS, _worst, "mixtral", torch.float64, rematerialize, checkpointing)
    assert max(worst for worst, _ in results) < 1e-9


def _train(rank: int, world_size: int, family: str) -> list[float]:
    """Losses over both ranks' batches, re-sharding every second step."""
    model = build_tiny(family, dtype=torch.float64)
    if world_size > 1:
        themis.parallelize(model, policy=ScriptedPolicy(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        parts = [_loss(model, r)[1] for r in ([rank] if world_size > 1 else range(RANKS))]
        total = torch.stack(parts).mean()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def test_training_with_experts_that_move_follows_one_process() -> None:
    alone = torch.tensor(_train(0, 1, "qwen2_moe"), dtype=torch.float64)
    mean = torch.tensor(run_ranks(RANKS, _train, RANKS, "qwen2_moe"), dtype=torch.float64).mean(dim=0)
    assert (mean - alone).abs().max() < 1e-9
    assert alone[-1] < alone[0]


def _generate(rank: int) -> list[int]:
    model: Any = build_tiny("mixtral", dtype=torch.float64)
    prompt = torch.arange(3, 9)[None]
    arguments = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    alone = model.eval().generate(prompt, **arguments)
    themis.parallelize(model, policy=ScriptedPolicy(4))
    return (model.generate(prompt, **arguments) != alone).flatten().int().tolist()


def test_generation_gives_the_same_tokens() -> None:
    assert all(not any(differs) for differs in run_ranks(RANKS, _generate))


def _tune_an_adapter(rank: int) -> tuple[float, int]:
    peft = pytest.importorskip("peft")
    worst = 0.0
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        models.append(peft.get_peft_model(build_tiny("mixtral", dtype=torch.float64), config).double())
    alone, model = models
    for r in range(RANKS):
        (_loss(alone, r)[1] / RANKS).backward()
    themis.parallelize(model, policy=ScriptedPolicy(6))
    _loss(model, rank)[1].backward()
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.requires_grad}
    mine = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert mine.keys() == wanted.keys()
    for name, gradient in mine.items():
        worst = max(worst, _difference(gradient, wanted[name]))
    return worst, len(mine)


def test_adapters_on_dense_layers_train_beside_frozen_experts() -> None:
    for worst, count in run_ranks(RANKS, _tune_an_adapter):
        assert worst < 1e-9
        assert count == 8


def test_bf16_compute_keeps_the_masters_type() -> None:
    model = build_tiny("qwen3_moe")
    themis.parallelize(model, policy=themis.EP(), mixed_precision=themis.MixedPrecision(torch.bfloat16, torch.float32))
    _loss(model, 0)[1].backward()
    gradients = [p.grad for name, p in model.named_parameters() if ".owned." in name]
    assert all(g is not None and g.dtype == torch.float32 and g.isfinite().all() for g in gradients)


def test_an_optimizer_built_before_is_refused() -> None:
    model = build_tiny("mixtral")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    themis.parallelize(model, policy=themis.EP())
    _loss(model, 0)[1].backward()
    with pytest.raises(ConfigError, match="build it after"):
        optimizer.step()


def test_a_skipped_choice_adds_nothing() -> None:
    model: Any = build_tiny("mixtral")
    experts = model.model.layers[0].mlp.experts
    tokens, weights = torch.randn(5, 32), torch.rand(5, 2)
    index = torch.tensor([[0, 8], [1, 2], [8, 8], [3, 4], [8, 5]])
    wanted = experts(tokens, index, weights)
    themis.parallelize(model, policy=themis.EP())
    assert torch.allclose(experts(tokens, index, weights), wanted, atol=1e-5)


def test_experts_outside_the_interface_are_refused_by_name() -> None:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "vocab_size": 64, "num_experts": 4}
    layers = {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1}
    config = SwitchTransformersConfig(**sizes, **layers)
    with pytest.raises(ConfigError, match="experts interface"):
        themis.parallelize(SwitchTransformersForConditionalGeneration(config))


def test_experts_that_are_not_what_their_flags_say_are_refused() -> None:
    model: Any = build_tiny("mixtral")
    model.model.layers[1].mlp.experts.scale = nn.Parameter(torch.ones(8))
    with pytest.raises(ConfigError, match=r"layers.1.mlp.experts.*scale"):
        themis.parallelize(model)
    assert hasattr(model.model.layers[0].mlp.experts, "gate_up_proj"), "a refusal changes nothing"
