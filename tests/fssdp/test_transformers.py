"""Transformers models of every kind of experts, parallelized unchanged: the result is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import themis
from themis.core.errors import ConfigError
from themis.testing.models import ScriptedPolicy
from themis.testing.ranks import RankError, run_ranks

pytest.importorskip("transformers")

from themis.testing.agreement import RANKS, batch_loss, difference, disagreement
from themis.testing.families import build_tiny

#: Every flag of the interface is among them; all 67 are in docs/families.md.
FAMILIES = [
    "aria",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "ernie4_5_moe",
    "flex_olmo",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "hunyuan_v1_moe",
    "inkling2_loop",
    "jamba",
    "lfm2_moe",
    "minimax_m2",
    "mixtral",
    "muse_spark",
    "nemotron_h",
    "olmoe",
    "openai_privacy_filter",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "zaya",
]
#: These compute parts in float32 whatever the model's type, so that the order of additions shows.
PARTLY_FLOAT32 = {"inkling2_loop", "muse_spark", "nemotron_h", "openai_privacy_filter"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_experts_gives_the_result_of_one_process(family: str) -> None:
    results = run_ranks(RANKS, disagreement, family, torch.float64)
    assert max(worst for worst, _ in results) < (1e-5 if family in PARTLY_FLOAT32 else 1e-9)
    assert set.union(*(owned for _, owned in results)) == set(range(8))


def _worst(family: str, options: dict[str, Any]) -> float:
    return max(run_ranks(RANKS, _disagreement, family, options))


def _disagreement(rank: int, family: str, options: dict[str, Any]) -> float:
    return disagreement(rank, family, torch.float64, **options)[0]


def _checkpoint(model: Any) -> None:
    model.gradient_checkpointing_enable()


@pytest.mark.parametrize(("rematerialize", "checkpointing"), [(True, False), (False, True), (True, True)])
def test_rematerialisation_and_gradient_checkpointing(rematerialize: bool, checkpointing: bool) -> None:
    prepare = _checkpoint if checkpointing else None
    assert _worst("mixtral", {"rematerialize": rematerialize, "prepare": prepare}) < 1e-9


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [("qwen2_moe", True), ("deepseek_v3", True), ("flint", False), ("ernie4_5_vl_moe", False)],
)
def test_sharded_dense_parameters(family: str, checkpointing: bool) -> None:
    """Also routers and attention's sinks of another type than the model, and two MoE layers in a block."""
    assert _worst(family, {"dense": "fully_shard", "prepare": _checkpoint if checkpointing else None}) < 1e-8


def test_sharded_dense_parameters_of_two_types_in_one_module_are_refused() -> None:
    with pytest.raises(RankError, match="InklingTopkRouter of the model has parameters of the types"):
        _worst("inkling", {"dense": "fully_shard"})


def _compile_attention(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.compile(backend="aot_eager")


def _compile_blocks(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


@pytest.mark.parametrize("compile_parts", [_compile_attention, _compile_blocks])
def test_compiled_dense_parts(compile_parts: Any) -> None:
    """A compiled block breaks its graph around the experts."""
    assert _worst("mixtral", {"prepare": compile_parts}) < 1e-9


def _train(rank: int, world_size: int, family: str) -> list[float]:
    """Losses over both ranks' batches, re-sharding every second step."""
    model = build_tiny(family, dtype=torch.float64)
    if world_size > 1:
        themis.parallelize(model, policy=ScriptedPolicy(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        parts = [batch_loss(model, r)[1] for r in ([rank] if world_size > 1 else range(RANKS))]
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
        (batch_loss(alone, r)[1] / RANKS).backward()
    themis.parallelize(model, policy=ScriptedPolicy(6))
    batch_loss(model, rank)[1].backward()
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.requires_grad}
    mine = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert mine.keys() == wanted.keys()
    for name, gradient in mine.items():
        worst = max(worst, difference(gradient, wanted[name]))
    return worst, len(mine)


def test_adapters_on_dense_layers_train_beside_frozen_experts() -> None:
    for worst, count in run_ranks(RANKS, _tune_an_adapter):
        assert worst < 1e-9
        assert count == 8


def test_bf16_compute_keeps_the_masters_type() -> None:
    model = build_tiny("qwen3_moe")
    themis.parallelize(model, policy=themis.EP(), mixed_precision=themis.MixedPrecision(torch.bfloat16, torch.float32))
    batch_loss(model, 0)[1].backward()
    gradients = [p.grad for name, p in model.named_parameters() if ".owned." in name]
    assert all(g is not None and g.dtype == torch.float32 and g.isfinite().all() for g in gradients)


def test_an_optimizer_built_before_is_refused() -> None:
    model = build_tiny("mixtral")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    themis.parallelize(model, policy=themis.EP())
    batch_loss(model, 0)[1].backward()
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
