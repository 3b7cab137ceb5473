"""The six hooks: their order, what passes them, replacing it, and taking a hook off again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from themis.core.errors import ConfigError
from themis.moe import MoEConfig, MoELayer
from themis.moe.hooks import HOOK_NAMES, Hooks
from themis.moe.reference import moe_reference

CONFIG = MoEConfig(6, 10, 4, 2)


def make_layer() -> tuple[MoELayer, Tensor]:
    torch.manual_seed(0)
    layer = MoELayer(CONFIG).double()
    return layer, torch.randn(5, CONFIG.width, dtype=torch.float64, requires_grad=True)


def test_six_fire_once_each_in_the_order_of_the_layer() -> None:
    layer, x_TM = make_layer()
    plain_TM = layer(x_TM).hidden
    seen: list[tuple[str, int]] = []
    for name in reversed(HOOK_NAMES):
        layer.hooks.add(name, lambda tensor, name=name: seen.append((name, tensor.shape[0])))
    hidden_TM = layer(x_TM).hidden
    assert seen == [
        ("before_moe_start", 5),
        ("before_dispatch", 10),
        ("after_dispatch", 10),
        ("before_combine", 10),
        ("after_combine", 10),
        ("before_moe_end", 5),
    ]
    assert torch.equal(hidden_TM, plain_TM), "hooks that return nothing change nothing"


def test_what_passes_each_hook() -> None:
    layer, x_TM = make_layer()
    passed: dict[str, Tensor] = {}
    for name in HOOK_NAMES:
        layer.hooks.add(name, lambda tensor, name=name: passed.update({name: tensor}))
    output = layer(x_TM)
    experts_TK = layer.gate(x_TM).experts_TK
    token_A = [t for e in range(4) for t in (experts_TK == e).any(1).nonzero().squeeze(1).tolist()]
    assert torch.equal(passed["before_moe_start"], x_TM)
    assert torch.equal(passed["before_dispatch"], x_TM[token_A])
    assert torch.equal(passed["after_dispatch"], x_TM[token_A])
    assert torch.equal(passed["before_combine"], passed["after_combine"])
    assert torch.equal(passed["before_moe_end"], output.hidden)


def test_a_pair_may_compress_rows_on_the_way() -> None:
    layer, x_TM = make_layer()
    on_the_wire: list[torch.dtype] = []

    def compress(rows_AM: Tensor) -> Tensor:
        on_the_wire.append(rows_AM.to(torch.bfloat16).dtype)
        return rows_AM.to(torch.bfloat16)

    for name in ("before_dispatch", "before_combine"):
        layer.hooks.add(name, compress)
    for name in ("after_dispatch", "after_combine"):
        layer.hooks.add(name, lambda rows_AM: rows_AM.double())
    output = layer(x_TM)
    assert on_the_wire == [torch.bfloat16] * 2
    exact = moe_reference(layer, x_TM)
    torch.testing.assert_close(output.hidden, exact.hidden, rtol=0.02, atol=0.02)
    assert not torch.equal(output.hidden, exact.hidden)
    (grad_TM,) = torch.autograd.grad(output.hidden.sum(), x_TM)
    assert grad_TM.isfinite().all()
    assert grad_TM.any()


@pytest.mark.parametrize("name", HOOK_NAMES)
def test_a_replacement_is_what_the_layer_goes_on_with(name: str) -> None:
    layer, x_TM = make_layer()
    layer.hooks.add(name, lambda tensor: tensor * 0.0)
    zero_TM = torch.zeros_like(x_TM)
    expected_TM = moe_reference(layer, zero_TM).hidden if HOOK_NAMES.index(name) < 3 else zero_TM
    torch.testing.assert_close(layer(x_TM).hidden, expected_TM)


def test_functions_of_one_hook_run_in_the_order_added_and_see_replacements() -> None:
    hooks = Hooks()
    hooks.add("before_dispatch", lambda tensor: tensor + 1.0)
    hooks.add("before_dispatch", lambda tensor: None)
    hooks.add("before_dispatch", lambda tensor: tensor * 10.0)
    assert hooks.run("before_dispatch", torch.tensor(2.0)).item() == 30.0
    assert hooks.run("after_dispatch", torch.tensor(2.0)).item() == 2.0


def test_removal_takes_off_exactly_that_entry() -> None:
    hooks = Hooks()

    def double(tensor: Tensor) -> Tensor:
        return tensor * 2.0

    hooks.add("before_combine", double)
    hooks.add("before_combine", lambda tensor: tensor + 1.0)
    remove_last = hooks.add("before_combine", double)
    value = torch.tensor(3.0)
    assert hooks.run("before_combine", value).item() == 14.0
    remove_last()
    remove_last()  # no harm
    assert hooks.run("before_combine", value).item() == 7.0


def test_a_function_may_remove_itself_while_it_runs() -> None:
    hooks, calls = Hooks(), []

    def once(tensor: Tensor) -> None:
        calls.append("once")
        remove()

    remove = hooks.add("after_combine", once)
    hooks.add("after_combine", lambda tensor: calls.append("always"))
    for _ in range(2):
        hooks.run("after_combine", torch.tensor(0.0))
    assert calls == ["once", "always", "always"]


def test_unknown_hooks_are_named() -> None:
    with pytest.raises(ConfigError, match=r"name is 'before_gate'; it must be one of before_moe_start, "):
        Hooks().add("before_gate", lambda tensor: tensor)
