"""The layer against its slow reference, and what surrounds it: padding, checkpointing, precision, bad arguments."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from themis.core.errors import ConfigError
from themis.moe import MoEConfig, MoELayer, MoEOutput
from themis.moe.reference import moe_reference
from themis.testing.strategies import quick

IDLE = -1e4


def build(config: MoEConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> MoELayer:
    torch.manual_seed(seed)
    layer = MoELayer(config).to(dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.dim() == 1 or name == "gate.weight":  # biases start at zero, scores close to it
                parameter.normal_()
    return layer


def make_tokens(num_tokens: int, config: MoEConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    x_TM = torch.randn(num_tokens, config.width, generator=draw, dtype=torch.float64)
    x_TM[:, 0] = 1.0
    return x_TM.to(dtype).requires_grad_()


def gradients(layer: MoELayer, output: MoEOutput, x: Tensor) -> dict[str, Tensor]:
    """Of a loss in which every output element has a weight of its own; "x" is the input's."""
    hidden = output.hidden.to(torch.float64)
    weight = torch.linspace(-1.0, 2.0, hidden.numel(), dtype=torch.float64).view_as(hidden)
    loss = (hidden.sin() * weight).sum() + 0.7 * output.aux_loss + 0.3 * output.z_loss
    named = dict(layer.named_parameters()) | {"x": x}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    missing = [name for name, grad in zip(named, grads, strict=True) if grad is None]
    assert not missing, f"no gradient for {missing}"
    return {name: grad for name, grad in zip(named, grads, strict=True) if grad is not None}


