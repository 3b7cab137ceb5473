"""Grouped GEMM against a loop of matmuls under plain autograd, with fresh memory full of NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from themis.moe import Experts, GPTExperts, SwiGLUExperts
from themis.moe.chunk import ChunkLayout
from themis.moe.grouped import _as_stack, grouped_linear
from themis.testing.strategies import quick

WIDTH, OUT = 3, 4


@pytest.fixture(scope="module", autouse=True)
def _nan_in_fresh_memory() -> Iterator[None]:
    """Deterministic mode fills uninitialised memory with NaN, so that a row nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.zeros(2).new_empty(5).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def slow_linear(rows_AM: Tensor, counts_S: list[int], weights_S: list[Tensor], biases_S: list[Tensor] | None) -> Tensor:
    """One matmul a row."""
    slot_A = [s for s, count in enumerate(counts_S) for _ in range(count)]
    rows = [row_M @ weights_S[s] + (biases_S[s] if biases_S else 0.0) for row_M, s in zip(rows_AM, slot_A, strict=True)]
    empty_N = rows_AM.sum() * 0.0 + sum(w.sum() * 0.0 for w in weights_S) + sum(b.sum() * 0.0 for b in biases_S or [])
    return torch.stack(rows) + empty_N if rows else rows_AM.new_zeros(0, OUT) + empty_N


def make(
    counts_S: list[int], seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()

    return normal(sum(counts_S), WIDTH), [normal(WIDTH, OUT) for _ in counts_S], [normal(OUT) for _ in counts_S]


@quick(80)
@given(st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=1, max_size=6), st.booleans(), st.integers(0, 99))
def test_equals_a_matmul_a_row(counts_S: list[int], bias: bool, seed: int) -> None:
    rows_AM, weights_S, biases_S = make(counts_S, seed)
    biases = biases_S if bias else None
    out_AN, expected_AN = (f(rows_AM, counts_S, weights_S, biases) for f in (grouped_linear, slow_linear))
    torch.testing.assert_close(out_AN, expected_AN, rtol=1e-12, atol=1e-12)
    inputs = [rows_AM, *weights_S, *(biases or [])]
    mine, theirs = (torch.autograd.grad(out.sin().sum(), inputs) for out in (out_AN, expected_AN))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    for s, count in enumerate(counts_S):
        assert count or not mine[1 + s].any(), "an empty group's gradient is exactly zero"
        assert count or not bias or not mine[1 + len(counts_S) + s].any()


