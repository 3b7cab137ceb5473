"""Transformers' families by their dimensions, and the losses of their routers."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

import themis
from themis.core.errors import ConfigError
from themis.fssdp import executor_of
from themis.models import TransformersConfig, build
from themis.train.config import RunConfig, from_record
from themis.train.memory import count

pytest.importorskip("transformers")

SMALL = TransformersConfig(
    model_type="qwen2_moe",
    sequence_length=16,
    width=16,
    num_heads=2,
    num_layers=2,
    num_experts=6,
    expert_hidden=12,
    settings={"shared_expert_intermediate_size": 20, "num_key_value_heads": 1},
)
TOKENS = torch.arange(24).view(3, 8)


def _model(config: TransformersConfig) -> Any:
    torch.manual_seed(0)
    return themis.parallelize(build(config, torch.float64))


def test_dimensions_are_the_familys() -> None:
    family = SMALL.family()
    assert (family.hidden_size, family.moe_intermediate_size, family.num_experts) == (16, 12, 6)
    assert (family.num_key_value_heads, family.shared_expert_intermediate_size) == (1, 20)
    mixtral = replace(SMALL, model_type="mixtral", settings={}).family()
    assert (mixtral.intermediate_size, mixtral.num_local_experts, mixtral.num_key_value_heads) == (12, 6, 2)


def test_losses_are_those_of_the_routers_logits() -> None:
    """Against transformers' own load-balancing loss, which is E times the same sum over the K choices."""
    model = _model(replace(SMALL, aux_loss_weight=0.5, z_loss_weight=0.25))
    output = model(TOKENS, TOKENS)
    logits_LTE = torch.stack(model.model(input_ids=TOKENS, output_router_logits=True).router_logits)
    probs_LTE = logits_LTE.softmax(2)
    chosen_LTE = torch.zeros_like(probs_LTE).scatter(2, logits_LTE.topk(2, dim=2).indices, 1.0)
    aux = 6 * (chosen_LTE.mean(1) / 2 * probs_LTE.mean(1)).sum(1).mean()
    z = logits_LTE.logsumexp(2).square().mean()
    assert output.aux_loss.item() == pytest.approx(aux.item(), rel=1e-6)
    assert output.z_loss.item() == pytest.approx(z.item(), rel=1e-6)
    assert output.loss.item() == pytest.approx((output.cross_entropy + 0.5 * aux + 0.25 * z).item(), rel=1e-6)
    output.loss.backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "gate.weight" in name)
    executor_of(model).close()


def test_an_empty_batch_has_a_loss_of_zero_and_gradients() -> None:
    model = _model(SMALL)
    output = model(TOKENS[:0], TOKENS[:0])
    assert output.logits.shape == (0, 8, 256)
    assert output.loss.item() == 0
    output.loss.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    full = model(TOKENS, TOKENS)  # nothing of the empty batch is left
    assert full.logits.shape == (3, 8, 256)
    executor_of(model).close()


@pytest.mark.parametrize("model_type", ["qwen2_moe", "deepseek_v3"])
def test_routers_compute_in_float32_under_autocast(model_type: str) -> None:
    settings = {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1} if model_type == "deepseek_v3" else {}
    model = themis.parallelize(build(replace(SMALL, model_type=model_type, settings=settings)))
    seen = []
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(lambda _, __, output: seen.append(output[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(TOKENS, TOKENS).loss.backward()
    assert seen == [torch.float32] * 2
    executor_of(model).close()


def test_a_missing_package_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "transformers.models.auto.modeling_auto", None)
    with pytest.raises(ConfigError, match=r"need that package: pip install 'themis-moe\[hf\]'"):
        build(SMALL)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, model_type="mixtral", settings={}),
        replace(SMALL, model_type="phimoe", settings={"attention_bias": True}),
        replace(
            SMALL,
            model_type="deepseek_v3",
            bias_update_rate=0.1,
            settings={"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1},
        ),
    ],
)
def test_parameters_are_counted(config: TransformersConfig) -> None:
    counted = count(config)
    model = _model(config)
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    unused = [p.numel() for n, p in model.named_parameters() if re.search(r"\.owned\.[2-5]\.", n)]
    assert counted.active == counted.total - sum(unused)
    executor_of(model).close()


def test_json_keeps_it() -> None:
    config = RunConfig(model=SMALL)
    assert from_record(RunConfig, asdict(config), "") == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "nope"}, "model.model_type is 'nope', which transformers does not know"),
        ({"model_type": "llama"}, "which has no num_local_experts or"),
        ({"settings": {"nope": 1}}, "model.settings is 'nope'; it must be arguments of Qwen2MoeConfig"),
        ({"settings": {"hidden_size": 8}}, "model.settings is 'hidden_size'; it must be given as its own flag"),
        ({"settings": {"shared_expert_intermediate_size": "x"}}, "Qwen2MoeConfig refuses these settings"),
        ({"top_k": 7}, "model.top_k is 7; it must be at most 6"),
        ({"width": 0}, "model.width is 0"),
        ({"width": 18}, "model.width is 18; it must be a multiple of 2 * model.num_heads (4)"),
        ({"settings": {"num_key_value_heads": 3}}, "model.num_heads is 2; it must be a multiple of model.settings"),
        ({"model_type": "phimoe", "top_k": 3, "settings": {}}, "model.top_k is 3; it must be 2 in a phimoe"),
        ({"model_type": "deepseek_v3", "settings": {"n_group": 4}}, "model.num_experts is 6; it must be a multiple of"),
        (
            {"model_type": "deepseek_v3", "top_k": 4, "settings": {"n_group": 2, "topk_group": 1}},
            "model.top_k is 4; it must be at most 3, the experts of",
        ),
        ({"bias_update_rate": 0.1}, "routers of qwen2_moe have no bias that balances them"),
        ({"bias_update_rate": -1.0}, "model.bias_update_rate is -1.0"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        build(replace(SMALL, **change))
    assert "\n" not in str(caught.value)
