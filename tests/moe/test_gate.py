"""The softmax gate against plain Python: ties, weights, gradients, precision, noise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from themis.moe.gates import SoftmaxGate
from themis.moe.gates.softmax import top_k_lowest_index
from themis.testing.strategies import quick


def make_gate(num_experts: int, top_k: int, *, width: int = 6, dtype: torch.dtype = torch.float64, **options: bool):
    torch.manual_seed(num_experts + top_k)
    gate = SoftmaxGate(width, num_experts, top_k, **options).to(dtype)
    with torch.no_grad():
        gate.weight.normal_()
    return gate


def make_tokens(num_tokens: int, *, width: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def score_rows(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    """Rows with few distinct scores, so that ties are everywhere; minus infinity is a masked expert."""
    num_experts = draw(st.integers(1, 9))
    score = st.sampled_from([float("-inf"), -1.0, -0.0, 0.0, 0.5, 0.5, 2.0])
    rows = draw(st.lists(st.lists(score, min_size=num_experts, max_size=num_experts), max_size=5))
    return rows, draw(st.integers(1, num_experts))


@quick(150)
@given(score_rows())
def test_of_equal_scores_the_lower_index_wins(problem: tuple[list[list[float]], int]) -> None:
    rows, top_k = problem
    num_experts = len(rows[0]) if rows else top_k
    scores_TE = torch.tensor(rows, dtype=torch.float32).view(len(rows), num_experts)
    expected = [sorted(range(num_experts), key=lambda e, row=row: (-row[e], e))[:top_k] for row in rows]
    assert top_k_lowest_index(scores_TE, top_k).tolist() == expected


@pytest.mark.parametrize("top_k", [1, 2, 7, 8])
def test_all_equal_rows_take_the_first_experts(top_k: int) -> None:
    for num_rows in (1, 300):  # torch.topk takes other ways through long inputs
        experts_TK = top_k_lowest_index(torch.zeros(num_rows, 8), top_k)
        assert (experts_TK == torch.arange(top_k)).all()


def test_a_tie_in_one_row_does_not_disturb_the_others() -> None:
    scores_TE = torch.tensor([[3.0, 1.0, 2.0, 0.0], [1.0, 2.0, 2.0, 2.0], [0.0, 1.0, 2.0, 3.0]])
    assert top_k_lowest_index(scores_TE, 2).tolist() == [[0, 2], [1, 2], [3, 2]]


@quick(40)
@given(st.integers(1, 7), st.data())
def test_weights_are_the_chosen_probabilities(num_experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    normalize = data.draw(st.booleans())
    gate = make_gate(num_experts, top_k, normalize_weights=normalize)
    tokens_TM = make_tokens(11)
    chosen = gate(tokens_TM)
    scores_TE = tokens_TM @ gate.weight.detach().T
    exps_TE = scores_TE.exp()
    torch.testing.assert_close(chosen.logits_TE, scores_TE)
    torch.testing.assert_close(chosen.probs_TE, exps_TE / exps_TE.sum(1, keepdim=True))
    for t, experts in enumerate(chosen.experts_TK.tolist()):
        assert sorted(experts) == sorted(sorted(range(num_experts), key=lambda e: -scores_TE[t, e])[:top_k])
        kept = exps_TE[t, experts]
        whole = kept.sum() if normalize and top_k > 1 else exps_TE[t].sum()
        torch.testing.assert_close(chosen.weights_TK[t], kept / whole)
    if normalize and top_k > 1:
        torch.testing.assert_close(chosen.weights_TK.sum(1), torch.ones(11, dtype=torch.float64))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_given_experts_weigh_what_chosen_ones_weigh(top_k: int, normalize: bool) -> None:
    gate = make_gate(4, top_k, normalize_weights=normalize)
    tokens_TM = make_tokens(9)
    chosen = gate(tokens_TM)
    given_again = gate(tokens_TM, chosen.experts_TK)
    assert torch.equal(given_again.experts_TK, chosen.experts_TK)
    assert torch.equal(given_again.weights_TK, chosen.weights_TK)
    other_TK = (torch.arange(9 * top_k) % 4).view(9, top_k)
    forced = gate(tokens_TM, other_TK)
    assert torch.equal(forced.experts_TK, other_TK)
    weights_TK = forced.probs_TE.gather(1, other_TK)
    if normalize and top_k > 1:
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
    torch.testing.assert_close(forced.weights_TK, weights_TK)


def test_given_experts_of_no_probability_still_get_finite_weights() -> None:
    gate = make_gate(4, 2, width=1, dtype=torch.float32)
    with torch.no_grad():
        gate.weight.copy_(torch.tensor([[500.0], [0.0], [0.0], [-1.0]]))
    weights_TK = gate(torch.ones(1, 1), torch.tensor([[1, 2]])).weights_TK
    torch.testing.assert_close(weights_TK, torch.tensor([[0.5, 0.5]]))
    weights_TK[0, 0].backward()
    torch.testing.assert_close(gate.weight.grad, torch.tensor([[0.0], [0.25], [-0.25], [0.0]]))


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (4, 2), (4, 4)])
def test_the_router_learns_from_the_output_alone(num_experts: int, top_k: int) -> None:
    gate = make_gate(num_experts, top_k, normalize_weights=True)
    weights_TK = gate(make_tokens(5)).weights_TK
    (weights_TK * torch.arange(1.0, 1.0 + top_k)).sum().backward()
    # Normalised top-1 weights would all be one, and this gradient zero.
    assert gate.weight.grad is not None
    assert gate.weight.grad.abs().max() > 1e-3


def test_router_gradient_passes_gradcheck() -> None:
    tokens_TM = make_tokens(4).requires_grad_()
    for top_k, normalize in [(1, True), (2, True), (2, False), (5, True)]:
        gate = make_gate(5, top_k, normalize_weights=normalize)

        def score(tokens_TM: Tensor, weight_EM: Tensor, gate: SoftmaxGate = gate):
            result = torch.func.functional_call(gate, {"weight": weight_EM}, (tokens_TM,))
            return result.weights_TK, result.logits_TE, result.probs_TE

        assert torch.autograd.gradcheck(score, (tokens_TM, gate.weight.detach().requires_grad_()))


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("autocast", [False, True])
def test_scores_never_fall_below_float32(parameters: torch.dtype, autocast: bool) -> None:
    gate = make_gate(8, 2, dtype=parameters)
    tokens_TM = make_tokens(64).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        chosen = gate(tokens_TM)
    for values in (chosen.weights_TK, chosen.logits_TE, chosen.probs_TE):
        assert values.dtype == torch.float32
    exact_TE = tokens_TM.double() @ gate.weight.detach().double().T
    torch.testing.assert_close(chosen.logits_TE.double(), exact_TE, rtol=1e-5, atol=1e-5)


def test_noise_only_in_training_and_from_the_seed() -> None:
    gate = make_gate(6, 2, noise=True)
    tokens_TM = make_tokens(40)
    clean_TE = tokens_TM @ gate.weight.detach().T

    def logits(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return gate(tokens_TM).logits_TE.detach()

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))
    noise_TE = logits(1) - clean_TE
    # softplus(0) = log 2 is the scale while the noise weights are zero.
    assert 0.85 < noise_TE.std() / torch.log(torch.tensor(2.0)) < 1.15
    gate.eval()
    torch.testing.assert_close(logits(1), clean_TE)
    state = torch.get_rng_state()
    gate(tokens_TM)
    assert torch.equal(torch.get_rng_state(), state), "evaluation draws nothing"


def test_noise_weights_are_trained() -> None:
    gate = make_gate(6, 2, noise=True)
    gate(make_tokens(10)).weights_TK[:, 0].sum().backward()
    assert gate.noise_weight is not None
    assert gate.noise_weight.grad is not None
    assert gate.noise_weight.grad.abs().max() > 0
    assert make_gate(6, 2).noise_weight is None