@pytest.mark.parametrize("counts_S", [[2, 0, 3], [0, 4, 0], [5], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck(counts_S: list[int], bias: bool) -> None:
    rows_AM, weights_S, biases_S = make(counts_S)
    biases_S = biases_S if bias else []

    def run(rows_AM: Tensor, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[: len(counts_S)], parameters[len(counts_S) :]
        return grouped_linear(rows_AM, counts_S, weights, biases or None)

    assert torch.autograd.gradcheck(run, (rows_AM, *weights_S, *biases_S))


def test_no_slots_at_all() -> None:
    rows_AM = torch.zeros(0, WIDTH, requires_grad=True)
    out_AN = grouped_linear(rows_AM, [], [])
    out_AN.sum().backward()
    assert out_AN.shape == rows_AM.grad.shape == (0, WIDTH)


def test_gradients_that_are_not_contiguous() -> None:
    counts_S = [2, 0, 3]
    rows_AM, weights_S, biases_S = make(counts_S)
    weight_NA = torch.randn(OUT, 5, dtype=torch.float64)
    inputs = [rows_AM, *weights_S, *biases_S]
    for upstream_AN in (weight_NA.t(), torch.ones(1, 1, dtype=torch.float64).expand(5, OUT)):
        assert not upstream_AN.is_contiguous()
        mine, theirs = (
            torch.autograd.grad(f(rows_AM, counts_S, weights_S, biases_S), inputs, upstream_AN)
            for f in (grouped_linear, slow_linear)
        )
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_rows_and_weights_that_are_not_contiguous() -> None:
    counts_S = [2, 3]
    rows_AM, weights_S, _ = make(counts_S)
    strided_AM = rows_AM.detach().repeat_interleave(2, dim=1)[:, ::2].requires_grad_()
    turned_S = [w.detach().t().contiguous().t().requires_grad_() for w in weights_S]
    out_AN = grouped_linear(strided_AM, counts_S, turned_S)
    expected_AN = slow_linear(rows_AM, counts_S, weights_S, None)
    torch.testing.assert_close(out_AN, expected_AN)
    mine = torch.autograd.grad(out_AN.sin().sum(), [strided_AM, *turned_S])
    theirs = torch.autograd.grad(expected_AN.sin().sum(), [rows_AM, *weights_S])
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("frozen", ["rows", "weights", "one weight", "biases"])
def test_frozen_inputs_get_none_and_the_others_what_is_theirs(frozen: str) -> None:
    counts_S = [2, 0, 3]
    rows_AM, weights_S, biases_S = make(counts_S)
    inputs = [rows_AM, *weights_S, *biases_S]
    whole = torch.autograd.grad(grouped_linear(rows_AM, counts_S, weights_S, biases_S).sin().sum(), inputs)
    still = {"rows": [rows_AM], "weights": weights_S, "one weight": weights_S[:1], "biases": biases_S}[frozen]
    for tensor in still:
        tensor.requires_grad_(False)
    grouped_linear(rows_AM, counts_S, weights_S, biases_S).sin().sum().backward()
    for tensor, grad in zip(inputs, whole, strict=True):
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, grad, rtol=0, atol=0)
        else:
            assert tensor.grad is None


def test_bfloat16_is_the_rounded_product() -> None:
    counts_S = [3, 0, 4]
    rows_AM, weights_S, biases_S = make(counts_S, dtype=torch.bfloat16)
    out_AN = grouped_linear(rows_AM, counts_S, weights_S, biases_S)
    assert out_AN.dtype == torch.bfloat16
    wide = [rows_AM.double(), counts_S, [w.double() for w in weights_S], [b.double() for b in biases_S]]
    torch.testing.assert_close(out_AN.double(), slow_linear(*wide), rtol=0.02, atol=0.02)
    out_AN.sum().backward()
    assert all(w.grad.dtype == torch.bfloat16 for w in weights_S)
    assert not weights_S[1].grad.any()


def test_autocast_casts_as_for_linear() -> None:
    counts_S = [3, 0, 4]
    rows_AM, weights_S, biases_S = make(counts_S, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow_AN = grouped_linear(rows_AM, counts_S, weights_S, biases_S)
        first_AN = torch.nn.functional.linear(rows_AM[:3], weights_S[0].t(), biases_S[0])
    assert narrow_AN.dtype == first_AN.dtype == torch.bfloat16
    torch.testing.assert_close(narrow_AN[:3], first_AN)
    narrow_AN.sum().backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in (rows_AM, *weights_S, *biases_S))
    wide_AM, wide_S, _ = make(counts_S)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert grouped_linear(wide_AM, counts_S, wide_S).dtype == torch.float64


@pytest.mark.parametrize(
    "experts",
    [GPTExperts(3, WIDTH, 5), GPTExperts(3, WIDTH, 5, bias=False), SwiGLUExperts(3, WIDTH, 5)],
    ids=["gpt", "gpt-no-bias", "swiglu"],
)
def test_experts_pass_gradcheck(experts: Experts) -> None:
    experts = experts.double()
    names = [name for name, _ in experts.named_parameters()]

    def run(rows_AM: Tensor, *parameters: Tensor) -> Tensor:
        weights: list[dict[str, Tensor]] = [{}, {}, {}]
        for name, parameter in zip(names, parameters, strict=True):
            weights[int(name[0])][name[2:]] = parameter
        return experts(rows_AM, [2, 0, 1], weights)

    assert torch.autograd.gradcheck(run, (make([2, 0, 1])[0], *experts.parameters()))


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_at_equal_steps_form_one_stack_that_the_grouped_kernel_takes(transposed: bool) -> None:
    layout = ChunkLayout({"w1": (16, 24), "b1": (24,)})
    buffer = torch.randn(4, layout.numel, dtype=torch.bfloat16)
    weights_S = [layout.views(chunk)["w1"] for chunk in buffer.unbind(0)]
    if transposed:
        weights_S = [weight.t() for weight in weights_S]
    stack_SMN = _as_stack(weights_S)
    assert stack_SMN is not None
    assert all(torch.equal(stack_SMN[s], weight) for s, weight in enumerate(weights_S))
    counts = [3, 0, 8, 5]
    rows_AM = torch.randn(16, weights_S[0].shape[0], dtype=torch.bfloat16)
    ends_S = torch.tensor(counts).cumsum(0).to(torch.int32)
    grouped_AN = torch.nn.functional.grouped_mm(rows_AM, stack_SMN, offs=ends_S)
    torch.testing.assert_close(grouped_AN, grouped_linear(rows_AM, counts, weights_S))


def test_weights_that_do_not_lie_at_equal_steps_form_no_stack() -> None:
    buffer = torch.randn(6, 8, 8)
    apart = [torch.randn(8, 8), torch.randn(8, 8)]
    for weights_S in ([buffer[0], buffer[1], buffer[3]], [buffer[1], buffer[0]], apart, [buffer[0], buffer[1].t()]):
        assert _as_stack(weights_S) is None