def assert_equal(left: MoEOutput, right: MoEOutput, tolerance: float = 1e-10) -> None:
    for name in MoEOutput._fields:
        mine, theirs = getattr(left, name), getattr(right, name)
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def assert_equal_gradients(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name], right[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@st.composite
def problems(draw: st.DrawFn) -> tuple[MoELayer, Tensor]:
    """A layer and tokens: zero tokens, idle experts, tied scores, every expert chosen and a single one among them."""
    num_experts = draw(st.integers(1, 8))
    config = MoEConfig(
        width=draw(st.sampled_from([1, 4, 7])),
        expert_hidden=draw(st.sampled_from([1, 5, 16])),
        num_experts=num_experts,
        top_k=draw(st.one_of(st.integers(1, num_experts), st.sampled_from([1, num_experts]))),
        experts=draw(st.sampled_from(["gpt", "swiglu"])),
        bias=draw(st.booleans()),
        shared_hidden=draw(st.sampled_from([0, 1, 6])),
        normalize_weights=draw(st.booleans()),
    )
    seed = draw(st.integers(0, 999))
    layer = build(config, seed)
    idle = draw(st.lists(st.integers(0, num_experts - 1), unique=True, max_size=num_experts - config.top_k))
    with torch.no_grad():
        if draw(st.booleans()):  # pairs of experts with one score: every choice between them is a tie
            layer.gate.weight.copy_(layer.gate.weight[torch.arange(num_experts) // 2])
        layer.gate.weight[idle, 0] = IDLE
    return layer, make_tokens(draw(st.sampled_from([0, 1, 2, 5, 13])), config, seed)


@quick(120)
@given(problems())
def test_equals_the_reference(problem: tuple[MoELayer, Tensor]) -> None:
    layer, x_TM = problem
    output, expected = layer(x_TM), moe_reference(layer, x_TM)
    assert_equal(output, expected)
    assert_equal_gradients(gradients(layer, output, x_TM), gradients(layer, expected, x_TM))


CONFIG = MoEConfig(6, 10, 5, 2, shared_hidden=4)


def test_experts_without_tokens_get_zero_gradients_not_none() -> None:
    layer = build(CONFIG)
    with torch.no_grad():
        layer.gate.weight[3, 0] = IDLE
    x_TM = make_tokens(9, CONFIG)
    grads = gradients(layer, layer(x_TM), x_TM)
    assert all(not grads[f"experts.3.{name}"].any() for name in layer.experts.layout.shapes)
    assert all(grads[f"experts.{e}.w1"].any() for e in range(5) if e != 3)


def test_leading_dimensions_are_those_of_the_input() -> None:
    layer = build(CONFIG)
    x_TM = make_tokens(12, CONFIG)
    flat = layer(x_TM)
    folded = layer(x_TM.view(2, 3, 2, -1))
    assert folded.hidden.shape == (2, 3, 2, CONFIG.width)
    assert_equal(folded._replace(hidden=folded.hidden.reshape(12, -1)), flat, 0.0)
    turned = x_TM.view(3, 4, -1).transpose(0, 1)  # not contiguous
    assert_equal(layer(turned), layer(turned.contiguous()), 0.0)


@given(st.lists(st.booleans(), min_size=12, max_size=12))
@quick(30)
def test_padding_counts_nowhere(kept: list[bool]) -> None:
    layer = build(CONFIG)
    mask = torch.tensor(kept).view(3, 4)
    poisoned = make_tokens(12, CONFIG).detach().view(3, 4, -1).masked_fill(~mask[..., None], float("nan"))
    padded_x, alone_x = poisoned.requires_grad_(), poisoned.detach()[mask].requires_grad_()
    padded, alone = layer(padded_x, mask), layer(alone_x)
    assert not padded.hidden[~mask].any()
    rows = MoEOutput(padded.hidden[mask], padded.aux_loss, padded.z_loss)
    assert_equal(rows, alone, 0.0)
    with_padding, without = gradients(layer, rows, padded_x), gradients(layer, alone, alone_x)
    assert not with_padding["x"][~mask].any()
    assert_equal_gradients(with_padding | {"x": with_padding["x"][mask]}, without, 0.0)


@pytest.mark.parametrize("noise", [False, True])
def test_checkpointing_recomputes_the_same(noise: bool) -> None:
    config = MoEConfig(6, 10, 5, 2, noise=noise)
    layer, twin = build(config), build(config)
    x_TM = make_tokens(9, config)
    torch.manual_seed(7)
    plain = layer(x_TM)
    torch.manual_seed(7)
    again = checkpoint(twin, x_TM, use_reentrant=False)
    assert_equal(again, plain, 0.0)
    assert_equal_gradients(gradients(twin, again, x_TM), gradients(layer, plain, x_TM), 0.0)


def test_a_copy_trains_experts_of_its_own() -> None:
    layer = build(CONFIG)
    twin = copy.deepcopy(layer)
    x_TM = make_tokens(9, CONFIG)
    assert_equal(twin(x_TM), layer(x_TM), 0.0)
    before = layer(x_TM).hidden
    with torch.no_grad():
        for parameter in twin.experts.parameters():
            parameter.zero_()
    torch.testing.assert_close(layer(x_TM).hidden, before, rtol=0, atol=0)
    assert not torch.equal(twin(x_TM).hidden, before)


@pytest.mark.parametrize("kind", ["gpt", "swiglu"])
@pytest.mark.parametrize("tokens", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_under_autocast_gemms_run_in_bfloat16_and_gradients_stay_wide(kind: str, tokens: torch.dtype) -> None:
    config = MoEConfig(6, 10, 5, 2, experts=kind, shared_hidden=4)
    layer = build(config, dtype=torch.float32)
    x_TM = make_tokens(16, config, dtype=torch.float32).detach().to(tokens).requires_grad_()
    seen: list[torch.dtype] = []
    layer.hooks.add("before_combine", lambda rows_AM: seen.append(rows_AM.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x_TM)
    assert seen == [torch.bfloat16]
    assert output.hidden.dtype == tokens
    assert output.aux_loss.dtype == output.z_loss.dtype == torch.float32
    exact = layer(x_TM.detach().float().requires_grad_())
    torch.testing.assert_close(output.hidden.float(), exact.hidden, rtol=0.05, atol=0.05)
    assert not torch.equal(output.hidden.float(), exact.hidden)
    grads = gradients(layer, output, x_TM)
    assert all(grads[name].dtype == parameter.dtype for name, parameter in layer.named_parameters())


def test_bfloat16_layer_keeps_losses_wide() -> None:
    layer = build(CONFIG, dtype=torch.bfloat16)
    x_TM = make_tokens(16, CONFIG, dtype=torch.bfloat16)
    output = layer(x_TM)
    assert output.hidden.dtype == torch.bfloat16
    assert output.aux_loss.dtype == output.z_loss.dtype == torch.float32
    exact = moe_reference(copy.deepcopy(layer).double(), x_TM.detach().double())
    torch.testing.assert_close(output.hidden.double(), exact.hidden, rtol=0.05, atol=0.1)
    assert all(g.isfinite().all() for g in gradients(layer, output, x_TM).values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "width is 0; it must be a whole number, 1 or more"),
        ({"expert_hidden": -3}, "expert_hidden is -3"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 1.5}, r"top_k is 1\.5; it must be a whole number"),
        ({"top_k": True}, "top_k is True"),
        ({"num_experts": "8"}, "num_experts is '8'; it must be a whole number"),
        ({"top_k": 6}, r"top_k is 6; it must be at most num_experts \(5\)"),
        ({"shared_hidden": -1}, "shared_hidden is -1; it must be a whole number, 0 or more"),
        ({"experts": "relu"}, "experts is 'relu'; it must be 'gpt' or 'swiglu'"),
    ],
)
def test_bad_configurations_name_the_argument(changes: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"width": 6, "expert_hidden": 10, "num_experts": 5, "top_k": 2}
    with pytest.raises(ConfigError, match=message):
        MoEConfig(**(good | changes))  # type: ignore[arg-type]


def test_bad_inputs_name_the_argument() -> None:
    layer = build(CONFIG)
    with pytest.raises(ConfigError, match=r"x is of shape \(3, 7\); it must be \[\.\.\., 6\]"):
        layer(torch.zeros(3, 7, dtype=torch.float64))
    x = torch.zeros(2, 3, 6, dtype=torch.float64)
    with pytest.raises(
        ConfigError, match=r"mask is torch.bool of shape \(6,\); it must be torch.bool of shape \(2, 3\)"
    ):
        layer(x, torch.ones(6, dtype=torch.bool))
    with pytest.raises(ConfigError, match=r"mask is torch\.float64"):
        layer(x, torch.zeros(2, 3, dtype=torch.float64))
