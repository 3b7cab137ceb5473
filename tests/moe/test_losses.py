"""Routing losses by hand, and the same on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from themis.moe import MoEConfig, MoELayer
from themis.moe.losses import load_balancing_loss, router_z_loss
from themis.testing.strategies import quick


def test_auxiliary_loss_by_hand() -> None:
    probs_TE = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.1, 0.3]], dtype=torch.float64)
    tokens_ED = np.array([[2], [1], [1]])  # top-2: experts 0 and 1, then 0 and 2
    # E * sum_i f_i * P_i with f = (2, 1, 1) / 4 and P = (0.55, 0.2, 0.25)
    assert load_balancing_loss(probs_TE, tokens_ED, 2).item() == pytest.approx(3 * (0.275 + 0.05 + 0.0625))


def test_z_loss_by_hand() -> None:
    logits_TE = torch.tensor([[0.0, 0.0], [np.log(3.0), 0.0]], dtype=torch.float64)
    expected = (np.log(2.0) ** 2 + np.log(4.0) ** 2) / 2
    assert router_z_loss(logits_TE, np.array([[1], [1]]), 1).item() == pytest.approx(expected)
    assert router_z_loss(logits_TE, np.array([[2], [2]]), 2).item() == pytest.approx(expected)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 1), (4, 2), (6, 3)])
def test_even_routing_gives_one_and_collapse_gives_the_number_of_experts(num_experts: int, top_k: int) -> None:
    tokens = 2 * num_experts
    even_TE = torch.full((tokens, num_experts), 1.0 / num_experts, dtype=torch.float64)
    even_ED = np.full((num_experts, 1), tokens * top_k // num_experts)
    assert load_balancing_loss(even_TE, even_ED, top_k).item() == pytest.approx(1.0)
    one_TE = torch.zeros_like(even_TE).index_fill_(1, torch.tensor([0]), 1.0)
    one_ED = np.zeros((num_experts, 1), dtype=np.int64)
    one_ED[0] = tokens
    assert load_balancing_loss(one_TE, one_ED, 1).item() == pytest.approx(num_experts)


def both(logits_TE: Tensor, tokens_ED: np.ndarray, top_k: int) -> tuple[Tensor, Tensor]:
    return load_balancing_loss(logits_TE.softmax(1), tokens_ED, top_k), router_z_loss(logits_TE, tokens_ED, top_k)


def counts(experts_TK: Tensor, num_experts: int) -> np.ndarray:
    return np.bincount(experts_TK.reshape(-1).numpy(), minlength=num_experts)


@quick(80)
@given(st.integers(1, 6), st.lists(st.sampled_from([0, 0, 1, 4, 9]), min_size=1, max_size=5), st.data())
def test_the_mean_over_ranks_is_the_loss_of_the_whole(
    num_experts: int, tokens_D: list[int], data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits_TE = torch.randn(sum(tokens_D), num_experts, generator=draw, dtype=torch.float64).requires_grad_()
    experts_TK = logits_TE.topk(top_k, dim=1).indices
    whole = both(logits_TE, counts(experts_TK, num_experts)[:, None], top_k)
    tokens_ED = np.stack([counts(part_TK, num_experts) for part_TK in experts_TK.split(tokens_D)], axis=1)
    shares = [both(part_TE, tokens_ED, top_k) for part_TE in logits_TE.split(tokens_D)]
    for mine, theirs in zip(zip(*shares, strict=True), whole, strict=True):
        mean = torch.stack(mine).mean()
        torch.testing.assert_close(mean, theirs, rtol=1e-12, atol=1e-12)
        gradient, expected = (torch.autograd.grad(v, logits_TE, retain_graph=True)[0] for v in (mean, theirs))
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_without_tokens_losses_are_zero_and_part_of_the_graph() -> None:
    layer = MoELayer(MoEConfig(6, 10, 4, 2))
    output = layer(torch.zeros(0, 6))
    assert output.aux_loss.item() == output.z_loss.item() == 0.0
    (output.aux_loss + output.z_loss).backward()
    assert layer.gate.weight.grad is not None
    assert not layer.gate.weight.grad.any()


def test_losses_teach_the_router_alone() -> None:
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(6, 10, 4, 2))
    output = layer(torch.randn(9, 6))
    (output.aux_loss + output.z_loss).backward()
    assert layer.gate.weight.grad is not None
    assert layer.gate.weight.grad.any()
    assert all(parameter.grad is None for parameter in layer.experts.parameters())


def test_descending_the_auxiliary_loss_evens_out_the_routing() -> None:
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(6, 4, 4, 1))
    x_TM = torch.randn(64, 6)
    x_TM[:, 0] = 1.0
    with torch.no_grad():
        layer.gate.weight[0, 0] = 2.0
    optimizer = torch.optim.SGD(layer.gate.parameters(), lr=0.5)

    def busiest() -> int:
        return int(counts(layer.gate(x_TM).experts_TK, 4).max())

    before = busiest()
    for _ in range(100):
        optimizer.zero_grad()
        layer(x_TM).aux_loss.backward()
        optimizer.step()
    assert before == 64
    assert busiest() < 32
