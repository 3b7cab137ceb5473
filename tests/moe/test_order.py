"""Order and I-Order against one-hot einsums, which say what they mean and cost T * E * A."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from themis.moe.order import Ordered, SortedOrder, invert, permute_rows
from themis.testing.strategies import quick

WIDTH = 3


@st.composite
def choices(draw: st.DrawFn) -> tuple[Tensor, int]:
    """(experts_TK, E): K distinct experts for each token; no token and idle experts among them."""
    num_experts = draw(st.integers(1, 6))
    top_k = draw(st.integers(1, num_experts))
    row = st.permutations(range(num_experts)).map(lambda p: p[:top_k])
    rows = draw(st.lists(row, max_size=7))
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), top_k), num_experts


def slow_layout(experts_TK: Tensor, num_experts: int) -> list[tuple[int, int]]:
    """The (token, choice) of each row: expert by expert, tokens ascending."""
    return [(t, k) for e in range(num_experts) for t, k in (experts_TK == e).nonzero().tolist()]


def one_hot_ATK(experts_TK: Tensor, num_experts: int) -> Tensor:
    """[A, T, K]: 1 where row a is the k-th choice of token t."""
    layout = slow_layout(experts_TK, num_experts)
    hot_ATK = torch.zeros(len(layout), *experts_TK.shape, dtype=torch.float64)
    for a, (t, k) in enumerate(layout):
        hot_ATK[a, t, k] = 1.0
    return hot_ATK


def random(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()


@quick(80)
@given(choices())
def test_plan_is_a_stable_permutation(problem: tuple[Tensor, int]) -> None:
    experts_TK, num_experts = problem
    ordered = SortedOrder().plan(experts_TK, num_experts)
    top_k = experts_TK.shape[1]
    assert ordered.index_A.tolist() == [t * top_k + k for t, k in slow_layout(experts_TK, num_experts)]
    assert ordered.index_A[ordered.inverse_A].tolist() == list(range(experts_TK.numel()))
    assert ordered.counts_E.tolist() == [int((experts_TK == e).sum()) for e in range(num_experts)]
    assert ordered.top_k == top_k


@quick(80)
@given(choices())
def test_order_and_restore_equal_the_one_hot_reference(problem: tuple[Tensor, int]) -> None:
    experts_TK, num_experts = problem
    order, hot_ATK = SortedOrder(), one_hot_ATK(*problem)
    ordered = order.plan(experts_TK, num_experts)
    tokens_TM, weights_TK = random(experts_TK.shape[0], WIDTH), random(*experts_TK.shape, seed=1)
    bend_AM = random(experts_TK.numel(), WIDTH, seed=2).detach()

    rows_AM = order.order(tokens_TM, ordered)
    expected_AM = torch.einsum("atk,tm->am", hot_ATK, tokens_TM)
    torch.testing.assert_close(rows_AM, expected_AM, rtol=0, atol=0)
    back_TM = order.restore(rows_AM * bend_AM, ordered, weights_TK)
    expected_TM = torch.einsum("atk,tk,am->tm", hot_ATK, weights_TK, expected_AM * bend_AM)
    torch.testing.assert_close(back_TM, expected_TM, rtol=1e-12, atol=1e-12)

    weight_TM = random(experts_TK.shape[0], WIDTH, seed=3).detach()
    mine = torch.autograd.grad((back_TM * weight_TM).sum(), (tokens_TM, weights_TK))
    theirs = torch.autograd.grad((expected_TM * weight_TM).sum(), (tokens_TM, weights_TK))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def make_ordered() -> Ordered:
    return SortedOrder().plan(torch.tensor([[2, 0], [0, 3], [3, 2], [2, 3]]), 5)


def test_order_passes_gradcheck() -> None:
    ordered = make_ordered()
    assert torch.autograd.gradcheck(lambda x: SortedOrder().order(x, ordered), random(4, WIDTH))


def test_restore_passes_gradcheck() -> None:
    ordered = make_ordered()
    assert torch.autograd.gradcheck(
        lambda rows, weights: SortedOrder().restore(rows, ordered, weights), (random(8, WIDTH), random(4, 2, seed=1))
    )


@quick(30)
@given(st.permutations(range(7)))
def test_permute_rows_is_undone_by_its_inverse(permutation: list[int]) -> None:
    index_A = torch.tensor(permutation)
    inverse_A = invert(index_A)
    rows_AM = random(7, WIDTH)
    moved_AM = permute_rows(rows_AM, index_A, inverse_A)
    assert torch.equal(moved_AM, rows_AM[index_A])
    assert torch.equal(permute_rows(moved_AM, inverse_A, index_A), rows_AM)
    weight_AM = random(7, WIDTH, seed=1).detach()
    (grad_AM,) = torch.autograd.grad((moved_AM * weight_AM).sum(), rows_AM)
    assert torch.equal(grad_AM[index_A], weight_AM)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_rows_are_weighted_in_float32(autocast: bool) -> None:
    ordered = make_ordered()
    rows_AM, weights_TK = random(8, WIDTH).detach().bfloat16(), random(4, 2, seed=1).detach().float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        tokens_TM = SortedOrder().restore(rows_AM, ordered, weights_TK)
    wide_TKM = rows_AM[ordered.inverse_A].float().view(4, 2, WIDTH)
    wide_TM = (wide_TKM * weights_TK[..., None]).sum(1)
    assert torch.equal(tokens_TM, wide_TM.bfloat16())
    rounded_TM = (wide_TKM * weights_TK.bfloat16().float()[..., None]).sum(1)
    assert not torch.equal(tokens_TM, rounded_TM.bfloat16()), "here rounded weights would show"
